"""Starts the ranks of one machine by forking a warm, single-threaded process, and minds them.

Forking after the imports makes a start take a second instead of a minute. It is sound only while
the parent has run no torch op and has one thread, so that is asserted. Ranks meet through a
FileStore in a private directory, die with the launcher (PR_SET_PDEATHSIG), and report on a pipe.
When one fails, the others fail too, because its sockets close: the launcher tells cause from
consequence, names the cause on one line, and kills what is left by pidfd.

Beside the ranks it minds the hosts' keepers, and starts those anew that die. It never ends them:
they outlive the ranks, and it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import setproctitle

from keepstep.ckpt.keeper_process import Backoff, KeeperFailed, KeeperProcess, Tell, tell_death
from keepstep.ckpt.owned_temp import RENDEZVOUS_PREFIX, owned_directories
from keepstep.ckpt.process import is_running, this_process
from keepstep.trainer.errors import RankFailed, ResumeRefused, TrainerError
from keepstep.trainer.signals import forward_stop, ignore_stop

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WARM_MODULES = (
    "numpy.ma",  # torch imports it at its first use of numpy
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "keepstep.trainer.loop",
)
GRACE_S = 2.0
"""How long the other ranks may still say what they saw, once one has failed."""
_PR_SET_PDEATHSIG = 1

# What a healthy rank says when another died: never the cause if any rank says something else.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "connectFullMesh failed",
    "Timed out waiting",
)

Report: TypeAlias = Mapping[str, Any]
RankMain: TypeAlias = Callable[["RankStart"], None]


def process_title(role: str, run: str) -> str:
    """What `ps` shows of a process: role (with its rank), host and run."""
    return f"keepstep: {role} host {socket.gethostname()} run {run}"


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is given at birth.

    Attributes:
        rank: of `world_size`.
        world_size: how many there are.
        rendezvous: directory of the FileStore.
        report_fd: a pipe to the launcher; JSON lines.
    """

    rank: int
    world_size: int
    rendezvous: Path
    report_fd: int

    def report(self, kind: str, **fields: object) -> None:
        """Tell the launcher something; it is handed to `on_report`.

        Two kinds are for the launcher itself: "failed", and "leaving" (keepers may end now).
        """
        line = json.dumps({"kind": kind, "rank": self.rank, **fields}).encode() + b"\n"
        os.write(self.report_fd, line)


def use_one_thread() -> None:
    """Set the environment under which numpy and torch start no threads. Call before any import."""
    os.environ.update(ONE_THREAD)


def warm_up() -> None:
    """Import everything that a rank needs, and run no torch op.

    Raises:
        TrainerError: the process has more than one thread, so that forking it is not safe.
    """
    for name in WARM_MODULES:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise TrainerError(
            f"this process has {threads} threads, 1 is needed to fork ranks from it: something "
            "imported before keepstep has started them (is OPENBLAS_NUM_THREADS=1 set?)"
        )


def run_ranks(
    world_size: int,
    main: RankMain,
    *,
    run: str,
    log_path: Callable[[int], Path],
    on_report: Callable[[Report], None],
    keepers: Sequence[KeeperProcess] = (),
    tell: Tell = lambda kind, reason, **details: None,
) -> None:
    """Fork the ranks, mind them until all have ended well, and leave nothing behind.

    SIGTERM or Ctrl-C is passed on to rank 0 once; a second one kills the ranks at once.

    Args:
        world_size: how many.
        main: what each runs; to return is to end well.
        run: the run's name, for process titles.
        log_path: where the standard output and error of a rank go.
        on_report: called with each report of a rank, in this process.
        keepers: of the hosts, started; one that dies is started anew.
        tell: makes events of this process.

    Raises:
        RankFailed: the first cause, on one line.
        ResumeRefused: the ranks refused alike to go on from what is in the store.
        StopNow: a second signal.
    """
    with _rendezvous_directory() as rendezvous:
        minder = _Minder(on_report, tell)
        for keeper in keepers:
            minder.add_keeper(keeper)
        try:
            forward_stop(minder.request_stop)
            for rank in range(world_size):
                minder.add(rank, *_fork(rank, world_size, rendezvous, main, run, log_path))
            minder.wait()
        finally:
            ignore_stop()
            minder.kill_all()


@contextlib.contextmanager
def _rendezvous_directory() -> Iterator[Path]:
    """A private directory that names its owner; those of dead owners are removed first."""
    parent = Path(tempfile.gettempdir())
    for stale, maker in owned_directories(parent):
        with contextlib.suppress(FileNotFoundError):  # another launcher was faster
            if stale.lstat().st_uid == os.getuid() and not is_running(maker):
                shutil.rmtree(stale, ignore_errors=True)
    me = this_process()
    path = parent / f"{RENDEZVOUS_PREFIX}{me.pid}-{me.ticks}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _fork(
    rank: int,
    world_size: int,
    rendezvous: Path,
    main: RankMain,
    run: str,
    log_path: Callable[[int], Path],
) -> tuple[int, int]:
    """Fork one rank; its pid and the reading end of its pipe."""
    reading, writing = os.pipe()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        start = RankStart(rank, world_size, rendezvous, writing)
        _run_rank(start, main, run, log_path(rank), launcher)
    os.close(writing)
    return pid, reading


def _run_rank(start: RankStart, main: RankMain, run: str, log: Path, launcher: int) -> NoReturn:
    """The life of a forked rank. Never returns into the launcher's code."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        setproctitle.setproctitle(process_title(f"rank {start.rank}", run))
        _redirect_output(log)
        main(start)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported, then it ends
        traceback.print_exc()
        is_refusal = isinstance(error, ResumeRefused)
        start.report("failed", message=_one_line(error), is_refusal=is_refusal)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    typed = isinstance(error, TrainerError) or type(error).__module__.startswith("keepstep.")
    return " ".join((text if typed else f"{type(error).__name__}: {text}").split())


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    message: str
    at_s: float
    is_refusal: bool = False

    @property
    def is_consequence(self) -> bool:
        return any(words in self.message for words in _CONSEQUENCES)


@dataclass(slots=True)
class _Rank:
    pid: int
    pidfd: int
    pipe: int
    pending: bytes = b""
    has_reported_failure: bool = False


@dataclass(slots=True)
class _Keeper:
    process: KeeperProcess
    backoff: Backoff
    start_at_s: float | None = None
    """When to start it anew; None: it lives, or nobody tries any more."""
    look_at_s: float = 0.0


class _Minder:
    """Waits for ranks to report and to end; starts keepers that die anew meanwhile."""

    def __init__(self, on_report: Callable[[Report], None], tell: Tell) -> None:
        self._on_report = on_report
        self._tell = tell
        self._keepers: list[_Keeper] = []
        self._ranks: dict[int, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._failures: list[_Failure] = []
        self._deadline_s: float | None = None
        self._is_leaving = False

    def add(self, rank: int, pid: int, pipe: int) -> None:
        """Mind this rank too."""
        one = _Rank(pid, os.pidfd_open(pid), pipe)
        self._ranks[rank] = one
        self._selector.register(one.pidfd, selectors.EVENT_READ, (rank, self._ended))
        self._selector.register(pipe, selectors.EVENT_READ, (rank, self._readable))

    def add_keeper(self, process: KeeperProcess) -> None:
        """Mind this keeper too."""
        one = _Keeper(process, Backoff())
        self._keepers.append(one)
        self._watch(one)

    def _watch(self, one: _Keeper) -> None:
        pidfd = one.process.pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, (-1, lambda _: self._died(one, pidfd)))

    def request_stop(self, name: str) -> None:
        """Pass a stop request on to rank 0, from whom all learn of it in the step's reduction."""
        self._on_report({"kind": "stop_requested", "reason": f"asked by {name}"})
        if 0 in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ranks[0].pidfd, signal.Signals[name])

    def wait(self) -> None:
        """Until all ranks have ended. Raises RankFailed, or ResumeRefused, with the first cause."""
        while self._ranks:
            self._start_keepers()
            now_s = time.monotonic()
            if self._deadline_s is not None and now_s >= self._deadline_s:
                break
            due_s = [one.start_at_s for one in self._keepers] + [self._deadline_s]
            waits_s = [max(0.0, at_s - now_s) for at_s in due_s if at_s is not None]
            waits_s += [self._look(one, now_s) for one in self._keepers]
            for key, _ in self._selector.select(min(waits_s, default=None)):
                rank, handle = key.data
                if rank in self._ranks or rank < 0:
                    handle(rank)
        if self._failures:
            first = min(self._failures, key=lambda one: (one.is_consequence, one.at_s))
            if first.is_refusal:
                raise ResumeRefused(first.message)
            raise RankFailed(f"rank {first.rank}: {first.message}", rank=first.rank)

    def _look(self, one: _Keeper, now_s: float) -> float:
        """Look for a sign of life if it is time; in how many seconds it is again."""
        if now_s >= one.look_at_s:
            one.look_at_s = now_s + one.process.look_every_s
            if not self._is_leaving:
                one.process.look(self._tell)
        return one.look_at_s - now_s

    def _died(self, one: _Keeper, pidfd: int) -> None:
        """A keeper has ended. While ranks need it: start it anew after a pause."""
        self._selector.unregister(pidfd)
        how, lived_s = one.process.reap()
        if self._is_leaving:
            return
        pause_s = one.backoff.pause_s(lived_s)
        one.start_at_s = time.monotonic() + pause_s
        tell_death(self._tell, one.process, how, pause_s)

    def _start_keepers(self) -> None:
        for one in self._keepers:
            if one.start_at_s is None or one.start_at_s > time.monotonic():
                continue
            one.start_at_s = None
            try:
                one.process.spawn()
            except KeeperFailed as error:
                self._tell("keeper_failed", f"{error}; ranks go on without it")
            else:
                self._watch(one)

    def _readable(self, rank: int) -> None:
        """Take what the rank has written. At the end of its pipe, wait for its death alone."""
        one = self._ranks[rank]
        data = os.read(one.pipe, 1 << 16)
        if not data:
            self._selector.unregister(one.pipe)
            return
        *lines, one.pending = (one.pending + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if report["kind"] == "leaving":
                self._is_leaving = True
            elif report["kind"] == "failed":
                one.has_reported_failure = True
                self._fail(rank, report["message"], report["is_refusal"])
            else:
                self._on_report(report)

    def _ended(self, rank: int) -> None:
        """Reap a rank; a death that it did not report itself is a failure."""
        one = self._ranks[rank]
        while one.pipe in self._selector.get_map():
            self._readable(rank)
        _, status = os.waitpid(one.pid, 0)
        self._selector.unregister(one.pidfd)
        os.close(one.pidfd)
        os.close(one.pipe)
        del self._ranks[rank]
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            self._fail(rank, f"killed by {signal.Signals(-code).name}")
        elif code and not one.has_reported_failure:
            self._fail(rank, f"ended with exit code {code} and without a word")

    def _fail(self, rank: int, message: str, is_refusal: bool = False) -> None:
        now_s = time.monotonic()
        self._failures.append(_Failure(rank, message, now_s, is_refusal))
        if self._deadline_s is None:
            self._deadline_s = now_s + GRACE_S

    def kill_all(self) -> None:
        """Kill what still lives, and reap it."""
        for one in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        for one in self._ranks.values():
            os.waitpid(one.pid, 0)
            os.close(one.pidfd)
            os.close(one.pipe)
        self._ranks.clear()
        self._selector.close()
