"""A second counter of collectives, at another seam: torch's dispatcher, through a dispatch mode.

Too slow for training; independent of `keepstep.trainer.comm`, and it misses no operator, since
every collective passes the dispatcher as `c10d::*` or `_c10d_functional::*`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_IGNORED = (
    "wait_tensor",
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "recv_",
    "recv_any_source_",
    "irecv",
)


def _size_bytes(value: Any) -> int:  # noqa: ANN401
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_size_bytes(v) for v in value)


class CommOracle(TorchDispatchMode):
    """Bytes sent by this rank in the mode's body, per sorted tuple of the group's global ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[int, ...], float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes it apart first, and its parts come here
        namespace, name = func.name().split("::")  # type: ignore[attr-defined]
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(name.split(".")[0], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _IGNORED:
            return
        self.calls[name] += 1
        group = self._group(name, [*args, *kwargs.values()])
        n = group.size()
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        per_rank = {
            "allreduce_": lambda: 2 * (n - 1) / n * _size_bytes(args[0]),
            "all_reduce": lambda: 2 * (n - 1) / n * _size_bytes(args[0]),
            "allgather_": lambda: (n - 1) * _size_bytes(args[1]),
            "_allgather_base_": lambda: (n - 1) * _size_bytes(args[1]),
            "all_gather_into_tensor": lambda: (n - 1) * _size_bytes(args[0]),
            "_reduce_scatter_base_": lambda: (n - 1) * _size_bytes(args[0]),
            "reduce_scatter_tensor": lambda: (n - 1) / n * _size_bytes(args[0]),
            "send": lambda: float(_size_bytes(args[0])),
        }
        self.sent[ranks] += per_rank[name]()  # a KeyError: an operator that nobody expected

    @staticmethod
    def _group(name: str, values: list[Any]) -> dist.ProcessGroup:
        for value in values:
            if isinstance(value, str) and value not in ("sum", "max", "min", "avg"):
                return torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
            if isinstance(value, dist.ProcessGroup):
                return value
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return dist.ProcessGroup.unbox(value)
        raise LookupError(f"no process group of {name} among {[type(value) for value in values]}")
