"""The plan of one rank of 1,024 for 10^5 tensors, and the size of the manifest. One process."""

from __future__ import annotations

import math
import statistics
import time
from itertools import pairwise
from typing import Any

from keepstep.ckpt.image import build, items_of
from keepstep.ckpt.manifest import (
    FORMAT_VERSION,
    ImageRecord,
    Manifest,
    State,
    TensorSpec,
    encode_manifest,
)
from keepstep.ckpt.placement import Mesh, MeshAxis, Placement, Split, mesh_size
from keepstep.ckpt.plan import Plan, plan_digest

TENSORS = 100_000
RANK = 777
FLOAT_BYTES = 4


def planning(repetitions: int) -> dict[str, Any]:
    """Seconds for one rank (which regions it owns, and where they lie in its image), and bytes."""
    mesh = Mesh(
        (
            MeshAxis("pp", 4),
            MeshAxis("dp_replicate", 4),
            MeshAxis("dp_shard", 8),
            MeshAxis("tp", 8),
        )
    )
    placements = (
        Placement((Split("tp", 0), Split("dp_shard", 0))),
        Placement((Split("tp", 1), Split("dp_shard", 0))),
        Placement((Split("dp_shard", 0),)),
        Placement(),
    )
    tensors = {
        f"model/layers.{i}.weight": TensorSpec((1000 + i % 997, 500 + i % 991), "F32", i % 4)
        for i in range(TENSORS)
    }
    owned_s, header_s = [], []
    for _ in range(repetitions):
        began_s = time.perf_counter()
        owned = Plan(mesh, placements, tensors).owned(RANK)
        owned_s.append(time.perf_counter() - began_s)
        digest = plan_digest(mesh, placements, tensors)
        began_s = time.perf_counter()
        header = build("bench", State(1, 1), RANK, mesh, digest, items_of(tensors, owned))
        header_s.append(time.perf_counter() - began_s)
    ranks = mesh_size(mesh)
    total_bytes = sum(math.prod(spec.shape) * FLOAT_BYTES for spec in tensors.values())
    ends = [total_bytes * rank // ranks for rank in range(ranks + 1)]
    records = tuple(
        ImageRecord(rank, header.header_bytes + end - start, header.header_bytes, digest)
        for rank, (start, end) in enumerate(pairwise(ends))
    )
    manifest = Manifest(
        format=FORMAT_VERSION,
        job="bench",
        state=State(1, 1),
        mesh=mesh,
        placements=placements,
        tensors=tensors,
        aliases={},
        values={},
        plan_digest=digest,
        images=records,
    )
    return {
        "tensors": TENSORS,
        "ranks": ranks,
        "plan_s": statistics.median(owned_s),
        "header_s": statistics.median(header_s),
        "manifest_bytes": len(encode_manifest(manifest)),
    }
