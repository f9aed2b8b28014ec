"""The sealed images of a pool as a read-only store: by the keys that they would have in any store.

    states/g000003/s000000000120/r00005.safetensors

An image may be overwritten by its rank at any moment, by the rule of `slots`, unless its keeper
pinned it. What `read_into` and the like return was whole and sealed until they were done: they look
at the table again afterwards. Who uses `view` checks what was read against the digests, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.ckpt.keys import ImageKey, image_key, parse_key
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_errors import PoolDamaged
from keepstep.ckpt.pool_table import SlotFacts, SlotStatus
from keepstep.storage.errors import NotFound, TooLarge, Truncated
from keepstep.storage.keys import check_key, check_prefix
from keepstep.storage.read_only import ReadOnly
from keepstep.storage.store import Capabilities, ObjectInfo
from keepstep.storage.writer import as_bytes_view


class PoolStore(ReadOnly):
    """Reads the images that are SEALED at the moment of each call. Thread-safe."""

    why_read_only = "a pool can only be read as a store; its images come from ranks and peers"

    def __init__(self, pool: Pool) -> None:
        """The pool must stay open for as long as slots are added to it."""
        self._pool = pool

    @property
    def url(self) -> str:
        """For messages; it cannot be opened from elsewhere."""
        return f"pool://{self._pool.path}"

    @property
    def capabilities(self) -> Capabilities:
        """Nothing can be written, and nothing outlives the host."""
        return Capabilities(put_if_absent=False, durable=False)

    def view(self, key: str) -> memoryview:
        """The image in place: read-only, no copy. Raises NotFound.

        Other bytes come under it when its slot is used again.
        """
        slot, facts = self._find("view", key)
        return slot.image[: facts.size_bytes].toreadonly()

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        slot, facts = self._find("get", key)
        if facts.size_bytes > bytes_max:
            raise TooLarge(
                f"get {key!r} in {self.url}: {facts.size_bytes} bytes, expected at most "
                f"{bytes_max}",
                operation="get",
                key=key,
                where=self.url,
            )
        return self._copied("get", key, slot, facts, 0, facts.size_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        slot, facts = self._find("get_range", key)
        self._check_range("get_range", key, facts, offset, length)
        return self._copied("get_range", key, slot, facts, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`. On NotFound the target may hold bytes of another image."""
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        slot, facts = self._find("read_into", key)
        self._check_range("read_into", key, facts, offset, len(view))
        view[:] = slot.image[offset : offset + len(view)]
        self._check_still("read_into", key, slot, facts)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`. A pool keeps no times: `modified_s` is 0."""
        _, facts = self._find("stat", key)
        return ObjectInfo(key, facts.size_bytes, 0.0)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. Shows the pool as it was at this call."""
        check_prefix(prefix, operation="list", where=self.url)
        found = {
            image_key(facts.state, facts.rank): facts.size_bytes for _, facts in self._sealed()
        }
        return (
            ObjectInfo(key, size_bytes, 0.0)
            for key, size_bytes in sorted(found.items())
            if key.startswith(prefix)
        )

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """None: what is not sealed is not in this store."""
        check_prefix(prefix, operation="leftovers", where=self.url)
        return iter(())

    def _sealed(self) -> Iterator[tuple[Slot, SlotFacts]]:
        for slot in self._pool.slots:
            if slot.status is not SlotStatus.SEALED:
                continue
            try:
                facts = slot.read()
            except PoolDamaged:
                continue  # its keeper finds it, and says so
            if facts.status is SlotStatus.SEALED:
                yield slot, facts

    def _find(self, operation: str, key: str) -> tuple[Slot, SlotFacts]:
        check_key(key, operation=operation, where=self.url)
        wanted = parse_key(key)
        if isinstance(wanted, ImageKey):
            for slot, facts in self._sealed():
                if facts.state == wanted.state and facts.rank == wanted.rank:
                    return slot, facts
        raise self._gone(operation, key, "no such image is sealed there")

    def _copied(
        self, operation: str, key: str, slot: Slot, facts: SlotFacts, offset: int, length: int
    ) -> bytes:
        data = bytes(slot.image[offset : offset + length])
        self._check_still(operation, key, slot, facts)
        return data

    def _check_still(self, operation: str, key: str, slot: Slot, facts: SlotFacts) -> None:
        """Raise NotFound if the image has been overwritten, maybe, while it was read."""
        if not slot.is_still(facts):
            raise self._gone(operation, key, "the image was overwritten while it was read")

    def _check_range(
        self, operation: str, key: str, facts: SlotFacts, offset: int, length: int
    ) -> None:
        if offset < 0 or length < 0:
            raise ValueError(f"{operation} {key!r}: offset {offset}, length {length}: negative")
        if offset + length > facts.size_bytes:
            raise Truncated(
                f"{operation} {key!r} in {self.url}: bytes {offset} to {offset + length} asked for,"
                f" the object has {facts.size_bytes}",
                operation=operation,
                key=key,
                where=self.url,
            )

    def _gone(self, operation: str, key: str, why: str) -> NotFound:
        return NotFound(
            f"{operation} {key!r} in {self.url}: {why}",
            operation=operation,
            key=key,
            where=self.url,
        )
