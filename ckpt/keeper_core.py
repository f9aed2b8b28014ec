"""What a keeper decides: whom it answers, which slots go to whom, what is kept. Pure.

The keeper of a host has no say in what the run does. It decides only about its own memory:

- **The fence.** A promise (generation, term) never goes back. Whatever comes from below is refused.
- **Pins.** From a promise on, nothing that was listed is freed. When ranks have entered the
  promised generation, its base is known: what lies above it is void, and only the base and one
  state below it stay pinned, until the new generation has a state that is sealed and acknowledged
  on all ranks.
- **Slots.** A slot that was assigned to a rank is that process's while it lives. An entering rank
  is assigned `count` slots, of which the first may be written at once. All others are for peers'
  images, by the same rule by which ranks use their own: what is older than a state that all ranks
  have may go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from keepstep.ckpt.control import Enter
from keepstep.ckpt.keeper_errors import NoRoom, Refusal, Stale
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import GENERATION_MAX, STEP_MAX, State
from keepstep.ckpt.placement import mesh_size
from keepstep.ckpt.pool_table import SlotStatus, Writer
from keepstep.ckpt.tenure import Tenure

PINNED_STATES_MAX = 2
EMPTY_S = 5.0
"""How long a keeper without images waits for ranks to come again."""
OVERSIZE = 2
"""A slot is used for an image that is smaller by at most this factor (or smaller than 1 MiB)."""

_SMALL_BYTES = 1 << 20


class Promise(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Below what a keeper refuses everything: both numbers count, each by itself."""

    generation: int = 0
    term: int = 0


class Row(msgspec.Struct, frozen=True):
    """A slot of the pool as it was at one moment.

    Attributes:
        index: in the table.
        status: what it is; the image's fields mean something from FILLING on.
        state: of the image.
        rank: of the image.
        is_own: the image is of a rank of this host.
        writer: who wrote the image.
        owner: whom the slot is assigned to; None: nobody.
        capacity_bytes: the largest image that fits.
        is_held: somebody reads the image.
        turn: counts changes of the status.
    """

    index: int
    status: SlotStatus
    state: State
    rank: int
    is_own: bool
    writer: Writer
    owner: Writer | None
    capacity_bytes: int
    is_held: bool = False
    turn: int = 0


class Choice(msgspec.Struct, frozen=True):
    """Slots for a rank; `missing`: how many must be made besides.

    One that can be written at once is among the one or the other.
    """

    slots: tuple[int, ...]
    missing: int


def check_fence(promise: Promise, generation: int, term: int, who: str) -> None:
    """Raise Stale for `who` comes with an older generation, or an older term, than promised."""
    for what, asked, promised in (
        ("generation", generation, promise.generation),
        ("term", term, promise.term),
    ):
        if asked < promised:
            raise Stale(
                f"{who} comes with {what} {asked}, but {what} {promised} was promised to this "
                f"host's memory: a newer run has taken over; stop",
                generation=promise.generation,
                term=promise.term,
            )


def promised(promise: Promise, generation: int, term: int, who: str) -> Promise:
    """The promise after `who` asked for one. Raises Stale, or Refusal for an impossible number."""
    if generation > GENERATION_MAX or term > STEP_MAX:
        raise Refusal(
            f"{who} asks for generation {generation}, term {term}: beyond any that can be"
        )
    check_fence(promise, generation, term, who)
    return Promise(generation, term)


def check_enter(
    tenure: Tenure | None, enter: Enter, host: str, *, has_entered: bool = False
) -> bool:
    """Whether `enter` begins a new tenure (else it joins the present one).

    A rank that `has_entered` the present one may bring another structure: optimizers make state in
    their first step. Then the same generation goes on with that.

    Raises Refusal for one that contradicts itself, this host, or the present tenure.
    """
    where = f"rank {enter.rank} cannot enter generation {enter.generation}"
    ranks = mesh_size(enter.structure.mesh)
    if len(enter.hosts) != ranks:
        raise Refusal(f"{where}: the mesh has {ranks} ranks, but hosts are given for {enter.hosts}")
    count = len(enter.addresses)
    if not all(0 <= index < count for index in (*enter.hosts, enter.committer)):
        raise Refusal(f"{where}: expected indices of {count} hosts, found {enter.hosts}")
    mine = tuple(
        rank for rank, index in enumerate(enter.hosts) if enter.addresses[index].host == host
    )
    if enter.ranks != mine or enter.rank not in mine:
        raise Refusal(
            f"{where}: host {host} has ranks {mine} by the layout, but names ranks {enter.ranks}"
        )
    if enter.image_bytes_max < 0 or bool(enter.header) > (enter.image_bytes_max > 0):
        raise Refusal(f"{where}: its largest image cannot have {enter.image_bytes_max} bytes")
    if tenure is None or enter.generation > tenure.generation:
        return True
    for name in ("generation", "term", "ranks", "hosts", "addresses", "committer", "base"):
        expected, found = getattr(tenure, name), getattr(enter, name)
        if expected != found:
            raise Refusal(
                f"{where}: {name} is {found}, but was {expected} for the rank that came first"
            )
    if tenure.structure.digest != enter.structure.digest:
        if has_entered:
            return True
        raise Refusal(
            f"{where}: its structure has digest {enter.structure.digest}, but that of the rank "
            f"that came first has {tenure.structure.digest}"
        )
    return False


def pinned_states(
    present: Collection[State],
    promise: Promise,
    tenure: Tenure | None,
    is_settled: bool,
    slot_count: int,
) -> frozenset[State]:
    """Which of the states in memory must stay whatever else is wanted.

    Args:
        present: all states that have a sealed image here.
        promise: what was promised.
        tenure: what ranks entered last.
        is_settled: all ranks of the tenure have a sealed, acknowledged state of it.
        slot_count: with two slots only the base can stay, since one is needed to go on.
    """
    if tenure is None or promise.generation > tenure.generation:
        return frozenset(present)
    base = tenure.base
    if is_settled or base is None:
        return frozenset()
    older = sorted(
        state
        for state in present
        if state < base and state.step < base.step and state.generation < tenure.generation
    )
    kept = [base] if base in present else []
    room = PINNED_STATES_MAX if slot_count > PINNED_STATES_MAX else PINNED_STATES_MAX - 1
    return frozenset(kept + older[::-1][: room - len(kept)])


def void_rows(rows: Sequence[Row], pinned: Collection[State], tenure: Tenure) -> list[int]:
    """Sealed images of older generations above the tenure's base: never to be restored."""
    base_step = -1 if tenure.base is None else tenure.base.step
    return [
        row.index
        for row in rows
        if row.status is SlotStatus.SEALED
        and row.state.generation < tenure.generation
        and row.state.step > base_step
        and not _is_kept(row, pinned)
    ]


def rows_to_seal(rows: Sequence[Row], promise: Promise) -> list[Row]:
    """Captured images that are to be sealed, each rank's in the order of its steps.

    None of a generation below the promise: its inventory has been given away without them.
    """
    captured = [
        row
        for row in rows
        if row.status is SlotStatus.CAPTURED
        and row.is_own
        and row.state.generation >= promise.generation
    ]
    return sorted(captured, key=lambda row: (row.state, row.rank))


def rows_to_free(rows: Sequence[Row], promise: Promise, living: Collection[Writer]) -> list[Row]:
    """Unfinished images that nobody is going to finish, since their writer is gone.

    FILLING, or CAPTURED below the promise; a peer's image, which is its keeper's to seal: either.
    `living` has this keeper, too. Who writes a FILLING slot says its owner; its fields may be an
    earlier image's.
    """
    found = []
    for row in rows:
        is_old = row.state.generation < promise.generation
        if row.status is SlotStatus.FILLING:
            writer = row.writer if row.owner is None else row.owner
        elif row.status is SlotStatus.CAPTURED and (is_old or not row.is_own):
            writer = row.writer
        else:
            continue
        if writer not in living:
            found.append(row)
    return found


def choose_own(
    rows: Sequence[Row],
    pinned: Collection[State],
    living: Collection[Writer],
    generation: int,
    rank: int,
    size_bytes: int,
    count: int,
) -> Choice:
    """Slots for an own rank that enters `generation`.

    The first is written at once, so it is neither pinned nor read by anybody. For the others those
    that are pinned are taken first: they are written when the pins are gone, and what is free is
    left for the first slots of other ranks.

    Args:
        rows: all slots.
        pinned: `pinned_states`.
        living: processes that keep what they own.
        generation: of which nothing is taken, nor of newer ones.
        rank: who enters.
        size_bytes: the largest image it may get.
        count: how many slots.
    """
    most_bytes = max(OVERSIZE * size_bytes, _SMALL_BYTES)
    fitting = [
        row
        for row in rows
        if _is_spare(row, living, generation) and size_bytes <= row.capacity_bytes <= most_bytes
    ]
    fitting.sort(key=lambda row: (not row.is_own or row.rank != rank, row.state, row.index))
    ready = [row.index for row in fitting if not _is_kept(row, pinned)]
    kept = [row.index for row in fitting if _is_kept(row, pinned)]
    first = ready[: min(count, 1)]
    chosen = (*first, *(kept + ready[1:])[: max(count - 1, 0)])
    return Choice(chosen, count - len(chosen))


def peer_slots_missing(
    rows: Sequence[Row],
    pinned: Collection[State],
    living: Collection[Writer],
    generation: int,
    ranks: int,
    size_bytes: int,
    count: int,
) -> int:
    """How many slots must be made so that `ranks` remote ranks have `count` each.

    At least one for each is to be free of pins, so that its first image of `generation` has a
    place.
    """
    there = [row for row in rows if row.owner not in living and row.capacity_bytes >= size_bytes]
    ready = [
        row
        for row in there
        if row.state.generation >= generation
        or (_is_spare(row, living, generation) and not _is_kept(row, pinned))
    ]
    return max(0, ranks * count - len(there), ranks - len(ready))


def surplus_rows(
    rows: Sequence[Row],
    pinned: Collection[State],
    living: Collection[Writer],
    generation: int,
    ranks: int,
    size_bytes: int,
    count: int,
) -> list[int]:
    """Slots whose memory may be given back, when `ranks` remote ranks have `count` slots each.

    Nobody's, with nothing of `generation` in it, not pinned; too small or far too large for peers'
    images, or too many.
    """
    most_bytes = max(OVERSIZE * size_bytes, _SMALL_BYTES)
    spare, fitting = [], []
    for row in rows:
        is_fitting = size_bytes <= row.capacity_bytes <= most_bytes
        if not _is_spare(row, living, generation) or _is_kept(row, pinned):
            if row.owner not in living and is_fitting:
                fitting.append(row.index)
        elif is_fitting:
            spare.append(row)
    wanted = max(0, ranks * count - len(fitting))
    spare.sort(key=lambda row: row.capacity_bytes)
    kept = {row.index for row in spare[:wanted]}
    return [
        row.index
        for row in rows
        if row.index not in kept
        and _is_spare(row, living, generation)
        and not _is_kept(row, pinned)
    ]


def choose_peer(
    rows: Sequence[Row],
    pinned: Collection[State],
    living: Collection[Writer],
    state: State,
    rank: int,
    size_bytes: int,
    agreed_acked: int,
    count: int,
) -> int:
    """The slot for an image of a remote `rank`. Raises NoRoom.

    A rank that has fewer than `count` slots with images of its generation gets a free one, or one
    of an older generation; else its own oldest that all ranks need no more.
    """
    fitting = [row for row in rows if row.owner not in living and row.capacity_bytes >= size_bytes]
    its_own = [
        row
        for row in fitting
        if not row.is_own
        and row.rank == rank
        and row.state.generation == state.generation
        and row.status in (SlotStatus.SEALED, SlotStatus.FILLING)
    ]
    new = [
        row
        for row in fitting
        if _is_spare(row, living, state.generation) and not _is_kept(row, pinned)
    ]
    again = [
        row
        for row in its_own
        if row.status is SlotStatus.SEALED
        and row.state.step < agreed_acked
        and not _is_kept(row, pinned)
    ]
    new.sort(key=lambda row: (row.status, row.capacity_bytes, row.state))
    again.sort(key=lambda row: row.state)
    candidates = new + again if len(its_own) < count else again
    if not candidates:
        raise NoRoom(
            f"no slot for the image of rank {rank} in {state_words(state)}: it has "
            f"{len(its_own)} of {count}, all ranks have acknowledged only up to step "
            f"{agreed_acked}, and no other slot of {size_bytes} bytes is free"
        )
    return candidates[0].index


def _is_spare(row: Row, living: Collection[Writer], generation: int) -> bool:
    """Whether nobody alive owns the slot, and what is in it is complete and older."""
    if row.owner is not None and row.owner in living:
        return False
    if row.status is SlotStatus.FREE:
        return True
    return row.status is SlotStatus.SEALED and row.state.generation < generation


def _is_kept(row: Row, pinned: Collection[State]) -> bool:
    return row.status is SlotStatus.SEALED and (row.is_held or row.state in pinned)


def why_end(
    living: int,
    ranks: Collection[int],
    finished: Collection[int],
    alone_s: float,
    patience_s: float,
    is_empty: bool = False,
) -> str:
    """Why the keeper and its memory are needed no more; "" if they are.

    Args:
        living: how many processes of ranks are there.
        ranks: of the tenure; () before there is one.
        finished: ranks that left since their run has ended well.
        alone_s: for how long no process has been there.
        patience_s: how long to wait for the next.
        is_empty: ranks have been here, and left no image: as when their run was refused.
    """
    if living:
        return ""
    if ranks and set(ranks) <= set(finished):
        return "all ranks of this host have finished"
    if is_empty and alone_s >= EMPTY_S:
        return "the ranks of this host are gone, and have left nothing"
    if alone_s >= patience_s:
        return f"no rank has been here for {alone_s:.1f} s, of a patience of {patience_s:g} s"
    return ""
