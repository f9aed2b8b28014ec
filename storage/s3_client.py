"""Requests to one S3 bucket, with typed errors and one pace for all of them.

s3fs finds the credentials, makes the client, and owns the thread on which its event loop runs. The
requests go to the client itself: s3fs would repeat some of them, botocore too, and aiohttp sends a
PUT again when its connection breaks. A conditional put that somebody repeats after a lost answer
finds its own object and calls it another's; so what must be sent at most once goes by a second
client, whose connections serve one request each and repeat nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import aiohttp
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from fsspec.asyn import sync

from keepstep.storage.errors import StoreError, Throttled
from keepstep.storage.retry import RetryPolicy
from keepstep.storage.s3_errors import FAILURES, Call, translate
from keepstep.storage.throttle import Throttle

T = TypeVar("T")

Arguments: TypeAlias = Mapping[str, object]
Answer: TypeAlias = dict[str, Any]
"""What a server answered, as botocore parsed it."""

PARTS_MAX = 10_000


class _OnceSession(AIOHTTPSession):  # type: ignore[misc]
    """Sends each request once. aiohttp has no public switch for it; a test counts the requests."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


_ONCE = {
    "connector_args": {"force_close": True, "keepalive_timeout": None},
    "http_session_cls": _OnceSession,
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to speak to a server. Endpoint, region and credentials are the environment's.

    Attributes:
        part_bytes: objects above it are written and read in parts of this size. At least 5 MiB
            against a real server; it grows where an object would have more than 10,000 parts.
        parts_at_once: of one store, in flight together; with `part_bytes` this bounds the memory.
        page_keys: keys asked for in one page of a listing.
        connect_timeout_s: to make a connection.
        silence_timeout_s: between two pieces of an answer.
        request_timeout_s: for one request as a whole, so that one which trickles ends too.
        retry: for the single requests of an operation that has several.
    """

    part_bytes: int = 16 << 20
    parts_at_once: int = 4
    page_keys: int = 1_000
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 30.0
    request_timeout_s: float = 120.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class S3Client:
    """Requests to one bucket. Safe between threads; not to be used across a fork.

    Endpoint, region and credentials come from where botocore looks for them: the environment
    (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, AWS_PROFILE, ...), ~/.aws, or the host's role.
    """

    def __init__(self, bucket: str, options: S3Options | None = None) -> None:
        self.bucket = bucket
        self.options = options = options or S3Options()
        self.slots = threading.BoundedSemaphore(options.parts_at_once)
        """One for each part in flight; whoever holds one holds a part's memory."""
        self._throttle = Throttle()
        self._lock = threading.Lock()
        self._file_systems: dict[bool, s3fs.S3FileSystem] = {}

    def call(self, call: Call, method: str, arguments: Arguments, *, once: bool = False) -> Answer:
        """What the server answered to one request; arguments as `request` takes them."""
        return self.run(self.request(call, method, arguments, _parsed, once=once))

    def call_patiently(self, call: Call, method: str, arguments: Arguments) -> Answer:
        """As `call`, repeated by the policy. For what has the same effect twice as once."""
        return self.run(self.patiently(call, method, arguments))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the event loop; cancelled if this is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing to one that has ended

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._file_system(once=False).loop)

    async def patiently(self, call: Call, method: str, arguments: Arguments) -> Answer:
        """As `call_patiently`, for the event loop."""

        async def request() -> Answer:
            return await self.request(call, method, arguments, _parsed)

        return await self.options.retry.call_async(request, repeats_unknown=True)

    async def request(
        self,
        call: Call,
        method: str,
        arguments: Arguments,
        read: Callable[[Answer], Awaitable[T]],
        *,
        once: bool = False,
    ) -> T:
        """One request, in its turn.

        Args:
            call: for whom.
            method: botocore's name of the request.
            arguments: botocore's, without the bucket.
            read: makes the result of the answer; whatever body it has is read there.
            once: nothing that lies below may send it a second time.

        Raises: StoreError, as `s3_errors.translate` says.
        """
        wait_s = self._throttle.take_turn()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                client = await self._file_system(once=once).set_session()
                answer = await getattr(client, method)(Bucket=self.bucket, **arguments)
                result = await read(answer)
        except StoreError:
            raise  # some of them are OSErrors as well
        except FAILURES as error:
            typed = translate(error, call)
            if isinstance(typed, Throttled):
                self._throttle.refused()
            raise typed from error
        self._throttle.accepted()
        return result

    def close(self) -> None:
        """Close all connections. What is asked for later makes new ones."""
        with self._lock:
            closing, self._file_systems = self._file_systems, {}
        for file_system in closing.values():
            client = file_system._s3
            if client is not None:
                sync(file_system.loop, client.__aexit__, None, None, None)

    def _file_system(self, *, once: bool) -> s3fs.S3FileSystem:
        with self._lock:
            found = self._file_systems.get(once)
            if found is None:
                found = self._file_systems[once] = self._connect(once)
            return found

    def _connect(self, once: bool) -> s3fs.S3FileSystem:
        options = self.options
        region = os.environ.get("AWS_REGION")  # botocore itself knows only AWS_DEFAULT_REGION
        return s3fs.S3FileSystem(
            skip_instance_cache=True,
            client_kwargs={"region_name": region} if region else {},
            config_kwargs={
                "s3": {"addressing_style": "path"},
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 2 * options.parts_at_once + 8,
                "connect_timeout": options.connect_timeout_s,
                "read_timeout": options.silence_timeout_s,
                **(_ONCE if once else {}),
                # Content-MD5 is what every server checks; a second checksum would be paid for too.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )


async def _parsed(answer: Answer) -> Answer:
    return answer
