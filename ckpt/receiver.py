"""The receiving side of replication: takes an offer, pulls the image into a slot, verifies it.

A chunk is checked while the kernel receives the next ones. A wrong one is told, and pulled again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from keepstep.ckpt.checksum import (
    CHUNK_BYTES,
    CHUNK_DIGITS,
    chunk_count,
    chunk_digest,
    digest128,
)
from keepstep.ckpt.document import shortened
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.image import CHUNKS_AT, ImageHeader, seal
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import NoRoom, Refusal
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.plane_messages import Accepted, Offer, PullFailed
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.service import PeerSlots, Reporter
from keepstep.ckpt.shelf import Shelf
from keepstep.ckpt.structure import Structure
from keepstep.storage.errors import StoreError
from keepstep.storage.peer import PeerStore
from keepstep.storage.token import Token

PULLS_MAX = 3
"""So often a chunk is pulled before the offer is given up; the sender offers again."""


class Receiver:
    """Takes offers of other keepers. Several threads may call it.

    Args:
        config: job, host and patience are used.
        slots: where images go.
        check_fence: raises Stale for an older (generation, term) than was promised.
        shelf: what this host has already.
        reporter: for events.
        token: for the pull from the sender.
    """

    def __init__(
        self,
        config: KeeperConfig,
        slots: PeerSlots,
        check_fence: Callable[[int, int], None],
        shelf: Shelf,
        reporter: Reporter,
        token: Token,
    ) -> None:
        self._job, self._host = config.job, config.host
        self._timeout_s = config.patience_s
        self._slots = slots
        self._check_fence = check_fence
        self._shelf = shelf
        self._reporter = reporter
        self._token = token
        self._keeper = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._ranks: dict[int, threading.Lock] = {}
        self._sources: dict[str, PeerStore] = {}
        self._headers: dict[int, ImageHeader] = {}  # the last one of each rank
        self._is_closed = False

    def close(self) -> None:
        """Close the connections that lie idle; later offers are refused."""
        with self._lock:
            self._is_closed = True
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.close()

    def receive(self, offer: Offer) -> Accepted:
        """Have a verified and sealed copy of the image. Blocking.

        Raises:
            Stale: the sender is of an older generation or term than was promised.
            NoRoom: no slot may be used for it now.
            PullFailed: the sender is not there, sends too little, or wrong bytes again and again.
            Refusal: it is meant for another host or job, or makes no sense.
        """
        self._check(offer)
        rank = offer.record.rank
        with self._alone(rank):
            held = self._shelf.find(offer.state, rank)
            if held is None or held.record != offer.record:
                self._copy(offer)
        return Accepted(self._keeper)

    def _check(self, offer: Offer) -> None:
        for what, expected, found in (
            ("job", self._job, offer.job),
            ("host", self._host, offer.to_host),
        ):
            if expected != found:
                raise Refusal(f"an offer for {what} {shortened(found)!r}; this is {expected!r}")
        if self._is_closed:
            raise Refusal("this keeper is about to end")
        self._check_fence(offer.generation, offer.term)
        record = offer.record
        if not 0 < record.header_bytes <= record.size_bytes or offer.state.generation < 0:
            raise Refusal(f"an offer of an image that cannot be: {record}")
        if offer.state.generation > offer.generation:
            raise Refusal(f"generation {offer.generation} offers {offer.state}, a later one's")

    @contextmanager
    def _alone(self, rank: int) -> Iterator[None]:
        """One offer for each rank at a time: a sender that gave up may come while we still pull."""
        with self._lock:
            lock = self._ranks.setdefault(rank, threading.Lock())
        if not lock.acquire(timeout=self._timeout_s / 2):
            raise NoRoom(f"another image of rank {rank} is still being pulled")
        try:
            yield
        finally:
            lock.release()

    def _copy(self, offer: Offer) -> None:
        structure = self._structure(offer)
        record = offer.record
        slot = self._slots.take(
            offer.generation,
            offer.term,
            offer.state,
            record.rank,
            record.size_bytes,
            offer.agreed_acked,
        )
        try:
            header = self._pull(offer, slot)
        except BaseException:
            self._slots.drop(slot)
            raise
        self._slots.keep(slot, header, record, bytes(offer.values), structure)

    def _structure(self, offer: Offer) -> Structure:
        found = self._slots.structure(offer.plan_digest)
        if found is None:
            client = PlaneClient(offer.address, self._token, self._timeout_s)
            try:
                found = client.structure(offer.plan_digest)
            finally:
                client.close()
            self._slots.keep_structure(found)
        return found

    def _source(self, address: str) -> PeerStore:
        with self._lock:
            if address not in self._sources:
                try:
                    store = PeerStore(address, "memory", self._token, self._timeout_s)
                except ValueError as error:
                    raise Refusal(str(error)) from error
                self._sources[address] = store
            return self._sources[address]

    def _pull(self, offer: Offer, slot: Slot) -> ImageHeader:
        """Fill the slot's memory with the image; all of it is verified on return."""
        record = offer.record
        key = image_key(offer.state, record.rank)
        source = self._source(offer.address)
        image = slot.image[: record.size_bytes]
        wrong = []
        try:
            with source.reading(key, 0, record.size_bytes) as answer:
                answer.fill(image[: record.header_bytes])
                header = self._header(offer, bytes(image[: record.header_bytes]))
                for index, digest in enumerate(header.digests):
                    chunk = _chunk(image, header, index)
                    answer.fill(chunk)
                    if chunk_digest(chunk) != digest:
                        wrong.append(index)
            for index in wrong:
                self._pull_again(offer, source, image, header, index)
        except StoreError as error:
            self._forget(offer.address)
            raise PullFailed(str(error)) from error
        return header

    def _forget(self, address: str) -> None:
        """A sender that could not be read from: its connections are not to be used again."""
        with self._lock:
            source = self._sources.pop(address, None)
        if source is not None:
            source.close()

    def _pull_again(
        self, offer: Offer, source: PeerStore, image: memoryview, header: ImageHeader, index: int
    ) -> None:
        chunk = _chunk(image, header, index)
        offset = header.header_bytes + index * CHUNK_BYTES
        names = header.names_at(index * CHUNK_BYTES, chunk.nbytes)
        for tries in range(1, PULLS_MAX + 1):
            self._reporter.event(
                "wrong_bytes",
                f"a chunk of rank {header.rank}'s image came from host {offer.from_host}'s memory "
                "with a wrong checksum; it is pulled again",
                tensors=names,
                rank=header.rank,
                generation=offer.state.generation,
                step=offer.state.step,
                tier="memory",
                host=offer.from_host,
                offset=offset,
                size_bytes=chunk.nbytes,
                tries=tries,
            )
            if tries == PULLS_MAX:
                break
            source.read_into(image_key(offer.state, header.rank), offset, chunk)
            if chunk_digest(chunk) == header.digests[index]:
                return
        raise PullFailed(
            f"the memory of host {offer.from_host} has wrong bytes at offset {offset} of rank "
            f"{header.rank}'s image of {offer.state} (tensors {', '.join(names[:5])}): its "
            "checksum did not match three times"
        )

    def _header(self, offer: Offer, encoded: bytes) -> ImageHeader:
        """The image's header, verified by the offer's digest. Raises PullFailed."""
        record, state = offer.record, offer.state
        if digest128(encoded) != record.digest:
            self._reporter.event(
                "wrong_bytes",
                f"the header of rank {record.rank}'s image came from host {offer.from_host}'s "
                "memory with a wrong checksum; it is pulled again",
                tensors=[],
                rank=record.rank,
                generation=state.generation,
                step=state.step,
                tier="memory",
                host=offer.from_host,
                offset=0,
                size_bytes=len(encoded),
            )
            raise PullFailed(f"the header's checksum does not match in {offer.from_host}'s memory")
        header = _as_before(self._headers.get(record.rank), offer, encoded)
        if header is None:
            file = image_key(state, record.rank)
            try:
                header = parse(encoded, file, record.size_bytes)
            except FormatError as error:
                raise PullFailed(str(error)) from error
        found = (header.job, header.state, header.rank, header.plan_digest)
        expected = (offer.job, state, record.rank, offer.plan_digest)
        if found != expected:
            raise PullFailed(f"the image is of {found}, expected {expected}")
        self._headers[record.rank] = header
        return header


def _chunk(image: memoryview, header: ImageHeader, index: int) -> memoryview:
    start = header.header_bytes + index * CHUNK_BYTES
    return image[start : start + CHUNK_BYTES]


def _as_before(before: ImageHeader | None, offer: Offer, encoded: bytes) -> ImageHeader | None:
    """The header that `encoded` is, if it differs from the one `before` in state and checksums
    alone: as it does at every step. Then it need not be parsed."""
    if before is None or before.header_bytes != len(encoded):
        return None
    if before.size_bytes != offer.record.size_bytes:
        return None
    template = before.at(offer.state)
    end = CHUNKS_AT + CHUNK_DIGITS * chunk_count(before.data_bytes)
    text = encoded[CHUNKS_AT:end]
    if not text.isalnum():
        return None
    digits = text.decode()
    digests = [digits[at : at + CHUNK_DIGITS] for at in range(0, len(digits), CHUNK_DIGITS)]
    if seal(template, digests) != encoded:
        return None
    return replace(template, digests=tuple(digests), encoded=encoded)
