"""A checkpoint written anew, in another layout, into a store of its own that a run resumes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.ckpt.arrays import Array
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.entry import Parent
from keepstep.ckpt.layout import Layout, check_batch, check_fits, mesh_of
from keepstep.ckpt.lineage import Lineage
from keepstep.ckpt.llama import shape_in
from keepstep.ckpt.manifest import State
from keepstep.ckpt.reader import CheckpointReader
from keepstep.ckpt.region import Box
from keepstep.ckpt.relayout import Relayout, relayout
from keepstep.ckpt.slabs import slabs
from keepstep.ckpt.writer import OnBytes, begin_run, write_state
from keepstep.storage.store import Store


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a reshard wrote.

    Attributes:
        state: the state in the target store: a generation of its own, the same step.
        layout: its layout.
        size_bytes: images and manifest together.
        dropped: tensors that belong to one rank, and were left out.
    """

    state: State
    layout: Layout
    size_bytes: int
    dropped: tuple[str, ...]


def plan_reshard(source: CheckpointReader, layout: Layout) -> Relayout:
    """What the checkpoint will be in `layout`; nothing is written.

    Raises:
        BadLayout: the model cannot be trained in it; names the two numbers.
    """
    llama = shape_in(source.manifest.values)
    if llama is not None:
        check_fits(layout, llama)
    check_batch(layout, source.manifest.values)
    return relayout(source.manifest, mesh_of(layout))


def reshard(
    source: CheckpointReader,
    lineage: Lineage,
    target: Store,
    layout: Layout,
    *,
    by: str,
    on_bytes: OnBytes = lambda _: None,
) -> Resharded:
    """Write `source` in `layout` as the first commit of `target`. Durable on return.

    Tensors keep their bits. Until the last write `target` has no commit, and the same call may be
    made again. Memory is bounded, whatever the sizes.

    Args:
        source: the checkpoint.
        lineage: of the source's log. The new generation's number is above all in it, so that a run
            that goes on in the same run directory counts on.
        target: an empty store.
        layout: the new layout.
        by: who does it, for people.
        on_bytes: called with numbers of bytes written.

    Raises:
        BadLayout: as `plan_reshard`.
        TargetTaken: the target holds something.
        Corrupt, FormatError: the source is damaged; nothing was committed.
        StoreError: a store failed; nothing was committed.
    """
    planned = plan_reshard(source, layout)
    manifest = source.manifest
    config = planned.values.get("config")
    log, number = begin_run(
        target,
        job=manifest.job,
        above=max((each.number for each in lineage.generations), default=0),
        mesh=planned.structure.mesh,
        parent=Parent(source.store.url, manifest.job, manifest.state, False),
        config=config if isinstance(config, dict) else {},
        by=by,
    )

    def pieces(name: str, box: Box) -> Iterator[Array]:
        itemsize = DTYPES[manifest.tensors[name].dtype].itemsize
        return (source.read(name, part) for part in slabs(box, itemsize))

    state = State(number, manifest.state.step)
    committed = write_state(
        log, manifest.job, state, planned.structure, planned.values, pieces, on_bytes
    )
    return Resharded(state, layout, committed.size_bytes, planned.dropped)
