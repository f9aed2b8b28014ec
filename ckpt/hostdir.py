"""The host directory: where a host's keeper and ranks meet, `<shm_dir>/<job>.<host>/`.

Everything in it belongs to one user (mode 0700), is in shared memory, and is made anew after a
reboot. A directory that somebody else could have put there, or could write to, is refused: shared
memory's root is open to all users of a machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from keepstep.ckpt.keeper_errors import KeeperRunning
from keepstep.ckpt.names import check_job
from keepstep.ckpt.pool_errors import HostDirRefused
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import is_running, this_process

SOCKET_PATH_BYTES_MAX = 107
"""The longest path that a Unix socket can be bound to."""

HOST_CHARS_MAX = 40

LOCK_NAME = "lock"

_NAMELESS_S = 1.0
_MAKES_MAX = 100

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def default_shm_dir() -> Path:
    """Of this user, on this host."""
    return Path(f"/dev/shm/keepstep-{os.geteuid()}")


def shm_dir_of_run(shm_dir: Path, tag: str) -> Path:
    """The directory of one run's own, beside `shm_dir`: runs of one name do not meet in it."""
    return shm_dir.with_name(f"{shm_dir.name}.{tag}")


def shm_dirs_of_runs(shm_dir: Path) -> list[Path]:
    """`shm_dir` and, of this user's, all that `shm_dir_of_run` can name, as far as they exist."""
    beside = sorted(shm_dir.parent.glob(f"{shm_dir.name}.*"))
    ours = [path for path in beside if path.lstat().st_uid == os.geteuid()]
    return [shm_dir, *ours] if shm_dir.exists() else ours


def check_host(host: str) -> None:
    """Raise HostDirRefused unless `host` can be a host's id: 1 to 40 of ``A-Za-z0-9_-``."""
    if len(host) > HOST_CHARS_MAX or _HOST.fullmatch(host) is None:
        raise HostDirRefused(
            f"host id {host[:100]!r}: expected 1 to {HOST_CHARS_MAX} letters, digits, '_' or '-', "
            "beginning with a letter or digit"
        )


@dataclass(frozen=True, slots=True)
class HostDir:
    """The directory's path, and those of the files in it."""

    path: Path

    @property
    def pool(self) -> Path:
        """See `ckpt.pool`."""
        return self.path / "pool"

    @property
    def lock(self) -> Path:
        """Held with flock by the living keeper; contains its pid and start time."""
        return self.path / LOCK_NAME

    @property
    def control(self) -> Path:
        """Unix stream socket of the keeper."""
        return self.path / "control"

    @property
    def bell(self) -> Path:
        """Unix datagram socket of the keeper: a byte wakes it up."""
        return self.path / "bell"

    @property
    def keeper_json(self) -> Path:
        """What a keeper leaves to its successor."""
        return self.path / "keeper.json"

    def structure(self, digest: str) -> Path:
        """The structure with this plan digest. Raises HostDirRefused for what is no digest."""
        if _DIGEST.fullmatch(digest) is None:
            raise HostDirRefused(f"plan digest {digest[:100]!r}: expected 32 hex digits")
        return self.path / f"structure-{digest}.json"

    def stage(self, generation: int) -> Path:
        """File that the local ranks share while they restore for `generation`."""
        return self.path / f"stage-{generation}"

    def check(self) -> None:
        """Raise HostDirRefused unless the directory, and the one above it, are safely ours."""
        with _opened(self.path.parent, None) as above, _opened(self.path, above):
            pass

    def holder(self) -> Writer | None:
        """The living keeper; None if nobody holds the lock. (0, 0): held, by whom is not known."""
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if _try_lock(fd):
                return None
            return _named_in(fd)
        finally:
            os.close(fd)

    def beat(self) -> None:
        """By the keeper: a sign of life. No error if the directory is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.lock, follow_symlinks=False)

    def beat_of(self, pid: int) -> int:
        """What changes with each sign of life of the keeper `pid`; 0 if another one, or none, is
        there. Does not block.
        """
        try:
            named = self.lock.read_bytes()[:64].split()
            changed_ns = os.stat(self.lock, follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0
        return changed_ns if named[:1] == [str(pid).encode()] else 0

    def hold(self) -> HostLock:
        """Become the keeper of this directory, until `release` or this process's end.

        The lock lives as long as any process that this one forks without exec: fork none.

        Raises KeeperRunning, naming the pid, if there is one; FileNotFoundError if the directory
        was removed meanwhile (make it again). Blocking: a second at most.
        """
        end_s = time.monotonic() + _NAMELESS_S
        while True:
            fd = os.open(
                self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode=0o600
            )
            if not _try_lock(fd):
                pid = _named_in(fd).pid
                os.close(fd)
                # Nameless: somebody looks whether it is held, or took it and has yet to sign it.
                if not pid and time.monotonic() < end_s:
                    time.sleep(0.01)
                    continue
                raise KeeperRunning(
                    f"{self.path} has a living keeper, pid {pid or 'unknown'}; stop it, or use "
                    "another job name or host id",
                    pid=pid,
                )
            if _is_same_file(fd, self.lock):
                me = this_process()
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{me.pid} {me.ticks}\n".encode(), 0)
                return HostLock(fd)
            os.close(fd)  # its last holder removed it between the two calls

    def remove(self) -> None:
        """Remove the directory with all in it; and the one above it, if it is empty then.

        For who holds the lock, or knows that there is no keeper. No error if it is gone.
        """
        # The lock goes last: until then nobody else can hold this directory.
        try:
            for entry in sorted(self.path.iterdir(), key=lambda entry: entry == self.lock):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        if _rmdir(self.path):
            _rmdir(self.path.parent)


class HostLock:
    """The keeper's hold on its host directory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Let go. No error if that was done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> HostLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def make_host_dir(shm_dir: Path, job: str, host: str) -> HostDir:
    """The host directory of (job, host), made if there is none. Mode 0700, checked.

    Raises BadName and HostDirRefused (a name, a symlink, another owner, a mode, too long a path).
    """
    place = HostDir(host_dir_path(shm_dir, job, host))
    shm_dir.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_MAKES_MAX):
        # Gone again: a keeper that ends removes what is empty.
        with contextlib.suppress(FileNotFoundError):
            return _made(place)
    return _made(place)


def check_shm_dir(shm_dir: Path) -> None:
    """Raise HostDirRefused unless the directory of all host directories is safely ours."""
    with _opened(shm_dir, None):
        pass


def host_dir_path(shm_dir: Path | str, job: str, host: str) -> Path:
    """Where the host directory of (job, host) is or would be. Raises as `make_host_dir` does."""
    check_job(job)
    check_host(host)
    path = Path(shm_dir) / f"{job}.{host}"
    longest = len(os.fsencode(HostDir(path).control))
    if longest > SOCKET_PATH_BYTES_MAX:
        raise HostDirRefused(
            f"{HostDir(path).control} has {longest} bytes, a Unix socket's path at most "
            f"{SOCKET_PATH_BYTES_MAX}; use a shorter shm_dir or job name"
        )
    return path


def _made(place: HostDir) -> HostDir:
    _make(place.path.parent, None)
    with _opened(place.path.parent, None) as above:
        _make(place.path, above)
        with _opened(place.path, above):
            return place


def _make(path: Path, above: int | None) -> None:
    name = path if above is None else path.name
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)


def _rmdir(path: Path) -> bool:
    """Remove a directory; False if somebody put something into it, or removed it."""
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path, above: int | None) -> Iterator[int]:
    """A descriptor of a directory that is safely ours: no symlink, our own, closed to others."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path if above is None else path.name, flags, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise HostDirRefused(
            f"{path} is a symlink or no directory; remove it, or choose another shm_dir"
        ) from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise HostDirRefused(
                f"{path} belongs to user {found.st_uid}, expected {os.geteuid()}; choose another "
                "shm_dir"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise HostDirRefused(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, expected 0700, since others "
                f"could look into it: chmod 700 {path}"
            )
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _named_in(fd: int) -> Writer:
    words = os.pread(fd, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return Writer(0, 0)
    named = Writer(int(words[0]), int(words[1]))
    return named if is_running(named) else Writer(0, 0)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
