"""Which hosts a run has, which ranks are where, and what each host's keeper is told.

`keepstep train` plays its hosts on one machine: h0, h1, ... Under torchrun a host is a node, named
as the system names it.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.ckpt.hostdir import HOST_CHARS_MAX, default_shm_dir, shm_dir_of_run
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.tiers import TierPolicy, Tiers
from keepstep.trainer.config import Config
from keepstep.trainer.errors import ConfigError
from keepstep.trainer.rundir import RunDir

_TAG_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a run.

    Attributes:
        index: among the run's hosts.
        name: its id.
        rack: the failure domain above it; "" if none was given.
        ranks: that it has, ascending.
        bind: address that its keeper listens on.
    """

    index: int
    name: str
    rack: str
    ranks: tuple[int, ...]
    bind: str = "127.0.0.1"


def played_hosts(config: Config) -> tuple[Host, ...]:
    """The hosts that the launcher plays.

    Raises:
        ConfigError: their ranks are not those of the layout, or the racks not as many.
    """
    count, each = config.hosts.count, config.hosts.ranks_per_host
    world_size = config.parallel.world_size
    if each and count * each != world_size:
        raise ConfigError(
            f"hosts.count {count} x hosts.ranks_per_host {each} are {count * each} ranks, but the "
            f"layout has {world_size} (dp x tp x pp): change one of them"
        )
    if world_size % count:
        raise ConfigError(
            f"{world_size} ranks (dp x tp x pp) cannot be shared evenly by hosts.count {count}; "
            "name a divisor"
        )
    each = world_size // count
    racks = racks_of(config, count)
    return tuple(
        Host(k, f"h{k}", racks[k], tuple(range(k * each, (k + 1) * each))) for k in range(count)
    )


def node(config: Config, environment: Mapping[str, str]) -> tuple[Host, int]:
    """This machine as a host of a run under torchrun, and how many there are.

    Its name is the system's, or KEEPSTEP_HOST; its keeper listens where it is seen from rank 0.

    Raises:
        ConfigError: hosts.count or the racks do not fit.
    """
    index = int(environment.get("GROUP_RANK", "0"))
    count = int(environment.get("GROUP_WORLD_SIZE", "1"))
    if config.hosts.count not in (1, count):
        raise ConfigError(
            f"hosts.count is {config.hosts.count}, but torchrun started {count} nodes: leave it out"
        )
    name = environment.get("KEEPSTEP_HOST") or _host_id(socket.gethostname())
    bind = "127.0.0.1" if count == 1 else _address_towards(environment["MASTER_ADDR"])
    return Host(index, name, racks_of(config, count)[index], (), bind), count


def _host_id(name: str) -> str:
    """A host's id out of the system's name for it."""
    kept = re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-_")
    return kept[:HOST_CHARS_MAX] or "host"


def _address_towards(other: str) -> str:
    """This machine's address on the way to `other`. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def racks_of(config: Config, hosts: int) -> Sequence[str]:
    """The racks of so many hosts. Raises ConfigError if others were given."""
    if not config.hosts.racks:
        return [""] * hosts
    racks = [rack.strip() for rack in config.hosts.racks.split(",")]
    if len(racks) != hosts:
        raise ConfigError(
            f"hosts.racks names {len(racks)} racks ({config.hosts.racks}), but there are {hosts} "
            "hosts: name one for each host, in order"
        )
    return racks


def tiers_of(config: Config, hosts: int) -> Tiers:
    """The policy of all tiers, on so many hosts."""
    run, tiers = config.run, config.tiers
    disk = TierPolicy(
        every_steps=tiers.disk_every if tiers.disk_dir else 0,
        every_s=tiers.disk_every_s if tiers.disk_dir else 0.0,
        keep=tiers.disk_keep,
        keep_every=tiers.disk_keep_every,
    )
    store = TierPolicy(
        every_steps=run.checkpoint_every,
        every_s=run.checkpoint_every_s,
        keep=run.keep,
        keep_every=run.keep_every,
    )
    return Tiers(
        capture_every=tiers.capture_every,
        peers=min(tiers.peers, hosts - 1),
        disk=disk,
        store=store,
    )


def keeper_config(
    config: Config, run_dir: RunDir, store_url: str, host: Host, hosts: int
) -> KeeperConfig:
    """What the keeper of `host` is told. The same for each start in one run directory."""
    tiers = config.tiers
    disk_dir = tiers.disk_dir
    if disk_dir:
        own = run_dir.host_path(host.name) if disk_dir == "run" else Path(disk_dir) / host.name
        disk_dir = str((own / "disk").absolute())
    return KeeperConfig(
        job=config.run.name,
        host=host.name,
        rack=host.rack,
        store_url=_absolute(store_url),
        disk_dir=disk_dir,
        shm_dir=str(shm_dir(config, run_dir.path)),
        events_path=str((run_dir.path / "events.jsonl").absolute()),
        patience_s=config.run.patience_s,
        tiers=tiers_of(config, hosts),
        token_file=str(run_dir.token_path.absolute()),
        bind=host.bind,
        slots=tiers.slots,
        compress=tiers.compress,
    )


def shm_dir(config: Config, run_dir: Path) -> Path:
    """Where the host directories of this run are: runs of one name do not share them."""
    base = Path(config.tiers.shm_dir).absolute() if config.tiers.shm_dir else default_shm_dir()
    tag = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:_TAG_DIGITS]
    return shm_dir_of_run(base, tag)


def _absolute(store_url: str) -> str:
    """A store's URL for a process that works in another directory."""
    return store_url if "://" in store_url else str(Path(store_url).absolute())
