"""What can go wrong with checkpoints, apart from the store itself (`storage.errors`).

    CheckpointError                 base; never raised itself
    ├── FormatError                 not what the format says (file, field, expected, found)
    │   ├── NewerVersion            written in a later format: use a newer keepstep
    │   ├── Foreign                 another kind of file: pickle, zip, a model's safetensors, ...
    │   └── Corrupt                 a checksum does not match: names tensor and offset
    ├── BadName                     a tensor or job name that cannot be used (also a ValueError)
    ├── PlacementError              a mesh or placement that cannot be (also a ValueError)
    ├── NotRepresentable            something that the format cannot hold, named (also a TypeError)
    ├── PlanMismatch                ranks planned from different structures; names the ranks
    ├── NoSuchState                 the store has no such checkpoint; names those it has
    ├── NotRestorable               nothing could be restored; the reasons, per state
    ├── StructureMismatch           a load would drop, invent or change tensors; lists all
    ├── NotCommitted                a state could not be committed; the last commit stays
    ├── WrongMoment                 the present phase does not allow it
    └── LogError                    the log refuses
        ├── Superseded              a higher term has taken over: stop, change nothing
        ├── LogMoved                another entry came first: read the log and decide again
        └── WrongJob                the store belongs to another job

Defined beside the one place that raises them, and CheckpointErrors too: `StageTooLarge` (mapping),
`LinesError` (jsonlines), `OtherRanksFailed` (agree), `BadLayout` (layout), `TargetTaken` (writer)
and `Unconvertible` (hf_config). Those of keepers are in `keeper_errors`, those of a host's shared
memory in `pool_errors`.

A caller writes::

    try:
        manifest = decode(data, file=key)
    except NewerVersion as error: ...  # tell the person to upgrade; nothing is wrong with the file
    except FormatError as error: ...   # error.file, error.field, error.expected, error.found
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of all errors of this room."""


class FormatError(CheckpointError):
    """Bytes that the format does not allow.

    Attributes:
        file: the store key or path of the file.
        field: where in it, as a path such as ``tensors["model/w"].shape``; "" for the whole file.
        expected: what the format allows there.
        found: what is there, shortened.
    """

    def __init__(self, file: str, field: str, expected: str, found: str, advice: str = "") -> None:
        where = f"{file}: {field}" if field else file
        message = f"{where}: expected {expected}, found {found}"
        super().__init__(f"{message}. {advice}" if advice else message)
        self.file = file
        self.field = field
        self.expected = expected
        self.found = found


class NewerVersion(FormatError):
    """The file is of a later format than this program knows. Nothing is wrong with it."""

    def __init__(self, file: str, field: str, known: int, found: int) -> None:
        super().__init__(
            file,
            field,
            f"a format up to {known}",
            f"format {found}, written by a newer keepstep",
            "Upgrade keepstep to read it; do not change or delete the file.",
        )
        self.known = known
        self.version = found


class Foreign(FormatError):
    """The file is of another kind altogether; `found` says which it seems to be."""


class Corrupt(FormatError):
    """A checksum does not match its bytes.

    Attributes:
        tensor: the tensor that the bytes belong to, or None (a header, an entry, a manifest).
        offset: where the bytes that do not match begin in the file, or None.
    """

    def __init__(
        self,
        file: str,
        field: str,
        expected: str,
        found: str,
        *,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(file, field, expected, found)
        self.tensor = tensor
        self.offset = offset


class BadName(CheckpointError, ValueError):
    """A tensor or job name that cannot be used; the message says why."""


class PlacementError(CheckpointError, ValueError):
    """A mesh or placement that cannot be, or that does not fit its tensor."""


class NotRepresentable(CheckpointError, TypeError):
    """Something that the format cannot hold. `name` says what was given."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class PlanMismatch(CheckpointError):
    """Ranks made their plans from different structures: their images do not fit together."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WrongMoment(CheckpointError):
    """Something was asked for that the present phase does not allow. Nothing changed."""


class NoSuchState(CheckpointError, LookupError):
    """The store has no such checkpoint. The message names those that it has."""


class NotRestorable(CheckpointError):
    """Nothing can be restored. `reasons` has one sentence for each state that was tried."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__("; ".join((message, *reasons)))
        self.reasons = tuple(reasons)


class StructureMismatch(CheckpointError):
    """A load would drop, invent or change tensors, and nobody asked for that.

    Attributes:
        missing: wanted, but not in the checkpoint.
        unexpected: in the checkpoint, but not wanted.
        changed: in both, with another shape or dtype: one sentence each.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        changed: Sequence[str] = (),
    ) -> None:
        parts = [
            f"{label} ({len(names)}): {_listed(names)}"
            for label, names in (
                ("missing from the checkpoint", missing),
                ("only in the checkpoint", unexpected),
                ("changed", changed),
            )
            if names
        ]
        super().__init__("; ".join((message, *parts)))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.changed = tuple(changed)


class NotCommitted(CheckpointError):
    """A state could not be committed, for the reasons given. The last commit is still the last."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__("; ".join((message, *reasons)))
        self.reasons = tuple(reasons)


class LogError(CheckpointError):
    """The log refuses what was asked of it."""


class Superseded(LogError):
    """A higher term has taken over this log. Stop; change nothing more in the store.

    Attributes:
        term: the higher term.
        by: who took it.
        seq: the entry in which.
    """

    def __init__(self, message: str, *, term: int, by: str, seq: int) -> None:
        super().__init__(message)
        self.term = term
        self.by = by
        self.seq = seq


class LogMoved(LogError):
    """What was decided on the log up to some entry is out of date. Nothing was appended."""


class WrongJob(LogError):
    """The store's log belongs to another job."""

    def __init__(self, message: str, *, expected: str, found: str) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


def _listed(names: Sequence[str], most: int = 20) -> str:
    """At most `most` of the names (the attributes have all of them)."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
