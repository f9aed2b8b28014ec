"""A run of the library, from its beginning to its end: behind `Checkpointer`."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path

import msgspec
import torch.distributed as dist

from keepstep.ckpt.agree import agree, all_gather_bytes, broadcast_bytes
from keepstep.ckpt.begin import begin
from keepstep.ckpt.beginning import PEER_SILENT_S, Begun, Home, Wanted
from keepstep.ckpt.control import Enter, Entered
from keepstep.ckpt.errors import CheckpointError, NotCommitted
from keepstep.ckpt.events import Events
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_errors import KeeperError
from keepstep.ckpt.keeper_process import host_dir_of
from keepstep.ckpt.level_exchange import LevelExchange, Said
from keepstep.ckpt.library_host import LibraryHost, least_slots
from keepstep.ckpt.lineage import resume_points, state_words
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.process import this_process
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import STEP_NONE, Level
from keepstep.ckpt.slots import agree as agree_levels
from keepstep.ckpt.snapshots import Captured, Snapshots
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due
from keepstep.storage.errors import StoreError
from keepstep.storage.store import Store
from keepstep.storage.token import TOKEN_VARIABLE, Token, find_token

_POLL_S = 0.02
_LEAVE_S = 10.0
_SEALED_S = 60.0
_ANSWER_S = 900.0
"""How long this host's keeper may take: it verifies or touches all of its memory first, which may
be hundreds of GB. That it has died is seen at once."""
_THREADS_MAX = 4
_NOTHING = Captured(0.0, 0.0, "", Due.NOWHERE, Due.NOWHERE, "")


class _Standing(msgspec.Struct, frozen=True):
    """What one rank says of itself while all wait for a commit."""

    level: Level
    committed: int
    failures: int
    is_late: bool


def newest_tensors(
    group: dist.ProcessGroup | None, store: Store, log: Log | None
) -> dict[str, TensorSpec]:
    """The tensors of the newest checkpoint in the log, on all ranks; {} if there is none.

    Collective. Raises OtherRanksFailed if rank 0 cannot read it.
    """
    data, problem = b"", None
    if log is not None:
        try:
            for commit in resume_points(log.read())[:1]:
                data = msgspec.json.encode(open_checkpoint(store, commit).manifest.tensors)
        except (StoreError, CheckpointError) as error:
            problem = str(error)
    agree(group, "reading which optimizer state the newest checkpoint has", problem)
    data = broadcast_bytes(group, data)
    return msgspec.json.decode(data, type=dict[str, TensorSpec]) if data else {}


class LibraryRun:
    """One rank's run.

    Attributes:
        begun: how it began.
        snapshots: of the present plan.
        captured: step of the last capture that was asked for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        registry: Registry,
        structure: Structure,
        store: Store,
        log: Log | None,
        host: LibraryHost,
        events: Events,
    ) -> None:
        """Begin. Collective; blocking. Raises as `begin`."""
        self._group = group
        self._registry = registry
        self._host = host
        self._events = events
        self._tiers = host.config.tiers
        self.snapshots = Snapshots(registry, structure, host.config.job)
        self._digest = structure.digest
        self.begun: Begun = self._begin(structure, store, log)
        base = self.begun.base
        base_step = STEP_NONE if base is None else base.step
        self.captured = base_step
        self._pending_due = STEP_NONE
        self._exchange = LevelExchange(group, base_step)
        self._disk_s = self._store_s = time.monotonic()
        self._skipped = 0
        absent = all_gather_bytes(group, b"1" if registry.has_absent_state() else b"")
        self._is_plan_due = any(absent)
        self._open(self.begun.entered)
        self._tell_beginning()

    def wants_plan(self) -> bool:
        """Whether all ranks must plan anew before the next capture: the same on all.

        Where optimizers make their state in the first step, before the first capture; and whenever
        a rank said that it has found something new.
        """
        is_due, self._is_plan_due = self._is_plan_due, False
        return self._exchange.take().wants_plan or is_due

    def plan(self, structure: Structure) -> None:
        """Go on with another structure. Collective. Raises OtherRanksFailed."""
        if structure.digest == self._digest:
            self.snapshots.confirm_plan()
            return
        # The keepers know one structure: what the older plan captured is sealed by that first.
        sealed = self.snapshots.wait_sealed(_SEALED_S)
        late = None if sealed else f"its keeper has sealed nothing for {_SEALED_S:.0f} s"
        agree(self._group, "planning anew", late)
        self.snapshots.close()
        self.snapshots = Snapshots(self._registry, structure, self._host.config.job)
        entered, problem = None, None
        try:
            with self._client() as client:
                entered = client.enter(self._enter(structure))
        except CheckpointError as error:
            problem = str(error)
        agree(self._group, "planning anew, with the optimizers' new state,", problem)
        self._digest = structure.digest
        self._open(entered)

    def capture(self, step: int) -> Captured:
        """See `Checkpointer.capture`."""
        if self._group is None:  # alone, what is so now is known now
            self._exchange.start(self._said())
        said = self._exchange.take()
        due = self._due(step, said.overdue)
        self.captured = step
        if not self._tiers.is_captured(step, due):
            return _NOTHING
        made = self._capture(step, due, said.level)
        self._exchange.start(self._said())
        return made

    def save(self, step: int, until_s: float) -> None:
        """See `Checkpointer.save`."""
        self.captured = step
        standing = self._stand(until_s)
        while not self._is_captured_due(step, standing):
            self._pause(step, standing, "memory is still in use for older states")
            standing = self._stand(until_s)
        self.snapshots.wait()
        self._exchange.start(self._said())
        standing = self._stand(until_s)
        while standing.committed < step:
            if standing.level.lost >= step:
                raise NotCommitted(self._why_not(step, standing, "the copy of a rank failed"))
            self._pause(step, standing, "not all of its images are in the store")
            standing = self._stand(until_s)
        self._tell_problems()

    def close(self, *, is_finished: bool) -> None:
        """See `Checkpointer.close`."""
        self.snapshots.close()
        self._tell_problems()
        try:
            with self._client(_LEAVE_S) as client:
                client.leave(is_finished=is_finished)
        except KeeperError as error:
            self._events.append("keeper_failed", f"{error}; its memory stays for its patience")
        self._host.let_go(_LEAVE_S if is_finished else 0.0)
        self._events.sync()

    # Beginning.

    def _begin(self, structure: Structure, store: Store, log: Log | None) -> Begun:
        config = self._host.config
        host_dir = host_dir_of(config)
        wanted = Wanted(
            job=config.job,
            by=f"library {socket.gethostname()} pid {os.getpid()}",
            header=self.snapshots.header,
            image_bytes_max=self.snapshots.size_bytes,
            replan=self._replan,
            threads=min(_THREADS_MAX, self._host.cores_per_rank()),
            tell=self._events.append,
        )
        with KeeperClient(host_dir, _ANSWER_S) as client:
            home = Home(
                host=config.host,
                rack=config.rack,
                keeper=client,
                host_dir=host_dir,
                disk_dir=Path(config.disk_dir) if config.disk_dir else None,
                token=_token(config.token_file),
                timeout_s=min(config.patience_s, PEER_SILENT_S),
            )
            return begin(self._group, self._registry, structure, store, log, home, wanted)

    def _replan(self, structure: Structure) -> tuple[bytes, int]:
        """Plan for the state that is to be restored: the header, and its image's size."""
        self.snapshots = Snapshots(self._registry, structure, self._host.config.job)
        self._digest = structure.digest
        return self.snapshots.header, self.snapshots.size_bytes

    def _enter(self, structure: Structure) -> Enter:
        begun, rank = self.begun, self._host.rank
        mine = begun.hosts[rank]
        return Enter(
            generation=begun.generation,
            term=begun.term,
            rank=rank,
            ranks=tuple(one for one, host in enumerate(begun.hosts) if host == mine),
            hosts=begun.hosts,
            addresses=begun.addresses,
            committer=0,
            base=begun.base,
            structure=structure,
            header=self.snapshots.header,
            image_bytes_max=self.snapshots.size_bytes,
        )

    def _open(self, entered: Entered | None) -> None:
        """Open the snapshots; on all ranks or none. Collective. Raises OtherRanksFailed."""
        slots = () if entered is None else entered.slots
        count = least_slots(self._group, slots)
        acked = self._exchange.known.level.acked
        problem = None
        try:
            if entered is not None:
                self.snapshots.open(
                    entered,
                    self.begun.generation,
                    count,
                    is_from_nothing=self.begun.base is None and self.captured == STEP_NONE,
                    kept=State(self.begun.generation, acked) if acked != STEP_NONE else None,
                )
        except (CheckpointError, OSError, RuntimeError) as error:
            problem = str(error)
        agree(self._group, "opening the pools", problem)

    def _client(self, timeout_s: float = _ANSWER_S) -> KeeperClient:
        """A line to this host's keeper, attached. Raises KeeperError."""
        me = this_process()
        client = KeeperClient(host_dir_of(self._host.config), timeout_s)
        try:
            client.attach(self._host.config.job, self._host.rank, me.pid, me.ticks)
        except KeeperError:
            client.close()
            raise
        return client

    # Capturing.

    def _due(self, step: int, overdue: Due) -> Due:
        """Where the state after `step` goes: the same on all ranks."""
        due = self._tiers.due(
            step,
            math.inf if overdue & Due.DISK else 0.0,
            math.inf if overdue & Due.STORE else 0.0,
        )
        now_s = time.monotonic()
        if due & Due.DISK:
            self._disk_s = now_s
        if due & Due.STORE:
            self._store_s = now_s
        return due

    def _said(self) -> Said:
        """What this rank says to all."""
        now_s, overdue = time.monotonic(), Due.NOWHERE
        if 0.0 < self._tiers.disk.every_s <= now_s - self._disk_s:
            overdue |= Due.DISK
        if 0.0 < self._tiers.store.every_s <= now_s - self._store_s:
            overdue |= Due.STORE
        return Said(self.snapshots.level(), overdue, self.snapshots.has_new_state)

    def _capture(self, step: int, due: Due, agreed: Level) -> Captured:
        made = self.snapshots.capture(State(self.begun.generation, step), due, agreed)
        self._tell_problems()
        if made.skipped:
            if not self._skipped:
                self._tell("capture_skipped", f"step {step} is not captured: {made.skipped}", step)
            self._skipped += 1
            return made
        if self._skipped:
            words = f"step {step} is captured, after {self._skipped} that were not"
            self._tell("capturing_again", words, step)
            self._skipped = 0
        if made.due:
            self._pending_due = step
        if made.put_off:
            words = f"step {step} was due in a tier, and a later one goes there: {made.reason}"
            self._tell("put_off", words, step)
        choice = self.snapshots.take_choice()
        if choice:
            self._tell("capture_mode", choice, step)
        return made

    # Waiting.

    def _is_captured_due(self, step: int, standing: _Standing) -> bool:
        """Capture the state for the store, if there is a slot and nothing else is on its way."""
        level = standing.level
        if self._pending_due > max(level.drained, level.lost):
            return False
        return not self._capture(step, Due.STORE, level).skipped

    def _stand(self, until_s: float) -> _Standing:
        """How far all ranks are. Collective."""
        mine = _Standing(
            level=self.snapshots.level(),
            committed=self.snapshots.committed,
            failures=self.snapshots.failures,
            is_late=time.monotonic() > until_s,
        )
        said = [
            msgspec.json.decode(data, type=_Standing)
            for data in all_gather_bytes(self._group, msgspec.json.encode(mine))
        ]
        return _Standing(
            level=agree_levels(one.level for one in said),
            committed=max(one.committed for one in said),
            failures=sum(one.failures for one in said),
            is_late=any(one.is_late for one in said),
        )

    def _pause(self, step: int, standing: _Standing, why: str) -> None:
        if standing.is_late:
            raise NotCommitted(self._why_not(step, standing, f"{why}, and the time is over"))
        time.sleep(_POLL_S)

    def _why_not(self, step: int, standing: _Standing, why: str) -> str:
        last = "none" if standing.committed < 0 else f"step {standing.committed}"
        return (
            f"step {step} is not committed: {why} ({standing.failures} failures of tiers, see "
            f"{self._host.config.events_path}); the last commit of this run is {last}"
        )

    # Words.

    def _tell(self, kind: str, words: str, step: int) -> None:
        """An event that is the same on all ranks: rank 0 tells it."""
        if self._host.rank == 0:
            self._events.append(kind, words, step=step)

    def _tell_problems(self) -> None:
        for state, why in self.snapshots.take_problems():
            self._events.append(
                "capture_failed",
                f"step {state.step} has no image of this rank: {why}; training goes on",
                step=state.step,
            )

    def _tell_beginning(self) -> None:
        begun = self.begun
        if self._host.rank != 0:
            return
        for problem in begun.passed_over:
            self._events.append("checkpoint_passed_over", problem)
        self._events.append(
            "started" if begun.base is None else "resumed",
            "from nothing" if begun.base is None else f"from {state_words(begun.base)}",
            generation=begun.generation,
            step=0 if begun.base is None else begun.base.step,
            is_committed=begun.is_committed,
            hosts=[one.host for one in begun.addresses],
            restore_s=begun.restore_s,
            read_bytes=dict(begun.read_bytes),
        )


def _token(file: str) -> Token | None:
    """The job token, if there is one. Raises Denied for one that others may read."""
    if not file and not os.environ.get(TOKEN_VARIABLE):
        return None
    return find_token(os.environ, file or None)
