"""The keeper's configuration: one JSON file without secrets, written by who starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.tiers import Tiers

CONFIG_BYTES_MAX = 1 << 20


class KeeperConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a keeper is told at its start.

    Attributes:
        job: the job's name.
        host: this host's id; unique among the job's hosts.
        rack: the failure domain above it; "" if none is known.
        store_url: the durable store, for `storage.locate.open_store`.
        disk_dir: root of the local disk tier; "" for none.
        shm_dir: where the host directory is made.
        events_path: file that events are appended to; "" for none.
        patience_s: the one time-out setting.
        tiers: the policy.
        token_file: file of mode 0600 with the job token; "" to take it from KEEPSTEP_TOKEN only.
        bind: address that the data plane listens on.
        port: its port; 0 for any.
        advertise: host part of the address told to others; "" for `bind`.
        slots: images of each own rank, and of each peer's rank, that memory holds: 3, or 2.
        single_writer: the store may ignore put-if-absent, since only this run ever writes to it.
        compress: "" or "zstd": encoding of images in the store.
    """

    job: str
    host: str
    store_url: str
    shm_dir: str
    rack: str = ""
    disk_dir: str = ""
    events_path: str = ""
    patience_s: float = 10.0
    tiers: Tiers = Tiers()
    token_file: str = ""
    bind: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    slots: int = 3
    single_writer: bool = False
    compress: Literal["", "zstd"] = ""

    def write(self, path: Path) -> None:
        """Write the file (mode 0600). Not durable: it serves one start."""
        path.touch(mode=0o600)
        path.write_bytes(encode(self))


def read_config(path: Path) -> KeeperConfig:
    """The configuration in a file. Raises FormatError (naming the field) and OSError."""
    return decode(path.read_bytes(), KeeperConfig, bytes_max=CONFIG_BYTES_MAX, file=str(path))
