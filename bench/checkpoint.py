"""Saving and loading against torch's own checkpointing and against the limits of the machine.

    python bench/checkpoint.py                 4 gloo ranks x 256 MB of FSDP2 + Adam, median of 5
    python bench/checkpoint.py --mb 16 --repetitions 1     a quick trial

Every repetition runs everything once, ours and theirs side by side and in turning order, so that
the machine's drift hits both alike; ratios are medians of the ratios within a repetition. Times are
from a barrier to the last rank's end. "durable" is from before the capture to the commit in the
log, on disk. Loads are from the page cache, except "uncached". "small" is the time of 5,000 tensors
of 1 KiB less that of one tensor of 5 MB, over 5,000, in one process, capture to commit. Prints
JSON; leaves nothing behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep.ckpt.agree import agree, all_gather_bytes, gather_structure
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.load import stage
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import FORMAT_VERSION, ImageRecord, Manifest, State
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.save import Saver
from keepstep.ckpt.structure import Structure, merge_structures
from keepstep.storage.file import FileStore

WIDTH = 1024
SMALL_COUNT = 5_000
WRITE_BYTES = 16 << 20
PR_SET_PDEATHSIG = 1
BARS = {"durable_vs_dcp": 2.0, "load_vs_dcp": 2.0, "small_ms": 0.05}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    ranks: int
    mb: int
    repetitions: int
    small_repetitions: int
    seed: int
    directory: str


class Run:
    """Our side of a save and a load, as a training loop would have it."""

    def __init__(self, registry: Registry, structure: Structure, root: Path) -> None:
        self.registry = registry
        self.structure = structure
        self.root = root
        self.store = FileStore(root)
        self.saver = Saver(registry, structure, self.store, "bench")
        self.step = 0
        self.manifest: Manifest | None = None
        self.stall_s: list[float] = []
        if registry.rank == 0:
            self.log = Log(self.store, job="bench")
            self.log.take_term("bench")
            hosts = tuple("here" for _ in range(_size(structure.mesh)))
            self.log.append(
                Generation(
                    number=1, hosts=hosts, mesh=structure.mesh, base=None, parent=None, config={}
                )
            )

    def save(self) -> None:
        """Capture to commit."""
        self.step += 1
        state = State(generation=1, step=self.step)
        began_s = time.perf_counter()
        values = self.saver.capture(state)
        self.stall_s.append(time.perf_counter() - began_s)
        self.saver.start()
        records = gathered(self.saver.wait())
        self.manifest = Manifest(
            format=FORMAT_VERSION,
            job="bench",
            state=state,
            mesh=self.structure.mesh,
            placements=self.structure.placements,
            tensors=self.structure.tensors,
            aliases=self.structure.aliases,
            values=values,
            plan_digest=self.structure.digest,
            images=tuple(record for record in records if record is not None),
        )
        if self.registry.rank == 0:
            commit(self.log, self.manifest)
        barrier()

    def load(self) -> None:
        """Stage, agree, apply."""
        assert self.manifest is not None
        with stage(self.registry, self.structure, self.manifest, self.store) as staged:
            if dist.is_initialized():
                agree(None, "the load", None)
            staged.apply()

    def forget(self) -> None:
        """Remove the last save's images, as retention would; not timed."""
        barrier()
        if self.registry.rank == 0:
            shutil.rmtree(self.root / "states", ignore_errors=True)
        barrier()

    def close(self) -> None:
        self.saver.close()


def gathered(record: ImageRecord | None) -> list[ImageRecord | None]:
    if not dist.is_initialized():
        return [record]
    parts = all_gather_bytes(None, msgspec.json.encode(record))
    return [msgspec.json.decode(part, type=ImageRecord | None) for part in parts]


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(call: Callable[[], object]) -> float:
    """Seconds from a barrier until the last rank has ended."""
    barrier()
    began_s = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


class Limits:
    """What the machine can do at all, with the same bytes in the same run."""

    def __init__(self, size_bytes: int, path: Path) -> None:
        self.size_bytes = size_bytes - size_bytes % 4096
        self.source = torch.randint(0, 255, (self.size_bytes,), dtype=torch.uint8)
        self.map = mmap.mmap(-1, self.size_bytes)
        self.view = memoryview(self.map)
        self.target = torch.frombuffer(self.map, dtype=torch.uint8)
        self.target.copy_(self.source)
        self.path = path
        self.cached = path.with_suffix(".cached")
        self.cached.write_bytes(self.source.numpy().tobytes())

    def memcpy(self) -> None:
        self.target.copy_(self.source)

    def direct_write(self) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
        fd = os.open(self.path, flags)
        done = 0
        while done < self.size_bytes:
            done += os.write(fd, self.view[done : done + WRITE_BYTES])
        os.fsync(fd)
        os.close(fd)

    def cached_read(self) -> None:
        fd = os.open(self.cached, os.O_RDONLY)
        done = 0
        while done < self.size_bytes:
            done += os.preadv(fd, [self.view[done : done + WRITE_BYTES]], done)
        os.close(fd)


def fsdp_state(options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 + AdamW whose state is `mb` MiB a rank: weights and two moments in float32."""
    total_bytes = options.mb * options.ranks * 2**20
    layers = max(1, total_bytes // (3 * 4 * WIDTH * WIDTH))
    torch.manual_seed(options.seed)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def local_bytes(value: object) -> int:
    if isinstance(value, dict):
        return sum(local_bytes(item) for item in value.values())
    if isinstance(value, DTensor):
        return value.to_local().nbytes
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def measure(options: Options, rank: int, root: Path) -> dict[str, Any]:
    """Everything that needs all ranks. The result is the same on each."""
    model, optimizer = fsdp_state(options)
    mesh = Mesh((MeshAxis(name="dp_shard", size=options.ranks),))
    registry = Registry(mesh, rank)
    registry.add_module("model/", model)
    registry.add_optimizer("optimizer/", optimizer)
    if rank == 0:
        (root / "ours").mkdir()
    barrier()
    run = Run(registry, gather_structure(None, registry), root / "ours")
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    size_bytes = local_bytes(state)
    limits = Limits(size_bytes, root / f"limit-{rank}")
    path = str(root / "dcp")

    def dcp_async() -> None:
        cast("Any", dcp_async_save(state, checkpoint_id=path)).result()

    def forget_dcp() -> None:
        barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        barrier()

    def ours_save() -> dict[str, float]:
        run.forget()
        return {"ours_durable": timed(run.save)}

    def theirs_save() -> dict[str, float]:
        forget_dcp()
        return {"dcp_save": timed(lambda: dcp_save(state, checkpoint_id=path))}

    def ours_load() -> dict[str, float]:
        first = timed(run.load)  # written past the page cache, so read from the disk
        return {"ours_load_uncached": first, "ours_load": timed(run.load)}

    def theirs_load() -> dict[str, float]:
        dcp_load(state, checkpoint_id=path)
        return {"dcp_load": timed(lambda: dcp_load(state, checkpoint_id=path))}

    def theirs_async() -> dict[str, float]:
        forget_dcp()
        return {"dcp_async": timed(dcp_async)}

    def limit_set() -> dict[str, float]:
        return {
            "memcpy": timed(limits.memcpy),
            "direct_write": timed(limits.direct_write),
            "cached_read": timed(limits.cached_read),
        }

    pairs = [[ours_save, theirs_save], [ours_load, theirs_load]]
    rounds: list[dict[str, float]] = []
    for number in range(options.repetitions + 1):
        found = limit_set()
        for pair in pairs:
            for part in pair if number % 2 else pair[::-1]:
                found |= part()
        found |= theirs_async()
        if number:  # the first round warms up: buffers touched, files made once
            rounds.append(found)
    stall_s = statistics.median(run.stall_s[1:])
    run.close()
    return {"bytes_per_rank": size_bytes, "rounds": rounds, "ours_stall_s_rank0": stall_s}


def small_cost(options: Options, root: Path) -> dict[str, Any]:
    """Milliseconds a small tensor costs, ours and DCP's, capture to durable; one process."""
    mesh = Mesh((MeshAxis(name="dp_shard", size=1),))
    small = {f"t{number:04}": torch.randn(256) for number in range(SMALL_COUNT)}
    one = {"one": torch.randn(SMALL_COUNT * 256)}
    runs = []
    for name, tensors in (("small", small), ("one", one)):
        (root / name).mkdir()
        registry = Registry(mesh, 0)
        for tensor_name, tensor in tensors.items():
            registry.add_tensor(tensor_name, tensor)
        structure = merge_structures([registry.structure()])
        runs.append(Run(registry, structure, root / name))
    ours, theirs = [], []
    for number in range(options.small_repetitions + 1):
        times = []
        for run in runs if number % 2 else runs[::-1]:
            run.forget()
            times.append(timed(run.save))
        dcp_times = []
        for tensors in (small, one):
            path = str(root / "dcp-small")
            shutil.rmtree(path, ignore_errors=True)
            saved: dict[str, Any] = dict(tensors)

            def save(state: dict[str, Any] = saved, where: str = path) -> None:
                dcp_save(state, checkpoint_id=where, no_dist=True)

            dcp_times.append(timed(save))
        if number:  # the first one warms up
            many, single = times if number % 2 else times[::-1]
            ours.append((many - single) * 1e3 / SMALL_COUNT)
            theirs.append((dcp_times[0] - dcp_times[1]) * 1e3 / SMALL_COUNT)
    for run in runs:
        run.close()
    return {
        "ours_ms": statistics.median(ours),
        "dcp_ms": statistics.median(theirs),
        "ours_ms_all": ours,
    }


def report(options: Options, found: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    rounds: list[dict[str, float]] = found["rounds"]
    total_bytes = found["bytes_per_rank"] * options.ranks
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}

    def ratio(theirs: str, ours: str) -> float:
        return statistics.median(one[theirs] / one[ours] for one in rounds)

    ratios = {
        "durable_vs_dcp": ratio("dcp_save", "ours_durable"),
        "durable_vs_dcp_async": ratio("dcp_async", "ours_durable"),
        "load_vs_dcp": ratio("dcp_load", "ours_load"),
        "durable_of_direct_write": ratio("direct_write", "ours_durable"),
        "load_of_cached_read": ratio("cached_read", "ours_load"),
    }
    return {
        "bench": "checkpoint",
        "options": {key: value for key, value in asdict(options).items() if key != "directory"},
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "bytes_per_rank": found["bytes_per_rank"],
        "seconds": seconds,
        "gb_per_s": {name: total_bytes / 1e9 / value for name, value in seconds.items()},
        "stall_s": found["ours_stall_s_rank0"],
        "ratios": ratios,
        "small": small,
        "rounds": rounds,
        "bars": {
            "durable_vs_dcp": [ratios["durable_vs_dcp"], ">=", BARS["durable_vs_dcp"]],
            "load_vs_dcp": [ratios["load_vs_dcp"], ">=", BARS["load_vs_dcp"]],
            "small_ms": [small["ours_ms"], "<=", BARS["small_ms"]],
        },
        "passed": ratios["durable_vs_dcp"] >= BARS["durable_vs_dcp"]
        and ratios["load_vs_dcp"] >= BARS["load_vs_dcp"]
        and small["ours_ms"] <= BARS["small_ms"],
    }


def git_commit() -> str:
    """The commit measured, marked if files differ from it; "unknown" outside a repository."""
    here = Path(__file__).resolve().parent
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def rank_main(options: Options, rank: int, root: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the bench
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=options.ranks
    )
    found = measure(options, rank, root)
    if rank == 0:
        (root / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_all(options: Options) -> dict[str, Any]:
    """Start the ranks, wait for them, then measure alone; removes all files in any case."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs the cleanup
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.directory) as text:
        root = Path(text).resolve()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--root", str(root), *arguments_of(options)]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment)
            for rank in range(options.ranks)
        ]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"ranks ended with exit codes {codes}")
        found = json.loads((root / "found.json").read_text())
        return report(options, found, small_cost(options, root))


def arguments_of(options: Options) -> list[str]:
    given = asdict(options)
    return [
        word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=256, help="MiB of state a rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--small-repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=".", help="where files go; on a disk, not tmpfs")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=None, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    rank, root = given.pop("rank"), given.pop("root")
    options = Options(**given)
    warnings.filterwarnings("ignore", module="torch")
    if rank is not None:
        rank_main(options, rank, root)
        return 0
    print(json.dumps(run_all(options), indent=1))
    return 0


def _size(mesh: Mesh) -> int:
    size = 1
    for axis in mesh.axes:
        size *= axis.size
    return size


if __name__ == "__main__":
    raise SystemExit(main())
