"""Which states a run may go on from: against a second implementation that knows no cleverness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.checkpoints import write_images
from tests.kit.logs import MESH, generation

from keepstep.ckpt.candidates import Candidate, Place, candidates, settle
from keepstep.ckpt.entry import Commit, Generation, Record, Retire, Rewind, Term, Verdict
from keepstep.ckpt.errors import NotRestorable
from keepstep.ckpt.inventory import Copy, Inventory
from keepstep.ckpt.lineage import Lineage, fold
from keepstep.ckpt.manifest import Description, ImageRecord, Manifest, State, done_record
from keepstep.ckpt.placement import mesh_size
from keepstep.ckpt.tiers import Tier
from keepstep.storage.memory import MemoryStore

DIGEST = "ab" * 16


def lineage_of(*bodies: object) -> Lineage:
    records = [
        Record(seq=seq, id=f"{seq:032x}", job="run-a", term=1, at="2026-01-01T00:00:00Z", body=body)  # type: ignore[arg-type]
        for seq, body in enumerate((Term(number=1, by="x"), *bodies))
    ]
    return fold(records)


def begun(number: int, base: State | None) -> Generation:
    return Generation(number=number, hosts=("a", "b"), mesh=MESH, base=base, parent=None, config={})


def manifest_at(state: State) -> Manifest:
    return write_images(MemoryStore(), state)


def description_of(manifest: Manifest) -> Description:
    fields = {name: getattr(manifest, name) for name in Description.__struct_fields__}
    return Description(**fields)


def inventory(host: str, *copies: Copy) -> Inventory:
    return Inventory(host=host, rack="", address="", generation=0, term=0, copies=copies)


def copy_of(manifest: Manifest, rank: int, tier: Tier = Tier.MEMORY) -> Copy:
    record = next(image for image in manifest.images if image.rank == rank)
    return Copy(state=manifest.state, record=record, tier=tier, plan_digest=manifest.plan_digest)


# A naive second implementation, over random histories.


@dataclass(frozen=True)
class History:
    """What the log says, and where copies are: (host, state, rank)."""

    bodies: tuple[object, ...]
    copies: tuple[tuple[str, State, int], ...]


STATES = st.builds(State, st.integers(1, 3), st.integers(0, 6))


@st.composite
def histories(draw: st.DrawFn) -> History:
    bodies: list[object] = []
    number = 0
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(("begin", "commit", "commit", "bad", "rewind", "retire")))
        state = draw(STATES)
        if kind == "begin" or number == 0:
            number += 1
            bodies.append(begun(number, draw(st.none() | STATES) if number > 1 else None))
        elif kind == "commit":
            at = State(number, state.step)
            bodies.append(Commit(state=at, manifest_digest=DIGEST, size_bytes=1))
        elif kind == "bad":
            bodies.append(Verdict(state=state, good=False, reason="nan"))
        elif kind == "rewind":
            bodies.append(Rewind(to=draw(st.none() | STATES), reason="r"))
        else:
            bodies.append(Retire(states=(state,), reason="old"))
    copies = draw(
        st.lists(st.tuples(st.sampled_from("ab"), STATES, st.integers(0, 1)), max_size=12)
    )
    return History(tuple(bodies), tuple(copies))


def naive_path(lineage: Lineage) -> list[State]:
    """All states of the lineage, walked back from the newest generation, one by one."""
    by_number = {one.number: one for one in lineage.generations}
    found = []
    for segment in lineage.chain:
        base = by_number[segment.generation].base
        low = -1 if base is None else base.step
        for step in range(low + 1, 20):
            if segment.cut is None or step <= segment.cut:
                found.append(State(segment.generation, step))
    return found


def naive_is_bad(lineage: Lineage, state: State) -> bool:
    by_number = {one.number: one for one in lineage.generations}
    at: State | None = state
    while at is not None:
        if any(bad.generation == at.generation and bad.step <= at.step for bad in lineage.bad):
            return True
        at = by_number[at.generation].base if at.generation in by_number else None
    return False


@given(histories())
def test_candidates_are_what_a_walk_over_the_lineage_finds(history: History) -> None:
    lineage = lineage_of(*history.bodies)
    by_host: dict[str, list[Copy]] = {}
    for host, state, rank in history.copies:
        record = ImageRecord(rank=rank, size_bytes=8192, header_bytes=4096, digest=DIGEST)
        by_host.setdefault(host, []).append(
            Copy(state=state, record=record, tier=Tier.MEMORY, plan_digest=DIGEST)
        )
    found = candidates(lineage, [inventory(host, *each) for host, each in by_host.items()])
    live = {commit.state for commit in lineage.live}
    dead = {commit.state for commit in lineage.commits} - live
    expected = set(live)
    for state in naive_path(lineage):
        if any(state == at for _, at, _ in history.copies):
            gone = state in dead or state in lineage.retired
            if not gone and not naive_is_bad(lineage, state):
                expected.add(state)
    assert {one.state for one in found} == expected
    assert [one.state.step for one in found] == sorted(
        (one.state.step for one in found), reverse=True
    )
    for one in found:
        assert (one.commit is not None) == (one.state in live)
        hosts = {host for host, at, _ in history.copies if at == one.state}
        assert set(one.describers) == hosts
        places = {
            (sighting.place.host, rank)
            for rank, sightings in one.sightings.items()
            for sighting in sightings
        }
        assert places == {(host, rank) for host, at, rank in history.copies if at == one.state}


# Settling.


def only(found: tuple[Candidate, ...]) -> Candidate:
    (one,) = found
    return one


def test_a_state_whose_images_lie_on_different_hosts_is_whole() -> None:
    manifest = manifest_at(State(1, 7))
    lineage = lineage_of(generation(1))
    found = only(
        candidates(
            lineage,
            [
                inventory("a", copy_of(manifest, 0), copy_of(manifest, 1, Tier.PEER)),
                inventory("b", copy_of(manifest, 1), copy_of(manifest, 1, Tier.DISK)),
            ],
        )
    )
    settled = settle(found, description_of(manifest))
    assert settled.manifest == manifest
    assert settled.places[0] == (Place(Tier.MEMORY, "a"),)
    assert settled.places[1] == (
        Place(Tier.MEMORY, "b"),
        Place(Tier.PEER, "a"),
        Place(Tier.DISK, "b"),
    )


def test_a_state_that_lacks_an_image_is_refused_and_the_rank_named() -> None:
    manifest = manifest_at(State(1, 7))
    found = only(candidates(lineage_of(generation(1)), [inventory("a", copy_of(manifest, 0))]))
    with pytest.raises(NotRestorable, match=r"ranks without an image anywhere: 1$"):
        settle(found, description_of(manifest))


def test_an_image_that_is_only_in_the_store_yet_makes_it_whole() -> None:
    manifest = manifest_at(State(1, 7))
    lineage = lineage_of(generation(1))
    stored = {manifest.state: [done_record(manifest.images[1])]}
    found = only(candidates(lineage, [inventory("a", copy_of(manifest, 0))], stored))
    assert settle(found, description_of(manifest)).places[1] == (Place(Tier.STORE, ""),)


def test_the_store_has_all_of_a_commit_beside_what_memory_has() -> None:
    manifest = manifest_at(State(1, 7))
    lineage = lineage_of(
        generation(1), Commit(state=manifest.state, manifest_digest=DIGEST, size_bytes=1)
    )
    found = only(candidates(lineage, [inventory("b", copy_of(manifest, 1))]))
    assert found.commit is not None
    places = settle(found, manifest).places
    assert places == {
        0: (Place(Tier.STORE, ""),),
        1: (Place(Tier.MEMORY, "b"), Place(Tier.STORE, "")),
    }


def test_a_copy_with_another_digest_is_left_out_and_told() -> None:
    manifest = manifest_at(State(1, 7))
    good = copy_of(manifest, 0)
    odd = ImageRecord(rank=0, size_bytes=9000, header_bytes=4096, digest="00" * 16)
    other = Copy(manifest.state, odd, Tier.PEER, manifest.plan_digest)
    found = only(
        candidates(
            lineage_of(generation(1)),
            [
                inventory("a", good, copy_of(manifest, 1)),
                inventory("b", other),
                inventory("c", copy_of(manifest, 0, Tier.PEER)),
            ],
        )
    )
    settled = settle(found, description_of(manifest))
    assert settled.places[0] == (Place(Tier.MEMORY, "a"), Place(Tier.PEER, "c"))
    (said,) = settled.odd
    assert "peer of b" in said
    assert "00" * 16 in said


@pytest.mark.parametrize("digest", ["00" * 16, "ff" * 16])
def test_a_header_that_went_wrong_on_a_disk_does_not_outdo_memory(digest: str) -> None:
    manifest = manifest_at(State(1, 7))
    good = copy_of(manifest, 0)
    odd = Copy(
        manifest.state,
        ImageRecord(0, good.record.size_bytes, good.record.header_bytes, digest),
        Tier.DISK,
        manifest.plan_digest,
    )
    found = only(
        candidates(
            lineage_of(generation(1)),
            [inventory("a", odd, good), inventory("b", copy_of(manifest, 1))],
        )
    )
    assert settle(found, description_of(manifest)).places[0] == (Place(Tier.MEMORY, "a"),)


def test_two_structures_of_one_state_are_never_mixed() -> None:
    manifest = manifest_at(State(1, 7))
    first, second = copy_of(manifest, 0), copy_of(manifest, 1)
    stray = Copy(manifest.state, second.record, Tier.MEMORY, "0" * 32)
    found = only(
        candidates(
            lineage_of(generation(1)),
            [inventory("a", first, second), inventory("b", stray)],
        )
    )
    assert found.plan_digest == manifest.plan_digest
    assert {s.place.host for each in found.sightings.values() for s in each} == {"a"}


def test_another_state_s_description_is_refused() -> None:
    manifest = manifest_at(State(1, 7))
    copies = [copy_of(manifest, rank) for rank in range(mesh_size(MESH))]
    found = only(candidates(lineage_of(generation(1)), [inventory("a", *copies)]))
    with pytest.raises(NotRestorable, match="step 8"):
        settle(found, description_of(manifest_at(State(1, 8))))
