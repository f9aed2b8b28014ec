"""`hosts/<host>.json` in the store: where a host's keeper said that it listens. A hint.

It decides nothing: whoever follows it still has to be let in by the token, and is asked for its
job and host. Nothing waits for the store here: it is read and written by a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.keys import HOSTS_PREFIX, HostKey, host_key, parse_key
from keepstep.storage.errors import NotFound, StoreError, TooLarge
from keepstep.storage.store import Store

HINT_BYTES_MAX = 1 << 12
_PAUSE_S = 1.0


class HostHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the keeper of `host` listens ("host:port"); said `at` (ISO time), in `generation`."""

    host: str
    address: str
    at: str
    generation: int


def publish_hint(store: Store, hint: HostHint) -> None:
    """Write the hint, over an older one. Raises StoreError."""
    store.put(host_key(hint.host), encode(hint))


def read_hint(store: Store, host: str) -> HostHint | None:
    """The hint of `host`, or None if there is none that can be read as one. Raises StoreError."""
    key = host_key(host)
    try:
        hint = decode(store.get(key, HINT_BYTES_MAX), HostHint, bytes_max=HINT_BYTES_MAX, file=key)
    except (NotFound, TooLarge, FormatError):
        return None
    return hint if hint.host == host else None


def read_hints(store: Store) -> dict[str, HostHint]:
    """All hints, by host. Raises StoreError."""
    found = {}
    for info in store.list(HOSTS_PREFIX):
        key = parse_key(info.key)
        hint = read_hint(store, key.host) if isinstance(key, HostKey) else None
        if hint is not None:
            found[hint.host] = hint
    return found


class HostHints:
    """Publishes this host's hint and finds those of others, in a thread of its own.

    Args:
        store: where they are.
        tell: called with an error's words, once until things go well again.
    """

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        self._store = store
        self._tell = tell
        self._changed = threading.Condition()
        self._to_publish: HostHint | None = None
        self._wanted: set[str] = set()
        self._found: dict[str, str] = {}
        self._is_failing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="keepstep-hints", daemon=True)
        self._thread.start()

    def publish(self, hint: HostHint) -> None:
        """Have the hint written, tried again until it is there. Returns at once."""
        with self._changed:
            self._to_publish = hint
            self._changed.notify()

    def locate(self, host: str) -> str | None:
        """Where `host` was last seen to listen, as of the last look; has it looked up anew.

        Returns at once. None: not known (yet).
        """
        with self._changed:
            self._wanted.add(host)
            self._changed.notify()
            return self._found.get(host)

    def close(self, timeout_s: float) -> None:
        """End the thread; it is a daemon, should the store hang."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or self._wanted or self._to_publish is not None
                )
                if self._is_closed:
                    return
                hint, wanted = self._to_publish, tuple(self._wanted)
                self._wanted.clear()
            try:
                if hint is not None:
                    publish_hint(self._store, hint)
                    with self._changed:
                        if self._to_publish is hint:
                            self._to_publish = None
                for host in wanted:
                    found = read_hint(self._store, host)
                    if found is not None:
                        with self._changed:
                            self._found[host] = found.address
                self._is_failing = False
            except StoreError as error:
                if not self._is_failing:
                    self._tell(f"the store does not take or give hints of hosts: {error}")
                self._is_failing = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=_PAUSE_S)
