"""How much shared memory this host has for a pool, by every limit that counts.

Pages of a tmpfs are memory: of the host, and, in a container, of its memory limit. A pool that goes
beyond the size of the tmpfs dies of SIGBUS, one beyond the container's limit by the OOM killer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
_CGROUP_V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
_CGROUP_V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Sizes in bytes.

    Attributes:
        mount: where the file system that has the directory is mounted.
        kind: of that file system: "tmpfs" is memory.
        size_bytes: of that file system.
        free_bytes: in it.
        available_bytes: of the host's memory, without swapping.
        limit_bytes: the container's memory limit; None: there is none.
        limit_left_bytes: what is left of that.
    """

    mount: str
    kind: str
    size_bytes: int
    free_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limit_left_bytes: int | None

    @property
    def room_bytes(self) -> int:
        """What a new pool may have, by the tightest limit."""
        left = [self.free_bytes, self.available_bytes]
        if self.limit_left_bytes is not None:
            left.append(self.limit_left_bytes)
        return min(left)


def memory_room(directory: str) -> MemoryRoom:
    """The room in the file system that has `directory`, or would have it.

    Raises: OSError, if the system does not say.
    """
    place = Path(os.path.realpath(directory))
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    mount, kind = _mount_of(place)
    limit_bytes, left_bytes = _container_limit()
    return MemoryRoom(
        mount,
        kind,
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
        _available_bytes(),
        limit_bytes,
        left_bytes,
    )


def _mount_of(place: Path) -> tuple[str, str]:
    """Mount point and kind of the file system that `place` is on."""
    best = ("/", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        mount = mount.encode().decode("unicode_escape")  # a space is \040 there
        if place.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1_024
    raise OSError("/proc/meminfo has no line MemAvailable")


def _container_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """The memory limit of the control group, as seen from inside it, and what is left of it.

    File pages that the kernel may drop at once count as free, as they do for kubelet.
    """
    for limit_name, usage_name, stat_name, droppable in (_CGROUP_V2, _CGROUP_V1):
        try:
            limit = (root / limit_name).read_text().strip()
            usage_bytes = int((root / usage_name).read_text())
            stat = dict(line.split() for line in (root / stat_name).read_text().splitlines())
        except FileNotFoundError:
            continue  # no such control group here, or its root, which has no limit
        if limit == "max" or int(limit) >= _UNLIMITED:
            continue
        used_bytes = usage_bytes - int(stat.get(droppable, 0))
        return int(limit), max(0, int(limit) - used_bytes)
    return None, None
