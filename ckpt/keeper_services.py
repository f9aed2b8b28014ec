"""The services of a keeper process, put together: drains, replicator, data plane, hints.

What is imported late is imported here, so that the control socket answers before.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable

import msgspec

from keepstep.ckpt.drains import Drains
from keepstep.ckpt.host_answers import HostAnswers
from keepstep.ckpt.host_hints import HostHint, HostHints
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.peer_memory import PeerMemory
from keepstep.ckpt.service import Reporter, Service
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.storage.errors import NotFound, StoreError
from keepstep.storage.store import Store
from keepstep.storage.token import Token, find_token

_HINTS_CLOSE_S = 1.0
_STORE_PAUSE_S = 1.0


class Alone:
    """The replicator of a host without a data plane: its own memory is all that acks.

    A `Service`.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._tenure: Tenure | None = None

    def enter(self, tenure: Tenure) -> None:
        """See `Service.enter`."""
        self._tenure = tenure

    def sealed(self, shelved: Shelved) -> None:
        """See `Service.sealed`."""
        if self._tenure is not None and shelved.state.generation == self._tenure.generation:
            self._reporter.acked(shelved.rank, shelved.state.step)

    def close(self, timeout_s: float) -> None:
        """Nothing is going on."""

    def status(self) -> dict[str, object]:
        """No peers."""
        return {"peers": []}


class Hints:
    """`host_hints` on a store that may not open for a while."""

    def __init__(self, open_store: Callable[[], Store], tell: Callable[[str], None]) -> None:
        self._open_store = open_store
        self._tell = tell
        self._lock = threading.Lock()
        self._hints: HostHints | None = None
        self._hint: HostHint | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._open, name="keepstep-hints-store", daemon=True).start()

    def publish(self, hint: HostHint) -> None:
        """Have the hint written as soon as may be. Returns at once."""
        with self._lock:
            self._hint = hint
            if self._hints is not None:
                self._hints.publish(hint)

    def locate(self, host: str) -> str | None:
        """Where `host` was last seen to listen; None: not known (yet). Returns at once."""
        with self._lock:
            return None if self._hints is None else self._hints.locate(host)

    def close(self) -> None:
        """End the threads; those that hang in the store are daemons."""
        self._is_closed.set()
        with self._lock:
            hints = self._hints
        if hints is not None:
            hints.close(_HINTS_CLOSE_S)

    def _open(self) -> None:
        is_told = False
        while not self._is_closed.is_set():
            try:
                store = self._open_store()
            except StoreError as error:
                if not is_told and not isinstance(error, NotFound):  # rank 0 makes the store
                    self._tell(f"the store cannot be opened for hints of hosts: {error}")
                is_told = True
                self._is_closed.wait(_STORE_PAUSE_S)
                continue
            with self._lock:
                if not self._is_closed.is_set():
                    self._hints = HostHints(store, self._tell)
                    if self._hint is not None:
                        self._hints.publish(self._hint)
            return


class Services:
    """All services of a host, started. Calls of `Service` go to each of them."""

    def __init__(self, memory: KeeperMemory, answers: HostAnswers, port_before: int) -> None:
        """Start the data plane, if there is a token, and all services. Blocking: imports.

        `port_before`: that an earlier keeper of this host listened at, for peers that know it; 0
        for any.
        """
        self._memory = memory
        self._services: dict[str, Service] = {}
        self._stop: list[Callable[[], None]] = []
        self._hints: Hints | None = None
        config = memory.config
        token = _find_token(memory)
        replicator: Service = Alone(memory)
        if token is not None:
            replicator = self._serve(config, token, answers, port_before)
        self._services["replicator"] = replicator
        self._drains = _drains(memory)
        self._services["drains"] = self._drains

    def enter(self, tenure: Tenure) -> None:
        """See `Service.enter`."""
        for service in self._services.values():
            service.enter(tenure)
        if self._hints is not None:
            self._hints.publish(self._hint(tenure.generation))

    def sealed(self, shelved: Shelved) -> None:
        """See `Service.sealed`."""
        for service in self._services.values():
            service.sealed(shelved)

    def promised(self, generation: int) -> None:
        """The inventory is promised to `generation`: nothing of it may go."""
        self._drains.promised(generation)

    def status(self) -> dict[str, object]:
        """See `Service.status`: by service."""
        return {name: service.status() for name, service in self._services.items()}

    def close(self, timeout_s: float) -> None:
        """Finish what is due, for at most `timeout_s` for each service; then end all threads."""
        for service in self._services.values():
            service.close(timeout_s)
        for stop in self._stop:
            stop()
        if self._hints is not None:
            self._hints.close()

    def _serve(
        self, config: KeeperConfig, token: Token, answers: HostAnswers, port_before: int
    ) -> Service:
        """Start the data plane; the replicator that sends from it."""
        from keepstep.ckpt.data_plane import DataPlane
        from keepstep.ckpt.pool_store import PoolStore
        from keepstep.ckpt.receiver import Receiver
        from keepstep.ckpt.replicator import Replicator

        memory = self._memory
        slots = PeerMemory(memory)
        receiver = Receiver(config, slots, answers.check_fence, memory.shelf, memory, token)
        stores: dict[str, Store] = {"memory": PoolStore(memory.pool)}
        if config.disk_dir:
            try:
                stores["disk"] = open_disk(config)
            except StoreError as error:
                memory.tell("disk_unserved", f"peers cannot read this host's disk: {error}")
        ports = (config.port,) if config.port or not port_before else (port_before, 0)
        for port in ports:
            here = msgspec.structs.replace(config, port=port)
            plane = DataPlane(here, token, answers, slots, stores, receiver)
            try:
                address = plane.start()
            except OSError as error:
                if port == ports[-1]:
                    raise
                memory.tell("port_taken", f"peers that know port {port} must look again: {error}")
                continue
            break
        self._stop.append(plane.close)
        memory.listen_at(address)
        self._hints = Hints(lambda: open_durable(config), self._tell_hints)
        self._hints.publish(self._hint(memory.promise.generation))
        return Replicator(
            config, memory.shelf, memory, token, address, memory.agreed_acked, self._hints.locate
        )

    def _hint(self, generation: int) -> HostHint:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return HostHint(self._memory.config.host, self._memory.address, now, generation)

    def _tell_hints(self, sentence: str) -> None:
        self._memory.tell("hint_failed", sentence)


def open_durable(config: KeeperConfig) -> Store:
    """The durable store. Raises StoreError."""
    from keepstep.storage.locate import open_store

    url = config.store_url
    if config.single_writer and not url.startswith("file:") and "single_writer=" not in url:
        url += f"{'&' if '?' in url else '?'}single_writer=true" if "://" in url else ""
    return open_store(url)


def open_disk(config: KeeperConfig) -> Store:
    """The store on this host's disk, made if it is missing. Raises StoreError."""
    from keepstep.storage.locate import open_store

    return open_store(config.disk_dir, create=True)


def _find_token(memory: KeeperMemory) -> Token | None:
    try:
        return find_token(os.environ, memory.config.token_file or None)
    except StoreError as error:
        memory.tell(
            "unserved",
            f"peers can neither send images to this host nor read its own: {error}",
        )
        return None


def _drains(memory: KeeperMemory) -> Drains:
    config = memory.config
    return Drains(
        lambda: open_durable(config),
        (lambda: open_disk(config)) if config.disk_dir else None,
        memory.shelf,
        memory,
        job=config.job,
        patience_s=config.patience_s,
        compresses=config.compress == "zstd",
    )
