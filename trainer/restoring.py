"""Where a run begins: the newest good commit, another run's checkpoint, or nothing.

Rank 0 takes a term, so that an older run can append nothing more, reads the log, and tells the
others. A candidate is staged and verified on all ranks before any of them applies it (S6). If it
is damaged anywhere, all go to the commit before it, together, with a `rewind` in the log; if it
cannot be read, none goes anywhere. Only then the generation begins, in the log first, and only
then anything is changed in memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch.distributed as dist

from keepstep.ckpt.address import find_live
from keepstep.ckpt.agree import OtherRanksFailed, agree, all_gather_bytes
from keepstep.ckpt.arena import Arena
from keepstep.ckpt.entry import Generation, Parent, Rewind
from keepstep.ckpt.errors import CheckpointError, NotRestorable, StructureMismatch
from keepstep.ckpt.layout import layout_of, mesh_of
from keepstep.ckpt.lineage import Lineage, resume_points, state_words
from keepstep.ckpt.load import Staged, stage
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Manifest, State
from keepstep.ckpt.optimizer import read_groups, write_groups
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import Options
from keepstep.ckpt.structure import Structure
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store
from keepstep.trainer.attempt import Attempt, attempt, is_damage
from keepstep.trainer.errors import ResumeRefused, TrainerError
from keepstep.trainer.job import Job
from keepstep.trainer.resume import check_resumable
from keepstep.trainer.train_step import Trainable

T = TypeVar("T")


class Told(msgspec.Struct, frozen=True):
    """What rank 0 decided; `refused` instead of it, if it could not."""

    refused: str = ""
    candidates: tuple[State, ...] = ()
    parent: Parent | None = None
    generation: int = 0
    term: int = 0


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a run began.

    Attributes:
        generation: its number.
        base: the state it goes on from; None: from nothing, or from `parent`.
        parent: the checkpoint of another run that its weights are of.
        layout: that `base` was saved in, in words.
        passed_over: damaged commits, newest first, with what was wrong.
        changed: keys of the configuration that differ from the base's, in words.
        restore_s: time from the decision to the state being in memory.
        read_bytes: read for it by all ranks.
    """

    generation: int
    base: State | None
    parent: Parent | None
    layout: str
    passed_over: tuple[str, ...]
    changed: tuple[str, ...]
    restore_s: float
    read_bytes: int


class Beginner:
    """Brings one rank to where its run begins. All methods are collective over all ranks."""

    def __init__(
        self,
        job: Job,
        trainable: Trainable,
        registry: Registry,
        structure: Structure,
        store: Store,
        log: Log | None,
        control: dist.ProcessGroup | None,
        arena: Arena,
    ) -> None:
        """Everything a rank has; `log` on rank 0 alone, where it is opened for this job."""
        self._job = job
        self._trainable = trainable
        self._registry = registry
        self._structure = structure
        self._store = store
        self._log = log
        self._control = control
        self._arena = arena

    def begin(self) -> Beginning:
        """Take a term, restore what there is to restore, and begin a generation.

        Raises:
            ResumeRefused: what is there is not this run, or cannot be taken.
            CheckpointError, StoreError: on rank 0, as the log or the store raised it.
            TrainerError: on the others, with rank 0's words.
        """
        started_s = time.monotonic()
        told = self._tell(self._decide)
        passed_over: list[str] = []
        base, manifest, read_bytes = None, None, 0
        if told.parent is not None:
            read_bytes = self._take_parent(told)
        elif told.candidates:
            base, manifest, staged = self._stage_newest(told.candidates, passed_over)
            with staged:
                self._append(told, base, passed_over)
                read_bytes = staged.read_bytes
                self._apply(staged)
        if base is None:
            self._append(told, None, passed_over)
        layout = layout_of(manifest.mesh) if manifest is not None else None
        return Beginning(
            generation=told.generation,
            base=base,
            parent=told.parent,
            layout=str(layout) if layout is not None else "",
            passed_over=tuple(passed_over),
            changed=tuple(self._changed(manifest)),
            restore_s=time.monotonic() - started_s,
            read_bytes=sum(self._gather(read_bytes)),
        )

    # What rank 0 decides.

    def _tell(self, decide: Callable[[Log], Told]) -> Told:
        """Rank 0's decision on every rank; its refusal is raised on every rank."""
        error: Exception | None = None
        told = Told()
        if self._log is not None:
            try:
                told = decide(self._log)
            except (CheckpointError, StoreError, TrainerError) as caught:
                error = caught
                told = Told(refused=str(caught))
        said = all_gather_bytes(self._control, msgspec.json.encode(told))[0]
        told = msgspec.json.decode(said, type=Told)
        if told.refused:
            raise ResumeRefused(told.refused) from error
        return told

    def _decide(self, log: Log) -> Told:
        lineage = log.read()
        self._check_config(lineage)
        term = log.take_term(f"trainer {socket.gethostname()} pid {os.getpid()}")
        lineage = log.read()
        newest = lineage.generation
        number = 1 if newest is None else newest.number + 1
        points = tuple(commit.state for commit in resume_points(lineage))
        parent = None
        if points:
            self._check_parent(lineage)
        else:
            parent = self._parent(lineage)
        if not points and lineage.commits:
            raise NotRestorable(
                f"{log.store.url} has commits, but none that is good: to begin again from nothing, "
                "name another --store",
                [
                    f"{state_words(one.state)} is {one.status.value}: {one.reason}"
                    for one in lineage.commits[:5]
                ],
            )
        return Told(candidates=points, parent=parent, generation=number, term=term)

    def _check_config(self, lineage: Lineage) -> None:
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
            self._check_manifest(manifest)
            return

    def _check_manifest(self, manifest: Manifest) -> list[str]:
        before = manifest.values.get("config")
        return check_resumable(
            f"{self._store.url}, {state_words(manifest.state)},",
            before if isinstance(before, dict) else {},
            self._job.tree(),
        )

    def _changed(self, manifest: Manifest | None) -> list[str]:
        return [] if manifest is None else self._check_manifest(manifest)

    def _parent(self, lineage: Lineage) -> Parent | None:
        """The checkpoint of another run to begin from, if the command asked for one."""
        address = self._job.init_from
        if address is None:
            return None
        theirs = Log(open_store(address.store)).read()
        commit = find_live(theirs, address.step, address.store)
        assert theirs.job is not None  # it has a commit
        return Parent(address.store, theirs.job, commit.state, self._job.weights_only)

    def _check_parent(self, lineage: Lineage) -> None:
        """Refuse --init-from over a store that holds a run which began otherwise."""
        address = self._job.init_from
        parents = [one.parent for one in lineage.generations if one.parent is not None]
        if address is None or any(
            parent.store == address.store and address.step in (None, parent.state.step)
            for parent in parents
        ):
            return
        raise ResumeRefused(
            f"{self._store.url} holds a run already, which did not begin from {address.store}: "
            "leave --init-from out to resume it, or name another --run-dir or --store"
        )

    # Staging, together.

    def _stage_newest(
        self, candidates: Sequence[State], passed_over: list[str]
    ) -> tuple[State, Manifest, Staged]:
        """The newest candidate that verifies on all ranks; notes what was wrong with newer ones."""
        for state in candidates:
            manifest, tried = self._try_stage(state)
            doing = f"restoring {state_words(state)}"
            try:
                self._refuse_in_trouble(doing, tried.trouble)
                agree(self._control, doing, tried.damage)
            except (OtherRanksFailed, ResumeRefused) as error:
                if tried.found is not None:
                    tried.found.close()
                if isinstance(error, ResumeRefused):
                    raise
                passed_over.append(str(error))
                continue
            assert manifest is not None
            assert tried.found is not None
            return state, manifest, tried.found
        raise NotRestorable(f"no commit in {self._store.url} could be restored", passed_over)

    def _refuse_in_trouble(self, doing: str, trouble: str) -> None:
        """A commit of which some rank knows nothing stays, and nobody goes on from an older one."""
        try:
            agree(self._control, doing, trouble)
        except OtherRanksFailed as error:
            raise ResumeRefused(
                f"{error}. That is no proof of damage, so the commit was not passed over: start "
                "again when all ranks can read it; if its files are lost for good, delete them"
            ) from error

    def _try_stage(self, state: State) -> tuple[Manifest | None, Attempt[Staged]]:
        """Stage a state on this rank; or what is wrong with it.

        Raises:
            ResumeRefused, StructureMismatch: it is whole, but of another run: on all ranks alike.
        """
        read = attempt(lambda: _manifest(self._store, state))
        manifest = read.found
        if manifest is None:
            return None, Attempt(damage=read.damage, trouble=read.trouble)
        self._check_manifest(manifest)
        return manifest, attempt(
            lambda: stage(self._registry, self._structure, manifest, self._store, arena=self._arena)
        )

    def _take_parent(self, told: Told) -> int:
        """Stage and apply another run's weights, with its optimizer state if asked for."""
        parent = told.parent
        assert parent is not None
        prefixes = ("model/",) if parent.weights_only else ("model/", "optimizer/")
        problem, staged = None, None
        try:
            store = open_store(parent.store)
            manifest = _manifest(store, parent.state)
            options = Options(prefixes=prefixes)
            staged = stage(self._registry, self._structure, manifest, store, options, self._arena)
        except StructureMismatch as error:
            hint = "" if parent.weights_only else "; for the weights alone give --weights-only"
            problem = f"{error}{hint}"
        except (CheckpointError, StoreError) as error:
            problem = str(error)
        try:
            agree(self._control, f"--init-from {parent.store}@{parent.state.step}", problem)
        except OtherRanksFailed as error:
            raise ResumeRefused(str(error)) from error
        assert staged is not None
        with staged:
            staged.apply()
            return staged.read_bytes

    def _apply(self, staged: Staged) -> None:
        """Apply, and put this run's own hyper-parameters back over those that were saved."""
        optimizer = self._trainable.optimizer
        groups = read_groups("param_groups", optimizer)
        staged.apply()
        write_groups(optimizer, groups)

    # The log.

    def _append(self, told: Told, base: State | None, passed_over: Sequence[str]) -> None:
        """Rewind if a newer commit was passed over, then begin the generation: rank 0 appends."""
        hosts = [
            data.decode() for data in all_gather_bytes(self._control, socket.gethostname().encode())
        ]

        def append(log: Log) -> Told:
            if passed_over:
                log.append_from(base, Rewind(to=base, reason=passed_over[0][:2000]))
            log.append_from(
                base,
                Generation(
                    number=told.generation,
                    hosts=tuple(hosts),
                    mesh=mesh_of(self._job.layout),
                    base=base,
                    parent=told.parent,
                    config=self._job.tree(),
                ),
            )
            return told

        self._tell(append)

    def _gather(self, number: int) -> list[int]:
        return [int(data) for data in all_gather_bytes(self._control, str(number).encode())]


def _manifest(store: Store, state: State) -> Manifest:
    """The checked manifest of a live commit.

    Raises:
        NotRestorable: the log does not have it as live.
        CheckpointError, StoreError: the log, or the manifest, is damaged or cannot be read.
    """
    for commit in resume_points(Log(store).read()):
        if commit.state == state:
            return open_checkpoint(store, commit).manifest
    raise NotRestorable(f"{store.url} has no live commit of {state_words(state)}")
