"""All copies of one image as one source of verified chunks: the nearest first, then the next.

What a copy does not have right is read from the next one. Nothing is handed on that was not
checked: the manifest vouches for the header, the header for each chunk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from keepstep.ckpt.attempt import PAUSES_S, is_damage
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES, CHUNK_DIGITS, chunk_digest, digest128
from keepstep.ckpt.errors import CheckpointError, Corrupt, FormatError
from keepstep.ckpt.image import CHUNKS_AT, ImageHeader
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import ImageRecord, State
from keepstep.ckpt.mapping import populate
from keepstep.ckpt.sources import Origin
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import Permanent, StoreError, Transient

_NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """A copy that did not serve, once.

    Attributes:
        place: where the copy is.
        image: rank whose image it is.
        error: what was wrong; a Corrupt names tensor and offset.
    """

    place: Place
    image: int
    error: CheckpointError | StoreError

    @property
    def is_trouble(self) -> bool:
        """Whether it says nothing of the state: the store could not be asked."""
        return self.place.tier is Tier.STORE and not is_damage(self.error)


class Lost(CheckpointError):
    """No copy had it. `faults`: what was wrong with each, the nearest first."""

    def __init__(self, what: str, faults: Sequence[Fault]) -> None:
        said = "; ".join(f"{fault.place}: {fault.error}" for fault in faults)
        super().__init__(f"{what} cannot be had: {said or 'no copy of it can be reached'}")
        self.faults = tuple(faults)

    @property
    def is_trouble(self) -> bool:
        """Whether the store might have it, and could not be asked."""
        return any(fault.is_trouble for fault in self.faults)


class Course:
    """How the copies of one state have served so far. Shared by all its images; thread-safe.

    Attributes:
        faults: in the order in which they came.
        read_bytes: by tier, what was read, or verified in place.
        sleep: waits so many seconds between two tries.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.faults: list[Fault] = []
        self.read_bytes: dict[str, int] = {}
        self.sleep = sleep
        self._silent: set[Place] = set()
        self._lock = threading.Lock()

    def failed(self, fault: Fault) -> None:
        """Note it. A place that does not answer is asked last from now on."""
        with self._lock:
            self.faults.append(fault)
            if isinstance(fault.error, Transient):
                self._silent.add(fault.place)

    def is_silent(self, place: Place) -> bool:
        """Whether it did not answer once."""
        return place in self._silent

    def count(self, place: Place, size_bytes: int) -> None:
        """So many bytes came from there."""
        with self._lock:
            tier = place.tier.value
            self.read_bytes[tier] = self.read_bytes.get(tier, 0) + size_bytes


class Copies:
    """All copies of one image. Thread-safe.

    Args:
        state: whose image.
        record: the image's, as the manifest has it.
        origins: where its copies are, nearest first.
        course: shared by the images of the state.
    """

    def __init__(
        self, state: State, record: ImageRecord, origins: Sequence[Origin], course: Course
    ) -> None:
        self.key = image_key(state, record.rank)
        self._record = record
        self._origins = tuple(origins)
        self._course = course
        self._header: bytes | None = None
        self._spoiled: set[int] = set()
        self._lock = threading.Lock()

    @property
    def is_in_place(self) -> bool:
        """Whether the nearest copy can be used where it lies."""
        return bool(self._origins) and self._origins[0].is_in_place

    def view(self) -> memoryview | None:
        """The nearest copy where it lies: its header checked, its data not. None, and noted: it
        is wrong."""
        origin = self._origins[0]
        try:
            view = origin.view(self.key)
            self._check_size(len(view))
            self._check_header(view[: self._record.header_bytes])
        except (FormatError, StoreError) as error:
            self._note(origin, error)
            return None
        return view

    def is_still_there(self) -> bool:
        """Whether the nearest copy lies where it lay, and was not overwritten since."""
        try:
            self._check_size(len(self._origins[0].view(self.key)))
        except (FormatError, StoreError):
            return False
        return True

    def header(self) -> bytes:
        """The header's bytes, whose digest is the manifest's. Read once. Raises Lost."""
        with self._lock:
            if self._header is None:
                self._header = self._read_header()
            return self._header

    def check_in_place(self, view: memoryview, first: int, last: int) -> list[int]:
        """Verify chunks [first, last) of the nearest copy; returns those that are wrong.

        Raises Lost for want of a header.
        """
        start, end = self._span(first, last)
        origin = self._origins[0]
        data = view[self._record.header_bytes + start : self._record.header_bytes + end]
        try:
            populate(data)
        except OSError as error:
            self._note(origin, Permanent(f"{self.key}: {error}", errno=error.errno))
            return list(range(first, last))
        self._course.count(origin.place, end - start)
        return [self._chunk_at(fault) for fault in self._wrong(origin, data, first)]

    def spoil(self, chunks: Iterable[int]) -> None:
        """These chunks of the nearest copy are wrong: never ask it for them again."""
        self._spoiled.update(chunks)

    def read_into(self, first: int, last: int, target: memoryview) -> None:
        """Fill `target` with chunks [first, last), each from the nearest copy that has it right.

        Raises Lost; the target then has bytes that must not be used.
        """
        missing = set(range(first, last))
        faults: list[Fault] = []
        base, _ = self._span(first, last)
        for origin in self._order():
            asked = missing - self._spoiled if origin is self._origins[0] else missing
            for low, high in _stretches(sorted(asked)):
                start, end = self._span(low, high)
                part = target[start - base : end - base]
                wrong = self._bring(origin, low, part)
                missing -= set(range(low, high))
                missing |= self._still_missing(wrong, low, high)
                faults += wrong
            if not missing:
                return
        what = f"data chunk {min(missing)} of {self.key}"
        raise Lost(what, faults or [one for one in self._course.faults if one.image == self._rank])

    # Inside.

    @property
    def _rank(self) -> int:
        return self._record.rank

    def _bring(self, origin: Origin, first: int, target: memoryview) -> list[Fault]:
        """Read and check a stretch of chunks from one copy."""
        offset = self._record.header_bytes + first * CHUNK_BYTES
        try:
            self._patiently(origin, lambda: origin.store.read_into(self.key, offset, target))
        except StoreError as error:
            return [self._note(origin, error)]
        self._course.count(origin.place, len(target))
        return self._wrong(origin, target, first)

    def _still_missing(self, faults: Sequence[Fault], first: int, last: int) -> set[int]:
        """Chunks of a stretch that a copy did not give right."""
        if any(not isinstance(fault.error, Corrupt) for fault in faults):
            return set(range(first, last))
        return {self._chunk_at(fault) for fault in faults}

    def _chunk_at(self, fault: Fault) -> int:
        assert isinstance(fault.error, Corrupt)
        assert fault.error.offset is not None
        return (fault.error.offset - self._record.header_bytes) // CHUNK_BYTES

    def _order(self) -> Iterator[Origin]:
        """The origins as they are to be asked: who did not answer once comes last."""
        yield from sorted(self._origins, key=lambda one: self._course.is_silent(one.place))

    def _patiently(self, origin: Origin, call: Callable[[], None]) -> None:
        """`call`, again after a pause while the failure may pass: once for a peer."""
        for pause_s in PAUSES_S if origin.place.tier is Tier.STORE else PAUSES_S[:1]:
            try:
                call()
            except Transient:
                self._course.sleep(pause_s)
            else:
                return
        call()

    def _read_header(self) -> bytes:
        faults = []
        for origin in self._order():
            found: list[bytes] = []
            try:
                self._patiently(origin, lambda: found.append(self._header_in(origin)))  # noqa: B023
            except (FormatError, StoreError) as error:
                faults.append(self._note(origin, error))
                continue
            self._course.count(origin.place, len(found[0]))
            return found[0]
        raise Lost(f"the header of {self.key}", faults)

    def _header_in(self, origin: Origin) -> bytes:
        self._check_size(origin.store.stat(self.key).size_bytes)
        data = origin.store.get_range(self.key, 0, self._record.header_bytes)
        self._check_header(data)
        return data

    def _check_header(self, data: bytes | memoryview) -> None:
        digest = digest128(data)
        if digest != self._record.digest:
            raise Corrupt(self.key, "header", f"digest {self._record.digest}", digest, offset=0)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes != self._record.size_bytes:
            expected = f"{self._record.size_bytes} bytes"
            raise FormatError(self.key, "size", expected, f"{size_bytes}")

    def _wrong(self, origin: Origin, data: memoryview, first: int) -> list[Fault]:
        """Compare chunks from `first` on with their checksums; notes those that differ."""
        header = self.header()
        faults = []
        for number, start in enumerate(range(0, len(data), CHUNK_BYTES), first):
            found = chunk_digest(data[start : start + CHUNK_BYTES])
            place = CHUNKS_AT + number * CHUNK_DIGITS
            expected = header[place : place + CHUNK_DIGITS].decode("ascii", "replace")
            if found != expected:
                faults.append(self._note(origin, self._corrupt(header, number, expected, found)))
        return faults

    def _corrupt(self, header: bytes, number: int, expected: str, found: str) -> Corrupt:
        parsed: ImageHeader = parse(header, self.key)
        start, end = self._span(number, number + 1)
        names = parsed.names_at(start, end - start)
        listed = ", ".join(map(repr, names[:_NAMED_MAX]))
        more = ", ..." if len(names) > _NAMED_MAX else ""
        return Corrupt(
            self.key,
            f"data chunk {number} ({listed}{more})",
            f"checksum {expected}",
            found,
            tensor=names[0] if names else None,
            offset=self._record.header_bytes + start,
        )

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Bytes of data [start, end) of chunks [first, last)."""
        data_bytes = self._record.size_bytes - self._record.header_bytes
        return first * CHUNK_BYTES, min(last * CHUNK_BYTES, data_bytes)

    def _note(self, origin: Origin, error: CheckpointError | StoreError) -> Fault:
        fault = Fault(origin.place, self._rank, error)
        self._course.failed(fault)
        return fault


def _stretches(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges [first, last)."""
    first = None
    for number, chunk in enumerate(chunks):
        first = chunk if first is None else first
        if number + 1 == len(chunks) or chunks[number + 1] != chunk + 1:
            yield first, chunk + 1
            first = None
