"""Writing a whole state from one process: the images of all ranks, one after the other.

For what makes checkpoints outside a training run: reshard and import. Data comes as streams, so
that an image of any size can be written; its checksums stand before its data, so an image that is
too large to be held is streamed twice, first for the checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import xxhash

from keepstep.ckpt.arrays import Array
from keepstep.ckpt.checksum import CHUNK_BYTES
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Commit, Generation, Parent
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.image import ImageHeader, build, image_record, items_of, seal
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import FORMAT_VERSION, ImageRecord, Manifest, State
from keepstep.ckpt.placement import Mesh, mesh_size
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box
from keepstep.ckpt.structure import Structure
from keepstep.storage.store import Store

HELD_BYTES_MAX = 128 << 20
"""Images up to this size are held in memory, and their source is read once."""

Pieces: TypeAlias = Callable[[str, Box], Iterator[Array]]
"""Called with a tensor's name and box: its elements in row-major order, in bounded arrays.

May be called twice for the same box, and must give the same bits again.
"""
OnBytes: TypeAlias = Callable[[int], None]


class TargetTaken(CheckpointError):
    """The target holds something already. Nothing was written."""


def begin_run(
    store: Store,
    *,
    job: str,
    above: int,
    mesh: Mesh,
    parent: Parent | None,
    config: dict[str, Any],
    by: str,
) -> tuple[Log, int]:
    """Begin the log of a new store: a term and a generation. Returns the log and its number.

    The generation's number is above `above`. An earlier try with the same parent that never
    committed does not stand in the way.

    Raises:
        TargetTaken: the store holds a run, or files that are not ours.
        WrongJob, FormatError, StoreError: as `Log.read` and `Log.append`.
    """
    log = Log(store, job=job)
    lineage = log.read()
    if lineage.next_seq == 0:
        other = next(store.list(""), None)
        if other is not None:
            raise TargetTaken(
                f"{store.url} is not empty: it has {other.key}; choose an empty or new directory"
            )
    # No host ever ran what a conversion wrote.
    strangers = [each for each in lineage.generations if each.hosts or each.parent != parent]
    if lineage.commits or strangers:
        raise TargetTaken(f"{store.url} already holds a run of job {job!r}; choose another target")
    log.take_term(by)
    newest = 0 if lineage.generation is None else lineage.generation.number
    number = max(above, newest) + 1
    log.append(
        Generation(number=number, hosts=(), mesh=mesh, base=None, parent=parent, config=config)
    )
    return log, number


def write_state(
    log: Log,
    job: str,
    state: State,
    structure: Structure,
    values: dict[str, Any],
    pieces: Pieces,
    on_bytes: OnBytes,
) -> Commit:
    """Write the images of all ranks, then the manifest, then commit. Durable on return.

    Killed at any moment before the end, it leaves no commit. `on_bytes` is told of bytes written.
    """
    plan = Plan(structure.mesh, structure.placements, structure.tensors)
    records = []
    for rank in range(mesh_size(structure.mesh)):
        owned = plan.owned(rank)
        if owned:
            items = items_of(structure.tensors, owned)
            header = build(job, state, rank, structure.mesh, structure.digest, items)
            records.append(write_image(log.store, header, pieces, on_bytes))
    record = commit(
        log,
        Manifest(
            format=FORMAT_VERSION,
            job=job,
            state=state,
            mesh=structure.mesh,
            placements=structure.placements,
            tensors=structure.tensors,
            aliases=structure.aliases,
            values=values,
            plan_digest=structure.digest,
            images=tuple(records),
        ),
    )
    assert isinstance(record.body, Commit)
    return record.body


def write_image(
    store: Store, header: ImageHeader, pieces: Pieces, on_bytes: OnBytes
) -> ImageRecord:
    """Write one image. Durable on return."""
    digester = _ChunkDigester()
    held: list[memoryview] | None = [] if header.data_bytes <= HELD_BYTES_MAX else None
    for data in _stream(header, pieces):
        digester.update(data)
        if held is not None:
            held.append(data)
    sealed = seal(header, digester.digests())
    again = iter(held) if held is not None else _stream(header, pieces)
    store.put_stream(
        image_key(header.state, header.rank),
        chain([memoryview(sealed)], _counted(again, on_bytes)),
        header.size_bytes,
    )
    return image_record(header, sealed)


def _stream(header: ImageHeader, pieces: Pieces) -> Iterator[memoryview]:
    """The image's data, item by item."""
    for name, item in header.items.items():
        for array in pieces(name, item.box):
            yield bits(array)


def bits(array: Array) -> memoryview:
    """The bytes of an array in row-major order; a copy only where they do not lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _counted(stream: Iterator[memoryview], on_bytes: OnBytes) -> Iterator[memoryview]:
    for data in stream:
        yield data
        on_bytes(data.nbytes)


class _ChunkDigester:
    """Checksums of the chunks of a stream, wherever its pieces begin and end."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._room = CHUNK_BYTES

    def update(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        while data.nbytes:
            part, data = data[: self._room], data[self._room :]
            self._hash.update(part)
            self._room -= part.nbytes
            if self._room == 0:
                self._finish()

    def digests(self) -> list[str]:
        """All checksums, after the last byte."""
        if self._room < CHUNK_BYTES:
            self._finish()
        return self._done

    def _finish(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._room = CHUNK_BYTES
