"""What rank 0 learns before it decides: what is where, and what each state is. No collectives.

The hosts of the new generation answer through their own ranks. Others that still have a keeper, by
the store's hints, are asked over the network: their memory may be all that is left of a state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from keepstep.ckpt.attempt import attempt
from keepstep.ckpt.candidates import Candidate, Settled, candidates, settle
from keepstep.ckpt.errors import CheckpointError, FormatError, NotRestorable
from keepstep.ckpt.host_hints import HostHint, read_hints
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import KeeperError, Stale
from keepstep.ckpt.keeper_line import KeeperLine
from keepstep.ckpt.keys import STATES_PREFIX, DoneKey, parse_key
from keepstep.ckpt.lineage import Lineage, state_words
from keepstep.ckpt.manifest import Description, DoneRecord, State, decode_description
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.store_tier import read_done
from keepstep.storage.store import Store
from keepstep.storage.token import Token

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


@dataclass(frozen=True, slots=True)
class Others:
    """Hosts that are no members (any more), by the store's hints.

    Attributes:
        inventories: of those that answered.
        silent: host -> why it said nothing.
    """

    inventories: tuple[Inventory, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)


class Unsure(CheckpointError):
    """The store could not be asked just now. That is no proof of damage, nor of absence."""


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
        self._trouble = stored.trouble
        found = candidates(lineage, inventories, stored.records)
        self._left = [one for one in found if step in (None, one.state.step)]
        self.passed_over: list[str] = []
        """Commits that could not be had, newest first, with what was wrong."""
        self.incomplete: list[str] = []
        """States without a commit that are not all there, newest first, with what is missing."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to try."""
        return not self._left

    def next(self) -> Found | None:
        """The newest state that is whole, of those not tried yet; None if there is none.

        Raises Unsure if that may be one of which the store cannot be asked just now.
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
            elif self._trouble:
                raise Unsure(f"{text}; and the store may have the rest: {self._trouble}")
            else:
                self.incomplete.append(text)
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


@dataclass(frozen=True, slots=True)
class Stored:
    """Images that are in the store whole, of states that have no commit (yet).

    Attributes:
        records: by state.
        trouble: why there may be more; "": the store was asked.
    """

    records: Mapping[State, list[DoneRecord]]
    trouble: str = ""


def stored_images(
    store: Store,
    lineage: Lineage,
    inventories: Iterable[Inventory],
    tell: Callable[..., None],
    sleep: Callable[[float], None] = time.sleep,
) -> Stored:
    """What done records say of states that the inventories know, and the log does not.

    Looked for only where a keeper can describe the state: nobody else knows what it is. What memory
    has may do without a store that does not answer; a state that is not whole then may be.
    """
    live = {commit.state for commit in lineage.live}
    states = {copy.state for one in inventories for copy in one.copies} - live
    generations = {state.generation for state in states if not lineage.admits(state)}
    found: dict[State, list[DoneRecord]] = {}
    for generation in sorted(generations):
        prefix = f"{STATES_PREFIX}g{generation:06}/"
        listed = attempt(partial(_done_keys, store, prefix), sleep)
        trouble = listed.damage or listed.trouble
        for key in listed.found or ():
            if key.state not in states:
                continue
            read = attempt(partial(read_done, store, key.state, key.rank), sleep)
            if read.found is not None:
                found.setdefault(key.state, []).append(read.found)
            elif read.damage:
                tell("done_record_refused", read.damage, step=key.state.step, rank=key.rank)
            trouble = trouble or read.trouble
        if trouble:
            tell("store_silent", f"which images are in the store without a commit: {trouble}")
            return Stored(found, trouble)
    return Stored(found)


def _done_keys(store: Store, prefix: str) -> list[DoneKey]:
    keys = (parse_key(info.key) for info in store.list(prefix))
    return [key for key in keys if isinstance(key, DoneKey)]


def other_inventories(
    store: Store,
    members: Iterable[str],
    job: str,
    token: Token | None,
    timeout_s: float,
    promise: tuple[int, int] | None,
    tell: Callable[..., None],
    sleep: Callable[[float], None] = time.sleep,
) -> Others:
    """What hosts have that are no members (any more), as far as their keepers answer.

    Args:
        job: theirs too: where a hint leads, another job's keeper may listen by now.
        promise: (generation, term) that they are to promise to; None: only asked.

    Raises:
        Stale: one of them has promised to somebody newer.
        Unsure: the store does not say now where they are, and a promise is wanted: to go on without
            them may void what they alone have.
    """
    read = attempt(lambda: read_hints(store), sleep)
    if read.found is None:
        said = f"where other hosts' keepers listen: {read.damage or read.trouble}"
        if promise is not None:
            raise Unsure(f"{store.url} does not say {said}")
        tell("store_silent", said)
        return Others()
    known = set(members)
    others = [hint for host, hint in sorted(read.found.items()) if host not in known]
    if token is None:
        return Others(silent={hint.host: "there is no token to ask it with" for hint in others})

    def ask(hint: HostHint) -> Inventory | str | Stale:
        try:
            with contextlib.closing(PlaneClient(hint.address, token, timeout_s)) as client:
                return _inventory_of(client, hint, job, promise)
        except Stale as error:
            return error
        except KeeperError as error:
            return str(error)

    found: list[Inventory] = []
    silent: dict[str, str] = {}
    if others:
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(others))) as pool:
            for hint, answer in zip(others, pool.map(ask, others), strict=True):
                if isinstance(answer, Stale):
                    raise answer
                if isinstance(answer, str):
                    silent[hint.host] = answer
                    tell("host_silent", f"{hint.host}: {answer}", of_host=hint.host)
                else:
                    found.append(answer)
    return Others(tuple(found), silent)


def _inventory_of(
    client: PlaneClient, hint: HostHint, job: str, promise: tuple[int, int] | None
) -> Inventory | str:
    """The inventory; or why nobody else's may be taken: a promise would end another run."""
    status = client.status()
    there = (status.get("job"), status.get("host"))
    if there != (job, hint.host):
        return (
            f"the keeper at {hint.address} is that of host {there[1]} of job {there[0]}, "
            f"not of {hint.host} of {job}"
        )
    return client.inventory() if promise is None else client.take_inventory(*promise)


def racks_of(inventories: Iterable[Inventory]) -> Mapping[str, str]:
    """Host -> rack, of those that have one."""
    return {one.host: one.rack for one in inventories if one.rack}


def decode_inventories(parts: Iterable[bytes]) -> Iterator[Inventory]:
    """The inventories that ranks sent each other; empty parts are passed over."""
    for data in parts:
        if data:
            yield msgspec.json.decode(data, type=Inventory)
