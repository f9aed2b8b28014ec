"""Objects with `state_dict` and `load_state_dict` (schedulers, scalers, samplers) as JSON values.

What they hold must be the same on all ranks, and plain: numbers, texts, lists and dicts. Tuples and
0-d tensors come back as lists and numbers. What JSON lacks and schedulers have is kept beside a
mark: whole numbers as keys (`MultiStepLR`), and infinity (`ReduceLROnPlateau`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol

import torch

from keepstep.ckpt.registry import Registry

_KEYS, _COUNTER, _FLOAT = "integer keys", "counter", "float"


class Stateful(Protocol):
    """What schedulers, `GradScaler` and stateful data loaders have in common."""

    def state_dict(self) -> dict[str, Any]:
        """All that is to be kept."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take it back."""


def add_stateful(registry: Registry, name: str, held: Stateful) -> None:
    """Register `held` as the value `name`.

    Raises:
        NotRepresentable: by name, if its state is not plain.
    """

    def write(saved: Any) -> None:  # noqa: ANN401
        held.load_state_dict(lively(saved))

    registry.add_value(
        name,
        lambda: plain(held.state_dict()),
        write,
        lambda saved: None if isinstance(saved, dict) else f"expected a dict, found {saved!r}",
    )


def plain(value: Any) -> Any:  # noqa: ANN401  a state dict holds anything
    """`value` as JSON has it; what it does not have stays, for the registry to refuse."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        if value and all(type(key) is int for key in value):
            mark = _COUNTER if isinstance(value, Counter) else _KEYS
            return {mark: [[key, plain(one)] for key, one in value.items()]}
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return value


def lively(value: Any) -> Any:  # noqa: ANN401
    """What `plain` was made of, but for tuples and tensors."""
    if isinstance(value, list):
        return [lively(one) for one in value]
    if isinstance(value, dict):
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        for mark, kind in ((_KEYS, dict), (_COUNTER, Counter)):
            if set(value) == {mark}:
                return kind({key: lively(one) for key, one in value[mark]})
        return {key: lively(one) for key, one in value.items()}
    return value
