"""What dead jobs of this user left on this host: host directories and temporary directories.

A host directory may hold the only copy of a run's newest states, from which the run could go on. So
nothing is freed that is not asked for, and the newest state in it is told before. What a living
process still uses is never touched: a keeper holds its directory's lock, a rank sits in the pool's
table, a temporary directory has its maker's name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from keepstep.ckpt.errors import BadName
from keepstep.ckpt.hostdir import HostDir, check_host, check_shm_dir
from keepstep.ckpt.keeper_errors import KeeperRunning
from keepstep.ckpt.manifest import State
from keepstep.ckpt.names import check_job
from keepstep.ckpt.owned_temp import owned_directories
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_errors import HostDirRefused, PoolDamaged
from keepstep.ckpt.pool_table import SlotStatus, Writer
from keepstep.ckpt.process import is_running


class Kind(Enum):
    """What a leftover is."""

    HOST = "memory of a job's host"
    RENDEZVOUS = "meeting place of a launcher's ranks"
    OTHER = "not made by keepstep"


@dataclass(frozen=True, slots=True)
class Leftover:
    """One directory that a job left, or still uses.

    Attributes:
        path: of the directory.
        kind: what it is.
        size_bytes: the memory or disk that it takes.
        idle_s: seconds since something in it was changed other than through memory.
        newest: the newest sealed state in it; None: there is none.
        in_use: why it stays, as a sentence; "" if it can be freed.
    """

    path: Path
    kind: Kind
    size_bytes: int
    idle_s: float
    newest: State | None
    in_use: str

    @property
    def is_dead(self) -> bool:
        """Whether it can be freed."""
        return not self.in_use


def find_leftovers(shm_dirs: Iterable[Path], temp_dirs: Iterable[Path]) -> list[Leftover]:
    """All that is there, in use or not, by path in each. Changes nothing.

    Args:
        shm_dirs: where host directories are. One that does not exist is passed over.
        temp_dirs: where temporary directories are.

    Raises:
        HostDirRefused: one of `shm_dirs` is not safely this user's.
        OSError: a directory cannot be read.
    """
    found: list[Leftover | None] = []
    for shm_dir in shm_dirs:
        if shm_dir.exists():
            check_shm_dir(shm_dir)
            found += map(_in_shm_dir, sorted(shm_dir.iterdir()))
    for temp_dir in temp_dirs:
        found += [_temporary(path, maker) for path, maker in owned_directories(temp_dir)]
    return [leftover for leftover in found if leftover is not None]


def free(leftover: Leftover) -> str:
    """Remove a leftover with all in it, if it is still dead. Why it stays, or "". Blocking.

    Raises OSError if the system refuses.
    """
    if leftover.kind is Kind.HOST:
        return _free_host(HostDir(leftover.path))
    if leftover.kind is Kind.RENDEZVOUS:
        for path, maker in owned_directories(leftover.path.parent):
            if path == leftover.path:
                return _free_temporary(path, maker)
        return ""
    return leftover.in_use


def _in_shm_dir(path: Path) -> Leftover | None:
    """What an entry of a directory of host directories is; None if it has gone meanwhile."""
    place = HostDir(path)
    try:
        job, _, host = path.name.rpartition(".")
        check_job(job)
        check_host(host)
        place.check()
        holder = place.holder()
        newest, ranks = _in_pool(place)
        in_use = "" if holder is None else f"its keeper, pid {holder.pid or 'unknown'}, is alive"
        return _leftover(path, Kind.HOST, newest, in_use or ranks)
    except (BadName, HostDirRefused) as error:
        return _leftover(path, Kind.OTHER, None, str(error))
    except FileNotFoundError:
        return None


def _in_pool(place: HostDir) -> tuple[State | None, str]:
    """The newest sealed state of a pool, and which living ranks use it, if any."""
    try:
        pool = Pool.open(place.pool)
    except (FileNotFoundError, PoolDamaged):
        return None, ""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None, ""  # a link is no pool; what it leads to is not touched
    with pool:
        states = []
        writers = {seat.writer: seat.rank for seat in pool.seats if seat.is_taken}
        for slot in pool.slots:
            owner = slot.owner
            if owner is not None:
                writers.setdefault(owner.writer, owner.rank)
            try:
                facts = slot.read()
            except PoolDamaged:
                continue  # its image is no state that anybody could go on from
            if facts.status is SlotStatus.SEALED:
                states.append(facts.state)
    alive = [f"rank {rank}, pid {pid.pid}," for pid, rank in writers.items() if is_running(pid)]
    return max(states, default=None), f"{alive[0]} is alive" if alive else ""


def _temporary(path: Path, maker: Writer) -> Leftover | None:
    try:
        if _is_foreign(path):
            return _leftover(path, Kind.OTHER, None, "it is another user's, or no directory")
        return _leftover(path, Kind.RENDEZVOUS, None, _alive(maker))
    except FileNotFoundError:
        return None


def _leftover(path: Path, kind: Kind, newest: State | None, in_use: str) -> Leftover:
    """With its size and age. Follows no symlink."""
    size_bytes, changed_s = 0, path.lstat().st_mtime
    for entry in (path, *_below(path, kind)):
        with contextlib.suppress(FileNotFoundError):
            found = entry.lstat()
            size_bytes += found.st_blocks * 512
            changed_s = max(changed_s, found.st_mtime)
    return Leftover(path, kind, size_bytes, max(0.0, time.time() - changed_s), newest, in_use)


def _below(path: Path, kind: Kind) -> Iterator[Path]:
    if kind is not Kind.OTHER:
        for directory, _, names in os.walk(path):
            yield from (Path(directory) / name for name in names)


def _free_host(place: HostDir) -> str:
    try:
        place.check()
        with place.hold():  # no keeper begins while this goes on
            _, ranks = _in_pool(place)
            if not ranks:
                place.remove()
            return ranks
    except KeeperRunning as error:
        return f"its keeper, pid {error.pid or 'unknown'}, is alive"
    except HostDirRefused as error:
        return str(error)
    except FileNotFoundError:
        return ""


def _free_temporary(path: Path, maker: Writer) -> str:
    try:
        if _is_foreign(path):
            return "it is another user's, or no directory"
        in_use = _alive(maker)
        if not in_use:
            shutil.rmtree(path)
    except FileNotFoundError:
        return ""
    return in_use


def _alive(maker: Writer) -> str:
    return f"its launcher, pid {maker.pid}, is alive" if is_running(maker) else ""


def _is_foreign(path: Path) -> bool:
    found = path.lstat()
    return not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()
