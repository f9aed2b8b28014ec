"""The tiers of a snapshot, with costs to start from until one's own are measured."""

from __future__ import annotations

from keepstep.planner.errors import PlannerError
from keepstep.planner.survive import Tier

DEFAULT_TIERS = (
    Tier("memory", capture_s=0.05, restore_s=2.0, survives="process"),
    Tier("peer", capture_s=0.10, restore_s=5.0, survives="host"),
    Tier("disk", capture_s=0.20, restore_s=20.0, survives="host"),
    Tier("store", capture_s=0.50, restore_s=120.0, survives="several"),
)
"""Stalls of captures that run beside the training: assumptions, to be replaced by measured ones."""


def parse_tier(text: str) -> Tier:
    """A tier from NAME=CAPTURE,RESTORE,SURVIVES[,INTERVAL], in seconds.

    Raises PlannerError naming the part that cannot be read.
    """
    name, sign, rest = text.partition("=")
    parts = rest.split(",")
    if not sign or not name or len(parts) not in (3, 4):
        raise PlannerError(
            f"--tier {text}: must be NAME=CAPTURE,RESTORE,SURVIVES[,INTERVAL],"
            " such as store=0.5,120,several"
        )
    try:
        capture, restore = float(parts[0]), float(parts[1])
        interval = float(parts[3]) if len(parts) == 4 else None
    except ValueError as error:
        raise PlannerError(f"--tier {text}: times must be numbers of seconds") from error
    return Tier(name, capture, restore, parts[2], interval)
