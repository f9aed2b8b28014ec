"""A host's keeper as a process: started, waited for, started anew when it dies, replaced.

Whoever starts it (the launcher, or under torchrun a host's first rank) is its parent, but not its
master: it runs in a session of its own and outlives them by its patience. A new start therefore
finds an older keeper alive, and replaces it: that one is asked to end (it finishes what it is
sealing and leaves the memory for its successor), and killed if it does not.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.host_damage import explained
from keepstep.ckpt.hostdir import HostDir, host_dir_path
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import KeeperGone
from keepstep.ckpt.pool_errors import PoolError
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import is_running

READY_S = 60.0
"""How long a start may take, on a machine that is busy starting ranks too."""
REPLACE_S = 10.0
"""How long an older keeper may take to end after it was asked."""

SILENCE_MIN_S = 5.0
LOOKS_IN_PATIENCE = 8
"""How often, in a patience, a sign of life is looked for."""

_POLL_S = 0.02
_WORDS_BYTES = 2000

Tell = Callable[..., None]
"""`tell(kind, reason, **details)`: makes an event."""


class KeeperFailed(CheckpointError):
    """A keeper could not be started, or could not be replaced. Nothing else changed."""


class Backoff:
    """Pauses before restarts: doubled at each death, from the first again after a healthy life."""

    def __init__(self, first_s: float = 0.1, most_s: float = 10.0, healthy_s: float = 30.0) -> None:
        self._first_s, self._most_s, self._healthy_s = first_s, most_s, healthy_s
        self._next_s = first_s

    def pause_s(self, lived_s: float) -> float:
        """How long to wait after a keeper died that had lived for so long."""
        if lived_s >= self._healthy_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._most_s)
        return pause_s


class Silence:
    """How long a keeper has given no sign of life. Counts from its first one. Pure.

    What counts is how often it was looked at in vain, and not the clock alone: a machine, or a
    container, that was stopped whole, must not find its keeper guilty of that.
    """

    def __init__(self, patience_s: float) -> None:
        # A busy machine does not run every process each second, whatever the patience.
        self.patience_s = max(patience_s, SILENCE_MIN_S)
        self.look_every_s = self.patience_s / LOOKS_IN_PATIENCE
        self._beat = 0
        self._silent_s = 0.0
        self._looked_s = 0.0

    def is_over(self, beat: int, now_s: float) -> bool:
        """Whether there was no new `beat` (0: none) for a patience: said once for each silence."""
        since_s = min(now_s - self._looked_s, 2 * self.look_every_s)
        self._looked_s = now_s
        if beat != self._beat or not self._beat:
            self._beat = beat or self._beat
            self._silent_s = 0.0
            return False
        was_over = self._silent_s >= self.patience_s
        self._silent_s += since_s
        return not was_over and self._silent_s >= self.patience_s


class KeeperProcess:
    """One host's keeper.

    Not thread-safe. The keeper outlives this object and this process.
    """

    def __init__(self, config: KeeperConfig, directory: Path) -> None:
        """Nothing is started yet.

        Args:
            config: of the keeper.
            directory: where its configuration and its output are kept; made if it is missing.
        """
        self._config = config
        self._config_path = directory.absolute() / "keeper.json"
        self._log_path = directory.absolute() / "keeper.log"
        self._log_at = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started_s = 0.0
        self._silence = Silence(config.patience_s)

    @property
    def host(self) -> str:
        """The host's id."""
        return self._config.host

    @property
    def host_dir(self) -> Path:
        """The host directory, where ranks find the keeper."""
        return host_dir_of(self._config)

    @property
    def pid(self) -> int:
        """Of the keeper that was started; 0 before."""
        return 0 if self._child is None else self._child.pid

    @property
    def pidfd(self) -> int:
        """Readable once the keeper has ended; -1 while none was started that is not reaped."""
        return self._pidfd

    def start(self) -> None:
        """End an older keeper of this host, and start one. Returns before it is ready.

        Raises:
            KeeperFailed: the older one cannot be ended, or the new one not be started.
        """
        replace_older(self.host_dir, self.host)
        self.spawn()

    def spawn(self) -> None:
        """Start a keeper where none is alive. Returns before it is ready; raises KeeperFailed."""
        # -P: a `storage.py` or `types.py` where the user stands is nothing to the keeper.
        command = [sys.executable, "-P", "-m", "keepstep.ckpt.keeper", str(self._config_path)]
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._config.write(self._config_path)
            with self._log_path.open("ab") as log:
                self._log_at = log.tell()
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C, and killing this process's group, spare it
                )
        except OSError as error:
            raise KeeperFailed(
                f"host {self.host}: cannot start its keeper: {error.strerror} "
                f"({error.filename or sys.executable})"
            ) from error
        self._pidfd = os.pidfd_open(self._child.pid)
        self._started_s = time.monotonic()
        self._silence = Silence(self._config.patience_s)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until the keeper answers. Blocking.

        Raises:
            KeeperFailed: it ended instead, or does not answer in time; with its last words.
        """
        child = self._child
        assert child is not None
        deadline_s = time.monotonic() + timeout_s
        while True:
            if child.poll() == 0:
                raise KeeperFailed(
                    f"host {self.host}: its keeper (pid {child.pid}) has ended by itself, before "
                    f"a rank came to it: {self.last_words()}"
                )
            if child.poll() is not None:
                raise KeeperFailed(
                    f"host {self.host}: its keeper ended with {_ended(child.returncode)} "
                    f"before it was ready: {self.last_words()}"
                )
            with contextlib.suppress(KeeperGone):
                KeeperClient(self.host_dir, timeout_s).close()
                return
            if time.monotonic() > deadline_s:
                raise KeeperFailed(
                    f"host {self.host}: its keeper (pid {child.pid}) does not answer in "
                    f"{self.host_dir} after {timeout_s:.0f} s: {self.last_words()}"
                )
            time.sleep(_POLL_S)

    @property
    def look_every_s(self) -> float:
        """How often `look` is to be called."""
        return self._silence.look_every_s

    def look(self, tell: Tell) -> None:
        """Look for a sign of life, and kill a keeper that has given none for a patience.

        It is then found dead, and started anew. Returns at once.
        """
        if self._pidfd < 0:
            return
        beat = HostDir(self.host_dir).beat_of(self.pid)
        if not self._silence.is_over(beat, time.monotonic()):
            return
        tell(
            "keeper_hung",
            f"host {self.host}: its keeper (pid {self.pid}) has given no sign of life for "
            f"{self._silence.patience_s:g} s (is it stopped, or does its machine hang?); it is "
            "killed, and started anew",
            of_host=self.host,
            keeper_pid=self.pid,
        )
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def reap(self) -> tuple[str, float]:
        """Take the end of a keeper that has ended: how, in words, and for how long it lived."""
        child = self._child
        assert child is not None
        code = child.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        return _ended(code), time.monotonic() - self._started_s

    def wait_end(self, timeout_s: float) -> bool:
        """Wait for the keeper to end by itself; whether it has. Blocking."""
        if self._pidfd < 0:
            return True
        if not _has_exited(self._pidfd, timeout_s):
            return False
        self.reap()
        return True

    def let_go(self) -> None:
        """Mind the keeper no more; it goes on."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # else its destructor warns of a child that still runs

    def last_words(self) -> str:
        """The end of what the keeper has printed since it was started, on one line."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_at)
                said = log.read()[-_WORDS_BYTES:].decode(errors="replace")
        except OSError as error:
            return f"its output in {self._log_path} cannot be read: {error.strerror}"
        lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
        return lines[-1] if lines else f"it said nothing (see {self._log_path})"


class KeeperMinder:
    """Starts a host's keeper anew whenever it dies or hangs: a thread of the host's first rank."""

    def __init__(self, process: KeeperProcess, tell: Tell) -> None:
        """Mind a keeper that was started.

        Args:
            process: nobody else's from now on.
            tell: makes events; called in the thread.
        """
        self._process = process
        self._tell = tell
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._mind, name="keepstep-keeper", daemon=True)
        self._thread.start()

    def close(self, end_s: float = 0.0) -> bool:
        """Mind the keeper no more; wait up to `end_s` for its end; whether it has ended."""
        os.close(self._stop)
        self._thread.join()
        os.close(self._wake)
        has_ended = self._process.wait_end(end_s)
        self._process.let_go()
        return has_ended

    def _mind(self) -> None:
        backoff = Backoff()
        while True:
            ready = _readable((self._process.pidfd, self._wake), self._process.look_every_s)
            if self._wake in ready:
                return
            if not ready:
                self._process.look(self._tell)
                continue
            how, lived_s = self._process.reap()
            pause_s = backoff.pause_s(lived_s)
            tell_death(self._tell, self._process, how, pause_s)
            if _is_readable((self._wake,), self._wake, pause_s):
                return
            try:
                self._process.spawn()
            except KeeperFailed as error:
                self._tell("keeper_failed", f"{error}; ranks go on without it")
                return


def host_dir_of(config: KeeperConfig) -> Path:
    """The host directory that a keeper with this configuration uses."""
    return host_dir_path(config.shm_dir, config.job, config.host)


def tell_death(tell: Tell, process: KeeperProcess, how: str, pause_s: float) -> None:
    """The event that a keeper has died and is going to be started anew."""
    tell(
        "keeper_died",
        f"host {process.host}: its keeper (pid {process.pid}) ended with {how}; started anew in "
        f"{pause_s:.1f} s; the images it sealed stay in memory; {process.last_words()}",
        of_host=process.host,
        keeper_pid=process.pid,
        pause_s=pause_s,
    )


def replace_older(host_dir: Path, host: str, timeout_s: float = REPLACE_S) -> int:
    """End the keeper that is alive in `host_dir`, if one is; its pid, or 0. Blocking.

    Raises:
        KeeperFailed: the keeper cannot be ended; or the directory is not safely this user's, or is
            damaged.
    """
    place = HostDir(host_dir)
    deadline_s = time.monotonic() + timeout_s
    asked = 0
    while True:
        try:
            with explained(host_dir):
                place.check()
                holder = place.holder()
        except FileNotFoundError:
            return asked
        except PoolError as error:
            raise KeeperFailed(f"host {host}: {error}") from error
        if holder is None:
            return asked
        if holder.pid:
            asked = holder.pid
            _end(holder, timeout_s, host)
        elif time.monotonic() > deadline_s:
            raise KeeperFailed(
                f"host {host}: {place.lock} is held, but it names no process that lives: find "
                "the holder with `lslocks`, and end it"
            )
        time.sleep(_POLL_S)


def _end(holder: Writer, timeout_s: float, host: str) -> None:
    """Ask a process to end, and kill it if it does not in time."""
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        if not is_running(holder):  # another one got the pid just now
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(pidfd, number)
            if _has_exited(pidfd, timeout_s):
                return
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise KeeperFailed(
            f"host {host}: an older keeper (pid {holder.pid}) belongs to another user; end it first"
        ) from error
    finally:
        os.close(pidfd)


def _has_exited(pidfd: int, timeout_s: float) -> bool:
    return _is_readable((pidfd,), pidfd, timeout_s)


def _is_readable(fds: tuple[int, ...], wanted: int, timeout_s: float | None = None) -> bool:
    """Wait for any of `fds` to be readable (or at its end); whether `wanted` is."""
    return wanted in _readable(fds, timeout_s)


def _readable(fds: tuple[int, ...], timeout_s: float | None) -> set[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)
    return {fd for fd, _ in ready}


def _ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
