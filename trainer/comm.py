"""Bytes that each axis of the mesh sends in a step, counted where the collectives are issued.

Two seams see every collective of torch's eager Python: the methods of `ProcessGroup` (fsdp,
pipelining, torch.distributed) and the operators of `_c10d_functional` (DTensor). They are wrapped
once per process; outside `Meter.counting` a wrapper costs one attribute look-up. Counted is the
logical volume on the ring, whatever the backend really sends (gloo's reduce-scatter sends more).
A ring over n ranks, for N bytes: all-reduce 2 (n-1)/n N on each rank; all-gather, reduce-scatter
and all-to-all (n-1)/n N, N being the whole tensor; one-to-all and all-to-one (n-1)/n N on average;
a send N. (NCCL tests, PERFORMANCE.md.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, get_process_group_ranks

AXES = ("dp", "tp", "pp")


class CommError(RuntimeError):
    """A collective was issued that the meter cannot attribute to an axis of the mesh."""


# Operation -> (ring factor in (n-1)/n, or None for a plain send; position of the counted payload).
_GROUP_METHODS: dict[str, tuple[int | None, int]] = {
    "allreduce": (2, 0),
    "allreduce_coalesced": (2, 0),
    "allgather": (1, 0),
    "allgather_coalesced": (1, 0),
    "_allgather_base": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0),
    "all_gather_single": (1, 0),
    "all_gather_single_coalesced": (1, 0),
    "reduce_scatter": (1, 1),
    "_reduce_scatter_base": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
    "reduce_scatter_single": (1, 1),
    "reduce_scatter_single_coalesced": (1, 1),
    "alltoall": (1, 1),
    "alltoall_base": (1, 1),
    "all_to_all_single": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "gather": (1, 1),
    "scatter": (1, 0),
    "send": (None, 0),
}
# Operator -> (ring factor; whether the payload counts group size times; position of the group).
_FUNCTIONAL: dict[str, tuple[int, bool, int]] = {
    "all_reduce": (2, False, 2),
    "all_reduce_": (2, False, 2),
    "all_reduce_coalesced": (2, False, 2),
    "all_reduce_coalesced_": (2, False, 2),
    "all_gather_into_tensor": (1, True, 2),
    "all_gather_into_tensor_out": (1, True, 2),
    "all_gather_into_tensor_coalesced": (1, True, 2),
    "reduce_scatter_tensor": (1, False, 3),
    "reduce_scatter_tensor_out": (1, False, 3),
    "reduce_scatter_tensor_coalesced": (1, False, 3),
    "all_to_all_single": (1, False, 3),
    "broadcast": (1, False, 2),
    "broadcast_": (1, False, 2),
}


def ring_bytes(factor: int | None, payload: float, size: int) -> float:
    """Bytes that one rank of `size` sends for `payload` bytes (None: a plain send)."""
    return payload if factor is None else factor * (size - 1) / size * payload


def payload_bytes(value: object) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(payload_bytes(v) for v in value)
    raise CommError(f"expected tensors to count and found {type(value).__name__}")


class Meter:
    """Counts one rank's bytes per axis. `groups`: ranks of a group, ascending -> its axis.

    Groups are known by their ranks, since DTensor may issue a collective on the group of an equal
    mesh that was made earlier in the process.
    """

    def __init__(self, groups: Mapping[tuple[int, ...], str]) -> None:
        self._groups = dict(groups)
        self._named: dict[str, str] = {}  # group name -> axis, as far as seen
        self._sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
        _TAP.install()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every collective issued by this process in the body."""
        before, _TAP.meter = _TAP.meter, self
        try:
            yield
        finally:
            _TAP.meter = before

    def add(self, group: ProcessGroup, factor: int | None, payload: float) -> None:
        """Count one collective of a group.

        Raises:
            CommError: the group's ranks are those of no axis.
        """
        size = group.size()
        if size == 1:
            return
        axis = self._named.get(group.group_name) or self._axis_of(group)
        self._sent[axis] += ring_bytes(factor, payload, size)

    def _axis_of(self, group: ProcessGroup) -> str:
        ranks = tuple(sorted(get_process_group_ranks(group)))
        axis = self._groups.get(ranks)
        if axis is None:
            raise CommError(
                f"a collective was issued in a step on the group {group.group_name!r} of ranks"
                f" {list(ranks)}, which belongs to no axis of the mesh"
            )
        self._named[group.group_name] = axis
        return axis

    def take(self) -> dict[str, float]:
        """This rank's bytes per axis since the last take; starts anew from zero."""
        sent = dict(self._sent)
        self._sent = dict.fromkeys(self._sent, 0.0)
        return sent


class _Tap:
    """The wrappers of this process, and the meter that they feed now, if any."""

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self._installed = False

    def install(self) -> None:
        if self._installed:
            return
        self._installed = True
        for name, (factor, position) in _GROUP_METHODS.items():
            original = getattr(ProcessGroup, name, None)  # the set differs between versions
            if original is not None:
                setattr(ProcessGroup, name, self._method(original, factor, position))
        namespace = torch.ops._c10d_functional
        for name, rule in _FUNCTIONAL.items():
            if hasattr(namespace, name):
                setattr(namespace, name, _CountedOperator(getattr(namespace, name), *rule, self))

    def _method(
        self, original: Callable[..., Any], factor: int | None, position: int
    ) -> Callable[..., Any]:
        def counted(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.meter is not None:
                values = [*args, *kwargs.values()]
                payload = payload_bytes(values[position])
                self.meter.add(group, factor, payload)
            return original(group, *args, **kwargs)

        return counted


class _CountedOperator:
    """An operator of `_c10d_functional` that counts its calls; all else is the operator's own."""

    def __init__(
        self,
        operator: Any,  # noqa: ANN401
        factor: int,
        times_size: bool,
        position: int,
        tap: _Tap,
    ) -> None:
        self._operator, self._factor, self._times_size = operator, factor, times_size
        self._position, self._tap = position, tap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        meter = self._tap.meter
        if meter is not None:
            values = [*args, *kwargs.values()]
            group: Any = values[self._position]  # a group, or its name
            if not isinstance(group, ProcessGroup):
                group = _resolve_process_group(group)
            payload = payload_bytes(values[0]) * (group.size() if self._times_size else 1)
            meter.add(group, self._factor, payload)
        return self._operator(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._operator, name)


_TAP = _Tap()
