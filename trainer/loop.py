"""What each rank does: join the others, begin, step until told to stop, and leave in order."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from keepstep.ckpt.agree import all_gather_bytes, gather_structure
from keepstep.ckpt.beginning import Begun
from keepstep.ckpt.events import Events
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import KeeperError
from keepstep.ckpt.keeper_process import KeeperMinder, KeeperProcess, host_dir_of
from keepstep.ckpt.layout import layout_values
from keepstep.ckpt.log import Log
from keepstep.ckpt.process import process_start_ticks
from keepstep.ckpt.snapshots import Snapshots
from keepstep.storage.locate import open_store
from keepstep.trainer import device as devices
from keepstep.trainer.beginning import begin_run, beginning_details, beginning_words, changes
from keepstep.trainer.budget import least_bytes
from keepstep.trainer.capturing import Capturing, Lag
from keepstep.trainer.dataset import Samples
from keepstep.trainer.flops import peak_flops, utilisation
from keepstep.trainer.job import Job
from keepstep.trainer.mesh import Grid, make_grid
from keepstep.trainer.metrics import Metrics, StepMetrics
from keepstep.trainer.optim import learning_rate
from keepstep.trainer.order import share, take
from keepstep.trainer.reduction import Entry
from keepstep.trainer.registration import Position, register
from keepstep.trainer.signals import StopRequest
from keepstep.trainer.train_step import Batch, StepNumbers, Trainable, build

_LEAVE_S = 30.0

Report = Callable[..., None]
"""`report(kind, **fields)`: rank 0's words to whoever shows them."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits.

    Attributes:
        rank: of `world_size`.
        world_size: all ranks.
        local_rank: among those of this host: which GPU.
        store: torch's rendezvous store; None: from the environment (torchrun).
        report: rank 0's words to whoever shows them; and, of every rank, that it is leaving.
        keeper: of this host, as it was told.
        process: that keeper, if this rank has to wait for it and to mind it.
        exit_on_second: whether a second signal ends this process itself.
    """

    rank: int
    world_size: int
    local_rank: int
    store: Store | None
    report: Report
    keeper: KeeperConfig
    process: KeeperProcess | None
    exit_on_second: bool


def run_rank(job: Job, seat: Seat) -> None:
    """Train on this rank until the run stops. Returns when the last commit is made.

    Raises:
        TrainerError, CheckpointError, StoreError: what ended the run otherwise.
    """
    stop = StopRequest(exit_on_second=seat.exit_on_second)
    torch.set_num_threads(1)
    torch.manual_seed((job.config.run.seed * 1_000_003 + seat.rank) % (1 << 63))
    device = devices.choose(job.config.run.device, seat.local_rank)
    with _process_group(job, seat, device) as control:
        grid = make_grid(job.config.parallel, device.device)
        trainable = build(job.config.numerics_config(), grid)
        run = _Run(job, seat, device, grid, trainable, control, stop)
        try:
            run.begin()
            run.train()
        finally:
            run.close()


@contextlib.contextmanager
def _process_group(
    job: Job, seat: Seat, device: devices.Device
) -> Iterator[dist.ProcessGroup | None]:
    """Join the other ranks; yields the group for CPU tensors (None: the default one is that)."""
    patience = datetime.timedelta(seconds=job.config.run.patience_s)
    dist.init_process_group(
        device.backend,
        store=seat.store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=patience,
    )
    control = None
    if device.backend != "gloo":
        control = dist.new_group(backend="gloo", timeout=patience)
    yield control
    # Reached only if all went well: after a failure the sockets close with the process, at once.
    dist.barrier(control)
    dist.destroy_process_group()


class _Run:
    """One rank's run, from its beginning to its last commit."""

    def __init__(
        self,
        job: Job,
        seat: Seat,
        device: devices.Device,
        grid: Grid,
        trainable: Trainable,
        control: dist.ProcessGroup | None,
        stop: StopRequest,
    ) -> None:
        self._job, self._seat, self._device = job, seat, device
        self._grid, self._trainable = grid, trainable
        self._control, self._stop = control, stop
        self._is_first = seat.rank == 0
        self._events = Events(job.run_dir, role="rank", rank=seat.rank)
        self._metrics = Metrics(job.run_dir) if self._is_first else None
        self._position = Position()
        registry = register(trainable, self._position, job, seat.rank)
        structure = gather_structure(control, registry)
        # Rank 0 makes the store's directory; the others open it once all know that it is there.
        store = open_store(job.store_url, create=True) if self._is_first else None
        dist.barrier(control)
        self._store = store or open_store(job.store_url)
        self._log = Log(self._store, job=job.config.run.name) if self._is_first else None
        self._registry, self._structure = registry, structure
        self._snapshots = Snapshots(registry, structure, job.config.run.name)
        self._capturing: Capturing | None = None
        self._minder: KeeperMinder | None = None
        self._is_finished = False
        self._least = {axis: round(size) for axis, size in least_bytes(trainable.config).items()}
        self._peak = peak_flops(device.name(), job.config.numerics.dtype)

    # Beginning.

    def begin(self) -> None:
        """Restore what there is, say so, and be ready to capture."""
        if self._seat.process is not None:
            self._seat.process.wait_ready()
            self._minder = KeeperMinder(self._seat.process, self._events.append)
        dist.barrier(self._control)
        begun = begin_run(
            self._job,
            self._trainable,
            self._registry,
            self._structure,
            self._store,
            self._log,
            self._control,
            self._snapshots,
            self._seat.keeper,
            self._events.append,
        )
        self._generation = begun.generation
        entered = begun.entered
        assert entered is not None  # there was a keeper
        slot_count = min((n for n in self._gather(len(entered.slots)) if n), default=2)
        base_step = 0 if begun.base is None else begun.base.step
        self._snapshots.open(
            entered, begun.generation, slot_count, is_from_nothing=begun.base is None
        )
        is_committed = begun.base is not None and begun.is_committed
        self._capturing = Capturing(
            self._snapshots,
            self._seat.keeper.tiers,
            generation=begun.generation,
            committed=base_step if is_committed else -1,
            control=self._control,
            tell=self._events.append,
            tell_first=self._tell,
            is_first=self._is_first,
        )
        self._tell_beginning(begun, sum(self._gather(self._snapshots.size_bytes)))

    def _tell_beginning(self, begun: Begun, checkpoint_bytes: int) -> None:
        if self._metrics is not None and self._metrics.repaired_bytes:
            torn_bytes = self._metrics.repaired_bytes
            self._tell("repaired", f"cut a torn last line of {torn_bytes} bytes off metrics.jsonl")
        for problem in begun.passed_over:
            self._tell("checkpoint_passed_over", problem)
        changed = changes(self._job, begun.manifest)
        if changed:
            self._tell("config_changed", "; ".join(changed), changed=changed)
        kind, reason = beginning_words(begun, self._job)
        self._tell(
            kind,
            reason,
            step=self._position.step,
            layout=dict(layout_values(self._job.layout)),
            world_size=self._seat.world_size,
            device=self._device.name(),
            checkpoint_bytes=checkpoint_bytes,
            **beginning_details(begun),
        )

    # Stepping.

    def train(self) -> None:
        """Step until `run.steps`, or until somebody asked to stop; the last step is committed.

        Raises:
            NotSaved: it could not be.
        """
        capturing = self._capturing
        assert capturing is not None
        first, steps = self._position.step, self._job.config.run.steps
        should_stop = False
        while self._position.step < steps and not should_stop:
            should_stop = self._step(capturing)
        step = self._position.step
        if step > first:
            way_out = "Ctrl-C again" if self._stop.is_requested else "Ctrl-C twice"
            capturing.save_last(step, self._job.config.run.patience_s, way_out)
        if step > first and step >= steps:
            reason = f"reached run.steps = {steps}"
        elif step >= steps:
            reason = f"step {step} had been done already, and run.steps is {steps}"
        else:
            reason = self._stop.reason or "another rank was asked to stop"
        self._tell("stopped", reason, step=step, generation=self._generation)
        self._is_finished = True

    def _step(self, capturing: Capturing) -> bool:
        """One step, and what is due after it. Returns whether to stop now."""
        started_s = time.perf_counter()
        config, position = self._job.config, self._position
        first, step = position.cursor, position.step + 1
        indices, end = take(first, config.batch.global_batch, position.skipped_ranges())
        mine = share(indices, config.parallel.dp, self._grid.place.dp)
        lr = learning_rate(step, config.optim)
        batch = _batch(self._job.corpus.batch(mine))
        numbers = self._trainable.step(batch, lr, lambda: self._entries(capturing, step))
        position.step, position.cursor = step, end
        if not numbers.applied:
            position.skipped.append([first, end])
            self._tell("skipped", "the gradient is not finite", step=step, samples=[first, end])
        step_ms = (time.perf_counter() - started_s) * 1e3
        should_stop = numbers.extra["stop"] == 1.0
        is_last = should_stop or step >= config.run.steps  # that one is captured by `save_last`
        lag = capturing.lag(step) if is_last else capturing.capture(step, numbers.extra)
        self._note(numbers, step, lr, (first, end), step_ms, lag)
        if config.run.evaluate_every and step % config.run.evaluate_every == 0:
            self._evaluate(step)
        return should_stop

    def _entries(self, capturing: Capturing, step: int) -> dict[str, Entry]:
        """What rides on the step's reduction."""
        return {"stop": ("max", float(self._stop.is_requested)), **capturing.entries(step)}

    def _note(
        self,
        numbers: StepNumbers,
        step: int,
        lr: float,
        samples: tuple[int, int],
        step_ms: float,
        lag: Lag,
    ) -> None:
        """Write the step's line, and show it."""
        if self._metrics is None:
            return
        tokens_per_s = numbers.tokens / (step_ms / 1e3)
        model, ranks = self._job.config.model, self._seat.world_size
        self._metrics.append(
            StepMetrics(
                step=step,
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                lr=lr,
                tokens=numbers.tokens,
                samples=samples,
                applied=numbers.applied,
                generation=self._generation,
                layout=dict(layout_values(self._job.layout)),
                comm_bytes=numbers.comm_bytes,
                comm_bytes_least=self._least,
                step_ms=step_ms,
                capture_ms=lag.blocked_ms,
                captured=lag.captured,
                lag_steps=lag.steps,
                lag_s=lag.seconds,
                tokens_per_s=tokens_per_s,
                flops_utilisation=utilisation(model, tokens_per_s, ranks, self._peak),
            )
        )
        self._seat.report(
            "step",
            step=step,
            steps=self._job.config.run.steps,
            loss=str(numbers.loss),
            grad_norm=str(numbers.grad_norm),
            lr=lr,
            tokens_per_s=tokens_per_s,
            step_ms=step_ms,
            comm_bytes=numbers.comm_bytes,
        )

    def _evaluate(self, step: int) -> None:
        """The loss on held-out windows: the same ones each time, in order."""
        run, batch = self._job.config.run, self._job.config.batch.global_batch
        dp, place = self._job.config.parallel.dp, self._grid.place.dp
        loss = self._trainable.evaluate(
            _batch(self._job.corpus.heldout_batch(number, batch, dp, place))
            for number in range(self._job.corpus.heldout_batches(batch, run.evaluate_batches))
        )
        self._tell("evaluated", f"held-out loss {loss:.4f}", step=step, loss=loss)

    # Words.

    def _tell(self, kind: str, reason: str, **details: object) -> None:
        """An event, of rank 0 alone."""
        if self._is_first:
            self._events.append(kind, reason, **details)
            self._seat.report("event", event=kind, reason=reason, details=details)

    def _gather(self, number: int) -> list[int]:
        return [int(data) for data in all_gather_bytes(self._control, str(number).encode())]

    def close(self) -> None:
        """Leave the keeper, and make the last lines durable."""
        self._snapshots.close()
        if self._is_finished:
            self._leave()
        if self._metrics is not None:
            self._metrics.sync()
        self._events.sync()

    def _leave(self) -> None:
        """Tell the keeper that the run has ended well, so that nothing need outlive it."""
        self._seat.report("leaving")
        keeper, pid = self._seat.keeper, os.getpid()
        try:
            with KeeperClient(host_dir_of(keeper), _LEAVE_S) as client:
                ticks = process_start_ticks(pid) or 0
                client.attach(keeper.job, self._seat.rank, pid, ticks)
                client.leave(is_finished=True)
        except KeeperError as error:
            self._events.append("keeper_failed", f"{error}; its memory stays for its patience")
        if self._minder is not None:
            self._minder.close(_LEAVE_S)


def _batch(samples: Samples) -> Batch:
    return Batch(torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels))
