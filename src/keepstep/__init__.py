"""Keepstep keeps a large training run in step: capture, check, commit, restore into any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.ckpt.checkpointer import Checkpointer
    from keepstep.ckpt.library_host import KeeperOptions
    from keepstep.ckpt.tiers import TierPolicy, Tiers

__all__ = ["Checkpointer", "KeeperOptions", "TierPolicy", "Tiers"]
__version__ = "0.1.0"

_HOMES = {
    "Checkpointer": "keepstep.ckpt.checkpointer",
    "KeeperOptions": "keepstep.ckpt.library_host",
    "TierPolicy": "keepstep.ckpt.tiers",
    "Tiers": "keepstep.ckpt.tiers",
}


def __getattr__(name: str) -> object:
    """The public names, imported when they are first asked for: torch takes seconds."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
