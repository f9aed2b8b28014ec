"""Committing: the manifest, then the one log entry that makes a checkpoint of a set of files."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.entry import Commit, Record
from keepstep.ckpt.errors import NotCommitted
from keepstep.ckpt.keys import manifest_key, state_prefix, stored_key
from keepstep.ckpt.lineage import Lineage, state_words
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Manifest, State, encode_manifest


def commit(log: Log, manifest: Manifest) -> Record:
    """Write `manifest` and commit its state. From the return on it is a checkpoint, durably.

    Before, checks that what the store holds is what was planned (I1): the images of the manifest
    have together as many bytes as its tensors, and each is there with the size that its rank wrote.

    Raises:
        FormatError: the manifest's parts do not agree, its images and tensors among them.
        NotCommitted: something is missing, or the log would not count, or did not count, the
            commit; says what. The last commit is still the last.
        Superseded: somebody took a higher term. Nothing was committed.
        OutcomeUnknown: the store did not answer; the next `log.read()` tells.
        StoreError: the store refused. Nothing was committed.
    """
    state = manifest.state
    data = encode_manifest(manifest)
    log.read()
    log.check_not_superseded()  # before the faults: a newer run's generation is one of them
    _refuse(log, state, list(_faults(log, manifest)))
    log.store.put(manifest_key(state), data)
    size_bytes = len(data) + sum(image.size_bytes for image in manifest.images)
    record = log.append(Commit(state=state, manifest_digest=digest128(data), size_bytes=size_bytes))
    lineage = log.known()  # asked of no store: a failure now must not unsay the commit
    if not any(each.seq == record.seq for each in lineage.live):
        _refuse(log, state, [_why_dead(lineage, record)])
    return record


def _refuse(log: Log, state: State, reasons: list[str]) -> None:
    if reasons:
        raise NotCommitted(f"{state_words(state)} was not committed to {log.store.url}", reasons)


def _faults(log: Log, manifest: Manifest) -> Iterator[str]:
    lineage = log.read()
    yield from _order_faults(lineage, manifest)
    # One listing, and not a look at each of a thousand images.
    sizes = {info.key: info.size_bytes for info in log.store.list(state_prefix(manifest.state))}
    for rank, expected in manifest.stored_bytes().items():
        key = stored_key(manifest, rank)
        size_bytes = sizes.get(key)
        if size_bytes is None:
            yield f"{key} (rank {rank}) is missing"
        elif size_bytes != expected:
            yield f"{key} has {size_bytes} bytes, rank {rank} wrote {expected}"


def _order_faults(lineage: Lineage, manifest: Manifest) -> Iterator[str]:
    """Why the log would not count the commit: better to know before the manifest is written.

    A committed state's manifest must not be written again, be it by an equal one (I3).
    """
    state, newest = manifest.state, lineage.generation
    if manifest.job != lineage.job:
        yield f"it is of job {manifest.job!r}, the store of job {lineage.job!r}"
    if newest is None or newest.number != state.generation:
        now = "none" if newest is None else str(newest.number)
        yield f"the newest generation is {now}, not {state.generation}"
    elif state.step <= lineage.committed_to:
        yield f"generation {newest.number} already stands at step {lineage.committed_to}"
    elif newest.mesh != manifest.mesh:
        yield f"its mesh is not the one with which generation {newest.number} began"


def _why_dead(lineage: Lineage, record: Record) -> str:
    for ignored in lineage.ignored:
        if ignored.seq == record.seq:
            return f"entry {record.seq} does not count: {ignored.reason}"
    return next(
        f"it is {each.status.value}: {each.reason}"
        for each in lineage.commits
        if each.seq == record.seq
    )
