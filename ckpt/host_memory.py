"""How much memory this host, or the pod that it plays in, can still give."""

from __future__ import annotations

import os
from pathlib import Path

HEADROOM_BYTES = 64 << 20
"""Left to the rest of the machine."""

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 62
"""Version 1 has no word for "no limit": it shows the greatest number of whole pages below 2**63."""


def available_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """What new allocations can have without swapping: by the kernel, and by this process's cgroups.

    A pod's memory limit counts the pages of its shared memory, too, and ends in a kill.
    """
    return min([_of_machine(), *_of_cgroups(cgroups, own)])


def machine_bytes() -> int:
    """What new allocations can have by the kernel alone, whatever a pod's limit is."""
    return _of_machine()


def limit_left_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What this process's cgroups leave; None if none of them has a limit."""
    return min(_of_cgroups(cgroups, own), default=None)


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroups(cgroups: Path, own: Path) -> list[int]:
    """What is left below each limit that can be read, from this process's cgroup upwards."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        place = root / path.strip("/")
        for directory in (place, *place.parents):
            found = _numbers(directory, limit, usage, cache)
            if found is not None:
                left.append(found)
            if directory == root:
                break
    return left


def _numbers(directory: Path, limit: str, usage: str, cache: str) -> int | None:
    """The limit less what is in use and cannot be dropped; None without a limit here."""
    try:
        text = (directory / limit).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT_BYTES:
            return None
        used = int((directory / usage).read_text())
        stats = dict(
            line.split(" ", 1) for line in (directory / "memory.stat").read_text().splitlines()
        )
    except OSError:
        return None
    return int(text) - used + int(stats.get(cache, 0))
