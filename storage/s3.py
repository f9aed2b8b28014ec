"""A store in a bucket of an S3 server: AWS, or anything that speaks its protocol.

An object is the S3 object ``prefix/key``. Large ones go up as multipart uploads and come down as
ranges, several at once, in bounded memory. Every part carries its MD5, so that the server refuses
what was damaged on its way. A prefix that holds a store holds the object ``.keepstep-store``, which
no key can be: writing it twice on the condition that it is new shows whether the server means it.

Two names, "a" and "a/b", may both be objects here; whether they may on a given server, it decides.
"""

from __future__ import annotations

import asyncio
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress

from keepstep.storage.errors import (
    AlreadyExists,
    NotFound,
    Permanent,
    TooLarge,
    Transient,
    Truncated,
)
from keepstep.storage.keys import check_key, check_prefix, is_key
from keepstep.storage.s3_client import Answer, Arguments, S3Client
from keepstep.storage.s3_errors import Call
from keepstep.storage.s3_upload import Upload, md5_base64, part_size
from keepstep.storage.store import Buffer, Capabilities, ObjectInfo, SingleWriterWarning
from keepstep.storage.writer import as_bytes_view

MARKER = ".keepstep-store"
_MARKER_TEXT = (
    b"Keepstep keeps checkpoints under this prefix. Writing this object twice shows whether the\n"
    b"server honours If-None-Match. It may be deleted; the next run writes it again.\n"
)
_IF_ABSENT = {"IfNoneMatch": "*"}
_NONE: Arguments = {}
_PIECE_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)")


class S3Store:
    """Objects under a prefix of a bucket, which must exist.

    Safe between threads, processes and hosts. Not to be used across a fork.

    Args:
        client: of the bucket; several stores may share it.
        prefix: "" or a key; the store's objects are below it.
        single_writer: where the server ignores the conditions of conditional puts, do without
            them. Two runs that write here at the same time then overwrite each other's log.
    """

    def __init__(
        self,
        client: S3Client,
        prefix: str = "",
        *,
        single_writer: bool = False,
    ) -> None:
        self._client = client
        self._options = client.options
        self._prefix = prefix + "/" if prefix else ""
        self._single_writer = single_writer
        self._url = f"s3://{client.bucket}/{prefix}" + (
            "?single_writer=true" if single_writer else ""
        )
        self._lock = threading.Lock()
        self._honours_conditions: bool | None = None

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, without endpoint and credentials."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Asks the server once: two conditional puts of one small object, or one if it is there.

        Warns (SingleWriterWarning) if the server ignores the condition and `single_writer` is set.

        Raises: StoreError, if the server cannot be asked.
        """
        conditional = self._probe("capabilities")
        return Capabilities(put_if_absent=conditional or self._single_writer, durable=True)

    def exists(self) -> bool:
        """Whether there is anything under the prefix. Raises StoreError."""
        call = self._call("open", "", is_write=False)
        page = self._client.call_patiently(
            call, "list_objects_v2", {"Prefix": self._prefix, "MaxKeys": 1}
        )
        return bool(page.get("Contents"))

    # Writing.

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        check_key(key, operation="put", where=self.url)
        view = as_bytes_view(data)
        call = self._call("put", key, is_write=True)
        part_bytes = self._part_bytes(view.nbytes)
        if view.nbytes <= part_bytes:
            self._put_whole(call, bytes(view))
            return
        with Upload(self._client, call, self._full(key)) as upload:
            for offset in range(0, view.nbytes, part_bytes):
                upload.add(view[offset : offset + part_bytes])
            upload.complete()

    def put_stream(self, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
        """See `Store.put_stream`."""
        check_key(key, operation="put_stream", where=self.url)
        call = self._call("put_stream", key, is_write=True)
        part_bytes = self._part_bytes(size_bytes)
        parts = _regroup(key, chunks, size_bytes, part_bytes)
        if size_bytes <= part_bytes:
            self._put_whole(call, b"".join(bytes(part) for part in parts))
            return
        with Upload(self._client, call, self._full(key)) as upload:
            for part in parts:
                upload.add(part)
            upload.complete()

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`. Permanent where the server ignores the condition.

        With `single_writer` it looks, then writes: right only if nobody else writes.
        """
        check_key(key, operation="put_if_absent", where=self.url)
        body = bytes(as_bytes_view(data))
        call = self._call("put_if_absent", key, is_write=True)
        if self._probe("put_if_absent"):
            self._put_whole(call, body, once=True, conditions=_IF_ABSENT)
        elif not self._single_writer:
            raise call.error(
                Permanent,
                "this server accepts conditional puts and ignores the condition, so two writers"
                " cannot be kept apart; use another server, or, if only one run ever writes here,"
                " add ?single_writer=true to the store's URL",
            )
        elif self._is_there(call):
            raise call.error(AlreadyExists, "the key is taken; read it to see by whom")
        else:
            self._put_whole(call, body, once=True)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key, operation="delete", where=self.url)
        call = self._call("delete", key, is_write=True)
        self._client.call(call, "delete_object", {"Key": self._full(key)})

    # Reading.

    def get(self, key: str, bytes_max: int) -> bytes:
        """See `Store.get`."""
        check_key(key, operation="get", where=self.url)
        call = self._call("get", key, is_write=False)

        async def read(answer: Answer) -> bytes:
            size_bytes = answer["ContentLength"]
            if size_bytes > bytes_max:
                answer["Body"].close()
                raise call.error(TooLarge, f"{size_bytes} bytes, expected at most {bytes_max}")
            data = bytearray(size_bytes)
            await _fill(call, answer, memoryview(data))
            return bytes(data)

        return self._client.run(
            self._client.request(call, "get_object", {"Key": self._full(key)}, read)
        )

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        check_key(key, operation="get_range", where=self.url)
        if length < 0:
            raise ValueError(f"get_range {key!r}: length {length}: negative")
        data = bytearray(length)
        self._read(self._call("get_range", key, is_write=False), offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """See `Store.read_into`. A large target is filled by several requests at once."""
        check_key(key, operation="read_into", where=self.url)
        view = as_bytes_view(target)
        if target.readonly:
            raise ValueError(f"read_into {key!r}: the target is read-only")
        self._read(self._call("read_into", key, is_write=False), offset, view)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        check_key(key, operation="stat", where=self.url)
        return self._head(self._call("stat", key, is_write=False, is_head=True))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. Holds the whole listing: not every server sorts it by whole keys."""
        check_prefix(prefix, operation="list", where=self.url)
        return self._listed(self._call("list", prefix, is_write=False))

    # Multipart uploads that nobody completed.

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.leftovers`: multipart uploads. One that is going on is among them."""
        check_prefix(prefix, operation="leftovers", where=self.url)
        call = self._call("leftovers", prefix, is_write=False)
        return (info for info, _ in self._uploads(call, self._prefix + prefix))

    def sweep(self, leftover: ObjectInfo) -> None:
        """See `Store.sweep`. One that has grown since it was listed is being written: it stays."""
        key = leftover.key
        check_key(key, operation="sweep", where=self.url)
        call = self._call("sweep", key, is_write=True)
        for info, upload_id in list(self._uploads(call, self._full(key))):
            if info == leftover:
                arguments = {"Key": self._full(key), "UploadId": upload_id}
                with suppress(NotFound):
                    self._client.call(call, "abort_multipart_upload", arguments)

    # What they are made of.

    def _call(self, operation: str, key: str, *, is_write: bool, is_head: bool = False) -> Call:
        return Call(operation, key, self.url, is_write=is_write, is_head=is_head)

    def _full(self, key: str) -> str:
        return self._prefix + key

    def _part_bytes(self, size_bytes: int) -> int:
        return part_size(size_bytes, self._options.part_bytes)

    def _put_whole(
        self, call: Call, body: bytes, *, once: bool = False, conditions: Arguments = _NONE
    ) -> None:
        self._client.call(
            call, "put_object", {**self._object(call.key, body), **conditions}, once=once
        )

    def _object(self, key: str, body: bytes) -> dict[str, object]:
        return {"Key": self._full(key), "Body": body, "ContentMD5": md5_base64(body)}

    def _probe(self, operation: str) -> bool:
        """Whether the server honours If-None-Match."""
        with self._lock:
            if self._honours_conditions is None:
                # With the second put the object is there, so a server that takes it ignores it.
                self._honours_conditions = not all(self._takes_marker(operation) for _ in range(2))
                if self._single_writer and not self._honours_conditions:
                    warnings.warn(
                        f"{self.url}: this server ignores the condition of a conditional put, and"
                        " single_writer is set. If two runs ever write here at the same time, they"
                        " overwrite each other's log, and committed checkpoints are lost.",
                        SingleWriterWarning,
                        stacklevel=3,
                    )
            return self._honours_conditions

    def _takes_marker(self, operation: str) -> bool:
        call = self._call(operation, MARKER, is_write=True)

        try:
            # Repeating it does no harm: it ends with the object there.
            self._client.call_patiently(
                call, "put_object", {**self._object(MARKER, _MARKER_TEXT), **_IF_ABSENT}
            )
        except AlreadyExists:
            return False
        return True

    def _is_there(self, call: Call) -> bool:
        try:
            self._head(self._call(call.operation, call.key, is_write=False, is_head=True))
        except NotFound:
            return False
        return True

    def _head(self, call: Call) -> ObjectInfo:
        answer = self._client.call(call, "head_object", {"Key": self._full(call.key)})
        return ObjectInfo(call.key, answer["ContentLength"], answer["LastModified"].timestamp())

    def _read(self, call: Call, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on, with all bytes from one version of the object."""
        if offset < 0:
            raise ValueError(f"{call.operation} {call.key!r}: offset {offset}: negative")
        if target.nbytes == 0:
            head = self._call(call.operation, call.key, is_write=False, is_head=True)
            self._check_end(call, offset, 0, self._head(head).size_bytes)
            return
        try:
            self._client.run(self._read_ranges(call, offset, target))
        except Truncated:
            head = self._call(call.operation, call.key, is_write=False, is_head=True)
            self._check_end(call, offset, target.nbytes, self._head(head).size_bytes)
            raise

    async def _read_ranges(self, call: Call, offset: int, target: memoryview) -> None:
        step = self._options.part_bytes
        first = target[:step]
        total, tag = await self._read_range(call, offset, first)
        # What the first range lacks shows here: it is known only now how long the object is.
        self._check_end(call, offset, target.nbytes, total)
        slots = asyncio.Semaphore(self._options.parts_at_once)

        async def fill(begin: int) -> str:
            async with slots:
                piece = target[begin : begin + step]
                return (await self._read_range(call, offset + begin, piece))[1]

        try:
            async with asyncio.TaskGroup() as group:
                rest = [group.create_task(fill(b)) for b in range(step, target.nbytes, step)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        if any(task.result() != tag for task in rest):
            raise call.error(Transient, "the object was replaced while it was read; read it again")

    async def _read_range(self, call: Call, offset: int, target: memoryview) -> tuple[int, str]:
        """Fill `target`, patiently. Returns the object's size and its version."""

        async def read(answer: Answer) -> tuple[int, str]:
            said = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
            if said is None or int(said["first"]) != offset:
                answer["Body"].close()
                raise call.error(Permanent, "the server does not answer with the range asked for")
            total = int(said["total"])
            if answer["ContentLength"] != target.nbytes:
                answer["Body"].close()
                self._check_end(call, offset, target.nbytes, total)
            await _fill(call, answer, target)
            return total, answer["ETag"]

        async def request() -> tuple[int, str]:
            asked = f"bytes={offset}-{offset + target.nbytes - 1}"
            return await self._client.request(
                call, "get_object", {"Key": self._full(call.key), "Range": asked}, read
            )

        return await self._options.retry.call_async(request, repeats_unknown=False)

    def _check_end(self, call: Call, offset: int, length: int, size_bytes: int) -> None:
        if offset + length > size_bytes:
            raise call.error(
                Truncated,
                f"bytes {offset} to {offset + length} asked for, the object has {size_bytes}",
            )

    def _listed(self, call: Call) -> Iterator[ObjectInfo]:
        found = []
        arguments = {"Prefix": self._prefix + call.key, "MaxKeys": self._options.page_keys}
        for page in self._pages(
            call,
            "list_objects_v2",
            {"ContinuationToken": "NextContinuationToken"},
            arguments,
        ):
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if is_key(key):
                    modified_s = entry["LastModified"].timestamp()
                    found.append(ObjectInfo(key, entry["Size"], modified_s))
        found.sort(key=lambda info: info.key)
        yield from found

    def _uploads(self, call: Call, full_prefix: str) -> Iterator[tuple[ObjectInfo, str]]:
        """Uploads under way or left over, with the bytes that they hold, and their ids."""
        for upload in self._listed_uploads(call, full_prefix):
            key = upload["Key"].removeprefix(self._prefix)
            if is_key(key):
                size_bytes = self._uploaded_bytes(call, upload["Key"], upload["UploadId"])
                if size_bytes is not None:
                    began_s = upload["Initiated"].timestamp()
                    yield ObjectInfo(key, size_bytes, began_s), upload["UploadId"]

    def _listed_uploads(self, call: Call, full_prefix: str) -> Iterator[Answer]:
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        # rclone says NoSuchUpload where it holds none; a bucket that is not there is no NotFound.
        with suppress(NotFound):
            for page in self._pages(call, "list_multipart_uploads", marks, {"Prefix": full_prefix}):
                yield from page.get("Uploads", ())

    def _uploaded_bytes(self, call: Call, full_key: str, upload_id: str) -> int | None:
        """The size of the parts of an upload; None if it has ended meanwhile."""
        marks = {"PartNumberMarker": "NextPartNumberMarker"}
        arguments = {"Key": full_key, "UploadId": upload_id}
        size_bytes = 0
        try:
            for page in self._pages(call, "list_parts", marks, arguments):
                for part in page.get("Parts", ()):
                    size_bytes += part["Size"]
        except NotFound:
            return None
        return size_bytes

    def _pages(
        self, call: Call, method: str, marks: dict[str, str], arguments: Arguments
    ) -> Iterator[Answer]:
        """All pages of a listing. `marks`: where to go on, and where the page before says it."""
        while True:
            page = self._client.call_patiently(call, method, arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {ours: page.get(theirs) for ours, theirs in marks.items()}
            if not any(following.values()) or following.items() <= arguments.items():
                raise call.error(Permanent, "the server's listing goes on, but does not say where")
            arguments = {**arguments, **following}


def _regroup(
    key: str, chunks: Iterable[Buffer], size_bytes: int, part_bytes: int
) -> Iterator[memoryview]:
    """The chunks' bytes in parts of `part_bytes`, the last one shorter. Holds one part.

    A part must be used before the next is asked for. Raises ValueError if the chunks have another
    total than `size_bytes`.
    """
    part = memoryview(bytearray(min(part_bytes, size_bytes)))
    filled = done = 0
    for chunk in chunks:
        view = as_bytes_view(chunk)
        done += view.nbytes
        if done > size_bytes:
            raise ValueError(f"{key}: chunks have more than the {size_bytes} bytes stated")
        while view.nbytes:
            taken = min(view.nbytes, part.nbytes - filled)
            part[filled : filled + taken] = view[:taken]
            filled += taken
            view = view[taken:]
            if filled == part.nbytes:
                # The last part waits below until it is sure that no more follows.
                if done == size_bytes and not view.nbytes:
                    break
                yield part
                filled = 0
    if done != size_bytes:
        raise ValueError(f"{key}: chunks have {done} bytes, expected {size_bytes}")
    if filled:
        yield part[:filled]


async def _fill(call: Call, answer: Answer, target: memoryview) -> None:
    """Read the body of an answer, which must have exactly as many bytes."""
    filled = 0
    async with answer["Body"] as body:
        while piece := await body.read(_PIECE_BYTES):
            if filled + len(piece) > target.nbytes:
                raise call.error(Transient, "the answer is longer than it said; read it again")
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
    if filled != target.nbytes:
        raise call.error(
            Transient, f"the answer ended after {filled} of {target.nbytes} bytes; read it again"
        )
