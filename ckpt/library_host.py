"""This process's place in a job under plain torchrun: its host, its mesh, its host's keeper."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from keepstep.ckpt.agree import agree, all_gather_bytes, rank_in
from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.hostdir import HOST_CHARS_MAX, default_shm_dir
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_process import KeeperFailed, KeeperMinder, KeeperProcess, Tell
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.tiers import TierPolicy, Tiers

HOST_VARIABLE = "KEEPSTEP_HOST"
"""Names this host, where its name in the system is not unique in the job."""

_CPU_BACKEND = "gloo"


@dataclass(frozen=True, kw_only=True)
class KeeperOptions:
    """What a host's keeper is told. All have defaults that serve one machine.

    Attributes:
        host: its id, unique in the job; "": KEEPSTEP_HOST, or the system's name.
        rack: the failure domain above it.
        shm_dir: where the memory of all states is; "": `/dev/shm/keepstep-<uid>`.
        disk_dir: of the local disk tier; "": none.
        slots: states of each rank that memory holds: 3, or 2 where it is short.
        patience_s: the one time-out; also how long memory is held after the last rank has gone:
            longer than a person takes to start the job again.
        token_file: with the job token, mode 0600; "": KEEPSTEP_TOKEN. Several hosts need one.
        bind: address that the keeper listens on for other hosts' keepers.
        advertise: the address told to them; "": `bind`.
        single_writer: the store may ignore put-if-absent: nobody else ever writes to it.
        compress: "zstd": encode what goes to the store, where that pays.
    """

    host: str = ""
    rack: str = ""
    shm_dir: str = ""
    disk_dir: str = ""
    slots: int = 3
    patience_s: float = 300.0
    token_file: str = ""
    bind: str = "127.0.0.1"
    advertise: str = ""
    single_writer: bool = False
    compress: Literal["", "zstd"] = ""


def mesh_of(device_mesh: DeviceMesh | None) -> Mesh:
    """The run's mesh: that of torch, or one axis "dp" over all ranks.

    Raises:
        NotRepresentable: for a mesh without names, or one that is not over all ranks in order.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if device_mesh is None:
        return Mesh((MeshAxis("dp", world),))
    names = device_mesh.mesh_dim_names
    ranks = device_mesh.mesh.flatten().tolist()
    if names is None or ranks != list(range(world)):
        raise NotRepresentable(
            "mesh",
            f"it has the axes {names} and the ranks {ranks}; give the outermost mesh, over all "
            f"{world} ranks in order, with mesh_dim_names",
        )
    return Mesh(
        tuple(
            MeshAxis(name, size) for name, size in zip(names, device_mesh.mesh.shape, strict=True)
        )
    )


def cpu_group() -> dist.ProcessGroup | None:
    """A group of all ranks for CPU tensors, which nobody else uses; None if there is one process.

    Collective.
    """
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend=_CPU_BACKEND)
    return group


class LibraryHost:
    """This rank's host, once all ranks know all hosts. Collective to make.

    Attributes:
        config: of its keeper.
        rank: this process's number in the job.
        hosts: ids of the hosts of all ranks, by rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        job: str,
        store_url: str,
        run_dir: Path,
        tiers: Tiers | None,
        options: KeeperOptions,
    ) -> None:
        name = options.host or os.environ.get(HOST_VARIABLE) or _host_id(socket.gethostname())
        self._group = group
        self.rank = rank_in(group)
        self.hosts = tuple(one.decode() for one in all_gather_bytes(group, name.encode()))
        self.config = KeeperConfig(
            job=job,
            host=name,
            rack=options.rack,
            store_url=store_url,
            disk_dir=_absolute(options.disk_dir),
            shm_dir=_absolute(options.shm_dir) or str(default_shm_dir()),
            events_path=_absolute(str(run_dir / "events.jsonl")),
            patience_s=options.patience_s,
            tiers=default_tiers(len(set(self.hosts))) if tiers is None else tiers,
            token_file=_absolute(options.token_file),
            bind=options.bind,
            advertise=options.advertise,
            slots=options.slots,
            single_writer=options.single_writer,
            compress=options.compress,
        )
        self._directory = run_dir / "hosts" / name
        self._minder: KeeperMinder | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its host, which starts and minds the keeper."""
        return self.hosts.index(self.config.host) == self.rank

    def cores_per_rank(self) -> int:
        """This rank's share of the cores that this process may use; 1 at least."""
        ranks = self.hosts.count(self.config.host)
        return max(1, len(os.sched_getaffinity(0)) // ranks)

    def start_keeper(self, tell: Tell) -> None:
        """Start the keepers of all hosts, and wait for them. Collective; blocking.

        Raises OtherRanksFailed, on all ranks alike, if one does not start.
        """
        problem = None
        if self.is_first:
            process = KeeperProcess(self.config, self._directory)
            try:
                process.start()
                process.wait_ready()
                self._minder = KeeperMinder(process, tell)
            except KeeperFailed as error:
                problem = str(error)
        agree(self._group, "starting the keepers", problem)

    def let_go(self, end_s: float) -> None:
        """Mind the keeper no more; wait up to `end_s` for its end. It goes on if it has to."""
        if self._minder is not None:
            self._minder.close(end_s)
            self._minder = None


def default_tiers(hosts: int) -> Tiers:
    """Every step in memory and one peer's; every ten minutes in the store, five of them kept."""
    return Tiers(peers=min(1, hosts - 1), store=TierPolicy(every_s=600.0, keep=5))


def least_slots(group: dist.ProcessGroup | None, slots: Sequence[int]) -> int:
    """The least number of slots that a rank got which got any; for `Snapshots.open`. Collective."""
    said = all_gather_bytes(group, str(len(slots)).encode())
    return min((count for count in map(int, said) if count), default=2)


def _host_id(name: str) -> str:
    kept = re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-_")
    return kept[:HOST_CHARS_MAX] or "host"


def _absolute(path: str) -> str:
    """A path for a process that works in another directory; "" stays."""
    return os.path.abspath(path) if path else ""
