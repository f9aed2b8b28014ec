"""Whether a path is on a file system of this machine, whose files may be mapped into memory.

On a network file system a mapping can hang, or change under its reader, when the server goes.
"""

from __future__ import annotations

import os
import re

_LOCAL = (
    *("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs"),
    *("overlay", "reiserfs", "squashfs", "tmpfs", "xfs", "zfs"),
)
_OCTAL = re.compile(r"\\([0-7]{3})")
_MOUNTS = "/proc/self/mountinfo"


def is_local(path: str | os.PathLike[str], mounts: str = _MOUNTS) -> bool:
    """Whether `path` lies on a local file system. False where that cannot be told."""
    wanted = os.path.realpath(path)
    kind, length = "", -1
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split(" ")
                point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
                # Of two mounts at one point the later one hides the other.
                if _is_below(wanted, point) and len(point) >= length:
                    kind, length = fields[fields.index("-") + 1], len(point)
    except (OSError, ValueError, IndexError):
        return False
    return kind in _LOCAL


def _is_below(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(f"{point}/")
