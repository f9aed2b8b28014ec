"""`keepstep train` from arguments to exit code, and the same run under torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle
from rich.console import Console

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.events import Events, EventTail
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_process import KeeperProcess
from keepstep.storage.errors import StoreError
from keepstep.storage.token import TOKEN_VARIABLE, make_token_file
from keepstep.trainer.config import Config
from keepstep.trainer.errors import RankFailed, TrainerError
from keepstep.trainer.hosts import Host, keeper_config, node, played_hosts
from keepstep.trainer.job import Arguments, Job, check_config, make_config, open_job
from keepstep.trainer.launch import (
    RankStart,
    Report,
    process_title,
    run_ranks,
    warm_up,
)
from keepstep.trainer.progress import Display, summary, way_on
from keepstep.trainer.rundir import RunDir, hold_run_dir
from keepstep.trainer.signals import StopNow, allow_stop

if TYPE_CHECKING:  # torch is imported late: only in `warm_up`, and under torchrun
    from torch.distributed.distributed_c10d import Store

KEEPER_END_S = 60.0
"""How long a keeper may take, after a run that ended well, to finish what is due on its disk."""

_PREPARED = "keepstep/prepared"


def train(arguments: Arguments, console: Console) -> None:
    """Train on this machine: fork the ranks, mind them, and say what came of it.

    Raises:
        TrainerError: a refusal, or the first cause of a failure; it is in events.jsonl too, if
            there is a run directory to write it in.
        StopNow: a second signal.
    """
    config = make_config(arguments)
    check_config(config)
    hosts = played_hosts(config)
    setproctitle.setproctitle(process_title("launcher", config.run.name))
    run_dir = _hold(arguments.run_dir, config.run.name)
    events = Events(run_dir.path, role="launcher")
    if events.repair():
        events.append("repaired", "cut a torn last line off events.jsonl")
    display = Display(console, lambda why: events.append("display_lost", why))
    try:
        job = open_job(arguments, config, run_dir)
        keepers = [
            keeper_config(config, run_dir, job.store_url, host, len(hosts)) for host in hosts
        ]
        with _keepers(keepers, run_dir, events) as processes:
            warm_up()
            for process in processes:
                process.wait_ready()
            _fork_and_mind(job, run_dir, hosts, keepers, processes, display, events)
    except (TrainerError, CheckpointError, StoreError, StopNow) as error:
        kind = "failed" if isinstance(error, RankFailed | StopNow) else "refused"
        events.append(kind, str(error))
        if isinstance(error, RankFailed):
            display.say(way_on(config.run.patience_s, run_dir.log_path(error.rank)))
        elif isinstance(error, StopNow):
            display.say(way_on(config.run.patience_s))
        raise
    finally:
        display.close()
        events.sync()
        run_dir.release()
    display.say(summary(job.run_dir, job.store_url))


def _hold(path: Path, run_name: str) -> RunDir:
    """Hold the run directory. A refusal over a live run is an event of that run."""
    try:
        return hold_run_dir(path, run_name)
    except TrainerError as error:
        if path.is_dir() and os.access(path, os.W_OK):
            Events(path, role="launcher").append("refused", str(error))
        raise


@contextlib.contextmanager
def _keepers(
    configs: Sequence[KeeperConfig], run_dir: RunDir, events: Events
) -> Iterator[list[KeeperProcess]]:
    """The hosts' keepers, started. After a run that ended well they end, and are waited for.

    Otherwise they are left alone: for their patience they keep what the next start goes on from.
    """
    if TOKEN_VARIABLE not in os.environ:
        make_token_file(run_dir.token_path)
    processes = [KeeperProcess(one, run_dir.host_path(one.host)) for one in configs]
    try:
        for process in processes:
            process.start()
        yield processes
        allow_stop()
        for process in processes:
            if not process.wait_end(KEEPER_END_S):
                events.append(
                    "keeper_lingers",
                    f"host {process.host}: its keeper (pid {process.pid}) has not ended within "
                    f"{KEEPER_END_S:.0f} s of its last rank; it ends by itself",
                    of_host=process.host,
                )
    finally:
        for process in processes:
            process.let_go()


def _fork_and_mind(
    job: Job,
    run_dir: RunDir,
    hosts: Sequence[Host],
    keepers: Sequence[KeeperConfig],
    processes: Sequence[KeeperProcess],
    display: Display,
    events: Events,
) -> None:
    tail = EventTail(run_dir.path)
    keeper_of = {rank: keepers[host.index] for host in hosts for rank in host.ranks}

    def main(start: RankStart) -> None:
        _forked_rank(job, start, keeper_of[start.rank])

    def on_report(report: Report) -> None:
        display.show_keepers(tail.read())
        display.show(report)

    run_ranks(
        job.config.parallel.world_size,
        main,
        run=job.config.run.name,
        log_path=run_dir.log_path,
        on_report=on_report,
        keepers=processes,
        tell=events.append,
    )
    display.show_keepers(tail.read())


def _forked_rank(job: Job, start: RankStart, keeper: KeeperConfig) -> None:
    """The life of a forked rank: all its torch begins here."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from keepstep.trainer.loop import Seat, run_rank

    os.environ["LOCAL_WORLD_SIZE"] = str(start.world_size)
    seat = Seat(
        rank=start.rank,
        world_size=start.world_size,
        local_rank=start.rank,
        store=FileStore(str(start.rendezvous / "store"), start.world_size),
        report=start.report,
        keeper=keeper,
        process=None,
        exit_on_second=False,
    )
    run_rank(job, seat)


def train_under_torchrun(arguments: Arguments, console: Console) -> None:
    """Train as one rank of many that torchrun has started: the environment says which.

    Rank 0 prepares the run directory and the corpus; the others wait for it.

    Raises: as `train`.
    """
    from torch.distributed.rendezvous import rendezvous

    from keepstep.trainer.loop import Seat, run_rank

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = make_config(arguments)
    check_config(config, world_size)
    setproctitle.setproctitle(process_title(f"rank {rank}", config.run.name))
    store, _, _ = next(iter(rendezvous("env://", rank=rank, world_size=world_size)))
    job = _prepare_together(arguments, config, rank, store)
    events = Events(job.run_dir, role="rank", rank=rank)
    display = Display(console, lambda why: events.append("display_lost", why))
    tail = EventTail(job.run_dir)
    run_dir = RunDir(job.run_dir, None)
    host, hosts = node(config, os.environ)
    keeper = keeper_config(config, run_dir, job.store_url, host, hosts)

    def report(kind: str, **fields: object) -> None:
        if rank == 0:
            display.show_keepers(tail.read())
            display.show({"kind": kind, **fields})

    process = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        process = KeeperProcess(keeper, run_dir.host_path(host.name))
    seat = Seat(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        store=store,
        report=report,
        keeper=keeper,
        process=process,
        exit_on_second=True,
    )
    try:
        if process is not None:
            process.start()
        run_rank(job, seat)
    except (TrainerError, CheckpointError, StoreError, RuntimeError) as error:
        events.append("failed", str(error))  # RuntimeError: torch's, as when a peer is gone
        raise
    finally:
        display.close()
    if rank == 0:
        display.say(summary(job.run_dir, job.store_url))


def _prepare_together(arguments: Arguments, config: Config, rank: int, store: Store) -> Job:
    """Rank 0 holds the run directory and builds the corpus; then the others open it."""
    if rank > 0:
        refused = store.get(_PREPARED).decode()
        if refused:
            raise TrainerError(refused)
        return open_job(arguments, config, RunDir(arguments.run_dir, None), verify=False)
    refused = "rank 0 failed before it had prepared the run directory"
    try:
        run_dir = _hold(arguments.run_dir, config.run.name)
        Events(run_dir.path, role="launcher").repair()
        job = open_job(arguments, config, run_dir)
        if TOKEN_VARIABLE not in os.environ:
            make_token_file(run_dir.token_path)
        refused = ""
    except (TrainerError, StoreError) as error:
        refused = str(error)
        raise
    finally:
        store.set(_PREPARED, refused)
    return job
