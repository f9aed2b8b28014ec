"""One rank's side of a save: plan once, capture, seal, write. No collectives.

`capture` blocks for one memory copy; sealing and writing go on in one background thread, which
touches no tensor. The commit is somebody else's: it needs the records of all ranks.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from keepstep.ckpt.arena import Arena
from keepstep.ckpt.capture import Capture
from keepstep.ckpt.checksum import chunk_digests
from keepstep.ckpt.errors import WrongMoment
from keepstep.ckpt.image import build, image_record, items_of, seal
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.structure import Structure
from keepstep.storage.store import Store


class Saver:
    """Saves the state of one registry, again and again, through one arena.

    A failed save changes nothing that was good before, and the saver can be used again.

    Args:
        registry: the state; its structure must be part of `structure`.
        structure: what all ranks registered (`merge_structures`).
        store: where images go.
        job: the job's name, for the header.

    Raises:
        ArenaTooLarge: if this machine has not the memory; nothing is allocated then.
    """

    def __init__(self, registry: Registry, structure: Structure, store: Store, job: str) -> None:
        self._registry = registry
        self._version = registry.version
        self._store = store
        mesh = structure.mesh
        owned = Plan(mesh, structure.placements, structure.tensors).owned(registry.rank)
        items = items_of(structure.tensors, owned)
        start = State(generation=0, step=0)
        self._header = build(job, start, registry.rank, mesh, structure.digest, items)
        self._owns_bytes = self._header.data_bytes > 0
        # A restore needs a little more than the image: the chunks around what other ranks own.
        spare_bytes = self.size_bytes // 8 + (64 << 20)
        self.arena = Arena(self.size_bytes, f"the image of rank {registry.rank}", spare_bytes)
        """The image's memory. Free for other use (a restore) while no save is going on."""
        self._capture = Capture(registry, self._header, self.arena.view)
        self._captured: State | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepstep-save")
        self._running: Future[ImageRecord | None] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of this rank's image; 0 if it owns nothing. For the line printed at start."""
        return self._header.size_bytes if self._owns_bytes else 0

    @property
    def is_running(self) -> bool:
        """Whether a save is going on, or its outcome has not been taken yet."""
        return self._running is not None

    def capture(self, state: State) -> dict[str, Any]:
        """Copy what this rank owns, as it is now, and return the values of this moment.

        Blocking; on return the live tensors may change.

        Raises:
            WrongMoment: if the last save's outcome has not been taken with `poll` or `wait`; or
                if tensors were registered since the plan was made (make a new Saver).
            NotRepresentable: naming what is not as it was registered.
        """
        if self._running is not None:
            raise WrongMoment(
                f"cannot capture {state}: the save before it is still going on; wait for it"
            )
        if self._registry.version != self._version:
            raise WrongMoment(
                f"cannot capture {state}: the structure has changed since the plan was made; "
                f"gather the structures of all ranks and make a new Saver"
            )
        self._captured = None
        values = self._registry.read_values()
        if self._owns_bytes:
            self._capture.run()
        self._captured = state
        return values

    def start(self) -> None:
        """Seal and write what was captured, in the background. Returns at once."""
        if self._captured is None or self._running is not None:
            raise WrongMoment("nothing is captured that is not being written; capture first")
        state, self._captured = self._captured, None
        self._running = self._thread.submit(self._write, state)

    def poll(self) -> bool:
        """Whether the write that was started has ended, well or badly; `wait` then tells."""
        return self._running is not None and self._running.done()

    def wait(self, timeout_s: float | None = None) -> ImageRecord | None:
        """The outcome of the write: its record for the manifest (None: this rank owns nothing).

        On return the image is durable in the store, and the saver is free.

        Raises:
            StoreError: as the store raised it, errno and all. The saver is free then too.
            TimeoutError: if it has not ended by then. It goes on.
            WrongMoment: if nothing was started.
        """
        if self._running is None:
            raise WrongMoment("no save is going on; capture and start one")
        running = self._running
        try:
            return running.result(timeout_s)
        finally:
            if running.done():
                self._running = None

    def close(self) -> None:
        """Wait for a write that is going on, drop its outcome, and free thread and memory."""
        self._thread.shutdown(wait=True)
        self._running = None
        del self._capture
        self.arena.close()

    def _write(self, state: State) -> ImageRecord | None:
        if not self._owns_bytes:
            return None
        header = self._header.at(state)
        begin, end = header.header_bytes, header.size_bytes
        sealed = seal(header, chunk_digests(self.arena.view[begin:end]))
        self.arena.view[:begin] = sealed
        self._store.put(image_key(state, header.rank), self.arena.view[:end])
        return image_record(header, sealed)
