"""The library: captures of any modules and optimizers, in a loop of the user's own.

    checkpointer = Checkpointer("file:///data/run7", job="run7", run_dir="runs/run7", mesh=mesh)
    checkpointer.add_module(model)
    checkpointer.add_optimizer(optimizer)
    step = checkpointer.begin()             # 0: from nothing
    while step < steps:
        step += 1
        ...                                 # forward, backward, optimizer.step()
        checkpointer.capture(step)          # returns at once
    checkpointer.save(step)                 # the last state, durably
    checkpointer.close()

Under plain torchrun, without a coordinator: each host's first rank starts its keeper; a committer
without collectives commits when the images of all ranks are in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from keepstep.ckpt.agree import agree, all_gather_bytes, gather_structure
from keepstep.ckpt.errors import CheckpointError, NotRepresentable, WrongMoment
from keepstep.ckpt.events import Events
from keepstep.ckpt.library_host import KeeperOptions, LibraryHost, cpu_group, mesh_of
from keepstep.ckpt.library_run import LibraryRun, newest_tensors
from keepstep.ckpt.log import Log
from keepstep.ckpt.placement import Pin
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.snapshots import Captured
from keepstep.ckpt.stateful import Stateful, add_stateful
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Tiers
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

_SAVE_S = 600.0
_DEFAULTS = KeeperOptions()


class Checkpointer:
    """Captures, checkpoints and restores one run. One on each rank, all calls in the same order.

    Args:
        store: URL or path of the durable store; made if it is not there.
        job: the job's name: the store is this job's from the first start on.
        run_dir: directory for events, and the keepers' output; made if it is not there.
        mesh: torch's outermost mesh, with names, over all ranks; None: all ranks are replicas
            (DDP), or each holds what it registers as a part.
        tiers: how often states go where; None: each step in memory and in one peer's, every ten
            minutes in the store.
        keeper: what this host's keeper is told.

    Raises:
        NotRepresentable: for a mesh without names, or not over all ranks.
    """

    def __init__(
        self,
        store: str,
        *,
        job: str,
        run_dir: str | Path,
        mesh: DeviceMesh | None = None,
        tiers: Tiers | None = None,
        keeper: KeeperOptions = _DEFAULTS,
    ) -> None:
        self._store_url = store if "://" in store else str(Path(store).absolute())
        self._job = job
        self._run_dir = Path(run_dir).absolute()
        self._tiers = tiers
        self._options = keeper
        self._group = cpu_group()
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.registry = Registry(mesh_of(mesh), self._rank)
        """For what the methods here do not offer; see its own words."""
        self.step = 0
        """The state's step: of the last capture, or of what was restored."""
        self._run: LibraryRun | None = None
        self._is_closed = False
        self.registry.add_value("step", lambda: self.step, self._set_step, _refuse_step)
        self.registry.add_rank_tensor("rng/cpu", torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_available():
            self.registry.add_rank_tensor(
                "rng/cuda", torch.cuda.get_rng_state, torch.cuda.set_rng_state
            )

    # Registration, before `begin`.

    def add_module(
        self,
        module: nn.Module,
        name: str = "model",
        *,
        at: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Register parameters and persistent buffers of `module` as ``name/...``.

        DDP's and the compiler's wrappers are looked through. What is no DTensor must be the same
        on all ranks along the mesh axes that `at` does not pin.

        Args:
            at: mesh axis -> the coordinates that hold it (a pipeline stage: ``{"pp": [stage]}``).

        Raises:
            NotRepresentable, BadName: by name, for what could not be given back.
        """
        pins = [Pin(axis, tuple(coords)) for axis, coords in (at or {}).items()]
        self.registry.add_module(f"{name}/", _unwrapped(module), at=pins)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, name: str = "optimizer", *, module: str = "model"
    ) -> None:
        """Register the state and the parameter groups of `optimizer`, and guard its updates.

        Its parameters must be of the module that was registered as `module`. Only registered
        optimizers may change captured parameters in place: see `wait_copied`.

        Raises:
            NotRepresentable: by name, for what could not be given back.
        """
        self.registry.add_optimizer(
            f"{name}/",
            optimizer,
            params_prefix=f"{module}/",
            groups_name="param_groups" if name == "optimizer" else f"{name}/param_groups",
        )

    def add_stateful(self, name: str, held: Stateful) -> None:
        """Register a scheduler, a `GradScaler`, ...: plain state that is the same on all ranks.

        Raises:
            NotRepresentable: by name, if it is not plain.
        """
        add_stateful(self.registry, name, held)

    def add_value(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Register a JSON value that is the same on all ranks: the data's cursor, ...

        Raises:
            NotRepresentable: if JSON would not give back what `read` gives now.
        """
        self.registry.add_value(name, read, write)

    # The run.

    def begin(self) -> int:
        """Start the keepers, restore the newest state that can be had wholly, begin a generation.

        Collective; blocking. On return all registered tensors and values are those of the state,
        on all ranks alike, and the generation is in the log.

        Returns: the state's step; 0 if there was nothing to restore.

        Raises:
            BeginRefused: what is there is not this run, or cannot be taken.
            NotRestorable: there are states, and none can be restored.
            CheckpointError, StoreError: otherwise. On all ranks, and nothing was changed.
        """
        if self._run is not None or self._is_closed:
            raise WrongMoment("the run has begun already; make a new Checkpointer for another")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        host = LibraryHost(
            self._group,
            job=self._job,
            store_url=self._store_url,
            run_dir=self._run_dir,
            tiers=self._tiers,
            options=self._options,
        )
        events = Events(self._run_dir, role="rank", rank=self._rank)
        try:
            store, log = self._open_store()
            structure = self._structure(store, log)
            host.start_keeper(events.append)
            self._run = LibraryRun(self._group, self.registry, structure, store, log, host, events)
        except BaseException:
            host.let_go(0.0)
            raise
        return self.step

    @property
    def generation(self) -> int:
        """Of the run that `begin` began."""
        return self._living().begun.generation

    @property
    def committed(self) -> int:
        """The newest committed step that this host's keeper knows of; -1: none since `begin`."""
        return self._living().snapshots.committed

    def capture(self, step: int) -> Captured:
        """Capture the state after `step`: right after the last optimizer's step, on every rank.

        Returns at once, on a state that is being copied while training goes on; the next step of
        a registered optimizer waits for that. Where the keepers then bring it is by the tiers.
        Nothing that goes wrong with a copy or a tier ends the training: see `events.jsonl`.

        Raises:
            WrongMoment: before `begin`, or for a step that does not come after the last one.
            Stale: another start of this job has taken over. End this process.
            OtherRanksFailed: an optimizer has made state that cannot be kept; names it.
            RuntimeError: another rank is gone, as torch says it.
        """
        run = self._living()
        if step <= run.captured:
            raise WrongMoment(f"step {step} does not come after step {run.captured}, the last")
        self._replan_if_wanted(run)
        self.step = step
        return run.capture(step)

    def save(self, step: int, timeout_s: float = _SAVE_S) -> None:
        """Capture the state after `step` and wait until it is committed: durable in the store.

        Collective; blocking. Instead of `capture`, at the end of a run.

        Raises:
            NotCommitted: not within `timeout_s`, and why; on all ranks alike. The commit before
                stays, and what was captured goes its way.
            WrongMoment, Stale: as `capture`.
        """
        run = self._living()
        if step <= run.captured:
            raise WrongMoment(
                f"step {step} does not come after step {run.captured}, the last: call `save` "
                f"instead of `capture` for a step that is to be durable"
            )
        self._replan_if_wanted(run)
        self.step = step
        run.save(step, time.monotonic() + timeout_s)

    def wait_copied(self) -> None:
        """Block until the copy of the last capture is done.

        Before captured tensors are changed in place by anything but a registered optimizer's step.
        """
        self._living().snapshots.wait()

    def close(self, *, is_finished: bool = True) -> None:
        """Take the guard off the optimizers, and leave. A second call does nothing.

        What was captured still goes to its tiers: the keeper finishes that by itself.

        Args:
            is_finished: the run has ended well: nothing need stay in memory for another start.
        """
        self._is_closed = True
        run, self._run = self._run, None
        if run is not None:
            run.close(is_finished=is_finished)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(is_finished=kind is None)

    # Inside.

    def _set_step(self, value: int) -> None:
        self.step = value

    def _living(self) -> LibraryRun:
        if self._run is None:
            raise WrongMoment("the run has not begun, or is closed; call begin() first")
        return self._run

    def _open_store(self) -> tuple[Store, Log | None]:
        """Rank 0 makes the store; the others open it once all know that it is there."""
        store, log, problem = None, None, None
        if self._rank == 0:
            try:
                store = open_store(self._store_url, create=True)
                log = Log(store, job=self._job)
            except (StoreError, CheckpointError) as error:
                problem = str(error)
        agree(self._group, f"opening {self._store_url}", problem)
        return (open_store(self._store_url) if store is None else store), log

    def _structure(self, store: Store, log: Log | None) -> Structure:
        """What all ranks registered, with the optimizer state that the newest checkpoint has."""
        absent = all_gather_bytes(self._group, b"1" if self.registry.has_absent_state() else b"")
        if any(absent):
            self.registry.create_absent(newest_tensors(self._group, store, log))
        return gather_structure(self._group, self.registry)

    def _replan_if_wanted(self, run: LibraryRun) -> None:
        """Plan anew, on all ranks together, if state has come to exist on any. Collective then."""
        if run.wants_plan():
            problem = None
            try:
                self.registry.refresh()
            except NotRepresentable as error:
                problem = str(error)
            agree(self._group, "looking at the optimizers' new state", problem)
            run.plan(gather_structure(self._group, self.registry))


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without the wrappers of DDP and the compiler."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = getattr(module, "_orig_mod", inner)
        if inner is None:
            return module
        module = inner


def _refuse_step(value: Any) -> str | None:  # noqa: ANN401  from a file: may be anything
    is_step = type(value) is int and value >= 0
    return None if is_step else f"expected a count of steps, found {value!r}"
