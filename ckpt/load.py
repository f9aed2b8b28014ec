"""A load as a transaction: everything is read and verified first, and only then anything changed.

registry.create_absent(...)                  # state that this optimizer makes lazily
structure = gather_structure(group, registry)
with stage(registry, structure, manifest, store) as staged:
    agree(group, ...)                        # S6: over all ranks
    staged.apply()

`stage` is for a rank alone. Ranks that share a host share the work by `Loading` (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from keepstep.ckpt.apply import Application
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.checksum import CHUNK_BYTES, CHUNK_DIGITS, chunk_count
from keepstep.ckpt.copies import Copies, Course, Lost
from keepstep.ckpt.errors import CheckpointError, FormatError, StructureMismatch
from keepstep.ckpt.fetch import check_belongs
from keepstep.ckpt.image import CHUNKS_AT, ImageHeader
from keepstep.ckpt.image_parse import parse
from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.ckpt.manifest import ImageRecord, Manifest
from keepstep.ckpt.mapping import StageMemory, populate
from keepstep.ckpt.mosaic import blocks, layout, shares, size_of, union
from keepstep.ckpt.plain_view import plain_view
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import (
    Options,
    Ranges,
    compare,
    find_sources,
    has_ranks,
    is_common,
    plan_reads,
)
from keepstep.ckpt.sources import Origin, origin_of
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Tier
from keepstep.ckpt.verify_image import planned_header
from keepstep.storage.errors import Permanent
from keepstep.storage.store import Store

_EXACT = Options()
_BLOCK_CHUNKS = 8
"""Chunks that a thread brings at a time: what it checks is still in the cache then."""

_FAR_THREADS = 4
"""At least so many wait for a network at once: that costs no core."""

Needs = Mapping[int, Ranges]
"""Image by rank -> its needed chunks."""


class Overwritten(CheckpointError):
    """Somebody wrote over a verified image while it was applied: what is live now is not a state.

    The process must end. Nobody may write there before the new generation is entered, so a process
    of an older one is still alive on this host.
    """


class Staged:
    """A verified state in memory, not applied yet. Close it, or use it in a ``with``."""

    def __init__(
        self,
        application: Application,
        read_bytes: Mapping[str, int],
        memory: StageMemory | None,
        in_place: Sequence[Copies] = (),
    ) -> None:
        self._application: Application | None = application
        self._memory = memory
        self._in_place = tuple(in_place)
        self.read_bytes = dict(read_bytes)
        """Bytes that this rank read, or verified in place, by tier."""

    def apply(self) -> None:
        """Copy the state into the registered tensors and values. Blocking.

        Raises:
            NotRepresentable: before anything is changed, if a tensor is not as registered.
            Overwritten: what was applied in place was written over meanwhile.
        """
        assert self._application is not None  # not closed yet
        self._application.run()
        for copies in self._in_place:
            if not copies.is_still_there():
                raise Overwritten(
                    f"{copies.key} in this host's memory was written over while it was applied; "
                    "a process of an older generation still runs here: end it, and start again"
                )

    def close(self) -> None:
        """Let go of the images and free the staging memory."""
        self._application = None
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Loading:
    """One rank's part in bringing a state to its host. Nothing live is changed by any of it.

    In order: `share`, once the needs of all ranks of the host are known; `bring` what is this
    rank's to bring; when all have, `mend` what was wrong in place for anybody; when all have
    done that, `finish`.

    Args:
        registry: what this rank has.
        structure: what all ranks have, so that all judge alike what is missing.
        manifest: the state, whatever its layout.
        origins: of the image of a rank, nearest first.
        options: what may differ.
        threads: that check what lies in place: this rank's share of the host's cores.

    Raises:
        StructureMismatch: listing what is missing, unexpected or changed.
        FormatError, NotRestorable: the manifest contradicts itself.
    """

    def __init__(
        self,
        registry: Registry,
        structure: Structure,
        manifest: Manifest,
        origins: Callable[[int], Sequence[Origin]],
        options: Options = _EXACT,
        threads: int = 1,
    ) -> None:
        self._registry = registry
        self._manifest = manifest
        self._records = {record.rank: record for record in manifest.images}
        self._origins = origins
        self._threads = threads
        chosen = compare(structure, manifest, options)
        self._values = _values(registry, structure, manifest, options)
        needs = {
            name: held.box
            for name, held in registry.tensors.items()
            if name in chosen and not held.box.is_empty
        }
        plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
        sources = find_sources(plan, needs, chosen)
        self._planned = {rank: planned_header(manifest, plan, rank) for rank in sorted(sources)}
        for rank, header in self._planned.items():
            _check_planned(manifest, self._records.get(rank), header)
        reads = plan_reads(sources, self._planned, manifest.tensors)
        self._pieces = reads.pieces
        self.needs: Needs = reads.chunks
        """What this rank needs itself."""
        self.course = Course()
        """How the copies have served."""
        self._copies: dict[int, Copies] = {}
        self._views: dict[int, memoryview] = {}
        self._all: dict[int, Ranges] = {}
        self._mine: Needs = {}
        self._parts: list[dict[int, Ranges]] = []
        self._index = 0
        self._in_place: set[int] = set()
        self._memory: StageMemory | None = None
        self._offsets: dict[int, int] = {}

    # The steps.

    def share(
        self, needs: Sequence[Needs], index: int, memory: Callable[[int], StageMemory]
    ) -> None:
        """Settle who brings what. Alike on all ranks of the host.

        Args:
            needs: of the ranks of this host, in one order for all.
            index: which of them is this one's.
            memory: makes, or opens, the staging memory that they share, of so many bytes.

        Raises OSError if the memory cannot be made.
        """
        self._all = union(needs)
        self._index = index
        self._copies = {image: self._copies_of(image) for image in self._all}
        self._in_place = {image for image, one in self._copies.items() if one.is_in_place}
        self._parts = self._shared(self._all, len(needs))
        self._mine = self._parts[index]
        sizes = {image: self._records[image].size_bytes for image in self._all}
        self._offsets, size_bytes = layout(sizes)
        self._memory = memory(size_bytes)

    def bring(self) -> dict[int, list[int]]:
        """Verify this rank's part of what lies in place, and stage its part of the rest. Blocking.

        Returns the chunks that are wrong in place, by image; all of an image's needed ones if it
        cannot be used in place at all.

        Raises:
            Lost: some chunk cannot be had from any copy.
            ArenaTooLarge: there is not the memory to stage it.
        """
        spoiled: dict[int, list[int]] = {}
        tasks: list[tuple[int, int, int]] = []
        for image, ranges in self._mine.items():
            if image not in self._in_place:
                self._put_header(image, self._parts)
                tasks += [(image, *block) for block in blocks(ranges, _BLOCK_CHUNKS)]
            elif self._view(image) is None:
                spoiled[image] = _numbers(ranges)
            else:
                self._copies[image].header()
                tasks += [(image, *block) for block in blocks(ranges, _BLOCK_CHUNKS)]
        for image in self.needs:
            if image in self._in_place and image not in spoiled and self._view(image) is None:
                spoiled[image] = _numbers(self.needs[image])
        for image, wrong in self._run(tasks):
            if wrong:
                spoiled.setdefault(image, []).extend(wrong)
        return spoiled

    def mend(self, spoiled: Iterable[Mapping[int, Sequence[int]]]) -> None:
        """Stage anew this rank's part of the images that are wrong in place for anybody here.

        Args:
            spoiled: what `bring` returned on each rank of this host.

        Raises as `bring`.
        """
        wrong: dict[int, set[int]] = {}
        for one in spoiled:
            for image, chunks in one.items():
                wrong.setdefault(image, set()).update(chunks)
        if not wrong:
            return
        for image, numbers in wrong.items():
            self._in_place.discard(image)
            self._views.pop(image, None)
            self._copies[image].spoil(numbers)
        parts = self._shared({image: self._all[image] for image in wrong}, len(self._parts))
        tasks = []
        for image, ranges in parts[self._index].items():
            self._put_header(image, parts)
            tasks += [(image, *block) for block in blocks(ranges, _BLOCK_CHUNKS)]
        self._run(tasks)

    def finish(self) -> Staged:
        """The state, ready to be applied, once all ranks of the host have brought their parts.

        Raises:
            FormatError: an image is not laid out as the manifest's plan says.
            Permanent: a page of a mapped file cannot be read.
        """
        data = {}
        for image, ranges in self.needs.items():
            view = self._bytes_of(image)
            planned = self._planned[image]
            _check_header(view[: planned.header_bytes], planned, self._manifest)
            data[image] = view[planned.header_bytes :]
            for first, last in ranges:
                self._make_present(image, data[image][first * CHUNK_BYTES : last * CHUNK_BYTES])
        application = Application(self._registry, self._pieces, data, self._values)
        in_place = [self._copies[image] for image in self.needs if image in self._in_place]
        return Staged(application, self.course.read_bytes, self._memory, in_place)

    def close(self) -> None:
        """Let go of what was begun, if it is not finished. After `finish`, close what it gave."""
        self._views.clear()
        if self._memory is not None:
            self._memory.close()

    # Inside.

    def _copies_of(self, image: int) -> Copies:
        record = self._records[image]
        return Copies(self._manifest.state, record, self._origins(image), self.course)

    def _shared(self, needed: Needs, ranks: int) -> list[dict[int, Ranges]]:
        sizes = {
            image: self._records[image].size_bytes - self._records[image].header_bytes
            for image in needed
        }
        return shares(needed, sizes, ranks)

    def _view(self, image: int) -> memoryview | None:
        if image not in self._views:
            view = self._copies[image].view()
            if view is None:
                return None
            self._views[image] = view
        return self._views[image]

    def _bytes_of(self, image: int) -> memoryview:
        if image in self._in_place:
            return self._views[image]
        return self._staged(image)

    def _staged(self, image: int) -> memoryview:
        assert self._memory is not None
        start = self._offsets[image]
        return self._memory.view[start : start + self._records[image].size_bytes]

    def _put_header(self, image: int, parts: Sequence[Needs]) -> None:
        """Read the header; the rank that brings the image's first chunks stages it too."""
        header = self._copies[image].header()
        first = next(index for index, part in enumerate(parts) if image in part)
        if first == self._index:
            assert self._memory is not None
            self._memory.reserve(self._offsets[image], len(header))
            self._staged(image)[: len(header)] = header

    def _run(self, tasks: Sequence[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
        """Carry out (image, first chunk, last chunk) tasks; which chunks were wrong in place."""
        is_far = any(image not in self._in_place for image, _, _ in tasks)
        threads = min(max(self._threads, _FAR_THREADS if is_far else 1), len(tasks))
        if threads <= 1:
            return [self._task(task) for task in tasks]
        with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-load") as pool:
            return list(pool.map(self._task, tasks))  # an error cancels those not begun

    def _task(self, task: tuple[int, int, int]) -> tuple[int, list[int]]:
        image, first, last = task
        copies = self._copies[image]
        if image in self._in_place:
            return image, copies.check_in_place(self._views[image], first, last)
        assert self._memory is not None
        record = self._records[image]
        data_bytes = record.size_bytes - record.header_bytes
        start = record.header_bytes + first * CHUNK_BYTES
        size_bytes = size_of(((first, last),), data_bytes)
        self._memory.reserve(self._offsets[image] + start, size_bytes)
        copies.read_into(first, last, self._staged(image)[start : start + size_bytes])
        return image, []

    def _make_present(self, image: int, data: memoryview) -> None:
        try:
            populate(data)
        except OSError as error:
            key = image_key(self._manifest.state, image)
            raise Permanent(f"{key}: {error}", key=key, errno=error.errno) from error


def stage(
    registry: Registry,
    structure: Structure,
    manifest: Manifest,
    store: Store,
    options: Options = _EXACT,
    threads: int = 1,
) -> Staged:
    """Read and verify what this rank needs of a checkpoint in one store. Blocking.

    Changes nothing. A store in a local directory is not copied: its files are verified, and later
    applied, where they lie.

    Args: as `Loading`; `store`: where the images are.

    Raises:
        StructureMismatch: listing what is missing, unexpected or changed.
        Corrupt, FormatError, NotRestorable: about the checkpoint's files.
        StoreError: as the store raises it.
        ArenaTooLarge: if there is not enough memory.
    """
    origin = origin_of(Place(Tier.STORE, ""), plain_view(store, manifest))
    loading = Loading(registry, structure, manifest, lambda image: (origin,), options, threads)
    try:
        loading.share([loading.needs], 0, StageMemory)
        loading.mend([loading.bring()])
        return loading.finish()
    except Lost as lost:
        loading.close()
        if lost.faults:
            raise lost.faults[-1].error from lost
        raise
    except BaseException:
        loading.close()
        raise


def _numbers(ranges: Ranges) -> list[int]:
    return [number for first, last in ranges for number in range(first, last)]


def _check_planned(manifest: Manifest, record: ImageRecord | None, planned: ImageHeader) -> None:
    """Raise FormatError unless the manifest has the image that its plan speaks of."""
    file = manifest_key(manifest.state)
    if record is None:
        raise FormatError(file, "images", f"an image of rank {planned.rank}", "none")
    found = (record.header_bytes, record.size_bytes)
    if found != (planned.header_bytes, planned.size_bytes):
        raise FormatError(
            file,
            f"the image of rank {planned.rank}",
            f"a header of {planned.header_bytes} bytes in a file of {planned.size_bytes}",
            f"{found[0]} in {found[1]}",
        )


def _check_header(header: memoryview, planned: ImageHeader, manifest: Manifest) -> None:
    """Raise FormatError unless a header that was vouched for is the planned one, sealed."""
    end = CHUNKS_AT + CHUNK_DIGITS * chunk_count(planned.data_bytes)
    encoded = memoryview(planned.encoded)
    if header[:CHUNKS_AT] == encoded[:CHUNKS_AT] and header[end:] == encoded[end:]:
        return
    key = image_key(planned.state, planned.rank)
    check_belongs(parse(header, key), manifest, planned.rank, key)
    raise FormatError(key, "header", "what the manifest's plan says", "another order of tensors")


def _values(
    registry: Registry, structure: Structure, manifest: Manifest, options: Options
) -> dict[str, object]:
    """The values to set: those that are registered and wanted."""
    with_ranks = has_ranks(structure, manifest)
    found, missing, changed = {}, [], []
    for name, value in registry.values.items():
        if not options.wants(name) or not (with_ranks or is_common(name)):
            continue
        if name not in manifest.values:
            missing.append(name)
            continue
        reason = value.refuse(manifest.values[name])
        if reason is not None:
            changed.append(f"{name}: {reason}")
        found[name] = manifest.values[name]
    if changed or (missing and not options.allow_missing):
        raise StructureMismatch(
            f"the values of generation {manifest.state.generation}, step {manifest.state.step} "
            f"do not fit; nothing was loaded",
            missing=() if options.allow_missing else missing,
            changed=changed,
        )
    return found
