"""How much shared memory this host has for a pool, by every limit that counts.

Pages of a tmpfs are memory: of the host, and, in a container, of its memory limit. A pool that goes
beyond the size of the tmpfs dies of SIGBUS, one beyond the container's limit by the OOM killer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keepstep.ckpt.host_memory import HEADROOM_BYTES, limit_left_bytes, machine_bytes


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Sizes in bytes.

    Attributes:
        mount: where the file system that has the directory is mounted.
        kind: of that file system: "tmpfs" is memory.
        size_bytes: of that file system.
        free_bytes: in it.
        available_bytes: of the host's memory, without swapping.
        limit_left_bytes: what a container's memory limit leaves; None: there is no limit.
    """

    mount: str
    kind: str
    size_bytes: int
    free_bytes: int
    available_bytes: int
    limit_left_bytes: int | None

    @property
    def room_bytes(self) -> int:
        """What a new pool may have, by the tightest limit."""
        left = [self.free_bytes, self.available_bytes - HEADROOM_BYTES]
        if self.limit_left_bytes is not None:
            left.append(self.limit_left_bytes - HEADROOM_BYTES)
        return max(0, min(left))


def memory_room(directory: str) -> MemoryRoom:
    """The room in the file system that has `directory`, or would have it.

    Raises: OSError, if the system does not say.
    """
    place = Path(os.path.realpath(directory))
    while not place.exists():
        place = place.parent
    space = os.statvfs(place)
    mount, kind = _mount_of(place)
    return MemoryRoom(
        mount,
        kind,
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
        machine_bytes(),
        limit_left_bytes(),
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
