"""A save's crash points: every disk a power loss may leave is built, read, and gone on from."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.kit.checkpoints import TENSORS
from tests.kit.crash_drain import drain_save
from tests.kit.crash_save import (
    BIGGER,
    NEW,
    expected_files,
    faults_found,
    faults_going_on,
    prepare,
    save,
)
from tests.kit.posixes import InterleavedPosix, ThreadedPosix, UnsyncedPosix
from tests.kit.powerloss import disk_states
from tests.kit.proof import print_report

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import TensorSpec
from keepstep.storage.errors import StoreError
from keepstep.storage.file import FileStore


@dataclass(slots=True)
class Figures:
    """What a sweep found.

    Attributes:
        operations: how many disk operations the save made.
        states: how many different disks a power loss may leave.
        tried: how many of them were built and opened.
        old: of those, how many showed the old commit as the newest.
        new: how many showed the new one.
        wrong: what was found wrong, with the disk it was found on.
    """

    operations: int = 0
    states: int = 0
    tried: int = 0
    old: int = 0
    new: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Add another sweep's figures to these."""
        self.operations += other.operations
        self.states += other.states
        self.tried += other.tried
        self.old += other.old
        self.new += other.new
        self.wrong += other.wrong


P = TypeVar("P", bound=InterleavedPosix | ThreadedPosix)


def at_once(posix: InterleavedPosix, store: FileStore, tensors: dict[str, TensorSpec]) -> None:
    """The images are put at once, in an order of system calls drawn with the seed."""
    save(store, lambda: posix.mark("committed"), tensors, posix.run)


def drained(posix: ThreadedPosix, store: FileStore, tensors: dict[str, TensorSpec]) -> None:
    """A keeper's drains and committer save, in as many threads as they have."""
    drain_save(store, lambda: posix.mark("committed"), tensors)


def power_loss(
    directory: Path,
    *,
    seed: int,
    act: Callable[[P, FileStore, dict[str, TensorSpec]], None],
    posix_class: type[P],
    every: int = 1,
    tensors: dict[str, TensorSpec] = TENSORS,
) -> Figures:
    """Record a save, and try every `every`-th disk that a power loss may leave.

    Args:
        directory: an empty one.
        seed: of what is drawn.
        act: saves.
        posix_class: records it.
        every: 1 for all disks.
        tensors: of the state.
    """
    root = directory / "recorded"
    root.mkdir()
    prepare(FileStore(root, posix=UnsyncedPosix()), tensors)
    posix = posix_class(root, seed)
    act(posix, FileStore(root, posix=posix), tensors)
    posix.mark("done")
    expected = expected_files(tensors)
    figures = Figures(operations=len(posix.operations))
    disk = directory / "disk"
    for number, state in enumerate(disk_states(posix, seed)):
        figures.states += 1
        if number % every:
            continue
        figures.tried += 1
        state.write_to(disk)
        store = FileStore(disk, posix=UnsyncedPosix())
        try:
            found = _faults(store, bool(state.marks), expected, figures)
        except (StoreError, CheckpointError) as error:
            found = [f"{type(error).__name__}: {error}"]
        figures.wrong += [
            f"disk {number}, after operation {state.after}, {state.kept} of {state.outstanding}"
            f" outstanding kept: {fault}"
            for fault in found
        ]
        shutil.rmtree(disk)
    shutil.rmtree(root)
    return figures


def _faults(
    store: FileStore, is_committed: bool, expected: dict[str, bytes], figures: Figures
) -> list[str]:
    wrong = faults_found(store, is_committed, expected)
    if wrong:
        return wrong
    if Log(store).read().live[0].state == NEW:
        figures.new += 1
    else:
        figures.old += 1
    return faults_going_on(store)


def main(arguments: list[str]) -> int:
    """Run the whole sweep; 1 if any disk is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5, help="so many seeds, from --seed on")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    total = Figures()
    with tempfile.TemporaryDirectory(prefix="keepstep-crash-") as directory:
        place = Path(directory)
        for seed in range(options.seed, options.seed + options.runs):
            for tensors in (TENSORS, BIGGER):
                total.add(
                    power_loss(
                        place, seed=seed, act=drained, posix_class=ThreadedPosix, tensors=tensors
                    )
                )
                total.add(
                    power_loss(
                        place, seed=seed, act=at_once, posix_class=InterleavedPosix, tensors=tensors
                    )
                )
    print_report(
        "crash",
        options.seed,
        {
            "runs": options.runs,
            "operations": total.operations,
            "disks": total.tried,
            "showed_old": total.old,
            "showed_new": total.new,
            "wrong": len(total.wrong),
            "first_wrong": total.wrong[:5],
            "seconds": round(time.monotonic() - begun, 1),
        },
    )
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
