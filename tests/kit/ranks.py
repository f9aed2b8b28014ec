"""Run a function on several gloo ranks of this machine, from a warm fork server.

A rank starts in well under a second, because the server has torch imported already. The ranks meet
through a FileStore in a temporary directory, so no port is needed. Nothing outlives the call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.optim",
    "numpy",
    "msgspec",
    "pytest",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 120.0  # until all ranks have met; `timeout_s` is counted from then on
_GRACE_S = 10.0  # for the other ranks' own reports, once one has failed
_DUMP_S = 10.0  # to write the stacks of all ranks
_PR_SET_PDEATHSIG = 1

# What a healthy rank says when another one died: never the cause, if any rank says something else.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "unexpected peer",
    "Gloo connectFullMesh failed",
    "Timed out waiting",
)


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time. The message holds its traceback.

    Attributes: `rank`; `kind`, the name of the exception's type ("" for a death or a time-out).
    """

    def __init__(self, message: str, *, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: str
    text: str
    at_s: float

    @property
    def is_consequence(self) -> bool:
        return any(words in self.text for words in _CONSEQUENCES)


@dataclass
class _Running:
    process: ForkServerProcess
    pipe: connection.Connection


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,  # noqa: ANN401  handed on as it is
    timeout_s: float = 120,
) -> list[Any]:
    """Call ``fn(rank, world, *args)`` in `world` processes joined by gloo; results in rank order.

    `fn` must be a module-level function. The default process group exists when it is called, and
    torch uses one thread a rank.

    `timeout_s` begins when all ranks have met, however long a busy machine took to start them.

    Raises:
        RankFailed: with the traceback of the rank that failed first and not because of another; on
            a time-out with the stacks of all ranks that were still running.
    """
    _start_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        running: list[_Running] = []
        try:
            running = [_start(rank, world, fn, args, directory, timeout_s) for rank in range(world)]
            return _collect(running, directory, timeout_s)
        finally:
            for one in running:
                if one.process.is_alive():
                    one.process.kill()
                one.process.join()
                one.process.close()
                one.pipe.close()


def _start_server() -> None:
    """Start the warm server, with one thread per library, if it does not run yet."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start(
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    directory: str,
    timeout_s: float,
) -> _Running:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main,
        args=(theirs, rank, world, fn, args, directory, timeout_s),
        name=f"rank {rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return _Running(process, ours)


def _rank_main(
    pipe: connection.Connection,
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    directory: str,
    timeout_s: float,
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the fork server
    os.environ.update(_ONE_THREAD)
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    with (Path(directory) / f"stacks-{rank}").open("w") as stacks, _Reporting(pipe):
        faulthandler.register(signal.SIGUSR1, file=stacks)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",  # a FileStore: no port needed
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s + _START_S),
        )
        pipe.send(("met", None))
        result = fn(rank, world, *args)
        dist.barrier()  # nobody closes a socket that another still reads
        dist.destroy_process_group()
        pipe.send(("result", result))
    pipe.close()


class _Reporting:
    """Sends whatever ends the block to the parent, instead of printing it."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None:
            text = "".join(traceback.format_exception(kind, error, trace))
            self._pipe.send(("failed", (kind.__name__, text, time.monotonic())))
        return True


def _collect(running: list[_Running], directory: str, timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + _START_S + timeout_s
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    met: set[int] = set()
    waiting = {one.pipe: rank for rank, one in enumerate(running)}
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), timeout=left_s):
            assert isinstance(pipe, connection.Connection)
            rank = waiting[pipe]
            outcome = _receive(rank, running[rank])
            if outcome is None:
                met.add(rank)
                if len(met) == len(running) and not failures:
                    deadline_s = time.monotonic() + timeout_s
                continue
            del waiting[pipe]
            if isinstance(outcome, _Failure):
                failures.append(outcome)
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            else:
                results[rank] = outcome[0]
    if failures:
        first = min(failures, key=lambda one: (one.is_consequence, one.at_s))
        raise RankFailed(
            f"rank {first.rank} of {len(running)} failed:\n{first.text}",
            rank=first.rank,
            kind=first.kind,
        )
    if waiting:
        late = sorted(waiting.values())
        raise RankFailed(
            f"ranks {late} of {len(running)} ran for more than {timeout_s} s\n"
            + _stacks(late, running, directory),
            rank=late[0],
            kind="",
        )
    return [results[rank] for rank in range(len(running))]


def _receive(rank: int, one: _Running) -> tuple[Any] | _Failure | None:
    """A rank's result or failure; None if it only says that it has met the others."""
    try:
        word, content = one.pipe.recv()
    except EOFError:
        one.process.join(_GRACE_S)
        text = f"the process ended without a word, exit code {one.process.exitcode}"
        return _Failure(rank, "", text, time.monotonic())
    if word == "met":
        return None
    if word == "failed":
        kind, text, at_s = content
        return _Failure(rank, kind, text, at_s)
    return (content,)


def _has_dumped(directory: str, rank: int) -> bool:
    """Whether the stack is there down to where every rank begins."""
    file = Path(directory) / f"stacks-{rank}"
    return file.exists() and "in _main" in file.read_text()


def _stacks(ranks: list[int], running: list[_Running], directory: str) -> str:
    for rank in ranks:
        pid = running[rank].process.pid
        if pid is not None and running[rank].process.is_alive():
            os.kill(pid, signal.SIGUSR1)
    end_s = time.monotonic() + _DUMP_S
    while time.monotonic() < end_s and not all(_has_dumped(directory, rank) for rank in ranks):
        time.sleep(0.05)
    texts = []
    for rank in ranks:
        file = Path(directory) / f"stacks-{rank}"
        texts.append(f"--- rank {rank}\n{file.read_text() if file.exists() else '(not started)'}")
    return "\n".join(texts)
