"""Where a training run begins: what it asks of `ckpt.begin`, and what it says of the answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.ckpt.begin import begin
from keepstep.ckpt.beginning import PEER_SILENT_S, BeginRefused, Begun, Home, Wanted
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_process import host_dir_of
from keepstep.ckpt.layout import layout_of
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.load import Staged
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.optimizer import read_groups, write_groups
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.structure import Structure
from keepstep.storage.store import Store
from keepstep.storage.token import find_token
from keepstep.trainer.capturing import Tell
from keepstep.trainer.device import cores_per_rank
from keepstep.trainer.errors import ResumeRefused
from keepstep.trainer.job import Job
from keepstep.trainer.resume import check_resumable
from keepstep.trainer.train_step import Trainable

_FETCH_THREADS_MAX = 4


def begin_run(
    job: Job,
    trainable: Trainable,
    registry: Registry,
    structure: Structure,
    store: Store,
    log: Log | None,
    control: dist.ProcessGroup | None,
    snapshots: Snapshots,
    keeper: KeeperConfig,
    tell: Tell,
) -> Begun:
    """Bring this rank to where its run begins. Collective, blocking.

    This run's own hyper-parameters stay, whatever was saved.

    Raises:
        ResumeRefused: what is there is not this run, or cannot be taken.
        CheckpointError, StoreError: otherwise, as `ckpt.begin.begin`.
    """

    def refuse(manifest: Manifest) -> str:
        try:
            changes(job, manifest)
        except ResumeRefused as error:
            return f"{store.url}, {error}"
        return ""

    def apply(staged: Staged) -> None:
        groups = read_groups("param_groups", trainable.optimizer)
        staged.apply()
        write_groups(trainable.optimizer, groups)

    wanted = Wanted(
        job=job.config.run.name,
        by=f"trainer {socket.gethostname()} pid {os.getpid()}",
        config=job.tree(),
        header=snapshots.header,
        image_bytes_max=snapshots.size_bytes,
        init_from=job.init_from,
        weights_only=job.weights_only,
        last_step=job.config.run.steps,
        refuse=refuse,
        apply=apply,
        threads=min(_FETCH_THREADS_MAX, cores_per_rank()),
        tell=tell,
    )
    patience_s = job.config.run.patience_s
    host_dir = host_dir_of(keeper)
    with KeeperClient(host_dir, patience_s) as client:
        home = Home(
            host=keeper.host,
            rack=keeper.rack,
            keeper=client,
            host_dir=host_dir,
            disk_dir=Path(keeper.disk_dir) if keeper.disk_dir else None,
            token=find_token(os.environ, keeper.token_file),
            timeout_s=min(patience_s, PEER_SILENT_S),
        )
        try:
            return begin(control, registry, structure, store, log, home, wanted)
        except BeginRefused as error:
            raise ResumeRefused(str(error)) from error


def changes(job: Job, manifest: Manifest | None) -> list[str]:
    """Keys of the configuration that differ from those of `manifest`, in words.

    Raises:
        ResumeRefused: they make it another run.
    """
    if manifest is None:
        return []
    before = manifest.values.get("config")
    where = f"{state_words(manifest.state)},"
    return check_resumable(where, before if isinstance(before, dict) else {}, job.tree())


def beginning_words(begun: Begun, job: Job) -> tuple[str, str]:
    """The kind of a beginning, and where it began."""
    if begun.base is None:
        if begun.parent is None:
            return "started", "from nothing"
        what = "weights" if begun.parent.weights_only else "state"
        return "started", f"from the {what} of {begun.parent.store}@{begun.parent.state.step}"
    reason = f"from step {begun.base.step} of generation {begun.base.generation}"
    if not begun.is_committed:
        read = sorted((size, tier) for tier, size in begun.read_bytes.items() if size)
        tiers = " and ".join(tier for _, tier in reversed(read))
        reason += f", which was not committed yet: read from {tiers or 'nowhere'}"
    layout = None if begun.manifest is None else layout_of(begun.manifest.mesh)
    if layout is not None and str(layout) != str(job.layout):
        reason += f", saved as {layout}, resharded to {job.layout}"
    return "resumed", reason


def beginning_details(begun: Begun) -> dict[str, Any]:
    """The figures of a beginning."""
    return {
        "generation": begun.generation,
        "base": None if begun.base is None else [begun.base.generation, begun.base.step],
        "is_committed": begun.is_committed,
        "hosts": [one.host for one in begun.addresses],
        "restore_s": begun.restore_s,
        "read_bytes": dict(begun.read_bytes),
    }
