"""What rank 0 learns before it decides: what is where, and what each state is. No collectives.

The hosts of the new generation answer through their own ranks. Others that still have a keeper, by
the store's hints, are asked over the network: their memory may be all that is left of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from keepstep.ckpt.attempt import attempt
from keepstep.ckpt.candidates import Candidate, Settled, candidates, settle
from keepstep.ckpt.document import decode
from keepstep.ckpt.errors import CheckpointError, FormatError, NotRestorable
from keepstep.ckpt.host_hints import HostHint, read_hints
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import KeeperError, Stale
from keepstep.ckpt.keeper_line import KeeperLine
from keepstep.ckpt.keys import STATES_PREFIX, DoneKey, parse_key
from keepstep.ckpt.lineage import Lineage, state_words
from keepstep.ckpt.manifest import Description, ImageRecord, State, decode_description
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.reader import open_checkpoint
from keepstep.storage.errors import StoreError
from keepstep.storage.store import Store
from keepstep.storage.token import Token

RECORD_BYTES_MAX = 1 << 12
_ASKED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A state that is all there: what to stage next.

    Attributes:
        settled: its manifest and where its images are.
        is_committed: whether the log has it.
    """

    settled: Settled
    is_committed: bool


class Unsure(CheckpointError):
    """The store could not be asked about a commit. That is no proof of damage."""


class Survey:
    """The states that a run may go on from, found out one after the other, newest first.

    Args:
        store: the durable one.
        lineage: of its log.
        inventories: of all hosts that could be asked.
        here: the host whose keeper `keeper` is.
        keeper: of this host; None if there is none.
        token: for the other hosts' keepers; None: they are not asked.
        timeout_s: how long one of them may be silent.
        tell: an event of this rank.
        step: only states at this step; None: all.
    """

    def __init__(
        self,
        store: Store,
        lineage: Lineage,
        inventories: Sequence[Inventory],
        *,
        here: str,
        keeper: KeeperLine | None,
        token: Token | None,
        timeout_s: float,
        tell: Callable[..., None],
        step: int | None = None,
    ) -> None:
        self._store = store
        self._here = here
        self._keeper = keeper
        self._token = token
        self._timeout_s = timeout_s
        self._tell = tell
        self._addresses = {one.host: one.address for one in inventories}
        stored = stored_images(store, lineage, inventories, tell)
        found = candidates(lineage, inventories, stored)
        self._left = [one for one in found if step in (None, one.state.step)]
        self.passed_over: list[str] = []
        """Commits that could not be had, newest first, with what was wrong."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to try."""
        return not self._left

    def next(self) -> Found | None:
        """The newest state that is whole, of those not tried yet; None if there is none.

        Raises Unsure if that is a commit whose manifest cannot be asked for just now.
        """
        while self._left:
            candidate = self._left.pop(0)
            problems: list[str] = []
            unsure: Unsure | None = None
            for known in (self._committed, self._described):
                try:
                    found = known(candidate)
                except Unsure as error:
                    unsure = error
                    continue
                except (NotRestorable, FormatError) as error:
                    problems.append(str(error))
                    continue
                if found is not None:
                    for odd in found.settled.odd:
                        self._tell("copy_passed_over", odd)
                    return found
            if unsure is not None:
                raise unsure
            text = "; ".join(problems)
            if candidate.commit is not None:
                self.passed_over.append(text)
            else:
                self._tell("snapshot_incomplete", text, step=candidate.state.step)
        return None

    def _committed(self, candidate: Candidate) -> Found | None:
        """By the manifest in the store."""
        commit = candidate.commit
        if commit is None:
            return None
        read = attempt(lambda: open_checkpoint(self._store, commit).manifest)
        if read.found is not None:
            return Found(settle(candidate, read.found), is_committed=True)
        if read.trouble:
            raise Unsure(f"{state_words(candidate.state)}: {read.trouble}")
        raise NotRestorable(read.damage)

    def _described(self, candidate: Candidate) -> Found | None:
        """By what a keeper says that it is."""
        problems = []
        for host in sorted(candidate.describers, key=lambda one: (one != self._here, one)):
            try:
                known = self._describe(host, candidate.state)
                if known is not None:
                    return Found(settle(candidate, known), candidate.commit is not None)
            except CheckpointError as error:
                problems.append(f"{host}: {error}")
        if candidate.commit is not None and not candidate.describers:
            return None
        said = "; ".join(problems) or "no keeper that can be asked describes it"
        raise NotRestorable(f"{state_words(candidate.state)}: {said}")

    def _describe(self, host: str, state: State) -> Description | None:
        if host == self._here and self._keeper is not None:
            return self._keeper.describe(state)
        address = self._addresses.get(host)
        if address is None or self._token is None:
            return None
        client = PlaneClient(address, self._token, self._timeout_s)
        try:
            return decode_description(client.describe(state), f"the description by {host}")
        finally:
            client.close()


def stored_images(
    store: Store,
    lineage: Lineage,
    inventories: Iterable[Inventory],
    tell: Callable[..., None],
) -> dict[State, list[ImageRecord]]:
    """Images that are in the store whole, of states that have no commit (yet).

    Looked for only where a keeper can describe the state: nobody else knows what it is. A store
    that does not answer has none: what memory has may do without.
    """
    live = {commit.state for commit in lineage.live}
    states = {copy.state for one in inventories for copy in one.copies} - live
    generations = {state.generation for state in states if not lineage.admits(state)}
    found: dict[State, list[ImageRecord]] = {}
    try:
        for generation in sorted(generations):
            for info in store.list(f"{STATES_PREFIX}g{generation:06}/"):
                key = parse_key(info.key)
                if isinstance(key, DoneKey) and key.state in states:
                    data = store.get(info.key, RECORD_BYTES_MAX)
                    record = decode(data, ImageRecord, bytes_max=RECORD_BYTES_MAX, file=info.key)
                    if record.rank == key.rank:
                        found.setdefault(key.state, []).append(record)
    except (FormatError, StoreError) as error:
        tell("store_silent", f"which images are in the store without a commit: {error}")
    return found


def other_inventories(
    store: Store,
    members: Iterable[str],
    token: Token | None,
    timeout_s: float,
    promise: tuple[int, int] | None,
    tell: Callable[..., None],
) -> list[Inventory]:
    """What hosts have that are no members (any more), as far as their keepers answer.

    Args:
        promise: (generation, term) that they are to promise to; None: only asked.

    Raises:
        Stale: one of them has promised to somebody newer.
    """
    if token is None:
        return []
    try:
        hints = read_hints(store)
    except StoreError as error:
        tell("store_silent", f"where other hosts' keepers listen: {error}")
        return []
    known = set(members)
    others = [hint for host, hint in sorted(hints.items()) if host not in known]

    def ask(hint: HostHint) -> Inventory | str | Stale:
        client = PlaneClient(hint.address, token, timeout_s)
        try:
            found = client.inventory() if promise is None else client.take_inventory(*promise)
        except Stale as error:
            return error
        except KeeperError as error:
            return str(error)
        finally:
            client.close()
        if found.host != hint.host:
            return f"the keeper at {hint.address} is that of {found.host}, not of {hint.host}"
        return found

    found = []
    if others:
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(others))) as pool:
            for hint, answer in zip(others, pool.map(ask, others), strict=True):
                if isinstance(answer, Stale):
                    raise answer
                if isinstance(answer, str):
                    tell("host_silent", f"{hint.host}: {answer}", of_host=hint.host)
                else:
                    found.append(answer)
    return found


def racks_of(inventories: Iterable[Inventory]) -> Mapping[str, str]:
    """Host -> rack, of those that have one."""
    return {one.host: one.rack for one in inventories if one.rack}


def decode_inventories(parts: Iterable[bytes]) -> Iterator[Inventory]:
    """The inventories that ranks sent each other; empty parts are passed over."""
    for data in parts:
        if data:
            yield msgspec.json.decode(data, type=Inventory)
