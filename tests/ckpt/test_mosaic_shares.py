"""How a host's ranks share a restore: every needed chunk once, evenly, the nearest copy first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.mosaic import Distance, blocks, layout, nearest, shares, size_of, union
from keepstep.ckpt.restore import Ranges
from keepstep.ckpt.tiers import Tier

CHUNKS = st.sets(st.integers(0, 30), max_size=20)


def ranges_of(chunks: set[int]) -> Ranges:
    """Naively: each chunk alone, then neighbours joined."""
    found: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return tuple(found)


def numbers(ranges: Ranges) -> list[int]:
    return [chunk for first, last in ranges for chunk in range(first, last)]


@given(st.lists(st.dictionaries(st.integers(0, 4), CHUNKS, max_size=4), max_size=4))
def test_the_union_has_each_chunk_that_anybody_needs_once(needs: list[dict[int, set[int]]]) -> None:
    found = union([{image: ranges_of(each) for image, each in one.items()} for one in needs])
    for image in range(5):
        expected = sorted({chunk for one in needs for chunk in one.get(image, ())})
        assert numbers(found.get(image, ())) == expected
    assert all(ranges == ranges_of(set(numbers(ranges))) for ranges in found.values())


@given(st.dictionaries(st.integers(0, 6), CHUNKS.filter(bool), max_size=6), st.integers(1, 8))
def test_shares_are_disjoint_and_together_all_and_even(
    needed: dict[int, set[int]], ranks: int
) -> None:
    data_bytes = {image: 30 * CHUNK_BYTES + 1 + image for image in needed}
    parts = shares(
        {image: ranges_of(chunks) for image, chunks in needed.items()}, data_bytes, ranks
    )
    assert len(parts) == ranks
    seen = [
        (image, chunk)
        for part in parts
        for image, ranges in part.items()
        for chunk in numbers(ranges)
    ]
    assert sorted(seen) == sorted((image, chunk) for image in needed for chunk in needed[image])
    sizes = [sum(size_of(r, data_bytes[image]) for image, r in part.items()) for part in parts]
    total = sum(sizes)
    even = total / ranks
    # A cut is at a chunk's border, and may be moved to an image's end if that is near.
    assert max(sizes) <= even * (1 + 2 / 16) + 2 * CHUNK_BYTES
    readers = {image: sum(image in part for part in parts) for image in needed}
    assert sum(count - 1 for count in readers.values()) <= ranks - 1


def test_equal_images_are_one_share_each() -> None:
    needed = dict.fromkeys(range(4), ((0, 64),))
    parts = shares(needed, {image: 64 * CHUNK_BYTES - image for image in needed}, 4)
    assert [list(part) for part in parts] == [[0], [1], [2], [3]]


@given(CHUNKS, st.integers(1, 5))
def test_blocks_are_the_ranges_in_pieces(chunks: set[int], most: int) -> None:
    found = list(blocks(ranges_of(chunks), most))
    assert numbers(tuple(found)) == sorted(chunks)
    assert all(0 < last - first <= most for first, last in found)


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 20_000), max_size=6))
def test_staged_images_lie_apart_at_page_borders(sizes: dict[int, int]) -> None:
    offsets, total = layout(sizes)
    ends = [0]
    for image in sorted(sizes):
        assert offsets[image] % 4096 == 0
        assert offsets[image] >= ends[-1]
        ends.append(offsets[image] + sizes[image])
    assert ends[-1] <= total < ends[-1] + 4096


def test_places_come_nearest_first() -> None:
    here = Distance("a", {"a": "r1", "b": "r1", "c": "r2"})
    store = Place(Tier.STORE, "")
    ordered = [
        Place(Tier.MEMORY, "a"),
        Place(Tier.DISK, "a"),
        Place(Tier.PEER, "b"),
        Place(Tier.MEMORY, "c"),
        Place(Tier.DISK, "b"),
        Place(Tier.DISK, "c"),
        store,
    ]
    assert nearest(reversed(ordered), here, 0) == tuple(ordered)


def test_equals_take_turns() -> None:
    here = Distance("a", {})
    places = [Place(Tier.PEER, host) for host in "bcd"]
    firsts = {nearest(places, here, turn)[0].host for turn in range(3)}
    assert firsts == {"b", "c", "d"}
    assert sorted(p.host for p in nearest(places, here, 5)) == ["b", "c", "d"]
