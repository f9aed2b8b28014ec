"""What may differ between a run and the one that it goes on from: pure.

Some keys make another run of it (another model, other data, other numbers): refused, each by name.
The rest may change, and is told as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.trainer.errors import ResumeRefused

FIXED = (
    "run.seed",
    "model.",
    "data.digest",
    "data.heldout_fraction",
    "batch.global_batch",
    "numerics.dtype",
)
"""Keys, or sections, that a resumed run must share with the one before."""

UNREMARKABLE = ("run.steps", "parallel.", "hosts.", "tiers.shm_dir", "data.path")
"""Keys whose change is told otherwise (layout, hosts), or is none (when to stop; places)."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys ("section.key") of two configurations that differ, with both values; None: absent."""
    first, second = _flat(before), _flat(now)
    names = [*first, *(name for name in second if name not in first)]
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }


def check_resumable(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The changes that are allowed and worth telling, one line each.

    Args:
        where: the checkpoint, in words.
        before: its configuration.
        now: the configuration of this start.

    Raises:
        ResumeRefused: a fixed key differs; all such are named with both values.
    """
    changed = differences(before, now)
    lines = {name: f"{name}: {old!r} there, {new!r} here" for name, (old, new) in changed.items()}
    refused = tuple(line for name, line in lines.items() if name.startswith(FIXED))
    if refused:
        raise ResumeRefused(
            f"{where} is of another run: {'; '.join(refused)}. Give the configuration it was "
            "trained with, or begin a new run from its weights: another --run-dir and --init-from",
            differences=refused,
        )
    return [line for name, line in lines.items() if not name.startswith(UNREMARKABLE)]


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, keys in tree.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }
