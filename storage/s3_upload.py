"""One multipart upload: parts in flight together, all or nothing.

Until it is completed readers see nothing of it. If it cannot be, it is aborted; if that fails too,
or the process dies, it is a leftover, which costs money until `gc` or a lifecycle rule of the
bucket removes it.
"""

from __future__ import annotations

import base64
import hashlib
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType

from keepstep.storage.errors import OutcomeUnknown, Permanent, StoreError
from keepstep.storage.s3_client import PARTS_MAX, Answer, S3Client
from keepstep.storage.s3_errors import Call

_ROUND_BYTES = 1 << 20


def part_size(size_bytes: int, least_bytes: int) -> int:
    """The size of the parts of an object: `least_bytes`, or what makes 10,000 of them enough."""
    needed_bytes = -(-size_bytes // PARTS_MAX)
    if needed_bytes <= least_bytes:
        return least_bytes
    return -(-needed_bytes // _ROUND_BYTES) * _ROUND_BYTES


def md5_base64(data: bytes) -> str:
    """`data`'s MD5 as a Content-MD5 header has it: against damage on the way, not people."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


class Upload:
    """A multipart upload of `call.key`. On leaving without `complete` it is aborted.

    Args:
        client: of the bucket.
        call: for whom.
        full_key: the object's name in the bucket.
    """

    def __init__(self, client: S3Client, call: Call, full_key: str) -> None:
        self._client = client
        self._call = call
        self._full_key = full_key
        self._parts: list[Future[Answer]] = []
        self._failures: list[BaseException] = []
        self._id = ""
        self._is_settled = False

    def __enter__(self) -> Upload:
        # An upload of which we get no answer is a leftover. A second one does no harm.
        made = self._client.call_patiently(
            self._call, "create_multipart_upload", {"Key": self._full_key}
        )
        self._id = made["UploadId"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_settled:
            return
        for part in self._parts:
            part.cancel()
        # A server that takes a part after this makes a leftover of the upload.
        with suppress(StoreError):
            self._client.call(
                self._call,
                "abort_multipart_upload",
                {"Key": self._full_key, "UploadId": self._id},
            )

    def add(self, data: memoryview) -> None:
        """Send the next part. Waits for a free slot; `data` may change on return.

        Raises: StoreError, if a part before it failed for good.
        """
        self._client.slots.acquire()
        try:
            self._raise_failure()
            body = bytes(data)
            # Here, not on the event loop, which would stand still for it.
            part = self._client.submit(self._send(len(self._parts) + 1, body, md5_base64(body)))
        except BaseException:
            self._client.slots.release()
            raise
        part.add_done_callback(self._ended)
        self._parts.append(part)

    def complete(self) -> None:
        """Make the object of the parts. Durable on return.

        Raises: StoreError; OutcomeUnknown if the object may be there.
        """
        wait(self._parts)
        self._raise_failure()
        parts = [
            {"PartNumber": number, "ETag": part.result()["ETag"]}
            for number, part in enumerate(self._parts, 1)
        ]
        self._is_settled = True  # from here on an abort could meet a completed upload
        is_unknown = False

        async def settled(_: Answer) -> None:
            return None

        async def request() -> None:
            nonlocal is_unknown
            try:
                await self._client.request(
                    self._call,
                    "complete_multipart_upload",
                    {
                        "Key": self._full_key,
                        "UploadId": self._id,
                        "MultipartUpload": {"Parts": parts},
                    },
                    settled,
                )
            except OutcomeUnknown:
                is_unknown = True
                raise

        try:
            self._client.run(self._client.options.retry.call_async(request, repeats_unknown=True))
        except StoreError as error:
            self._is_settled = is_unknown
            if is_unknown and isinstance(error, Permanent):
                # Not every server knows an upload that it has completed.
                raise self._call.error(OutcomeUnknown, str(error)) from error
            raise

    async def _send(self, number: int, data: bytes, checksum: str) -> Answer:
        return await self._client.patiently(
            self._call,
            "upload_part",
            {
                "Key": self._full_key,
                "UploadId": self._id,
                "PartNumber": number,
                "Body": data,
                "ContentMD5": checksum,
            },
        )

    def _ended(self, part: Future[Answer]) -> None:
        self._client.slots.release()
        failure = None if part.cancelled() else part.exception()
        if failure is not None:
            self._failures.append(failure)

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]
