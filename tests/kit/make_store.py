"""Small real stores made without torch: numpy arrays in, a committed checkpoint out.

    store = MemoryStore()
    make_store(store, arrays({"model/w": (7, 3)}), mesh(dp_shard=3, tp=2),
               {"model/w": split("tp:0", "dp_shard:0")})

`llama_state` gives the tensors, placements and values that the trainer would save for a layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keepstep.ckpt.arrays import NUMPY_DTYPES, Array
from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.image import build, image_record, seal
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.layout import Layout, layout_values, mesh_of
from keepstep.ckpt.llama import LlamaShape, parameter_shapes, tensor_parallel_dim
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import FORMAT_VERSION, Manifest, State
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin, Placement, Split, mesh_size
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box
from keepstep.ckpt.stages import parameter_stages, split_layers
from keepstep.ckpt.structure import HeldTensor, Structure, structure_of
from keepstep.storage.store import Store

TINY = LlamaShape(
    vocab_size=64,
    dim=16,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_dim=24,
    seq_len=32,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=False,
)


@dataclass
class Content:
    """A state to be stored. `dtypes` names the types that numpy cannot tell apart."""

    tensors: dict[str, Array]
    mesh: Mesh
    placements: dict[str, Placement] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def dtype(self, name: str) -> str:
        """The format's name of a tensor's element type."""
        if name in self.dtypes:
            return self.dtypes[name]
        return next(n for n, d in NUMPY_DTYPES.items() if d == self.tensors[name].dtype)

    def structure(self) -> Structure:
        """What ranks that hold these tensors would have agreed upon."""
        held = {
            name: HeldTensor(array.shape, self.dtype(name), self.placements.get(name, Placement()))
            for name, array in self.tensors.items()
        }
        return structure_of(self.mesh, held, self.aliases)


def mesh(**sizes: int) -> Mesh:
    """A mesh with these axes, outermost first."""
    return Mesh(tuple(MeshAxis(name, size) for name, size in sizes.items()))


def split(*cuts: str, **pins: tuple[int, ...]) -> Placement:
    """A placement: "axis:dim" for each split in order, axis=(coords) for each pin."""
    splits = []
    for cut in cuts:
        axis, _, dim = cut.partition(":")
        splits.append(Split(axis, int(dim)))
    return Placement(tuple(splits), tuple(Pin(axis, pins[axis]) for axis in sorted(pins)))


def arange(shape: tuple[int, ...], dtype: str = "F32") -> Array:
    """0, 1, 2, ... as this element type (its bits, where numpy cannot count in it)."""
    wanted = NUMPY_DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64))
    if wanted.kind in "iuf" and dtype not in ("U8", "I8"):
        return np.arange(count).astype(wanted).reshape(shape)
    raw = np.arange(count * wanted.itemsize, dtype=np.int64).astype(np.uint8)
    return raw.view(wanted).reshape(shape)


def begin(store: Store, mesh: Mesh, job: str = "kit", number: int = 1) -> Log:
    """A log with one more term, and a generation that begins from the last commit."""
    log = Log(store, job=job)
    log.take_term("the test kit")
    live = log.read().live
    base = live[0].state if live else None
    log.append(Generation(number, ("here",) * mesh_size(mesh), mesh, base, None, {}))
    return log


def write_images(store: Store, content: Content, state: State, job: str = "kit") -> Manifest:
    """All images of a state, by the plan; returns the manifest, which is not written."""
    structure = content.structure()
    plan = Plan(structure.mesh, structure.placements, structure.tensors)
    records = []
    for rank in range(mesh_size(structure.mesh)):
        owned = plan.owned(rank)
        if not owned:
            continue
        items = {
            name: (content.dtype(name), content.tensors[name].shape, box)
            for name, box in owned.items()
        }
        header = build(job, state, rank, structure.mesh, structure.digest, items)
        data = b"".join(
            cut(content.tensors[name], item.box).tobytes() for name, item in header.items.items()
        )
        sealed = seal(header, chunk_digests(data))
        store.put(image_key(state, rank), sealed + data)
        records.append(image_record(header, sealed))
    return Manifest(
        format=FORMAT_VERSION,
        job=job,
        state=state,
        mesh=structure.mesh,
        placements=structure.placements,
        tensors=structure.tensors,
        aliases=structure.aliases,
        values=content.values,
        plan_digest=structure.digest,
        images=tuple(records),
    )


def make_store(
    store: Store, *contents: Content, steps: tuple[int, ...] = (1,), job: str = "kit"
) -> list[State]:
    """Commit the contents at `steps` in generation 1 (the last content for all further steps)."""
    log = begin(store, contents[0].mesh, job)
    states = []
    for index, step in enumerate(steps):
        state = State(1, step)
        content = contents[min(index, len(contents) - 1)]
        commit(log, write_images(store, content, state, job))
        states.append(state)
    return states


def cut(array: Array, box: Box) -> Array:
    """A region of a global array."""
    places = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return np.ascontiguousarray(array[places]).reshape(box.sizes)


def llama_state(
    layout: Layout, llama: LlamaShape = TINY, *, seed: int = 0, step: int = 10, virtual: int = 1
) -> Content:
    """Random weights, Adam moments and values as the trainer saves them in `layout`."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(layout)
    stages = split_layers(llama.layers, layout.pp * virtual)
    content = Content({}, mesh, values=_values(layout, llama, step, stages, virtual))
    for fqn, shape in parameter_shapes(llama).items():
        held = parameter_stages(fqn, stages, layout.pp, llama.tied)
        assert held is not None
        splits = []
        dim = tensor_parallel_dim(fqn)
        if dim is not None and layout.tp > 1:
            splits.append(Split("tp", dim))
        if layout.dp > layout.dp_replicate:
            splits.append(Split("dp_shard", 0))
        splits.sort(key=lambda each: each.dim)
        pins = (Pin("pp", held),)
        for name in (f"model/{fqn}", f"optimizer/{fqn}/exp_avg", f"optimizer/{fqn}/exp_avg_sq"):
            content.tensors[name] = rng.standard_normal(shape, dtype=np.float32)
            content.placements[name] = Placement(tuple(splits), pins)
        name = f"optimizer/{fqn}/step"
        content.tensors[name] = np.array(step, np.float32)
        content.placements[name] = Placement((), pins)
    if llama.tied:
        content.aliases["model/output.weight"] = "model/tok_embeddings.weight"
    for rank in range(mesh_size(mesh)):
        name = f"rank/{rank}/rng/cpu"
        content.tensors[name] = rng.integers(0, 256, 40, dtype=np.uint8)
        content.placements[name] = _pinned(mesh, rank)
    return content


def _pinned(mesh: Mesh, rank: int) -> Placement:
    """On one rank only."""
    pins = []
    for axis in reversed(mesh.axes):
        rank, coord = divmod(rank, axis.size)
        pins.append(Pin(axis.name, (coord,)))
    return Placement((), tuple(sorted(pins, key=lambda pin: pin.axis)))


def _values(
    layout: Layout, llama: LlamaShape, step: int, stages: list[list[int]], virtual: int
) -> dict[str, Any]:
    model = {name: getattr(llama, name) for name in LlamaShape.__struct_fields__}
    return {
        "step": step,
        "cursor": step * 16,
        "skipped": [],
        "config": {
            "model": model,
            "parallel": dict(layout_values(layout)) | {"schedule": "1f1b", "virtual": virtual},
            "batch": {"global_batch": 16, "micro_batch": 2},
            "run": {"name": "kit", "seed": 0},
        },
        "pipeline": {"stages": stages, "virtual": virtual},
        "layout": dict(layout_values(layout)),
        "tokenizer": {"name": "bytes", "digest": "", "vocab_size": 257, "end_of_document": 256},
    }
