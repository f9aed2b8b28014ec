"""How a host shares out a restore: which chunks, from which copies, by which of its ranks. Pure.

The ranks of a host need parts of images that overlap where they hold replicas. Their needs are
united, so that each chunk is brought once per host, and cut into equal parts, one for each rank.
An image that the host has itself is used where it lies; the others are staged, each at an offset
of its own, with the layout that it has as a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_count
from keepstep.ckpt.restore import Ranges, merged
from keepstep.ckpt.tiers import Tier

PAGE_BYTES = 4096

_SNAP = 16
"""A cut that is nearer to an image's end than this part of a share is moved there."""


@dataclass(frozen=True, slots=True)
class Distance:
    """What a reader must know to tell near from far.

    Attributes:
        host: the reader's.
        racks: host -> rack; hosts without one are left out.
    """

    host: str
    racks: Mapping[str, str]

    def of(self, place: Place) -> int:
        """A number that grows with what reading there costs.

        0 this host's pool, 1 its disk, 2 and 3 memory in this rack and beyond, 4 and 5 disks
        likewise, 6 the store.
        """
        if place.tier is Tier.STORE:
            return 6
        is_memory = place.tier in (Tier.MEMORY, Tier.PEER)
        if place.host == self.host:
            return 0 if is_memory else 1
        rack = self.racks.get(self.host)
        is_far = rack is None or self.racks.get(place.host) != rack
        return (2 if is_memory else 4) + is_far


def nearest(places: Iterable[Place], distance: Distance, turn: int) -> tuple[Place, ...]:
    """The places, cheapest first; equals are rotated by `turn`, so that no host serves all."""
    by_distance: dict[int, list[Place]] = {}
    for place in places:
        by_distance.setdefault(distance.of(place), []).append(place)
    found: list[Place] = []
    for _, equals in sorted(by_distance.items()):
        equals.sort(key=lambda place: (place.host, place.tier.value))
        start = turn % len(equals)
        found += equals[start:] + equals[:start]
    return tuple(found)


def union(needs: Iterable[Mapping[int, Ranges]]) -> dict[int, Ranges]:
    """Image -> the chunks that anybody needs."""
    found: dict[int, list[tuple[int, int]]] = {}
    for need in needs:
        for image, ranges in need.items():
            found.setdefault(image, []).extend(ranges)
    return {image: merged(ranges) for image, ranges in sorted(found.items())}


def size_of(ranges: Ranges, data_bytes: int) -> int:
    """Bytes of these chunks of an image with so much data."""
    size_bytes = sum(last - first for first, last in ranges) * CHUNK_BYTES
    if ranges and ranges[-1][1] == chunk_count(data_bytes):
        size_bytes -= ranges[-1][1] * CHUNK_BYTES - data_bytes
    return size_bytes


def shares(
    needed: Mapping[int, Ranges], data_bytes: Mapping[int, int], ranks: int
) -> list[dict[int, Ranges]]:
    """Cut `needed` into one part per rank: disjoint, together all of it, even by bytes.

    A part is a stretch of the images in ascending order, so that few images have two readers.
    """
    sizes = {image: size_of(needed[image], data_bytes[image]) for image in sorted(needed)}
    total = sum(sizes.values())
    ends: list[int] = []
    for size in sizes.values():
        ends.append((ends[-1] if ends else 0) + size)
    cuts = [0]
    for index in range(1, ranks):
        cut = total * index // ranks
        near = min(ends, key=lambda end: abs(end - cut), default=cut)
        cuts.append(near if abs(near - cut) * _SNAP * ranks <= total else cut)
    cuts.append(total)
    parts: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(ranks)]
    place, part = 0, 0
    for image in sizes:
        for first, last in needed[image]:
            while first < last:
                while part < ranks - 1 and place >= cuts[part + 1]:
                    part += 1
                room = cuts[part + 1] - place if part < ranks - 1 else total
                count = min(last - first, max(1, -(-room // CHUNK_BYTES)))
                parts[part].setdefault(image, []).append((first, first + count))
                place += size_of(((first, first + count),), data_bytes[image])
                first += count
    return [{image: tuple(ranges) for image, ranges in one.items()} for one in parts]


def blocks(ranges: Ranges, chunks_max: int) -> Iterator[tuple[int, int]]:
    """The ranges, cut into blocks of at most so many chunks."""
    for first, last in ranges:
        for start in range(first, last, chunks_max):
            yield start, min(start + chunks_max, last)


def layout(sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Where each image would lie in staging memory, at a page's border, and the size of it all.

    `sizes`: image -> bytes of its file. Only what is written there costs memory.
    """
    offsets: dict[int, int] = {}
    end = 0
    for image in sorted(sizes):
        offsets[image] = end
        end += -(-sizes[image] // PAGE_BYTES) * PAGE_BYTES
    return offsets, end


def holders(parts: Sequence[Mapping[int, Ranges]]) -> dict[int, int]:
    """Image -> the part in which its first needed chunk is: whose rank stages the header."""
    found: dict[int, int] = {}
    for index, part in enumerate(parts):
        for image in part:
            found.setdefault(image, index)
    return found
