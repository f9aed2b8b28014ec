"""A Hugging Face Llama as a store of one checkpoint, from which `train --init-from` starts.

The weights become step 0 of a run of one rank, in the element type in which a run keeps its master
weights. There is no optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from keepstep.ckpt.arrays import NUMPY_DTYPES, Array
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.entry import Operator
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.hf_config import cast, cast_note
from keepstep.ckpt.hf_source import HfModel
from keepstep.ckpt.layout import Layout, layout_values, mesh_of
from keepstep.ckpt.llama import EMBEDDINGS, MODEL_PREFIX, OUTPUT, LlamaShape, parameter_shapes
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Placement
from keepstep.ckpt.region import Box, strides
from keepstep.ckpt.slabs import slabs
from keepstep.ckpt.structure import HeldTensor, structure_of
from keepstep.ckpt.writer import OnBytes, begin_run, write_state
from keepstep.storage.store import Store

MASTER_DTYPES = {"F32": "fp32", "F64": "fp64"}
"""Element types of a run's master weights, and what the run's configuration calls them."""
_LAYOUT = Layout(dp=1, tp=1, pp=1)


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import wrote, and what to know of it."""

    state: State
    size_bytes: int
    llama: LlamaShape
    dtype: str
    notes: tuple[str, ...]


def import_hf(
    model: HfModel,
    target: Store,
    *,
    job: str,
    by: str,
    dtype: str | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Imported:
    """Write `model` as step 0 into `target`, an empty store. Durable on return.

    Args:
        model: from `hf_source.open_hf`.
        target: where to.
        job: the name of the job that the store is to hold.
        by: who does it, for people.
        dtype: F32 or F64; None: F64 if the model has any such weight, else F32 (which is exact).
        on_bytes: called with numbers of bytes written.

    Raises:
        Unconvertible: a weight does not fit the dtype.
        TargetTaken: the target holds something.
        FormatError: a file of the model changed meanwhile.
        StoreError: the target failed; nothing was committed.
    """
    stored = sorted({weight.stored.dtype for weight in model.weights.values()})
    master = dtype or ("F64" if "F64" in stored else "F32")
    mesh = mesh_of(_LAYOUT)
    held = {
        MODEL_PREFIX + fqn: HeldTensor(shape, master, Placement())
        for fqn, shape in parameter_shapes(model.llama).items()
    }
    tied = {MODEL_PREFIX + OUTPUT: MODEL_PREFIX + EMBEDDINGS} if model.llama.tied else {}
    values = _values(model.llama, master, job)
    log, number = begin_run(
        target, job=job, above=0, mesh=mesh, parent=None, config=values["config"], by=by
    )
    log.append(Operator("import", by, f"the Hugging Face model in {model.path}"))
    state = State(number, 0)

    def pieces(name: str, box: Box) -> Iterator[Array]:
        return _pieces(model, name.removeprefix(MODEL_PREFIX), box, master)

    committed = write_state(
        log, job, state, structure_of(mesh, held, tied), values, pieces, on_bytes
    )
    casts = [each for each in stored if each != master]
    notes = (*model.notes, cast_note(casts, master)) if casts else model.notes
    return Imported(state, committed.size_bytes, model.llama, master, notes)


def _pieces(model: HfModel, fqn: str, box: Box, dtype: str) -> Iterator[Array]:
    """A weight in row-major order, read and cast piece by piece."""
    weight = model.weights[fqn]
    stored, itemsize = weight.stored, DTYPES[weight.stored.dtype].itemsize
    steps = strides(stored.shape, itemsize)
    with weight.path.open("rb") as file:
        for part in slabs(box, max(itemsize, DTYPES[dtype].itemsize), within=box):
            offset = sum(o * step for o, step in zip(part.offsets, steps, strict=True))
            file.seek(stored.start + offset)
            data = file.read(part.volume * itemsize)
            if len(data) != part.volume * itemsize:
                raise FormatError(
                    weight.path.name, fqn, f"bytes up to {stored.end}", "the file's end before"
                )
            array = np.frombuffer(data, NUMPY_DTYPES[stored.dtype]).reshape(part.sizes)
            yield cast(array, dtype, fqn)


def _values(llama: LlamaShape, dtype: str, job: str) -> dict[str, Any]:
    return {
        "step": 0,
        "cursor": 0,
        "skipped": [],
        "config": {
            "model": msgspec.to_builtins(llama),
            "numerics": {"dtype": MASTER_DTYPES[dtype]},
            "parallel": dict(layout_values(_LAYOUT)),
            "run": {"name": job},
        },
        "pipeline": {"stages": [list(range(llama.layers))], "virtual": 1},
        "layout": dict(layout_values(_LAYOUT)),
        "tokenizer": None,
    }
