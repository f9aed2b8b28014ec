"""The shelf: all sealed images in this host's memory, and who is reading which. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.manifest import FORMAT_VERSION, Description, ImageRecord, State
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """One sealed image in the pool.

    Attributes:
        state: whose image it is.
        rank: likewise.
        is_own: of a rank of this host; else a peer's.
        header: the sealed header.
        record: what a manifest says of the image.
        due: the tiers that it is to go to.
        slot: its index in the pool's table.
        view: the image's bytes, all of them. Good while `Shelf.hold` holds it.
        values: the state's JSON values.
        structure: of all ranks.
    """

    state: State
    rank: int
    is_own: bool
    header: ImageHeader
    record: ImageRecord
    due: Due
    slot: int
    view: memoryview
    values: dict[str, Any]
    structure: Structure

    def description(self) -> Description:
        """What the state is, without images."""
        structure = self.structure
        return Description(
            format=FORMAT_VERSION,
            job=self.header.job,
            state=self.state,
            mesh=structure.mesh,
            placements=structure.placements,
            tensors=structure.tensors,
            aliases=structure.aliases,
            values=self.values,
            plan_digest=structure.digest,
        )


class Shelf:
    """Sealed images by (state, rank).

    An image that its writer overwrites by the rule of slots leaves the shelf a moment later, held
    or not: who reads an image of which that may be true checks what it read against the digests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: dict[tuple[State, int], Shelved] = {}
        self._held: Counter[int] = Counter()
        self._watchers: list[Callable[[Shelved], None]] = []

    def add(self, shelved: Shelved) -> None:
        """Put an image up, and call the watchers (in this thread) if it is an own one."""
        with self._lock:
            self._images[shelved.state, shelved.rank] = shelved
            watchers = tuple(self._watchers) if shelved.is_own else ()
        for watcher in watchers:
            watcher(shelved)

    def remove(self, state: State, rank: int) -> None:
        """Take an image down. No error if there is none."""
        with self._lock:
            self._images.pop((state, rank), None)

    def find(self, state: State, rank: int) -> Shelved | None:
        """The image of `rank` in `state`, or None."""
        with self._lock:
            return self._images.get((state, rank))

    def all(self) -> tuple[Shelved, ...]:
        """All images, by state and rank."""
        with self._lock:
            return tuple(image for _, image in sorted(self._images.items()))

    @contextmanager
    def hold(self, shelved: Shelved) -> Iterator[bool]:
        """Keep the keeper from freeing or reusing the image's slot meanwhile.

        Yields whether the image was still on the shelf; its bytes must not be used if not.
        """
        with self._lock:
            is_there = self._images.get((shelved.state, shelved.rank)) is shelved
            if is_there:
                self._held[shelved.slot] += 1
        try:
            yield is_there
        finally:
            if is_there:
                with self._lock:
                    self._held[shelved.slot] -= 1
                    if not self._held[shelved.slot]:
                        del self._held[shelved.slot]

    def held(self) -> frozenset[int]:
        """The slots that are held."""
        with self._lock:
            return frozenset(self._held)

    def watch(self, callback: Callable[[Shelved], None]) -> None:
        """Have `callback` called with each own image from now on, by step for each rank."""
        with self._lock:
            self._watchers.append(callback)
