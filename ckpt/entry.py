"""The kinds of log entry, fixed from the first version (DESIGN D6).

On disk an entry is one `Record`: see docs/format.md for the bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh


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
    """

    seq: int
    id: str
    job: str
    term: int
    at: str
    body: Body
