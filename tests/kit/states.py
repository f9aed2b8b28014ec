"""Small sharded states whose every element is known beforehand, to be saved and restored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from keepstep.ckpt.agree import all_gather_bytes, gather_structure
from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.image import build, image_record, items_of, seal
from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.manifest import (
    FORMAT_VERSION,
    ImageRecord,
    Manifest,
    State,
    decode_manifest,
    encode_manifest,
)
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slot_copy import ImageParts, SlotCopy, Streams
from keepstep.ckpt.structure import Structure, merge_structures
from keepstep.storage.file import FileStore
from keepstep.storage.store import Store

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
STATE = State(generation=1, step=20)


@dataclass(frozen=True)
class Layout:
    """Sizes of the four axes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.tp)

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            tuple(
                MeshAxis(name=name, size=size) for name, size in zip(AXES, self.sizes, strict=True)
            )
        )


class Uneven(nn.Module):
    """Dims of 7 and 13: over tp 2 and dp 3 no cut is even, and some parts are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7, bias=False)
        self.narrow = nn.Linear(7, 2)
        self.wide = nn.Linear(7, 20_011, bias=False)  # 560 KB: more than one piece, split in two
        self.norm = nn.LayerNorm(7)
        self.counter: torch.Tensor
        self.mask: torch.Tensor
        self.register_buffer("counter", torch.tensor(41, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def full_values(model: nn.Module) -> None:
    """Set every parameter to values that tell tensor and place."""
    for number, param in enumerate(model.parameters()):
        count = param.numel()
        with torch.no_grad():
            param.copy_(
                (torch.arange(count) + 1_000_003 * number).double().sqrt().view(param.shape)
            )


def moments(optimizer: torch.optim.Optimizer) -> None:
    """Set the Adam state to functions of the parameters, element by element."""
    with torch.no_grad():
        for param, state in optimizer.state.items():
            state["exp_avg"].copy_(param * 0.5 + 1)
            state["exp_avg_sq"].copy_(param * param)
            state["step"].fill_(20)


def sharded(layout: Layout) -> nn.Module:
    """The model with `full_values`, cut by torch itself over the ranks of the default group."""
    model = Uneven()
    full_values(model)
    if layout.world > 1:
        mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=AXES)
        if layout.tp > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "wide": ColwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        data = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
        fully_shard(model, mesh=data)
    return model


def register(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout, rank: int
) -> Registry:
    """Everything of `model` and `optimizer`, under the usual names."""
    registry = Registry(layout.mesh, rank)
    registry.add_module("model/", model)
    if optimizer is not None:
        registry.add_optimizer("optimizer/", optimizer)
    return registry


def manifest_of(
    structure: Structure,
    records: list[ImageRecord | None],
    values: dict[str, object],
    state: State = STATE,
    job: str = "test",
) -> Manifest:
    """The manifest of images that were written."""
    return Manifest(
        format=FORMAT_VERSION,
        job=job,
        state=state,
        mesh=structure.mesh,
        placements=structure.placements,
        tensors=structure.tensors,
        aliases=structure.aliases,
        values=values,
        plan_digest=structure.digest,
        images=tuple(record for record in records if record is not None),
    )


def write_image(
    registry: Registry, structure: Structure, store: Store, state: State, job: str = "test"
) -> ImageRecord | None:
    """Copy, seal and store what this rank owns; None if that is nothing."""
    mesh = structure.mesh
    owned = Plan(mesh, structure.placements, structure.tensors).owned(registry.rank)
    items = items_of(structure.tensors, owned)
    header = build(job, state, registry.rank, mesh, structure.digest, items)
    if not header.data_bytes:
        return None
    image = memoryview(bytearray(header.size_bytes))
    copy = SlotCopy(ImageParts(registry, header), header, image, Streams())
    copy.copy_inside()
    for part in copy.jobs(state)[0]:
        part()
    sealed = seal(header, chunk_digests(image[header.header_bytes :]))
    image[: header.header_bytes] = sealed
    store.put(image_key(state, header.rank), image)
    return image_record(header, sealed)


def save_alone(registry: Registry, store: Store, state: State = STATE) -> Manifest:
    """Save the state of one process, which is the whole mesh."""
    structure = merge_structures([registry.structure()])
    record = write_image(registry, structure, store, state)
    return manifest_of(structure, [record], registry.read_values(), state)


def save_together(registry: Registry, root: Path) -> None:
    """Save the state of all ranks of the default group into a file store, manifest and all."""
    structure = gather_structure(None, registry)
    store = FileStore(root)
    record = write_image(registry, structure, store, STATE)
    gathered = all_gather_bytes(None, msgspec.json.encode(record))
    records = [msgspec.json.decode(data, type=ImageRecord | None) for data in gathered]
    if registry.rank == 0:
        manifest = manifest_of(structure, records, registry.read_values())
        store.put(manifest_key(STATE), encode_manifest(manifest))


def read_manifest(root: Path) -> Manifest:
    """What `save_together` wrote."""
    key = manifest_key(STATE)
    return decode_manifest(FileStore(root).get(key, 1 << 24), key)
