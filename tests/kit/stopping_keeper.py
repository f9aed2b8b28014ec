"""A keeper that stops itself (SIGSTOP) once, at a chosen moment of a chosen write to a disk.

`python -m tests.kit.stopping_keeper CONFIG.json`, with `VARIABLE` in the environment. It is a real
keeper on a real file store; only its system calls wait.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.ckpt.keeper import main
from keepstep.storage.posix import Posix

VARIABLE = "KIT_STOP"


class Stop(msgspec.Struct, frozen=True):
    """When to stop.

    Attributes:
        operation: a method of `Posix`: pwrite, rename, link or unlink.
        path: expression that is found in the path it works on (of `pwrite`: the temporary file's).
        armed: not before this file is there.
        is_after: stop when the operation is done, not before it.
    """

    operation: str
    path: str
    armed: str
    is_after: bool = False

    def encoded(self) -> str:
        """For the environment."""
        return msgspec.json.encode(self).decode()


class _Stopper:
    """The first call that fits stops the process; all others pass."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._path = re.compile(stop.path)
        self._lock = threading.Lock()
        self._is_over = False

    def before(self, path: str) -> None:
        if not self._stop.is_after:
            self._stop_if(path)

    def after(self, path: str) -> None:
        if self._stop.is_after:
            self._stop_if(path)

    def _stop_if(self, path: str) -> None:
        if self._path.search(path) is None or not Path(self._stop.armed).exists():
            return
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            # At this thread: it gets no further. (To the process, any thread may take the signal.)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def install(stop: Stop) -> None:
    """Have the chosen system call of all file stores of this process stop it."""
    stopper = _Stopper(stop)
    inner: Callable[..., object] = getattr(Posix, stop.operation)

    def on_name(posix: Posix, *arguments: object) -> object:
        *names, fd = arguments
        path = f"{os.readlink(f'/proc/self/fd/{fd}')}/{names[-1]}"
        stopper.before(path)
        result = inner(posix, *arguments)
        stopper.after(path)
        return result

    def on_file(posix: Posix, fd: int, *arguments: object) -> object:
        path = os.readlink(f"/proc/self/fd/{fd}")
        stopper.before(path)
        result = inner(posix, fd, *arguments)
        stopper.after(path)
        return result

    setattr(Posix, stop.operation, on_file if stop.operation == "pwrite" else on_name)


if __name__ == "__main__":
    install(msgspec.json.decode(os.environ[VARIABLE], type=Stop))
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
