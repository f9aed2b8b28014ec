"""The run directory: its files, and the lock that lets one run at a time use it.

    DIR/lock            held (flock) by the launcher and its ranks while any of them lives
    DIR/metrics.jsonl   one line a finished step
    DIR/events.jsonl    what happened
    DIR/logs/           standard output and error of each rank
    DIR/data/           the default corpus, built once
    DIR/store/          checkpoints, unless --store names another place
    DIR/token           the job's secret between its hosts, mode 0600
    DIR/hosts/HOST/     of each host's keeper: configuration, output, and the disk tier

The kernel drops the lock with its last holder, however that one died, so a stale lock cannot be.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from keepstep.ckpt.process import process_start_ticks
from keepstep.trainer.errors import RunDirError, RunIsLive

LOCK_NAME = "lock"
DYING_S = 5.0
"""How long a start waits for the last ranks of a killed launcher to be gone."""
_RECORD_BYTES_MAX = 4096


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock: host, pid, and the process's start time (clock ticks since boot)."""

    host: str
    pid: int
    start_ticks: int
    run: str


class RunDir:
    """A run directory that this process holds until it and all its children are gone.

    With no `lock_fd` another process of the same run holds it.
    """

    def __init__(self, path: Path, lock_fd: int | None) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @property
    def store_url(self) -> str:
        """Where checkpoints go by default."""
        return str(self.path / "store")

    @property
    def corpus_path(self) -> Path:
        """NAME of the default corpus's token file."""
        return self.path / "data" / "python-standard-library"

    @property
    def token_path(self) -> Path:
        """Where the job's token is, unless KEEPSTEP_TOKEN has it."""
        return self.path / "token"

    def host_path(self, host: str) -> Path:
        """Where what belongs to one host's keeper is."""
        return self.path / "hosts" / host

    def log_path(self, rank: int) -> Path:
        """Where a rank's standard output and error go."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def release(self) -> None:
        """Give the directory up now. Children that hold the lock keep it until they end."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def hold_run_dir(path: Path, run_name: str, dying_s: float = DYING_S) -> RunDir:
    """Make the directory if there is none, and take its lock.

    If the recorded holder is dead but the lock is not free yet, its last ranks are dying: wait
    up to `dying_s` for them.

    Raises:
        RunIsLive: another run holds it; host and pid are named.
        RunDirError: it cannot be made or written.
    """
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot use it as a run directory: {error.strerror} (errno {error.errno}); "
            "name another with --run-dir"
        ) from error
    deadline_s = time.monotonic() + dying_s
    while not _try_lock(fd):
        holder = _read_holder(fd)
        if _is_alive(holder) or time.monotonic() > deadline_s:
            os.close(fd)
            raise RunIsLive(
                f"{path}: a run is live here: host {holder.host} pid {holder.pid} ({holder.run}); "
                "stop it first (SIGTERM: it commits and ends), or name another --run-dir",
                host=holder.host,
                pid=holder.pid,
            )
        time.sleep(0.05)
    _write_holder(fd, run_name)
    return RunDir(path, fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(fd: int) -> Holder:
    """Who wrote the record; pid 0 if it was never finished."""
    try:
        return msgspec.json.decode(os.pread(fd, _RECORD_BYTES_MAX, 0), type=Holder)
    except msgspec.DecodeError:
        return Holder("unknown", 0, 0, "unknown")


def _is_alive(holder: Holder) -> bool:
    """Whether the holder lives, as far as this host can know; another host's counts as alive."""
    if holder.host != socket.gethostname():
        return holder.pid != 0
    return process_start_ticks(holder.pid) == holder.start_ticks


def _write_holder(fd: int, run_name: str) -> None:
    pid = os.getpid()
    record = Holder(socket.gethostname(), pid, process_start_ticks(pid) or 0, run_name)
    os.ftruncate(fd, 0)
    os.pwrite(fd, msgspec.json.encode(record) + b"\n", 0)
