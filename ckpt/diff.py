"""Comparing two checkpoints tensor by tensor, whatever their layouts.

Equal means equal bits. Where bits differ, the difference is measured in float64 (complex128); two
NaNs at one place count as no difference there, a NaN against a number as one that has no size.
What only says how a state is laid out is no part of it: between two layouts, the values that
describe the layout and the tensors that belong to single ranks are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keepstep.ckpt.arrays import Array, numbers
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.manifest import TensorSpec
from keepstep.ckpt.reader import CheckpointReader
from keepstep.ckpt.restore import is_common

ELEMENTS_MAX = 1 << 19
"""Elements compared at a time: measuring takes some 100 bytes for each."""

_LAYOUT_VALUES = ("layout", "pipeline", "config.parallel")


@dataclass(slots=True)
class TensorDiff:
    """One tensor that is in both, with equal shape and dtype, and whose bits differ.

    Attributes:
        name: the tensor.
        elements: how many it has.
        differing: how many of them differ in bits.
        nan_against_number: how many are NaN on one side only.
        max_abs: the largest absolute difference of two numbers.
        max_rel: the largest difference relative to the larger magnitude of the two; at most 2.
        where: the index of the largest absolute difference (or of the first NaN against a number).
    """

    name: str
    elements: int
    differing: int = 0
    nan_against_number: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    where: tuple[int, ...] = ()

    @property
    def badness(self) -> tuple[int, float, int]:
        """For sorting: NaN against a number first, then the relative difference, then the count."""
        return self.nan_against_number, self.max_rel, self.differing


@dataclass(slots=True)
class Diff:
    """What is not the same in A and B. `values` has one line for each value that differs."""

    identical: int = 0
    identical_bytes: int = 0
    differing: list[TensorDiff] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    """Tensors with another shape or dtype, or that are another's alias only on one side: how."""
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Path of a value -> what A has and what B has (None: nothing there)."""
    not_compared: list[str] = field(default_factory=list)
    """Tensors of single ranks, where the layouts are not the same. Such values go unsaid."""

    @property
    def is_same(self) -> bool:
        """Whether all tensors have equal bits and all values are equal."""
        tensors = self.differing or self.only_in_a or self.only_in_b or self.changed
        return not tensors and not self.values


def diff(
    a: CheckpointReader, b: CheckpointReader, on_tensor: Callable[[str], None] = lambda _: None
) -> Diff:
    """Compare two checkpoints. Worst first in `differing`. `on_tensor` is told each name.

    Layouts, images and names of generations are not compared: only what they hold.

    Raises:
        Corrupt, FormatError, StoreError: as `CheckpointReader.read`.
    """
    found = Diff()
    names_a, names_b = _names(a), _names(b)
    same_mesh = a.manifest.mesh == b.manifest.mesh
    if not same_mesh:
        ranks = sorted(name for name in names_a | names_b if not is_common(name))
        found.not_compared = ranks
        names_a, names_b = (
            {n: t for n, t in ns.items() if n not in ranks} for ns in (names_a, names_b)
        )
    found.only_in_a = sorted(set(names_a) - set(names_b))
    found.only_in_b = sorted(set(names_b) - set(names_a))
    for name in sorted(set(names_a) & set(names_b)):
        on_tensor(name)
        change = _change(a.spec(name), b.spec(name))
        if names_a[name] != names_b[name]:
            change = f"{_alias(name, names_a[name])} in A, {_alias(name, names_b[name])} in B"
        if change:
            found.changed[name] = change
        elif names_a[name] == name:
            _compare(a, b, name, found)
    found.differing.sort(key=lambda each: each.badness, reverse=True)
    found.values = {
        path: pair
        for path, pair in _values(a.manifest.values, b.manifest.values, "")
        if same_mesh or (is_common(path) and not _describes_layout(path))
    }
    return found


def _describes_layout(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in _LAYOUT_VALUES)


def _names(reader: CheckpointReader) -> dict[str, str]:
    """Every name of a tensor -> the tensor that it is."""
    return {name: name for name in reader.manifest.tensors} | dict(reader.manifest.aliases)


def _alias(name: str, tensor: str) -> str:
    return "a tensor of its own" if name == tensor else f"another name of {tensor}"


def _change(a: TensorSpec, b: TensorSpec) -> str:
    changes = []
    if a.shape != b.shape:
        changes.append(f"shape {list(a.shape)} in A, {list(b.shape)} in B")
    if a.dtype != b.dtype:
        changes.append(f"dtype {a.dtype} in A, {b.dtype} in B")
    return "; ".join(changes)


def _compare(a: CheckpointReader, b: CheckpointReader, name: str, found: Diff) -> None:
    spec = a.spec(name)
    result = TensorDiff(name, math.prod(spec.shape))
    size_bytes = 0
    for box, ours in a.pieces(name, ELEMENTS_MAX * DTYPES[spec.dtype].itemsize):
        theirs = b.read(name, box)
        size_bytes += ours.nbytes
        if not np.array_equal(_bits(ours), _bits(theirs)):
            _measure(result, spec.dtype, ours, theirs, box.offsets)
    if result.differing:
        found.differing.append(result)
    else:
        found.identical += 1
        found.identical_bytes += size_bytes


def _measure(result: TensorDiff, dtype: str, a: Array, b: Array, offsets: tuple[int, ...]) -> None:
    """Add what differs in one piece, which begins at `offsets`."""
    unequal = (_bits(a) != _bits(b)).reshape(-1, a.dtype.itemsize).any(axis=1)
    places = np.flatnonzero(unequal)
    result.differing += len(places)
    gap, rel, one_nan = _gaps(a.reshape(-1)[places], b.reshape(-1)[places], dtype)
    if one_nan.any() and not result.nan_against_number:
        result.where = _index(places[int(np.argmax(one_nan))], a.shape, offsets)
    result.nan_against_number += int(one_nan.sum())
    worst = int(np.argmax(gap))
    if gap[worst] > result.max_abs:
        result.max_abs = float(gap[worst])
        if not result.nan_against_number:
            result.where = _index(places[worst], a.shape, offsets)
    result.max_rel = max(result.max_rel, float(rel.max()))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _gaps(a: Array, b: Array, dtype: str) -> tuple[Array, Array, Array]:
    """Absolute and relative differences of elements, and where just one of two is NaN."""
    if a.dtype.kind in "iu":
        # Exact for 64 bits, where float64 is not.
        gap = (np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)).astype(
            np.float64
        )
        scale = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
        one_nan = np.zeros(a.shape, np.bool_)
    else:
        with np.errstate(all="ignore"):
            x, y = numbers(a, dtype), numbers(b, dtype)
            one_nan = np.isnan(x) != np.isnan(y)
            gap = np.where(x == y, 0.0, np.abs(x - y))
            scale = np.maximum(np.abs(x), np.abs(y))
        gap = np.where(np.isnan(x) | np.isnan(y), 0.0, np.where(np.isnan(gap), np.inf, gap))
    with np.errstate(all="ignore"):
        rel = np.where(gap == 0, 0.0, np.where(np.isinf(gap), 2.0, gap / scale))
    return gap, rel, one_nan


def _index(place: int, shape: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    """The index in the whole tensor of element number `place` of a piece."""
    local = np.unravel_index(int(place), shape) if shape else ()
    return tuple(int(i) + offset for i, offset in zip(local, offsets, strict=True))


def _values(a: object, b: object, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The innermost values that differ, each with its path."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(set(a) | set(b)):
            yield from _values(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield path, (a, b)
