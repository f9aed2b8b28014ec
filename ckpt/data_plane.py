"""What a keeper answers over the network: a thread with its own loop, and threads for what blocks.

Every request needs the job's token. Bodies are bounded. Nothing can be written through it but
copies of images, which their receiver pulls and verifies itself (`receiver`). The messages are in
`plane_messages`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web

from keepstep.ckpt import plane_messages as messages
from keepstep.ckpt.document import encode, shortened
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import Refusal
from keepstep.ckpt.manifest import GENERATION_MAX, STEP_MAX, State
from keepstep.ckpt.receiver import Receiver
from keepstep.ckpt.service import Answers, PeerSlots
from keepstep.storage.errors import TooLarge
from keepstep.storage.http_server import HttpServer
from keepstep.storage.peer_server import StoreHandlers, bearer, read_bounded
from keepstep.storage.store import Store
from keepstep.storage.token import Token

T = TypeVar("T")

_DIGEST = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,12}")
_CORE_THREADS = 16
_OFFER_THREADS = 32
_READ_THREADS = 32
_CLOSE_S = 5.0


class DataPlane:
    """The server. `start` binds and returns "host:port"; `close` ends it, its thread and sockets.

    Args:
        config: bind, port, advertise and patience are used.
        token: the job's. No token, no server.
        answers: the core.
        slots: for structures.
        stores: "memory" and, with a disk tier, "disk": readable by peers, never writable. A store
            that has `view(key) -> memoryview` is sent from that memory.
        receiver: takes peers' offers.
    """

    def __init__(
        self,
        config: KeeperConfig,
        token: Token,
        answers: Answers,
        slots: PeerSlots,
        stores: Mapping[str, Store],
        receiver: Receiver,
    ) -> None:
        self._config = config
        self._token = token
        self._answers = answers
        self._slots = slots
        self._stores = dict(stores)
        self._receiver = receiver
        self._core = _threads("core", _CORE_THREADS)
        self._offers = _threads("offers", _OFFER_THREADS)
        self._readers = {name: _threads(name, _READ_THREADS) for name in self._stores}
        self._server = HttpServer(self._app, config.bind, config.port, "keepstep-data-plane")

    def start(self) -> str:
        """Listen. Returns "host:port". Raises OSError."""
        port = self._server.start()
        return f"{self._config.advertise or self._config.bind}:{port}"

    def close(self) -> None:
        """End what is going on, close all sockets, join the thread. Blocking, bounded."""
        self._receiver.close()
        self._server.close(_CLOSE_S)
        for threads in (self._core, self._offers, *self._readers.values()):
            threads.shutdown(wait=False, cancel_futures=True)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[bearer(self._token)])
        app.add_routes(
            [
                web.get("/v1/inventory", self._typed(self._inventory)),
                web.post("/v1/inventory", self._typed(self._take_inventory)),
                web.get("/v1/describe/{generation}/{step}", self._typed(self._describe)),
                web.get("/v1/structure/{digest}", self._typed(self._structure)),
                web.post("/v1/offer", self._typed(self._offer)),
                web.get("/v1/status", self._typed(self._status)),
            ]
        )
        for name, store in self._stores.items():
            threads, timeout_s = self._readers[name], self._config.patience_s
            handlers = StoreHandlers(store, name, threads, timeout_s, is_writable=False)
            app.add_routes(handlers.routes())
        return app

    def _typed(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def call(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except CheckpointError as error:
                return _refusal(error)
            except TooLarge as error:
                return _refusal(Refusal(str(error)))

        return call

    async def _inventory(self, request: web.Request) -> web.StreamResponse:
        return await self._patient(request, self._core, self._answers.inventory)

    async def _take_inventory(self, request: web.Request) -> web.StreamResponse:
        ask = _decoded(await read_bounded(request, messages.ASK_BYTES_MAX), messages.Ask)

        def take() -> Inventory:
            return self._answers.take_inventory(ask.generation, ask.term)

        return await self._patient(request, self._core, take)

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        generation = _number(request, "generation", GENERATION_MAX)
        state = State(generation, _number(request, "step", STEP_MAX))
        return _json(await self._ask(lambda: self._answers.describe(state)))

    async def _structure(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        found = None
        if _DIGEST.fullmatch(digest) is not None:
            found = await self._ask(lambda: self._slots.structure(digest))
        if found is None:
            raise Refusal(f"host {self._config.host} knows no structure {shortened(digest)!r}")
        return _json(encode(found))

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode(await self._ask(self._answers.status)))

    async def _offer(self, request: web.Request) -> web.StreamResponse:
        offer = _decoded(await read_bounded(request, messages.OFFER_BYTES_MAX), messages.Offer)
        return await self._patient(request, self._offers, lambda: self._receiver.receive(offer))

    async def _patient(
        self,
        request: web.Request,
        threads: ThreadPoolExecutor,
        call: Callable[[], msgspec.Struct],
    ) -> web.StreamResponse:
        """The answer to what may take long: a space now and then says that somebody is there.

        Once there was one, the status is 200, and the body alone says whether it went well.
        """
        running = asyncio.get_running_loop().run_in_executor(threads, call)
        response = None
        while not (await asyncio.wait([running], timeout=self._config.patience_s / 4))[0]:
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                await response.prepare(request)
            await response.write(b" ")
        if response is None:
            return _json(encode(running.result()))
        try:
            answer = running.result()
        except CheckpointError as error:
            _, answer = messages.refused(error)
        await response.write(encode(answer))
        await response.write_eof()
        return response

    async def _ask(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._core, call)


def _threads(name: str, most: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=f"keepstep-{name}")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refusal(error: CheckpointError) -> web.Response:
    status, answer = messages.refused(error)
    return web.Response(status=status, body=encode(answer), content_type="application/json")


def _decoded(body: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise Refusal(f"not a request of ours: {str(error)[:200]}") from error


def _number(request: web.Request, name: str, most: int) -> int:
    text = request.match_info[name]
    if _NUMBER.fullmatch(text) is None or int(text) > most:
        raise Refusal(f"{name} {shortened(text)!r} is no number up to {most}")
    return int(text)
