"""A pool with slots for one rank and no keeper: the test seals, acknowledges and frees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from keepstep.ckpt.control import Entered
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_table import Seat, SlotStatus
from keepstep.ckpt.process import this_process
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import Level
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.structure import Structure, merge_structures
from keepstep.ckpt.torch_dtypes import torch_dtype

JOB = "job"


def structure_alone(registry: Registry) -> Structure:
    """The structure of the only rank."""
    return merge_structures([registry.structure()])


@dataclass
class Shelves:
    """The keeper's place, held by the test."""

    pool: Pool
    slots: tuple[Slot, ...]
    seat: Seat
    entered: Entered

    def seal(self, acked: bool = True) -> int:
        """Seal what is captured, and say so in the seat; the newest sealed step."""
        for slot in self.slots:
            if slot.status is SlotStatus.CAPTURED:
                slot.sealed()
                self.seat.sealed = max(self.seat.sealed, slot.state.step)
        if acked:
            self.seat.acked = self.seat.sealed
        return self.seat.sealed

    def of(self, step: int) -> Slot:
        """The slot with the state after `step`."""
        full = (SlotStatus.CAPTURED, SlotStatus.SEALED)
        (found,) = [one for one in self.slots if one.status in full and one.state.step == step]
        return found

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """What the image of `step` has, copied, by name."""
        slot = self.of(step)
        return image_tensors(slot.image[: slot.size_bytes])


def image_tensors(image: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of an image, copied."""
    header = parse(image[: header_size(image, "image", len(image))], "image", len(image))
    found = {}
    for name, item in header.items.items():
        start = header.header_bytes + item.offset
        data = torch.frombuffer(
            bytearray(image[start : start + item.size_bytes]), dtype=torch.uint8
        )
        found[name] = data.view(torch_dtype(item.dtype.name)).view(item.box.sizes)
    return found


@contextlib.contextmanager
def shelves(
    directory: Path, capacity_bytes: int, *, slots: int = 3, rank: int = 0, generation: int = 1
) -> Iterator[Shelves]:
    """A pool in `directory` with slots for one rank, entered in `generation`."""
    writer = this_process()
    with Pool.create(directory / "pool") as pool:
        made = tuple(pool.add_slot(capacity_bytes) for _ in range(slots))
        for slot in made:
            slot.assign(writer, rank)
        pool.seats[0].take(rank, writer, generation)
        entered = Entered(str(pool.path), 0, tuple(slot.index for slot in made))
        yield Shelves(pool, made, pool.seats[0], entered)


@contextlib.contextmanager
def opened(
    directory: Path, registry: Registry, *, slots: int = 3, generation: int = 1
) -> Iterator[tuple[Snapshots, Shelves]]:
    """Snapshots of the only rank, open on a pool of their own."""
    snapshots = Snapshots(registry, structure_alone(registry), JOB)
    with shelves(directory, snapshots.size_bytes, slots=slots, generation=generation) as place:
        snapshots.open(place.entered, generation, slots)
        try:
            yield snapshots, place
        finally:
            snapshots.close()


NOBODY = Level()
"""What is agreed before anything is."""
