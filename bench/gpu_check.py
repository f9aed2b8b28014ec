"""Captures on a CUDA machine: registration, overlap, order and speed, in under three minutes. JSON.

    python bench/gpu_check.py                  1 GiB of state on the first GPU
    python bench/gpu_check.py --mib 4096
    python bench/gpu_check.py --rehearse       the same path on the CPU: shows that it runs, no more

Prints one JSON object. Exit codes: 0: all checks hold; 1: one does not; 3: there is no CUDA here.

registration  page-locking a slot of the pool in shared memory, and letting it go: ms, and GB/s
link          the best of five copies from the device into memory that CUDA itself allocated: GB/s
capture       a whole state into a slot, launch to arrival: GB/s, and as a share of the link's
call_ms       how long `capture` keeps the host
order         the image is the state of its moment though the next update was queued at once, with
              the copies held back on purpose; and that this test sees it where the guard is off
overlap       steps of matrix products with and without a capture each: inflation of the median
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepstep.ckpt.control import Entered
from keepstep.ckpt.device_copies import DeviceCopies, Registered, SideStream
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_table import SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import Level
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.structure import merge_structures
from keepstep.ckpt.tiers import Due

NO_CUDA = 3
REPETITIONS = 5
STEPS = 20
HELD_BACK_CYCLES = 200_000_000  # about a tenth of a second
LINK_SHARE_MIN = 0.8
CALL_MS_MAX = 2.0
INFLATION_MAX = 1.1


@dataclass(frozen=True)
class Machine:
    """Where to run: a device, torch's module for its kind, and where shared memory is."""

    device: torch.device
    api: Any
    shm_dir: str

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def timed_s(self, act: Callable[[], object]) -> float:
        """How long `act` takes until the device is done with it."""
        self.api.synchronize()
        began_s = time.perf_counter()
        act()
        self.api.synchronize()
        return time.perf_counter() - began_s


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; numbers mean nothing")
    parser.add_argument("--shm-dir", default="/dev/shm", help="where the pool is made")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "gpu_check needs CUDA, and torch finds none here: run it on a machine with a GPU and "
            "a torch that is built for it (--rehearse shows on the CPU that it runs)",
            file=sys.stderr,
        )
        return NO_CUDA
    kind = "cpu" if options.rehearse else "cuda"
    device = torch.device(kind, None if options.rehearse else 0)
    machine = Machine(device, torch.get_device_module(kind), options.shm_dir)
    report = check(machine, options.mib << 20)
    print(json.dumps(report, indent=2))
    return 0 if all(report["holds"].values()) else 1


def check(machine: Machine, size_bytes: int) -> dict[str, Any]:
    """All checks, as what is printed."""
    began_s = time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if machine.is_cuda else "cpu (a rehearsal)",
        "torch": torch.__version__,
        "state_bytes": size_bytes,
        "registration": registration(machine, size_bytes) if machine.is_cuda else None,
        "order": order(machine),
        "link_gb_s": link(machine, size_bytes),
    }
    report["capture"] = asdict(capture(machine, size_bytes))
    report["took_s"] = time.perf_counter() - began_s
    seen = report["capture"]
    holds = {"order": report["order"]["is_kept"], "images": seen["are_images_right"]}
    if machine.is_cuda:
        holds |= {
            "order_test_sees_a_fault": report["order"]["is_seen_to_fail"],
            "link_share": seen["gb_s"] >= LINK_SHARE_MIN * report["link_gb_s"],
            "call_ms": seen["call_ms"] <= CALL_MS_MAX,
            "inflation": seen["inflation"] <= INFLATION_MAX,
            "time": report["took_s"] < 180.0,
        }
    return report | {"link_share": seen["gb_s"] / report["link_gb_s"], "holds": holds}


def registration(machine: Machine, size_bytes: int) -> dict[str, float]:
    """Page-locking a slot, twice: the second time nothing is new to the system."""
    found: dict[str, float] = {}
    with made_pool(machine) as pool:
        slot = pool.add_slot(size_bytes)
        slot.prefault()
        for name in ("first", "again"):
            began_s = time.perf_counter()
            memory = Registered(slot.image)
            locked_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            memory.close()
            found[f"{name}_ms"] = locked_s * 1e3
            found[f"{name}_gb_s"] = size_bytes / locked_s / 1e9
            found[f"{name}_unlock_ms"] = (time.perf_counter() - began_s) * 1e3
    return found


@contextlib.contextmanager
def made_pool(machine: Machine) -> Iterator[Pool]:
    """A pool in shared memory, for as long as it is needed."""
    with (
        tempfile.TemporaryDirectory(dir=machine.shm_dir) as directory,
        Pool.create(Path(directory) / "pool") as pool,
    ):
        yield pool


def link(machine: Machine, size_bytes: int) -> float:
    """What the way from the device to the host can do at best, in GB/s."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=machine.is_cuda)
    target.zero_()
    best_s = min(
        machine.timed_s(lambda: target.copy_(source, non_blocking=True)) for _ in range(REPETITIONS)
    )
    return size_bytes / best_s / 1e9


def order(machine: Machine) -> dict[str, bool]:
    """Whether copies that start late still have the old values; with the hold, and without."""
    return {
        "is_kept": _late_copy(machine, is_held=True),
        "is_seen_to_fail": not _late_copy(machine, is_held=False),
    }


def _late_copy(machine: Machine, *, is_held: bool) -> bool:
    """Copy behind a pause, update at once: whether the copy has what was there before."""
    sources = [torch.full((1 << 20,), float(number), device=machine.device) for number in range(8)]
    targets = [torch.empty(1 << 20, pin_memory=machine.is_cuda) for _ in sources]
    stream = SideStream(machine.device, machine.api)
    copies = DeviceCopies(targets, sources)
    stream.mark()
    if machine.is_cuda:
        with torch.cuda.stream(stream.stream):
            torch.cuda._sleep(HELD_BACK_CYCLES)
    stream.launch(copies)
    if is_held:
        stream.hold_current()
    for source in sources:
        source.fill_(-1.0)
    stream.settle()
    machine.api.synchronize()
    return all(bool((one == number).all()) for number, one in enumerate(targets))


@dataclass(frozen=True)
class Captures:
    """What captures of a whole state cost."""

    gb_s: float
    call_ms: float
    guard_ms: float
    step_ms: float
    step_with_capture_ms: float
    inflation: float
    are_images_right: bool


def capture(machine: Machine, size_bytes: int) -> Captures:
    """A net with fused AdamW: each step captured, the keeper played by this function."""
    width = 1024
    layers = max(1, size_bytes // (3 * 4 * width * width))
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    net.to(machine.device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    registry = Registry(Mesh((MeshAxis("dp", 1),)), 0)
    registry.add_module("model/", net)
    registry.add_optimizer("optimizer/", optimizer)
    snapshots = Snapshots(registry, merge_structures([registry.structure()]), "gpu-check")
    data = torch.randn(2048 if machine.is_cuda else 4, width, device=machine.device)

    def step() -> None:
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with made_pool(machine) as pool:
        slots = [pool.add_slot(snapshots.size_bytes) for _ in range(3)]
        writer = this_process()
        for slot in slots:
            slot.assign(writer, 0)
        pool.seats[0].take(0, writer, 1)
        entered = Entered(str(pool.path), 0, tuple(slot.index for slot in slots))
        snapshots.open(entered, 1, 3, is_from_nothing=True)
        try:
            return _captures(machine, snapshots, pool, step, net)
        finally:
            snapshots.close()


def _captures(
    machine: Machine, snapshots: Snapshots, pool: Pool, step: Callable[[], None], net: nn.Module
) -> Captures:
    number = 0
    calls_ms: list[float] = []
    guards_ms: list[float] = []

    def one() -> None:
        nonlocal number
        number += 1
        done = snapshots.capture(State(1, number), Due.NOWHERE, Level(number - 1, number - 1))
        assert not done.skipped
        calls_ms.append(done.call_ms)
        guards_ms.append(done.guard_ms)

    def settle() -> None:
        snapshots.wait()
        for slot in pool.slots:
            if slot.status is SlotStatus.CAPTURED:
                slot.sealed()

    def whole() -> None:
        one()
        settle()

    best_s = min(machine.timed_s(whole) for _ in range(REPETITIONS + 3))
    first = next(net.parameters())
    before = first.detach().clone()
    one()
    step()
    settle()
    (slot,) = [slot for slot in pool.slots if slot.state.step == number]
    floats = torch.frombuffer(slot.image, dtype=torch.float32)
    start = len(snapshots.header) // 4  # the first layer's weight comes first by its name
    image = floats[start : start + before.numel()].view_as(before)
    are_right = bool(torch.equal(image, before.cpu()))
    alone_ms, beside_ms = [], []
    for _ in range(STEPS):
        alone_ms.append(machine.timed_s(step) * 1e3)
        one()
        beside_ms.append(machine.timed_s(step) * 1e3)
        settle()
    step_ms, with_ms = statistics.median(alone_ms), statistics.median(beside_ms)
    return Captures(
        gb_s=snapshots.size_bytes / best_s / 1e9,
        call_ms=statistics.median(calls_ms[-STEPS:]),
        guard_ms=statistics.median(guards_ms[-STEPS:]),
        step_ms=step_ms,
        step_with_capture_ms=with_ms,
        inflation=with_ms / step_ms,
        are_images_right=are_right,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
