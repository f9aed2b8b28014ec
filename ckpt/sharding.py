"""From a torch DTensor to a `Placement`: which mesh axes cut which dim, and in which order.

torch lists placements by mesh dim, and hides the order of cuts along one tensor dim in the
`split_factor` of `_StridedShard`. Its helper for offsets is wrong where such cuts are uneven, so
the order is worked out here, and the result compared with the local tensor that really exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.ckpt.errors import NotRepresentable, PlacementError
from keepstep.ckpt.placement import (
    Mesh,
    Pin,
    Placement,
    Split,
    check_placement,
    coordinates,
    local_box,
)
from keepstep.ckpt.region import Box


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, sharing its memory, without autograd."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor.detach()


def placement_of(
    name: str, tensor: DTensor, mesh: Mesh, rank: int, at: Sequence[Pin] = ()
) -> Placement:
    """How `tensor` lies over `mesh`; `at` pins it to coordinates of axes that torch knows not of.

    The axes are found by the names of the DTensor's device mesh.

    Raises:
        NotRepresentable: for a device mesh without names or with axes that are not in `mesh`, for
            a rank at another place there, for partial sums and unknown placements, or when the
            local part has another shape than the placement gives.
    """
    device_mesh = tensor.device_mesh
    names = _axis_names(name, device_mesh, mesh, rank)
    cuts: dict[int, list[tuple[str, int]]] = {}  # tensor dim -> (axis, size) in the order of cuts
    for index in reversed(range(device_mesh.ndim)):
        placement = tensor.placements[index]
        if isinstance(placement, Replicate):
            continue
        cut = (names[index], device_mesh.size(index))
        if isinstance(placement, _StridedShard):
            inner = cuts.setdefault(placement.dim % tensor.ndim, [])
            inner.insert(_depth(name, int(placement.split_factor), inner), cut)
        elif isinstance(placement, Shard):
            cuts.setdefault(placement.dim % tensor.ndim, []).insert(0, cut)
        else:
            raise NotRepresentable(
                name,
                f"its placement over axis {names[index]!r} is {placement!r}; "
                "redistribute it to Shard or Replicate first",
            )
    splits = tuple(Split(axis=axis, dim=dim) for dim in sorted(cuts) for axis, _ in cuts[dim])
    return Placement(splits=splits, at=sorted_pins(at))


def sorted_pins(at: Sequence[Pin]) -> tuple[Pin, ...]:
    """Pins in the one order in which placements list them."""
    return tuple(sorted(at, key=lambda pin: pin.axis))


def checked_box(
    name: str,
    shape: tuple[int, ...],
    placement: Placement,
    mesh: Mesh,
    rank: int,
    found: tuple[int, ...],
) -> Box:
    """The box of this rank by `placement`, which must have the sizes `found` on this rank.

    Raises:
        NotRepresentable: if it has other sizes, or if the placement puts no part on this rank.
    """
    try:
        check_placement(placement, mesh, len(shape))
    except PlacementError as error:
        raise NotRepresentable(name, str(error)) from error
    box = local_box(shape, placement, mesh, rank)
    if box is None:
        raise NotRepresentable(
            name,
            f"its placement {placement.at} puts nothing on rank {rank}; "
            "register it only on the ranks that hold it",
        )
    if box.sizes != found and not (0 in box.sizes and 0 in found):
        raise NotRepresentable(
            name,
            f"by its placement {placement.splits} of shape {shape} rank {rank} holds "
            f"{box.sizes}, but its local part has shape {found}; "
            "say how it is split, or shard it by torch.chunk's rule",
        )
    return box


def _axis_names(name: str, device_mesh: DeviceMesh, mesh: Mesh, rank: int) -> tuple[str, ...]:
    names = device_mesh.mesh_dim_names
    ours = {axis.name: index for index, axis in enumerate(mesh.axes)}
    if names is None or not set(names) <= set(ours):
        raise NotRepresentable(
            name,
            f"its device mesh has the axes {names}, the run's mesh {tuple(ours)}; "
            "name the axes of the device mesh after those of the run",
        )
    coords = coordinates(mesh, rank)
    for index, axis in enumerate(names):
        size = mesh.axes[ours[axis]].size
        place = device_mesh.get_local_rank(index)
        if (device_mesh.size(index), place) != (size, coords[ours[axis]]):
            raise NotRepresentable(
                name,
                f"on its device mesh rank {rank} is number {place} of {device_mesh.size(index)} "
                f"along {axis!r}, on the run's mesh number {coords[ours[axis]]} of {size}; "
                "build both meshes in the same order",
            )
    return tuple(names)


def _depth(name: str, split_factor: int, inner: list[tuple[str, int]]) -> int:
    """How many of the `inner` cuts come before a strided one: those with this many pieces."""
    pieces = 1
    for depth, (_, size) in enumerate(inner):
        if pieces == split_factor:
            return depth
        pieces *= size
    if pieces != split_factor:
        raise NotRepresentable(
            name,
            f"its strided shard has split factor {split_factor}, but the axes inside it make "
            f"{[size for _, size in inner]} pieces; "
            "shard it by whole mesh axes",
        )
    return len(inner)
