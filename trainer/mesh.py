"""The grid of ranks: one device mesh, and the groups that the numerics reduce over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keepstep.ckpt.layout import AXES
from keepstep.trainer.layout import Coordinates, axis_sizes, coordinates
from keepstep.trainer.model_config import ParallelConfig


class MeshError(ValueError):
    """The layout does not fit the number of ranks."""


@dataclass(frozen=True)
class Grid:
    """The mesh with axes AXES (all present, size 1 too), and this rank's place in it."""

    parallel: ParallelConfig
    mesh: DeviceMesh
    device: torch.device
    place: Coordinates

    @cached_property
    def tp(self) -> DeviceMesh:
        """The 1-d mesh of this rank's tensor-parallel peers."""
        return self.mesh["tp"]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh for fully_shard: (replicate, shard) where there are replicas, else shard."""
        if self.parallel.dp_replicate > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of an axis of the mesh, or of "dp", the two data-parallel axes together."""
        if axis != "dp":
            return self.mesh.get_group(axis)
        if self.parallel.dp_replicate == 1:
            return self.mesh.get_group("dp_shard")
        if self.parallel.dp_shard == 1:
            return self.mesh.get_group("dp_replicate")
        return self._dp.get_group()

    @cached_property
    def _dp(self) -> DeviceMesh:
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp")

    def reduction_axes(self) -> list[tuple[str, dist.ProcessGroup]]:
        """The axes of more than one rank, innermost first: reducing over each reduces over all."""
        sizes = {"tp": self.parallel.tp, "dp": self.parallel.dp, "pp": self.parallel.pp}
        return [(axis, self.group(axis)) for axis, size in sizes.items() if size > 1]


def make_grid(parallel: ParallelConfig, device: torch.device) -> Grid:
    """Make the mesh. Collective: all ranks of the default process group must call it.

    Raises:
        MeshError: the layout's ranks are not the process group's.
    """
    world = dist.get_world_size()
    if parallel.world_size != world:
        raise MeshError(
            f"the layout dp={parallel.dp}, tp={parallel.tp}, pp={parallel.pp} has"
            f" {parallel.world_size} ranks and {world} were started"
        )
    mesh = init_device_mesh(device.type, axis_sizes(parallel), mesh_dim_names=AXES)
    grid = Grid(parallel, mesh, device, coordinates(parallel, dist.get_rank()))
    if parallel.dp > 1:
        grid.group("dp")  # group creation is collective: here, where all ranks are
    return grid
