"""Verifying a store: every byte that the log refers to, and whatever else lies there.

What is compared with what: log entries with their own digest; manifests with the digest in their
commit; image headers with the digest in the manifest, and byte by byte with the header that the
manifest's plan makes; chunks of data with the checksums in the header. So each wrong byte is found,
and named by file and by what it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.entry import Record
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.gc import is_past
from keepstep.ckpt.keys import (
    LOG_PREFIX,
    DoneKey,
    EntryKey,
    ImageKey,
    ManifestKey,
    StateKey,
    entry_key,
    manifest_key,
    parse_key,
    stored_key,
)
from keepstep.ckpt.lineage import Committed, Lineage, Status, fold
from keepstep.ckpt.log import read_entry
from keepstep.ckpt.manifest import MANIFEST_BYTES_MAX, Manifest, State, decode_manifest
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.verify_image import Finding, check_frames, check_image
from keepstep.storage.errors import NotFound, Permanent, TooLarge
from keepstep.storage.store import ObjectInfo, Store

THREADS = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a verification is. `total_bytes` grows when another manifest is read."""

    file: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """A file that no live, void or bad checkpoint needs, and what it seems to be."""

    file: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found.

    Attributes:
        job: the job that the log belongs to; None if there is no readable log.
        entries: number of log entries read.
        states: the checkpoints whose files were read.
        read_bytes: how much was read.
        findings: what is wrong.
        unreferenced: files that nothing refers to. Not wrong; `gc` takes those that are ours.
    """

    job: str | None
    entries: int
    states: tuple[Committed, ...]
    read_bytes: int
    findings: tuple[Finding, ...]
    unreferenced: tuple[Unreferenced, ...]


def verify(
    store: Store,
    choose: Callable[[Lineage], Iterable[Committed]] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    threads: int = THREADS,
) -> Report:
    """Read and check the log and the checkpoints that `choose` picks (None: all not retired).

    Holds at most 8 MiB for each thread, besides headers. Blocks until done. Changes nothing.

    Raises:
        StoreError: the store cannot be read. What is wrong with the bytes is a finding, not raised.
    """
    findings: list[Finding] = []
    records = _read_log(store, findings)
    is_log_whole = not findings
    lineage = fold(records)
    states = tuple((choose or _present)(lineage))
    tally = _Tally(on_progress)
    for commit in states:
        findings += _check_state(store, lineage.job, commit, tally, threads)
    unreferenced = tuple(_unreferenced(store, lineage, is_log_whole))
    return Report(
        lineage.job, len(records), states, tally.done_bytes, tuple(findings), unreferenced
    )


def _present(lineage: Lineage) -> list[Committed]:
    """All commits whose files should be there: also void and bad ones, until they are retired."""
    return [commit for commit in lineage.commits if commit.status is not Status.RETIRED]


class _Tally:
    """Bytes read so far, of how many."""

    def __init__(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._on_progress = on_progress
        self.done_bytes = 0
        self.total_bytes = 0

    def add(self, file: str, done_bytes: int) -> None:
        self.done_bytes += done_bytes
        if self._on_progress is not None:
            self._on_progress(Progress(file, self.done_bytes, self.total_bytes))


def _read_log(store: Store, findings: list[Finding]) -> list[Record]:
    """All entries that can be read. Goes on past those that cannot: their loss is a finding."""
    listed = (parse_key(info.key) for info in store.list(LOG_PREFIX))
    last = max((key.seq for key in listed if isinstance(key, EntryKey)), default=-1)
    records: list[Record] = []
    seq = 0
    while True:
        key = entry_key(seq)
        try:
            record = read_entry(store, seq)
        except FormatError as error:
            findings.append(Finding(key, "entry", (), error.expected, error.found))
            seq += 1
            continue
        except Permanent as error:
            found = f"what cannot be read: {error}"
            findings.append(Finding(key, "file", (), f"entry {seq} of the log", found))
            seq += 1
            continue
        if record is None and seq > last:
            return records
        if record is None:
            findings.append(Finding(key, "file", (), f"entry {seq} of the log", "no such file"))
        elif records and record.job != records[0].job:
            findings.append(Finding(key, "job", (), records[0].job, record.job))
        else:
            records.append(record)
        seq += 1


def _check_state(
    store: Store, job: str | None, commit: Committed, tally: _Tally, threads: int
) -> Iterator[Finding]:
    key = manifest_key(commit.state)
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except NotFound:
        yield Finding(key, "file", (), f"the manifest of entry {commit.seq}", "no such file")
        return
    except TooLarge as error:
        yield Finding(key, "file", (), f"at most {MANIFEST_BYTES_MAX} bytes", str(error))
        return
    except Permanent as error:
        found = f"what cannot be read: {error}"
        yield Finding(key, "file", (), f"the manifest of entry {commit.seq}", found)
        return
    tally.total_bytes += len(data)
    tally.add(key, len(data))
    digest = digest128(data)
    if digest != commit.manifest_digest:
        yield Finding(key, "manifest", (), f"digest {commit.manifest_digest}", f"digest {digest}")
        return
    try:
        manifest = decode_manifest(data, key)
    except FormatError as error:
        yield Finding(key, error.field or "manifest", (), error.expected, error.found)
        return
    yield from _check_manifest(manifest, len(data), job, commit, key)
    tally.total_bytes += sum(image.size_bytes for image in manifest.images)
    plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
    view = plain_view(store, manifest)
    for image in manifest.images:
        on_read = partial(tally.add, stored_key(manifest, image.rank))
        yield from check_image(view, manifest, plan, image, on_read, threads)
    for encoded in manifest.encoded:
        yield from check_frames(store, stored_key(manifest, encoded.rank), encoded)


def _check_manifest(
    manifest: Manifest, size_bytes: int, job: str | None, commit: Committed, key: str
) -> Iterator[Finding]:
    """A manifest whose digest is right may still not belong here: that takes a wrong writer."""
    if manifest.job != job:
        yield Finding(key, "job", (), str(job), manifest.job)
    if manifest.state != commit.state:
        yield Finding(key, "state", (), str(commit.state), str(manifest.state))
    total_bytes = size_bytes + sum(image.size_bytes for image in manifest.images)
    if total_bytes != commit.size_bytes:
        yield Finding(key, "images", (), f"{commit.size_bytes} bytes in all", str(total_bytes))


def _unreferenced(store: Store, lineage: Lineage, is_log_whole: bool) -> Iterator[Unreferenced]:
    present = {commit.state: commit for commit in _present(lineage)}
    named: dict[State, set[str] | None] = {}
    for info in store.list(""):
        key = parse_key(info.key)
        if key is None:
            yield Unreferenced(info.key, info.size_bytes, "foreign: not a name of this format")
        elif isinstance(key, StateKey):
            reason = _why_unreferenced(key, lineage) if is_log_whole else _LOG_DAMAGED
            if key.state in present:
                if isinstance(key, ManifestKey):
                    continue
                if isinstance(key, ImageKey):
                    if key.state not in named:
                        named[key.state] = _named_by(store, key.state)
                    known = named[key.state]
                    if known is None or info.key in known:
                        continue
                reason = _why_beside(key)
            yield Unreferenced(info.key, info.size_bytes, reason)
    yield from (_leftover(info) for info in store.leftovers(""))


_LOG_DAMAGED = "unknown: the log is damaged, and what is lost of it may refer to this: keep it"


def _why_beside(key: StateKey) -> str:
    """What a file is that lies with a checkpoint, and is no part of it."""
    if isinstance(key, DoneKey):
        return "a done record, of no use after the commit: gc will take it"
    return "its checkpoint's manifest does not name it"


def _why_unreferenced(key: StateKey, lineage: Lineage) -> str:
    if key.state in lineage.retired:
        return f"retired: {lineage.retired[key.state]}; gc will finish it"
    if is_past(key.state, lineage):
        return "never committed, and never will be: gc will take it"
    return "not committed yet: it is being written, or was left by a run that ended"


def _named_by(store: Store, state: State) -> set[str] | None:
    """Keys of the images, by the manifest; None if it cannot be read (a finding already)."""
    key = manifest_key(state)
    try:
        manifest = decode_manifest(store.get(key, MANIFEST_BYTES_MAX), key)
    except (Permanent, FormatError):
        return None
    return {stored_key(manifest, image.rank) for image in manifest.images}


def _leftover(info: ObjectInfo) -> Unreferenced:
    return Unreferenced(info.key, info.size_bytes, "left by an interrupted write of this file")
