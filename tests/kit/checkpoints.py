"""Real little checkpoints without torch: two ranks, a few tensors, all bytes from one counter."""

from __future__ import annotations

from tests.kit.logs import MESH, generation, open_log

from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.commit import commit
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.entry import Record
from keepstep.ckpt.image import build, image_record, seal
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import ImageRecord, Manifest, State, TensorSpec
from keepstep.ckpt.placement import Placement, Split, mesh_size
from keepstep.ckpt.plan import Plan, plan_digest
from keepstep.storage.store import Store

PLACEMENTS = (Placement(), Placement(splits=(Split("dp_shard", 0),)))
TENSORS = {
    "model/norm.weight": TensorSpec(shape=(16,), dtype="F32", placement=0),
    "model/wq.weight": TensorSpec(shape=(7, 24), dtype="F32", placement=1),
    "model/wk.weight": TensorSpec(shape=(5, 3), dtype="BF16", placement=1),
    "optimizer/step": TensorSpec(shape=(), dtype="I64", placement=0),
}


def data_of(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that repeat only after 251, and are all finite as F32 and BF16."""
    return bytes((seed + place) % 251 % 64 for place in range(size_bytes))


def write_images(
    store: Store,
    at: State,
    tensors: dict[str, TensorSpec] | None = None,
    job: str = "run-a",
) -> Manifest:
    """Write the images of a state, and return the manifest that belongs to them (not written)."""
    specs = TENSORS if tensors is None else tensors
    digest = plan_digest(MESH, PLACEMENTS, specs)
    plan = Plan(MESH, PLACEMENTS, specs)
    images: list[ImageRecord] = []
    for rank in range(mesh_size(MESH)):
        boxes = plan.owned(rank)
        items = {name: (specs[name].dtype, specs[name].shape, box) for name, box in boxes.items()}
        header = build(job, at, rank, MESH, digest, items)
        if header.data_bytes == 0:
            continue
        data = data_of(header.data_bytes, seed=at.step + rank)
        sealed = seal(header, chunk_digests(data))
        store.put(image_key(at, rank), sealed + data)
        images.append(image_record(header, sealed))
    values = {"step": at.step, "cursor": at.step * 8, "layout": {"dp": 2, "tp": 1, "pp": 1}}
    return Manifest(
        format=1,
        job=job,
        state=at,
        mesh=MESH,
        placements=PLACEMENTS,
        tensors=specs,
        aliases={"model/output.weight": min(specs)},
        values=values,
        plan_digest=digest,
        images=tuple(images),
    )


def save(log: Log, at: State) -> Record:
    """Write and commit one checkpoint."""
    return commit(log, write_images(log.store, at))


def begin(store: Store, *steps: int, job: str = "run-a") -> Log:
    """A run in term 1 and generation 1 that has committed these steps."""
    log = open_log(store, job=job)
    log.take_term("trainer on host-a, pid 1")
    log.append(generation(1))
    for step in steps:
        commit(log, write_images(store, State(generation=1, step=step), job=job))
    return log


def tensor_bytes() -> int:
    """Bytes of all tensors of one checkpoint."""
    total = 0
    for spec in TENSORS.values():
        volume = 1
        for size in spec.shape:
            volume *= size
        total += volume * DTYPES[spec.dtype].itemsize
    return total
