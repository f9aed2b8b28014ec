"""What a beginning is asked for, and what came of it: plain data of `begin`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.ckpt.address import Address
from keepstep.ckpt.control import Entered
from keepstep.ckpt.entry import Parent
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.load import Staged
from keepstep.ckpt.manifest import Manifest, State
from keepstep.ckpt.structure import Structure
from keepstep.storage.token import Token


class BeginRefused(CheckpointError):
    """The run cannot begin here; nothing was changed. On all ranks alike."""


PEER_SILENT_S = 10.0
"""A silent peer holds a beginning up no longer than this, whatever the patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """This rank's host.

    Attributes:
        host: its id, unique among the job's hosts.
        rack: the failure domain above it; "" if none is known.
        keeper: connected, not attached yet; None: without memory and disk tiers.
        host_dir: the host directory (pool, staging file); None without a keeper.
        disk_dir: root of the disk tier; None for none.
        token: for other hosts' keepers; None: these are not asked.
        timeout_s: how long a peer may be silent.
    """

    host: str
    rack: str = ""
    keeper: KeeperClient | None = None
    host_dir: Path | None = None
    disk_dir: Path | None = None
    token: Token | None = None
    timeout_s: float = PEER_SILENT_S


def _apply(staged: Staged) -> None:
    staged.apply()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to begin. The same on all ranks, but for `header`.

    Attributes:
        job: the job's name.
        by: who takes the term, for people.
        config: of the run, as JSON: for people and for `show`.
        header: this rank's unsealed image header (`Snapshots.header`); b"" if it owns nothing.
        image_bytes_max: the largest image that this rank may get.
        init_from: the checkpoint of another run to begin from, if there is nothing to resume.
        weights_only: leave that one's optimizer state.
        last_step: where the run is to end; None: nowhere. An uncommitted state of that step or a
            later one is not taken: nothing would be captured after it, so it would never be
            committed. The step before it is, and the last step is done again.
        refuse: why a state's manifest is not of this run; "" if it is. Asked on rank 0.
        apply: applies what was staged; for who has something to put back afterwards.
        replan: `header` and `image_bytes_max` for a larger structure: where optimizers make their
            state lazily, what a state has of it is made before that is restored. None: a state with
            tensors that nobody registered is refused.
        threads: that read and verify: this rank's share of the host's cores.
        tell: `tell(kind, reason, **details)`: an event of this rank.
    """

    job: str
    by: str
    config: dict[str, Any] = field(default_factory=dict)
    header: bytes = b""
    image_bytes_max: int = 0
    init_from: Address | None = None
    weights_only: bool = False
    last_step: int | None = None
    refuse: Callable[[Manifest], str] = lambda manifest: ""
    apply: Callable[[Staged], None] = _apply
    replan: Callable[[Structure], tuple[bytes, int]] | None = None
    threads: int = 1
    tell: Callable[..., None] = lambda kind, reason, **details: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How it began.

    Attributes:
        generation: its number.
        term: under which its commits are appended.
        base: the state it goes on from; None: from nothing, or from `parent`.
        manifest: of `base`.
        is_committed: whether `base` had a commit.
        parent: the checkpoint of another run that its weights are of.
        passed_over: newer states that could not be had, newest first, with what was wrong.
        addresses: the generation's hosts; `hosts`: of all ranks, index into these.
        entered: this rank's place in the pool; None without a keeper.
        restore_s: from the decision to the state being in memory.
        read_bytes: read and verified for it by all ranks, by where they came from ("memory",
            "peer", "disk", "store").
    """

    generation: int
    term: int
    base: State | None
    manifest: Manifest | None
    is_committed: bool
    parent: Parent | None
    passed_over: tuple[str, ...]
    addresses: tuple[HostAddress, ...]
    hosts: tuple[int, ...]
    entered: Entered | None
    restore_s: float
    read_bytes: Mapping[str, int]
