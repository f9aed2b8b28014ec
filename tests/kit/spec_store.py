"""The store that docs/format.md shows: the same bytes every time it is made."""

from __future__ import annotations

from itertools import count

import ml_dtypes
import numpy as np
from tests.kit.make_store import Content, mesh, split, write_images

from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.storage.store import Store

JOB = "demo"
STATE = State(generation=1, step=20)
TENSORS = {
    "model/b": np.array([1, 2, 3], dtype=ml_dtypes.bfloat16),
    "model/w": np.arange(28, dtype=np.float32).reshape(7, 4),
}


def spec_content() -> Content:
    """A 7 x 4 matrix, cut by tp and then by dp, and a replicated vector, on 3 x 2 ranks."""
    return Content(
        tensors=dict(TENSORS),
        mesh=mesh(dp=3, tp=2),
        placements={"model/w": split("tp:0", "dp:0")},
        values={"step": 20, "cursor": 160},
    )


def write_spec_store(store: Store) -> Log:
    """Term 1, generation 1, and a commit at step 20."""
    ids = count(1)
    log = Log(
        store,
        job=JOB,
        clock=lambda: "2026-01-31T12:00:00.000Z",
        new_id=lambda: f"{next(ids):032x}",
    )
    log.take_term("trainer on host-a, pid 4711")
    content = spec_content()
    log.append(Generation(1, ("host-a",) * 6, content.mesh, None, None, {}))
    commit(log, write_images(store, content, STATE, JOB))
    return log
