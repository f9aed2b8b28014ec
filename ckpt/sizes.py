"""Sizes for people, in one unit everywhere: decimal, as disks and networks are sold."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """A size in decimal units, three digits: "812 B", "4.10 kB", "1.07 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            break
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"
