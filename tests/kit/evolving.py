"""A state that evolves by a rule, bit by bit, and is known for every step without being evolved.

Each element is a number of a linear congruential sequence modulo 2**32: a step multiplies and adds
in place, in an optimizer whose `step` the update guard can hold up. A state of two steps mixed, or
of one that was copied while it changed, is the state of no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.ckpt.placement import Mesh, MeshAxis, Split, coordinates
from keepstep.ckpt.registry import Registry

MULTIPLIER = 1_664_525
INCREMENT = 1_013_904_223
_MODULUS = 2**32


def reference(first: int, count: int, step: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`count` elements, from the one with number `first`, after `step` steps."""
    multiplier, increment = 1, 0
    factor, term, left = MULTIPLIER, INCREMENT, step
    while left:
        if left & 1:
            multiplier, increment = (
                multiplier * factor % _MODULUS,
                (increment * factor + term) % _MODULUS,
            )
        factor, term = factor * factor % _MODULUS, (factor + 1) * term % _MODULUS
        left >>= 1
    start = np.arange(first, first + count, dtype=np.uint32)
    return start * np.uint32(multiplier) + np.uint32(increment)


class Evolution(torch.optim.Optimizer):
    """Multiplies and adds, in place."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all elements."""
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(MULTIPLIER).add_(INCREMENT)


class Evolving:
    """A matrix split by rows over tp, and a vector that all ranks hold.

    Args:
        dp, tp: the mesh's sizes.
        rank: whose part this is.
        rows, columns: of the matrix.
    """

    def __init__(self, dp: int, tp: int, rank: int, rows: int = 512, columns: int = 1024) -> None:
        mesh = Mesh((MeshAxis("dp", dp), MeshAxis("tp", tp)))
        part, share = coordinates(mesh, rank)[1], rows // tp
        self._firsts = (part * share * columns, rows * columns)
        self._params = [
            nn.Parameter(torch.zeros(share, columns, dtype=torch.int32), requires_grad=False),
            nn.Parameter(torch.zeros(rows * columns // 16, dtype=torch.int32), requires_grad=False),
        ]
        self.step = 0
        self.registry = Registry(mesh, rank)
        self.registry.add_tensor(
            "model/matrix", self._params[0], splits=[Split("tp", 0)], shape=(rows, columns)
        )
        self.registry.add_tensor("model/vector", self._params[1])
        self.optimizer = Evolution(self._params)
        self.registry.add_optimizer("optimizer/", self.optimizer)
        self.registry.add_value("step", lambda: self.step, self._set_step)
        self._set_to(0)

    def _set_step(self, step: int) -> None:
        self.step = step

    def _set_to(self, step: int) -> None:
        for param, first in zip(self._params, self._firsts, strict=True):
            found = reference(first, param.numel(), step).view(np.int32)
            param.copy_(torch.from_numpy(found).view(param.shape))

    def advance(self) -> None:
        """To the state after the next step. Waits for the copy of this one."""
        self.optimizer.step()
        self.step += 1

    @property
    def is_true(self) -> bool:
        """Whether every bit is that of the reference at its step."""
        return all(
            np.array_equal(
                param.detach().numpy().reshape(-1).view(np.uint32),
                reference(first, param.numel(), self.step),
            )
            for param, first in zip(self._params, self._firsts, strict=True)
        )
