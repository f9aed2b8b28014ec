"""What rank 0 decides when a run begins: the term, what to go on from, the entries in the log.

No collectives: what comes of it is a `Told` for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keepstep.ckpt.address import Address, find_live
from keepstep.ckpt.attempt import is_damage
from keepstep.ckpt.beginning import BeginRefused, Home, Wanted
from keepstep.ckpt.candidates import Settled
from keepstep.ckpt.entry import Generation, Parent, Rewind
from keepstep.ckpt.errors import CheckpointError, NotRestorable
from keepstep.ckpt.inventory import HostAddress, Inventory
from keepstep.ckpt.keeper_line import KeeperLine
from keepstep.ckpt.lineage import Lineage, resume_points, state_words
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State, encode_manifest
from keepstep.ckpt.placement import Mesh
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.survey import Found, Survey, Unsure, other_inventories
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

NO_PROOF = (
    "That is no proof of damage, so the commit was not passed over: start again when all ranks can "
    "read it; if its files are lost for good, delete them"
)
_REASON_MAX = 2_000


class Told(msgspec.Struct, frozen=True):
    """What rank 0 decided, for all ranks; `refused` instead of it, if it could not.

    Attributes:
        refused: why not; `kind`: the error's class.
        generation: the number that is to begin; `term`: under which.
        state: what to try next; None: there is nothing, or `parent`.
        is_committed: whether the log has it.
        manifest: of the state, or of `parent`.
        places: by image, where it is.
        parent: the checkpoint of another run to begin from.
        passed_over: commits that could not be had.
        others: what hosts have that are no members.
    """

    refused: str = ""
    kind: str = ""
    generation: int = 0
    term: int = 0
    state: State | None = None
    is_committed: bool = False
    manifest: bytes = b""
    places: dict[int, tuple[tuple[Tier, str], ...]] = {}
    parent: Parent | None = None
    passed_over: tuple[str, ...] = ()
    others: tuple[Inventory, ...] = ()


class Chooser:
    """Rank 0's decisions, in the order of the methods. All of them may raise what the log, the
    store and the keepers raise.

    Args:
        store: the durable one; `log`: its log, opened for this job.
        home, wanted: rank 0's.
        keeper: of rank 0's host; None if there is none.
    """

    def __init__(
        self, store: Store, log: Log, home: Home, wanted: Wanted, keeper: KeeperLine | None
    ) -> None:
        self._keeper = keeper
        self._store = store
        self._log = log
        self._home = home
        self._wanted = wanted
        self._survey: Survey | None = None
        self._silent: Mapping[str, str] = {}
        self._too_far: list[str] = []

    def take_term(self) -> Told:
        """Take a term, if what is there is this run.

        Raises BeginRefused before anything is written, if the newest commit is another run's.
        """
        self._check_commits(self._log.read())
        term = self._log.take_term(self._wanted.by)
        newest = self._log.read().generation
        return Told(term=term, generation=1 if newest is None else newest.number + 1)

    def ask_others(self, members: Sequence[str], generation: int, term: int) -> Told:
        """The inventories, promised, of living hosts that are no members."""
        home, promise = self._home, (generation, term)
        found = other_inventories(
            self._store,
            members,
            self._wanted.job,
            home.token,
            home.timeout_s,
            promise,
            self._wanted.tell,
        )
        self._silent = found.silent
        return Told(others=found.inventories)

    def next(self, inventories: Sequence[Inventory], tried: Sequence[str]) -> Told:
        """The next state to try; when none is left, another run's, or nothing.

        Args:
            inventories: of all hosts that answered.
            tried: what was wrong with those tried before.

        Raises:
            BeginRefused: it is of another run; or the store says nothing of a state now.
            NotRestorable: the run has states, and none could be had.
        """
        lineage = self._log.read()
        if self._survey is None:
            self._check_known(lineage, inventories)
            self._survey = Survey(
                self._store,
                lineage,
                inventories,
                here=self._home.host,
                keeper=self._keeper,
                token=self._home.token,
                timeout_s=self._home.timeout_s,
                tell=self._wanted.tell,
            )
            if not self._survey.is_empty:
                self._check_parent(lineage)
        try:
            found = self._survey.next()
            while found is not None and self._is_too_far(found):
                found = self._survey.next()
        except Unsure as error:
            raise BeginRefused(f"{error}. {NO_PROOF}") from error
        passed_over = tuple(self._survey.passed_over)
        self._survey.passed_over.clear()
        if found is None:
            return self._anew(lineage, inventories, (*tried, *passed_over), passed_over)
        manifest = found.settled.manifest
        reason = self._wanted.refuse(manifest)
        if reason:
            raise BeginRefused(reason)
        return Told(
            state=manifest.state,
            is_committed=found.is_committed,
            manifest=encode_manifest(manifest),
            places=_places_of(found.settled),
            passed_over=passed_over,
        )

    def append(
        self,
        base: Told,
        generation: int,
        mesh: Mesh,
        hosts: Sequence[int],
        ordered: Sequence[HostAddress],
        passed_over: Sequence[str],
    ) -> Told:
        """Rewind if a newer commit was passed over, then begin the generation. Durable."""
        floor = -1 if base.state is None else base.state.step
        if any(commit.state.step > floor for commit in self._log.read().live):
            reason = next(iter(passed_over), "it was passed over")[:_REASON_MAX]
            self._log.append_from(base.state, Rewind(to=base.state, reason=reason))
        self._log.append_from(
            base.state,
            Generation(
                number=generation,
                hosts=tuple(ordered[index].host for index in hosts),
                mesh=mesh,
                base=base.state,
                parent=base.parent,
                config=self._wanted.config,
            ),
        )
        return Told()

    # Inside.

    def _is_too_far(self, found: Found) -> bool:
        """Whether it is an uncommitted state from which on the run has nothing to do."""
        last, state = self._wanted.last_step, found.settled.manifest.state
        if last is None or found.is_committed or state.step < last:
            return False
        text = (
            f"{state_words(state)} was never committed, and the run is to end at step {last}: it "
            "goes on from an older one, to commit what it comes to"
        )
        self._too_far.append(text)
        self._wanted.tell("state_passed_over", text, step=state.step)
        return True

    def _check_commits(self, lineage: Lineage) -> None:
        """Refuse another run's checkpoint before anything is written to its log.

        Damaged manifests are passed by: that is found, and told, when they are staged.
        """
        for commit in resume_points(lineage):
            try:
                manifest = open_checkpoint(self._store, commit).manifest
            except (CheckpointError, StoreError) as error:
                if not is_damage(error):
                    raise
                continue
            reason = self._wanted.refuse(manifest)
            if reason:
                raise BeginRefused(reason)
            return

    def _check_known(self, lineage: Lineage, inventories: Sequence[Inventory]) -> None:
        """Refuse hosts with states of generations that the log has not come to.

        Somebody else's log named these generations: another store's, or one that has lost its end.
        They are not touched: they may be all that is left of that run.
        """
        newest = 0 if lineage.generation is None else lineage.generation.number
        strange: dict[str, State] = {}
        for one in inventories:
            for copy in one.copies:
                if copy.state.generation > newest:
                    strange[one.host] = max(copy.state, strange.get(one.host, copy.state))
        if strange:
            has = "; ".join(f"{host} has {state_words(at)}" for host, at in sorted(strange.items()))
            raise BeginRefused(
                f"{has}, but the log in {self._store.url} has only {newest} generations: these "
                "states belong to a run in another store. Name that store; or, if they are not "
                "wanted any more, delete them there (`keepstep clean`, and the disk directories), "
                "or start under another --run-dir"
            )

    def _anew(
        self,
        lineage: Lineage,
        inventories: Sequence[Inventory],
        tried: Sequence[str],
        passed_over: tuple[str, ...],
    ) -> Told:
        """From nothing, or another run's checkpoint: unless this run has states."""
        if lineage.live:
            raise NotRestorable(f"no commit in {self._store.url} could be restored", tried)
        if lineage.commits:
            raise NotRestorable(
                f"{self._store.url} has commits, but none that is good: to begin again from "
                "nothing, name another --store",
                [
                    f"{state_words(one.state)} is {one.status.value}: {one.reason}"
                    for one in lineage.commits[:5]
                ],
            )
        self._check_nothing_is_left(lineage, inventories, tried)
        address, weights_only = self._wanted.init_from, self._wanted.weights_only
        newest = lineage.generation
        if address is None and newest is not None and newest.parent is not None:
            parent = newest.parent  # what this run began from, and has to begin from again
            address = Address(parent.store, parent.state.step)
            weights_only = parent.weights_only
        if address is None:
            return Told(passed_over=passed_over)
        theirs = open_store(address.store)
        their_lineage = Log(theirs).read()
        commit = find_live(their_lineage, address.step, address.store)
        assert their_lineage.job is not None  # it has a commit
        manifest = open_checkpoint(theirs, commit).manifest
        store: tuple[tuple[Tier, str], ...] = ((Tier.STORE, ""),)
        return Told(
            manifest=encode_manifest(manifest),
            places={image.rank: store for image in manifest.images},
            parent=Parent(address.store, their_lineage.job, commit.state, weights_only),
            passed_over=passed_over,
        )

    def _check_nothing_is_left(
        self, lineage: Lineage, inventories: Sequence[Inventory], tried: Sequence[str]
    ) -> None:
        """Refuse to begin a run again from nothing while it may have states somewhere.

        That would void them for good, and nobody would have decided it. If all hosts of the run
        answer, what they have not is lost; then, or if only a few say nothing and nobody knows of
        any state, it begins again, and that is told.
        """
        newest, survey = lineage.generation, self._survey
        if newest is None:
            return
        missing = [] if survey is None else survey.incomplete
        said = [*tried, *self._too_far, *missing]
        how = "to begin again from nothing, start under another --run-dir and --store"
        if tried or self._too_far:
            raise NotRestorable(
                f"the run in {self._store.url} has states but no commit, and none of them could be "
                f"gone on from; nothing was changed: {how}",
                said,
            )
        hosts = set(newest.hosts)
        there = hosts.intersection(one.host for one in inventories)
        is_known = newest.base is not None or bool(missing)
        if self._silent and (is_known or 2 * len(there) <= len(hosts)):
            silent = [f"{host} does not answer: {why}" for host, why in self._silent.items()]
            raise NotRestorable(
                f"the run in {self._store.url} has no commit, and all its states may be on hosts "
                "that do not answer: start again when their keepers can be reached (any run there "
                f"under this --run-dir starts one); {how}",
                [*silent, *said],
            )
        self._wanted.tell(
            "begun_again",
            f"generation {newest.number} left no commit, and no state that can be had; so the run "
            f"begins again: {'; '.join(missing) or 'no image of it is left'}",
            generation=newest.number,
        )

    def _check_parent(self, lineage: Lineage) -> None:
        """Refuse `init_from` over a store that holds a run which began otherwise."""
        address = self._wanted.init_from
        parents = [one.parent for one in lineage.generations if one.parent is not None]
        if address is None or any(
            parent.store == address.store and address.step in (None, parent.state.step)
            for parent in parents
        ):
            return
        raise BeginRefused(
            f"{self._store.url} holds a run already, which did not begin from {address.store}: "
            "leave --init-from out to resume it, or name another --run-dir or --store"
        )


def _places_of(settled: Settled) -> dict[int, tuple[tuple[Tier, str], ...]]:
    return {
        image: tuple((place.tier, place.host) for place in where)
        for image, where in settled.places.items()
    }
