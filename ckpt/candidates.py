"""Which states a run may go on from, and where copies of their images are. Pure.

A candidate is a state on the lineage that no verdict calls bad, of which the inventories or the log
know at least one image. Whether all of it is there is told by `settle`, since that takes the
state's description: the images' data must have together as many bytes as the tensors.

All images of a candidate are of one state and one structure. Which copy serves is decided image by
image, and later chunk by chunk: any mix of tiers and hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.ckpt.encoding import EncodedImage
from keepstep.ckpt.errors import FormatError, NotRestorable
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.lineage import Committed, Lineage, resume_points, state_words
from keepstep.ckpt.manifest import (
    Description,
    DoneRecord,
    ImageRecord,
    Manifest,
    State,
    check_manifest,
)
from keepstep.ckpt.placement import mesh_size
from keepstep.ckpt.tiers import Tier

_NAMED_MAX = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a copy of an image is: `host` is "" for the store, which is nobody's."""

    tier: Tier
    host: str

    def __str__(self) -> str:
        return "the store" if self.tier is Tier.STORE else f"{self.tier.value} of {self.host}"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One copy of an image, as an inventory or the store's done records tell."""

    record: ImageRecord
    place: Place


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that a run may go on from, if it turns out to be whole.

    Attributes:
        state: the state.
        commit: its live commit, if it has one; then the store has all of it.
        plan_digest: of its structure, as the inventories say; "" if only the log knows it.
        sightings: by rank, all copies.
        describers: hosts whose keepers can describe it, ascending.
        encoded: by rank, how those in the store are encoded, if it has no commit.
    """

    state: State
    commit: Committed | None
    plan_digest: str
    sightings: Mapping[int, tuple[Sighting, ...]]
    describers: tuple[str, ...]
    encoded: Mapping[int, EncodedImage]


@dataclass(frozen=True, slots=True)
class Settled:
    """A state that is all there.

    Attributes:
        manifest: with the record of each image.
        places: by rank, where that very image is: memory before disk before the store, and by host
            id among equals. Nearness to a reader is the reader's to judge (`mosaic.nearest`).
        odd: copies that contradict the record, in words.
    """

    manifest: Manifest
    places: Mapping[int, tuple[Place, ...]]
    odd: tuple[str, ...]


def candidates(
    lineage: Lineage,
    inventories: Iterable[Inventory],
    stored: Mapping[State, Iterable[DoneRecord]] | None = None,
) -> tuple[Candidate, ...]:
    """What a run may go on from, newest (highest step) first.

    Args:
        lineage: the log's meaning.
        inventories: of all hosts that could be asked.
        stored: images that are in the store whole, of states that have no commit yet.

    Two structures under one state cannot be mixed: the one with more images counts.
    """
    live = {commit.state: commit for commit in resume_points(lineage)}
    seen: dict[State, dict[str, dict[int, list[Sighting]]]] = {}
    describers: dict[tuple[State, str], set[str]] = {}
    for inventory in inventories:
        for copy in inventory.copies:
            if copy.state not in live and lineage.admits(copy.state):
                continue
            by_rank = seen.setdefault(copy.state, {}).setdefault(copy.plan_digest, {})
            place = Place(copy.tier, inventory.host)
            by_rank.setdefault(copy.record.rank, []).append(Sighting(copy.record, place))
            describers.setdefault((copy.state, copy.plan_digest), set()).add(inventory.host)
    found = []
    for state in {*live, *seen}:
        kinds = seen.get(state, {})
        digest = min(kinds, key=lambda one: (-len(kinds[one]), one), default="")
        by_rank = {rank: list(copies) for rank, copies in kinds.get(digest, {}).items()}
        encoded = {}
        if state not in live:
            for done in (stored or {}).get(state, ()):
                place = Place(Tier.STORE, "")
                by_rank.setdefault(done.rank, []).append(Sighting(done.image, place))
                if done.encoded is not None:
                    encoded[done.rank] = done.encoded
        found.append(
            Candidate(
                state=state,
                commit=live.get(state),
                plan_digest=digest,
                sightings={rank: tuple(copies) for rank, copies in sorted(by_rank.items())},
                describers=tuple(sorted(describers.get((state, digest), ()))),
                encoded=encoded,
            )
        )
    return tuple(
        sorted(found, key=lambda one: (one.state.step, one.state.generation), reverse=True)
    )


def settle(candidate: Candidate, known: Description | Manifest) -> Settled:
    """The candidate as a whole state.

    Args:
        candidate: one of `candidates`.
        known: the manifest of its commit, or the description that a keeper gave.

    Raises:
        NotRestorable: images are missing, or the description is of another structure.
    """
    state, name = candidate.state, state_words(candidate.state)
    if known.state != state:
        raise NotRestorable(f"what describes {name} is of {state_words(known.state)}")
    if isinstance(known, Manifest):
        manifest = known
        in_store = True
    else:
        in_store = False
        if known.plan_digest != candidate.plan_digest:
            raise NotRestorable(
                f"the images of {name} are of structure {candidate.plan_digest}, its description "
                f"is of {known.plan_digest}"
            )
        records = [_record(copies) for copies in candidate.sightings.values()]
        manifest = known.manifest(records, _encoded(candidate, records))
        _check_whole(manifest, name)
    places, odd = {}, []
    for record in manifest.images:
        copies = candidate.sightings.get(record.rank, ())
        same = {copy.place for copy in copies if copy.record == record}
        odd += [
            f"the image of rank {record.rank} of {name} in {copy.place} has digest "
            f"{copy.record.digest}, expected {record.digest}"
            for copy in copies
            if copy.record != record
        ]
        if in_store:
            same.add(Place(Tier.STORE, ""))
        places[record.rank] = tuple(sorted(same, key=place_order))
    return Settled(manifest, places, tuple(odd))


_ORDER = {Tier.MEMORY: 0, Tier.PEER: 1, Tier.DISK: 2, Tier.STORE: 3}


def place_order(place: Place) -> tuple[int, str]:
    """Sort key: memory before peers' memory before disks before the store, then by host id."""
    return _ORDER[place.tier], place.host


def _record(copies: Sequence[Sighting]) -> ImageRecord:
    """The record that most copies of one rank's image agree on.

    Of equals a disk's comes last: it is made from a header that nobody has compared yet, the others
    from what was sealed. Then the smallest digest.
    """
    counts: dict[ImageRecord, int] = {}
    sealed = set()
    for copy in copies:
        counts[copy.record] = counts.get(copy.record, 0) + 1
        if copy.place.tier is not Tier.DISK:
            sealed.add(copy.record)
    return min(
        counts,
        key=lambda one: (-counts[one], one not in sealed, one.digest, one.size_bytes),
    )


def _encoded(candidate: Candidate, records: Iterable[ImageRecord]) -> Iterator[EncodedImage]:
    """How the copies in the store are encoded, where they are of the images that count."""
    for record in records:
        encoded = candidate.encoded.get(record.rank)
        if encoded is not None and any(
            copy.place.tier is Tier.STORE and copy.record == record
            for copy in candidate.sightings[record.rank]
        ):
            yield encoded


def _check_whole(manifest: Manifest, name: str) -> None:
    try:
        check_manifest(manifest, "description")
    except FormatError as error:
        have = {image.rank for image in manifest.images}
        absent = [rank for rank in range(mesh_size(manifest.mesh)) if rank not in have]
        more = f", and {len(absent) - _NAMED_MAX} more" if len(absent) > _NAMED_MAX else ""
        ranks = ", ".join(map(str, absent[:_NAMED_MAX])) + more if absent else "none"
        raise NotRestorable(
            f"{name} is not all there: {error}; ranks without an image anywhere: {ranks}"
        ) from error
