"""The kinds of log entry, fixed from the first version (DESIGN D6).

On disk an entry is one `Record`: see docs/format.md for the bytes.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec

from keepstep.ckpt.checksum import DIGEST_DIGITS, digest128
from keepstep.ckpt.document import check_json, decode, encode, shortened
from keepstep.ckpt.errors import CheckpointError, Corrupt, Foreign, FormatError
from keepstep.ckpt.foreign import seems
from keepstep.ckpt.keys import SEQ_MAX
from keepstep.ckpt.manifest import FORMAT_VERSION, GENERATION_MAX, State, check_digest, check_state
from keepstep.ckpt.names import job_fault
from keepstep.ckpt.placement import Mesh, check_mesh
from keepstep.storage.store import Buffer

RECORD_BYTES_MAX = 1 << 24
"""Room for the hosts of 10^5 ranks."""

TERM_MAX = 2**53 - 1
"""The largest integer that every JSON reader holds exactly."""

_DIGEST_LINE = re.compile(rb"[0-9a-f]{%d}\n" % DIGEST_DIGITS)
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?Z")


class Term(msgspec.Struct, frozen=True, tag_field="kind", tag="term", forbid_unknown_fields=True):
    """A coordinator takes over. `number` is above every term before it."""

    number: int
    by: str
    """Who: role, host and pid, for people."""


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint of another run whose weights this run began from."""

    store: str
    job: str
    state: State
    weights_only: bool


class Generation(
    msgspec.Struct, frozen=True, tag_field="kind", tag="generation", forbid_unknown_fields=True
):
    """A membership begins at `base` (None: from nothing). Voids its predecessor's later steps."""

    number: int
    hosts: tuple[str, ...]
    """Host of each rank, in rank order."""
    mesh: Mesh
    base: State | None
    parent: Parent | None
    config: dict[str, Any]
    """The run's configuration as JSON, for people and for `show`."""


class Commit(
    msgspec.Struct, frozen=True, tag_field="kind", tag="commit", forbid_unknown_fields=True
):
    """All images of `state` are in the store, and the manifest has this digest."""

    state: State
    manifest_digest: str
    size_bytes: int
    """Images and manifest together."""


class Verdict(
    msgspec.Struct, frozen=True, tag_field="kind", tag="verdict", forbid_unknown_fields=True
):
    """What health says: `state`, and all that descends from it, is bad; or it is good."""

    state: State
    good: bool
    reason: str


class Rewind(
    msgspec.Struct, frozen=True, tag_field="kind", tag="rewind", forbid_unknown_fields=True
):
    """Voids every live commit above `to` (None: all), before any of those steps is done again."""

    to: State | None
    reason: str


class Retire(
    msgspec.Struct, frozen=True, tag_field="kind", tag="retire", forbid_unknown_fields=True
):
    """These commits' files are about to be deleted; nobody may begin to read them."""

    states: tuple[State, ...]
    reason: str


class Operator(
    msgspec.Struct, frozen=True, tag_field="kind", tag="operator", forbid_unknown_fields=True
):
    """Something a person asked for: what, who, why."""

    action: str
    who: str
    why: str


class End(msgspec.Struct, frozen=True, tag_field="kind", tag="end", forbid_unknown_fields=True):
    """The run reached its end, or a typed verdict ended it."""

    state: State | None
    reason: str


Body: TypeAlias = Term | Generation | Commit | Verdict | Rewind | Retire | Operator | End


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the log.

    Attributes:
        seq: its place, from 0; also in its key.
        id: 32 hex digits, new for each entry somebody wants to append (D6: "own id = success").
        job: the job's name, the same in all entries of a log.
        term: the term under which it was written (a Term entry carries its own new number).
        at: when, RFC 3339 UTC, by the writer's clock: for people, decides nothing.
        format: version of the format; an entry of a newer one is refused, not guessed at.
    """

    seq: int
    id: str
    job: str
    term: int
    at: str
    body: Body
    format: int = FORMAT_VERSION


def encode_record(record: Record) -> bytes:
    """The entry as stored: 32 hex digits of the JSON's xxh3_128, newline, JSON, newline.

    Equal entries make equal bytes. Raises FormatError (file "entry") for one that `decode_record`
    would refuse, and NotRepresentable for a configuration that JSON does not have.
    """
    if isinstance(record.body, Generation):
        check_json(record.body.config, "body.config")
    _check_record(record, "entry")
    text = encode(record)
    if len(text) + DIGEST_DIGITS + 2 > RECORD_BYTES_MAX:
        raise FormatError("entry", "", f"at most {RECORD_BYTES_MAX} bytes", f"{len(text)}")
    return digest128(text).encode() + b"\n" + text + b"\n"


def decode_record(data: Buffer, file: str) -> Record:
    """The entry in `data`. Any byte that differs from what was encoded is found.

    Raises FormatError (Corrupt, Foreign, NewerVersion) and nothing else.
    """
    if memoryview(data).nbytes > RECORD_BYTES_MAX:
        found = f"{memoryview(data).nbytes}"
        raise FormatError(file, "", f"at most {RECORD_BYTES_MAX} bytes", found)
    whole = bytes(data)
    line = _DIGEST_LINE.match(whole)
    if line is None:
        kind = seems(whole)
        if kind is not None:
            raise Foreign(file, "", "an entry of the log", kind)
        raise FormatError(
            file, "digest", f"{DIGEST_DIGITS} hex digits and a newline", shortened(repr(whole[:40]))
        )
    if not whole.endswith(b"\n", line.end()):
        raise FormatError(file, "end", "a newline", f"{whole[-1:]!r}: truncated?")
    text = whole[line.end() : -1]
    stated = whole[:DIGEST_DIGITS].decode()
    if digest128(text) != stated:
        raise Corrupt(file, "digest", stated, f"{digest128(text)}, of the bytes that are there")
    record = decode(
        text, Record, bytes_max=RECORD_BYTES_MAX, file=file, version_known=FORMAT_VERSION
    )
    if isinstance(record.body, Generation):
        try:
            check_json(record.body.config, "body.config")
        except CheckpointError as error:
            raise FormatError(file, "body.config", "plain JSON", shortened(str(error))) from error
    _check_record(record, file)
    return record


def _check_record(record: Record, file: str) -> None:
    """Raise FormatError unless all parts of the entry are possible."""
    if record.format != FORMAT_VERSION:
        raise FormatError(file, "format", f"{FORMAT_VERSION}", f"{record.format}")
    if not 0 <= record.seq <= SEQ_MAX:
        raise FormatError(file, "seq", f"0 to {SEQ_MAX}", f"{record.seq}")
    if not 0 <= record.term <= TERM_MAX:
        raise FormatError(file, "term", f"0 to {TERM_MAX}", f"{record.term}")
    check_digest(record.id, file, "id")
    fault = job_fault(record.job)
    if fault is not None:
        raise FormatError(file, "job", "a job's name", f"{shortened(record.job)!r}, which {fault}")
    if _TIME.fullmatch(record.at) is None:
        raise FormatError(file, "at", "a time as 2026-01-31T23:59:59Z", shortened(repr(record.at)))
    _check_body(record.body, file)


def _check_body(body: Body, file: str) -> None:
    match body:
        case Term(number=number) if not 0 <= number <= TERM_MAX:
            raise FormatError(file, "body.number", f"0 to {TERM_MAX}", f"{number}")
        case Generation():
            _check_generation(body, file)
        case Commit(state=state, manifest_digest=digest, size_bytes=size_bytes):
            check_state(state, file, "body.state")
            check_digest(digest, file, "body.manifest_digest")
            if not 0 <= size_bytes <= TERM_MAX:
                raise FormatError(file, "body.size_bytes", f"0 to {TERM_MAX}", f"{size_bytes}")
        case Verdict(state=state):
            check_state(state, file, "body.state")
        case Rewind(to=State() as state) | End(state=State() as state):
            check_state(state, file, "body.to" if isinstance(body, Rewind) else "body.state")
        case Retire(states=states):
            for index, state in enumerate(states):
                check_state(state, file, f"body.states[{index}]")
        case _:
            pass


def _check_generation(body: Generation, file: str) -> None:
    if not 0 <= body.number <= GENERATION_MAX:
        raise FormatError(file, "body.number", f"0 to {GENERATION_MAX}", f"{body.number}")
    try:
        check_mesh(body.mesh)
    except CheckpointError as error:
        raise FormatError(file, "body.mesh", "a mesh", shortened(str(error))) from error
    if body.base is not None:
        check_state(body.base, file, "body.base")
    if body.parent is not None:
        check_state(body.parent.state, file, "body.parent.state")
