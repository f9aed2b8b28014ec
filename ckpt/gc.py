"""Deleting: what retention lets go, and what interrupted saves left. Never the last good commit.

The order is that of docs/format.md: `retire` is in the log before any file goes (I10); of a state,
the manifest goes before the images (I2). A state that was retired, but whose files are still there,
is finished by the next call, so it may be interrupted anywhere.

What may go is decided from the log as read, and stays true whatever is appended later (I7, I8):
a state that the log had not committed by then, of a generation that has a successor, or not above
the newest generation's last commit, will never be committed. Files of a generation that the log did
not name yet are left alone: it may have begun just now. So is every file whose name is not ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from keepstep.ckpt.entry import Retire
from keepstep.ckpt.errors import LogError, LogMoved
from keepstep.ckpt.keys import (
    LOG_PREFIX,
    STATES_PREFIX,
    DoneKey,
    EntryKey,
    ManifestKey,
    StateKey,
    parse_key,
)
from keepstep.ckpt.lineage import Committed, Lineage, Status
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.presence import is_present
from keepstep.ckpt.retention import Policy, to_retire
from keepstep.storage.store import ObjectInfo, Store

_TURNS_MAX = 20


@dataclass(frozen=True, slots=True)
class Doomed:
    """One file that goes, or went."""

    key: str
    size_bytes: int
    reason: str
    leftover: ObjectInfo | None = None
    """Set if it is what an interrupted write left, not an object."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one collection did, or, on a dry run, would do."""

    is_dry_run: bool
    retired: tuple[State, ...]
    """Newly retired by this call."""
    deleted: tuple[Doomed, ...]
    foreign: tuple[ObjectInfo, ...]
    """Files in the store whose names are not ours: never touched."""
    kept: tuple[State, ...]
    """The live commits that stay, newest first."""

    @property
    def deleted_bytes(self) -> int:
        """The bytes that this frees."""
        return sum(doomed.size_bytes for doomed in self.deleted)


def collect(
    log: Log, policy: Policy, *, is_dry_run: bool = False, is_thorough: bool = True
) -> Report:
    """Retire what `policy` lets go, and delete the files of all that is retired or unreferenced.

    Safe beside a run that writes to the same store, and to be interrupted. Blocks until done;
    what is deleted is durably so.

    Args:
        log: of the store to collect in. Without a term of its own, it borrows the current one.
        policy: what to keep.
        is_dry_run: only say what would go.
        is_thorough: False looks at no file outside ``states/``, and takes it that the newest commit
            has its files, so that a run may collect after each commit at a cost that does not grow
            with its log.

    Raises:
        Superseded: the log's writer had a term that has ended. Nothing was deleted.
        LogError: others kept appending, so nothing could be decided.
        FormatError: the log is damaged. Nothing was deleted.
        StoreError: the store refused. What was retired stays retired; call again to finish.
    """
    lineage, going = _retire(log, policy, is_dry_run, is_thorough)
    retiring = tuple(commit.state for commit in going)
    ours, foreign = _survey(log.store, "" if is_thorough else STATES_PREFIX)
    doomed = [
        *_dead_files(ours, lineage, going),
        *_dead_leftovers(log.store, lineage),
        *(_dead_entries(log.store, lineage) if is_thorough else ()),
    ]
    if not is_dry_run:
        _delete(log.store, doomed)
    kept = tuple(commit.state for commit in lineage.live if commit.state not in retiring)
    return Report(is_dry_run, retiring, tuple(doomed), foreign, kept)


def protected(lineage: Lineage) -> set[State]:
    """Live commits that no policy may retire: the newest, and the newest called good.

    Two, since the newest of all may yet turn out to be bad.
    """
    live = [commit.state for commit in lineage.live]
    return set(live[:1]) | set([state for state in live if state in lineage.good][:1])


def to_collect(
    lineage: Lineage, policy: Policy, protect: Collection[State] = ()
) -> tuple[Committed, ...]:
    """The commits to retire now, oldest entry first.

    Live ones as `policy` says, but none of `protect`; with them those that are void or bad.
    `keep_last=0` keeps them all.
    """
    if policy.keep_last == 0:
        return ()
    live = [commit.state for commit in lineage.live]
    going = set(to_retire(live, policy, protected(lineage).union(protect)))
    going |= {c.state for c in lineage.commits if c.status in (Status.VOID, Status.BAD)}
    return tuple(c for c in reversed(lineage.commits) if c.state in going)


def _newest_whole(store: Store, lineage: Lineage) -> list[State]:
    """The newest live commit whose files are there: the last good one, if a newer is damaged."""
    whole = (each.state for each in lineage.live if is_present(store, each))
    return list(islice(whole, 1))


def _retire(
    log: Log, policy: Policy, is_dry_run: bool, is_thorough: bool
) -> tuple[Lineage, tuple[Committed, ...]]:
    """Append the `retire` entry, decided on the log exactly as it is before that entry."""
    for _ in range(_TURNS_MAX):
        lineage = log.read()
        going = to_collect(lineage, policy)
        if is_thorough and going:
            going = to_collect(lineage, policy, _newest_whole(log.store, lineage))
        if is_dry_run or not going:
            return lineage, going
        reason = f"retention: keep_last={policy.keep_last}, keep_every={policy.keep_every}"
        try:
            states = tuple(commit.state for commit in going)
            log.append_if_last(Retire(states=states, reason=reason), lineage.next_seq)
        except LogMoved:
            continue
        return log.read(), going
    raise LogError(
        f"others appended to the log in {log.store.url} {_TURNS_MAX} times while this looked for "
        "what to retire; nothing was deleted, try again"
    )


def _survey(store: Store, prefix: str) -> tuple[list[ObjectInfo], tuple[ObjectInfo, ...]]:
    """The objects of states, and those whose names are not ours."""
    ours, foreign = [], []
    for info in store.list(prefix):
        key = parse_key(info.key)
        if key is None:
            foreign.append(info)
        elif isinstance(key, StateKey):
            ours.append(info)
    return ours, tuple(foreign)


def _dead_files(
    ours: list[ObjectInfo], lineage: Lineage, going: tuple[Committed, ...]
) -> Iterator[Doomed]:
    """The files that go, in the order in which they go: of each state, the manifest first (I2)."""
    committed = {commit.state: commit.seq for commit in lineage.commits}
    retiring = {commit.state: commit.status for commit in going}
    found = []
    for info in ours:
        key = parse_key(info.key)
        if not isinstance(key, StateKey):
            continue
        if key.state in retiring:
            status = retiring[key.state]
            reason = "retired" if status is Status.LIVE else f"retired: it is {status.value}"
        elif key.state in lineage.retired:
            reason = f"retired earlier: {lineage.retired[key.state]}"
        elif key.state not in committed and is_past(key.state, lineage):
            reason = "unreferenced: it was never committed, and never will be"
        elif key.state in committed and isinstance(key, DoneKey):
            reason = f"of no use any more: entry {committed[key.state]} commits its state"
        else:
            continue
        order = (key.state, not isinstance(key, ManifestKey), info.key)
        found.append((order, Doomed(info.key, info.size_bytes, reason)))
    for _, doomed in sorted(found, key=lambda pair: pair[0]):
        yield doomed


def is_past(state: State, lineage: Lineage) -> bool:
    """Whether a state that is not committed by now never will be, nor is needed (I7, I8).

    The base of the newest generation is needed until that has a commit: should it fail before, the
    next one begins at the same base. (If the base is committed, its files are no matter of this.)
    """
    newest = lineage.generation
    if newest is None:
        return False
    is_base = state == newest.base and all(one.state != state for one in lineage.commits)
    if is_base and lineage.committed_to == state.step:
        return False
    if state.generation == newest.number:
        return state.step <= lineage.committed_to
    return state.generation < newest.number


def _dead_leftovers(store: Store, lineage: Lineage) -> Iterator[Doomed]:
    """What interrupted writes left, of objects that nobody who counts can still be writing."""
    for info in store.leftovers(STATES_PREFIX):
        key = parse_key(info.key)
        if isinstance(key, StateKey) and is_past(key.state, lineage):
            yield Doomed(info.key, info.size_bytes, "left by an interrupted write", info)


def _dead_entries(store: Store, lineage: Lineage) -> Iterator[Doomed]:
    """What interrupted appends left, by writers who are superseded."""
    for info in store.leftovers(LOG_PREFIX):
        key = parse_key(info.key)
        # Up to where the current term was taken: whoever still tries to append there is superseded.
        if isinstance(key, EntryKey) and key.seq <= lineage.term_seq:
            yield Doomed(info.key, info.size_bytes, "left by an interrupted append", info)


def _delete(store: Store, doomed: list[Doomed]) -> None:
    for each in doomed:
        if each.leftover is not None:
            store.sweep(each.leftover)
        else:
            store.delete(each.key)
