"""A rank of a benchmark: begun at a living keeper, capturing when it is told to."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from tests.kit.keepers import JOB, TOKEN, KeeperHost, keeper_host

from keepstep.ckpt.agree import agree, all_gather_bytes, gather_structure
from keepstep.ckpt.begin import begin
from keepstep.ckpt.beginning import Home, Wanted
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.keeper_client import KeeperClient
from keepstep.ckpt.load import Loading
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Manifest, State
from keepstep.ckpt.mosaic import Distance
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_store import PoolStore
from keepstep.ckpt.reader import open_checkpoint
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import Options as RestoreOptions
from keepstep.ckpt.slots import Level
from keepstep.ckpt.slots import agree as agree_levels
from keepstep.ckpt.snapshots import Captured, Snapshots
from keepstep.ckpt.sources import Sources
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due, Tier, TierPolicy, Tiers
from keepstep.ckpt.together import Crew, Together
from keepstep.storage.locate import open_store
from keepstep.storage.token import Token

POLL_S = 0.0005
WAIT_S = 300.0
HOST = "h0"
PATIENCE_S = 10.0
ANSWER_S = 120.0


class Site(msgspec.Struct, frozen=True):
    """Where ranks of one host find their keeper and their store."""

    host_dir: str
    store: str
    disk: str


@contextlib.contextmanager
def keeper_site(directory: Path) -> Iterator[tuple[Site, KeeperHost]]:
    """A living keeper with a disk tier and a store in `directory`, and memory in /dev/shm."""
    shm_dir = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir="/dev/shm"))
    (directory / "disk").mkdir(parents=True)
    tiers = Tiers(peers=0, disk=TierPolicy(keep=1), store=TierPolicy(keep=1))
    try:
        with (
            keeper_host(
                directory,
                HOST,
                shm_dir=str(shm_dir),
                disk_dir=str(directory / "disk"),
                tiers=tiers,
                patience_s=PATIENCE_S,
            ) as host,
            contextlib.ExitStack() as stack,
        ):
            host.start()
            # While this process is attached the keeper waits for ranks, however slowly they start.
            stack.enter_context(contextlib.closing(host.client()))
            site = Site(str(host.place.path), str(directory / "store"), str(directory / "disk"))
            yield site, host
    finally:
        shutil.rmtree(shm_dir, ignore_errors=True)


def barrier() -> None:
    """Of all ranks; nothing where there is but one process."""
    if dist.is_initialized():
        dist.barrier()


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def timed(call: Callable[[], object]) -> float:
    """Seconds from a barrier until the last rank has ended."""
    barrier()
    began_s = time.perf_counter()
    call()
    return slowest(time.perf_counter() - began_s)


@dataclass(frozen=True)
class Progress:
    """When things were so of one captured state, on all ranks together, in seconds.

    Attributes:
        call_s: the slowest call of `capture`.
        captured_to_drained_s: from before the captures until the slots were free everywhere.
        sealed_to_drained_s: the same from when the first image was sealed.
        last_sealed_to_drained_s: the same from when the last one was.
        captured_to_committed_s: until all ranks knew of the commit; 0 if none was due.
    """

    call_s: float
    captured_to_drained_s: float
    sealed_to_drained_s: float
    last_sealed_to_drained_s: float
    captured_to_committed_s: float


class BenchRank:
    """One rank of a run.

    Args:
        registry: what it holds.
        site: its host.
        stack: ends its connections.
    """

    def __init__(self, registry: Registry, site: Site, stack: contextlib.ExitStack) -> None:
        self.registry = registry
        self.site = site
        self.step = 0
        self.structure: Structure = gather_structure(None, registry)
        self._snapshots = Snapshots(registry, self.structure, JOB)
        self.store = open_store(site.store)
        keeper = stack.enter_context(KeeperClient(Path(site.host_dir), ANSWER_S))
        wanted = Wanted(
            job=JOB,
            by="bench",
            header=self._snapshots.header,
            image_bytes_max=self._snapshots.size_bytes,
        )
        home = Home(
            host=HOST,
            keeper=keeper,
            host_dir=Path(site.host_dir),
            disk_dir=Path(site.disk),
            token=Token(TOKEN),
        )
        log = Log(self.store, job=JOB) if registry.rank == 0 else None
        self._begun = begin(None, registry, self.structure, self.store, log, home, wanted)
        self._open()
        stack.callback(self.close)

    @property
    def inside_bytes(self) -> int:
        """What each capture copies before it returns."""
        return self._snapshots.inside_bytes

    def renew(self) -> None:
        """Forget how copies are done best: the next ones overlap, as at the beginning of a run."""
        self._snapshots.close()
        self._snapshots = Snapshots(self.registry, self.structure, JOB)
        self._open()

    def capture(self, due: Due = Due.NOWHERE) -> Captured:
        """Capture the next step. Every earlier one must be safe everywhere (`wait_safe`)."""
        agreed = self.agreed()
        self.step += 1
        barrier()
        made = self._snapshots.capture(State(self._begun.generation, self.step), due, agreed)
        if made.skipped or made.put_off:
            raise SystemExit(f"step {self.step} was not captured as asked: {made}")
        return made

    def agreed(self) -> Level:
        """How far all ranks are."""
        mine = msgspec.json.encode(self._snapshots.level())
        said = all_gather_bytes(None, mine)
        return agree_levels(msgspec.json.decode(one, type=Level) for one in said)

    def wait_safe(self) -> float:
        """Wait until the last capture is sealed here; when that was found."""
        return self._when(lambda: self._snapshots.level().acked >= self.step, "sealed")

    def save(self, due: Due) -> Progress:
        """Capture, wait until the state is wherever it is due, and say when it was."""
        agreed = self.agreed()
        self.step += 1
        barrier()
        began_s = time.perf_counter()
        made = self._snapshots.capture(State(self._begun.generation, self.step), due, agreed)
        called_s = time.perf_counter()
        if made.skipped or made.due != due:
            raise SystemExit(f"step {self.step} was not captured as asked: {made}")
        sealed_s = self.wait_safe()
        drained_s = self._when(lambda: self._snapshots.level().drained >= self.step, "drained")
        committed_s = began_s
        if Due.STORE in due:
            committed_s = self._when(lambda: self._snapshots.committed >= self.step, "committed")
        # One clock for all processes: the first and the last of each.
        first_began, first_sealed = -slowest(-began_s), -slowest(-sealed_s)
        last_sealed, last_drained = slowest(sealed_s), slowest(drained_s)
        return Progress(
            call_s=slowest(called_s - began_s),
            captured_to_drained_s=last_drained - first_began,
            sealed_to_drained_s=last_drained - first_sealed,
            last_sealed_to_drained_s=last_drained - last_sealed,
            captured_to_committed_s=slowest(committed_s) - first_began,
        )

    def manifest(self) -> Manifest:
        """Of the newest commit."""
        lineage = Log(self.store).read()
        return open_checkpoint(self.store, lineage.live[0]).manifest

    def close(self) -> None:
        """Let go of the pool. A second call does nothing."""
        self._snapshots.close()

    def _open(self) -> None:
        entered = self._begun.entered
        if entered is None:
            raise SystemExit("the keeper gave no slots")
        self._snapshots.open(
            entered, self._begun.generation, len(entered.slots), is_from_nothing=True
        )

    def _when(self, is_so: Callable[[], bool], what: str) -> float:
        deadline_s = time.perf_counter() + WAIT_S
        while not is_so():
            if time.perf_counter() > deadline_s:
                raise SystemExit(f"step {self.step} is not {what} after {WAIT_S} s")
            time.sleep(POLL_S)
        return time.perf_counter()


def restore(
    registry: Registry, structure: Structure, manifest: Manifest, site: Site, tier: Tier
) -> None:
    """Bring a state from one tier to all ranks, verified on all, and apply it. A collective."""
    ranks = tuple(range(dist.get_world_size()))
    crew = Crew(ranks, registry.rank, Path(site.host_dir))
    place = Place(tier, HOST)
    with contextlib.ExitStack() as stack:
        pool = None
        if tier is Tier.MEMORY:
            opened = Pool.open(HostDir(Path(site.host_dir)).pool)
            stack.callback(opened.close)
            pool = PoolStore(opened)
        here = Distance(HOST, {})
        sources = stack.enter_context(
            Sources(here, store=None, pool=pool, disk_dir=Path(site.disk))
        )

        def make() -> Loading:
            return Loading(
                registry,
                structure,
                manifest,
                lambda image: sources.origins((place,), image),
                RestoreOptions(),
                max(1, len(os.sched_getaffinity(0)) // len(ranks)),
            )

        together = Together(None, crew, "stage-bench", lambda kind, reason, **details: None)
        outcome = together.load(make)
        if outcome.staged is None:
            raise SystemExit(f"nothing was restored: {outcome}")
        with outcome.staged as staged:
            staged.apply()
            agree(None, "applying", None)
