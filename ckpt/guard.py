"""The update guard: the next in-place update of captured tensors waits for their copy.

It sits on the optimizers, for they alone change what is being copied. A forward, a backward and
everything else goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class UpdateGuard:
    """Hooks before `step` of some optimizers. A closure given to `step` runs behind it too."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], wait: Callable[[], None]
    ) -> None:
        """Put the hooks on.

        Args:
            optimizers: all that update captured tensors.
            wait: returns when updates may go on; at once if nothing is being copied.
        """
        self._wait = wait
        self._handles = [one.register_step_pre_hook(self._before_step) for one in optimizers]

    def close(self) -> None:
        """Take the hooks off. Does not wait for a copy."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._wait()
