"""`keeper.json`: what a keeper says of itself, and leaves to its successor."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.manifest import State
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Tiers

RECORD_BYTES_MAX = 1 << 24
RESERVED_BYTES = 1 << 16


class SavedTenure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Tenure` with the digest of its structure, which is in a file of its own.

    `is_complete`: all ranks of the host have entered.
    """

    generation: int
    term: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    addresses: tuple[HostAddress, ...]
    committer: int
    base: State | None
    structure: str
    tiers: Tiers
    is_complete: bool


class KeeperRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        address: "host:port" of the data plane; "" for none.
        pid: of the keeper; `ticks`: its start time.
        generation: promised; `term`: likewise.
        tenure: what ranks entered last.
    """

    address: str = ""
    pid: int = 0
    ticks: int = 0
    generation: int = 0
    term: int = 0
    tenure: SavedTenure | None = None

    def write(self, path: Path) -> None:
        """Replace the file atomically. Durable on return, as far as its file system is.

        The room for the next write is taken beforehand: a promise can be given though others have
        filled the file system since.
        """
        data, draft = encode(self), path.with_name(f"{path.name}.new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.ftruncate(fd, len(data))
            os.fsync(fd)
        os.replace(draft, path)
        _reserve(draft, max(RESERVED_BYTES, 2 * len(data)))


def _reserve(draft: Path, size_bytes: int) -> None:
    """Take room for the next write, if there is any."""
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_record(path: Path) -> KeeperRecord:
    """The record at `path`; an empty one if there is no file. Raises FormatError and OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return KeeperRecord()
    return decode(data, KeeperRecord, bytes_max=RECORD_BYTES_MAX, file=str(path))


def save_tenure(tenure: Tenure, *, is_complete: bool) -> SavedTenure:
    """What is kept of a tenure."""
    return SavedTenure(
        generation=tenure.generation,
        term=tenure.term,
        ranks=tenure.ranks,
        hosts=tenure.hosts,
        addresses=tenure.addresses,
        committer=tenure.committer,
        base=tenure.base,
        structure=tenure.structure.digest,
        tiers=tenure.tiers,
        is_complete=is_complete,
    )


def load_tenure(saved: SavedTenure, job: str, host: str, structure: Structure) -> Tenure:
    """The tenure that was kept."""
    return Tenure(
        job=job,
        host=host,
        generation=saved.generation,
        term=saved.term,
        ranks=saved.ranks,
        hosts=saved.hosts,
        addresses=saved.addresses,
        committer=saved.committer,
        base=saved.base,
        structure=structure,
        tiers=saved.tiers,
    )
