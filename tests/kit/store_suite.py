"""One conformance suite for every store.

Subclass it and say how to make a store, and how to read and write an object behind its back, so
that a store whose put and get are wrong in the same way does not pass.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.storage.errors import (
    AlreadyExists,
    BadKey,
    NotFound,
    Permanent,
    StoreError,
    TooLarge,
    Truncated,
)
from keepstep.storage.store import Buffer, ObjectInfo, Store

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.keepstep-tmp-b~0123456789abcdef",
    "a b",
    "a\0b",
    "a\nb",
    "a\n",
    "a\\b",
    "ä",
    "٣",
    "a~b",
    "-a",
    "x" * 201,
    "/".join(["abcdefghi"] * 101),
]

BAD_PREFIXES = ["a", "/", "../", "a//", ".x/", "a/b"]

CALLS: dict[str, Callable[[Store, str], object]] = {
    "put": lambda store, key: store.put(key, b"x"),
    "put_stream": lambda store, key: store.put_stream(key, [b"x"], 1),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"x"),
    "get": lambda store, key: store.get(key, 10),
    "get_range": lambda store, key: store.get_range(key, 0, 1),
    "read_into": lambda store, key: store.read_into(key, 0, memoryview(bytearray(1))),
    "stat": lambda store, key: store.stat(key),
    "delete": lambda store, key: store.delete(key),
    "sweep": lambda store, key: store.sweep(ObjectInfo(key, 0, 0.0)),
}

READS = ["get", "get_range", "read_into", "stat"]


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes of which no two blocks are alike."""
    period = bytes((i * 131 + seed * 17 + i // 251) % 256 for i in range(65_521))
    return (period * (size_bytes // len(period) + 1))[:size_bytes]


def page_aligned(data: bytes) -> memoryview:
    """A writable copy of `data` that begins at a page."""
    view = memoryview(mmap.mmap(-1, max(1, len(data))))[: len(data)]
    view[:] = data
    return view


class StoreSuite(ABC):
    """What every store must do.

    What a store cannot do, its class here says, and the suite then wants it refused.
    """

    can_put_if_absent = True
    """False: it must say so, and refuse."""
    one_writer_only = False
    """Whether its put_if_absent keeps two writers apart only within one process, or not at all."""
    names_may_nest = False
    """Whether "a" and "a/b" may both be objects, as on most object stores."""
    clash_errors: tuple[type[StoreError], ...] = (BadKey,)
    """What a put says if they may not."""
    turns = 60
    """Of the tests in which threads meet; fewer for a store that is slow."""

    @abstractmethod
    def make(self, directory: Path) -> Store:
        """A new, empty store."""

    @abstractmethod
    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        """Put an object there without the store's own code."""

    @abstractmethod
    def get_raw(self, store: Store, key: str) -> bytes | None:
        """What is there, read without the store's own code; None if nothing."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make(tmp_path)

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert "://" in store.url

    @pytest.mark.parametrize("size_bytes", [0, 1, 4_095, 4_096, 4_097, 1 << 20, (5 << 20) + 3])
    def test_put_stores_exactly_the_bytes(self, store: Store, size_bytes: int) -> None:
        data = pattern(size_bytes)
        kinds: list[Buffer] = [
            data,
            bytearray(data),
            memoryview(data),
            page_aligned(data),
            page_aligned(data).toreadonly(),
        ]
        for number, buffer in enumerate(kinds):
            store.put(f"d/k{number}", buffer)
            assert self.get_raw(store, f"d/k{number}") == data

    def test_put_takes_a_view_of_wider_items(self, store: Store) -> None:
        wide = memoryview(bytearray(pattern(64))).cast("Q")
        store.put("k", wide)
        assert self.get_raw(store, "k") == pattern(64)

    def test_put_refuses_what_is_not_contiguous(self, store: Store) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            store.put("k", memoryview(b"abcdef")[::2])
        assert self.get_raw(store, "k") is None
        assert list(store.leftovers("")) == []

    def test_put_replaces(self, store: Store) -> None:
        self.set_raw(store, "a/b", b"a longer one, the old")
        store.put("a/b", b"new")
        assert self.get_raw(store, "a/b") == b"new"

    def test_put_copies(self, store: Store) -> None:
        data = bytearray(b"as it was")
        store.put("k", data)
        data[:] = b"changed!!"
        assert store.get("k", 100) == b"as it was"

    @pytest.mark.parametrize(
        "cuts", [[], [0], [1], [4_096], [10, 10, 8_192], [1 << 20], [1 << 20, (1 << 20) + 1]]
    )
    def test_put_stream_joins_chunks(self, store: Store, cuts: list[int]) -> None:
        data = pattern((2 << 20) + 11)
        edges = [0, *cuts, len(data)]
        chunks = [page_aligned(data[a:b]) for a, b in itertools.pairwise(edges) if a <= b]
        store.put_stream("k", iter(chunks), len(data))
        assert self.get_raw(store, "k") == data

    def test_put_stream_of_nothing_is_an_empty_object(self, store: Store) -> None:
        store.put_stream("k", [], 0)
        assert self.get_raw(store, "k") == b""

    @pytest.mark.parametrize("size_bytes", [0, 5, 7, 100])
    def test_put_stream_of_another_size_writes_nothing(self, store: Store, size_bytes: int) -> None:
        self.set_raw(store, "k", b"old")
        with pytest.raises(ValueError, match=str(size_bytes)):
            store.put_stream("k", [b"abc", b"def"], size_bytes)
        assert self.get_raw(store, "k") == b"old"
        assert list(store.leftovers("")) == []

    def test_put_stream_whose_source_fails_writes_nothing(self, store: Store) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"abc"
            raise KeyError("source")

        self.set_raw(store, "k", b"old")
        with pytest.raises(KeyError, match="source"):
            store.put_stream("k", chunks(), 6)
        assert self.get_raw(store, "k") == b"old"
        assert list(store.leftovers("")) == []

    def test_says_whether_it_can_put_if_absent(self, store: Store) -> None:
        assert store.capabilities.put_if_absent is self.can_put_if_absent
        if not self.can_put_if_absent:
            with pytest.raises(Permanent, match="single_writer"):
                store.put_if_absent("a/b", b"first")
            assert list(store.list("")) == []

    def test_put_if_absent_takes_a_free_key_once(self, store: Store) -> None:
        self.needs_put_if_absent()
        store.put_if_absent("a/b", b"first")
        with pytest.raises(AlreadyExists) as caught:
            store.put_if_absent("a/b", b"second")
        assert caught.value.key == "a/b"
        assert self.get_raw(store, "a/b") == b"first"
        assert list(store.leftovers("")) == []

    def needs_put_if_absent(self) -> None:
        if not self.can_put_if_absent:
            pytest.skip("cannot put-if-absent, and says so")

    def test_put_if_absent_finds_what_others_wrote(self, store: Store) -> None:
        self.needs_put_if_absent()
        self.set_raw(store, "k", b"")
        with pytest.raises(FileExistsError):
            store.put_if_absent("k", b"x")
        assert self.get_raw(store, "k") == b""

    def test_put_if_absent_has_one_winner(self, store: Store) -> None:
        self.needs_put_if_absent()
        if self.one_writer_only:
            pytest.skip("for one writer only, and warns of it")
        writers = 8
        for turn in range(10):
            start = threading.Barrier(writers)

            def write(
                writer: int, turn: int = turn, start: threading.Barrier = start
            ) -> int | None:
                start.wait()
                try:
                    store.put_if_absent(f"log/{turn}", f"writer {writer}".encode())
                except AlreadyExists:
                    return None
                return writer

            with ThreadPoolExecutor(writers) as pool:
                winners = [w for w in pool.map(write, range(writers)) if w is not None]
            assert len(winners) == 1
            assert self.get_raw(store, f"log/{turn}") == f"writer {winners[0]}".encode()

    def test_get_returns_what_is_there(self, store: Store) -> None:
        self.set_raw(store, "a/b/c", b"hello")
        assert store.get("a/b/c", 5) == b"hello"
        assert isinstance(store.get("a/b/c", 5), bytes)

    def test_get_refuses_an_object_above_the_bound(self, store: Store) -> None:
        self.set_raw(store, "k", b"hello")
        with pytest.raises(TooLarge, match=r"5 bytes.*at most 4"):
            store.get("k", 4)

    @pytest.mark.parametrize("name", READS)
    @pytest.mark.parametrize("key", ["k", "a/k", "a", "a/b/c"])
    def test_reads_of_nothing_say_not_found(self, store: Store, name: str, key: str) -> None:
        self.set_raw(store, "a/b", b"hello")
        with pytest.raises(NotFound) as caught:
            CALLS[name](store, key)
        assert isinstance(caught.value, FileNotFoundError)
        assert (caught.value.operation, caught.value.key) == (name, key)
        assert caught.value.where == store.url
        assert key in str(caught.value)

    def test_ranges_are_slices(self, store: Store) -> None:
        data = b"0123456789"
        self.set_raw(store, "k", data)
        for offset in range(12):
            for length in range(12):
                target = bytearray(b"." * length)
                if offset + length <= len(data):
                    assert store.get_range("k", offset, length) == data[offset : offset + length]
                    store.read_into("k", offset, memoryview(target))
                    assert target == data[offset : offset + length]
                    continue
                with pytest.raises(Truncated, match="10"):
                    store.get_range("k", offset, length)
                with pytest.raises(Truncated, match="10"):
                    store.read_into("k", offset, memoryview(target))

    def test_read_into_fills_a_big_target_of_wider_items(self, store: Store) -> None:
        data = pattern(3 << 20)
        self.set_raw(store, "k", data)
        target = memoryview(bytearray((1 << 20) * 2))
        store.read_into("k", 4_097, target.cast("q"))
        assert target == data[4_097 : 4_097 + (2 << 20)]

    def test_ranges_refuse_what_makes_no_sense(self, store: Store) -> None:
        self.set_raw(store, "k", b"hello")
        for offset, length in ((-1, 2), (2, -1)):
            with pytest.raises(ValueError, match="negative"):
                store.get_range("k", offset, length)
        with pytest.raises(ValueError, match="negative"):
            store.read_into("k", -1, memoryview(bytearray(1)))
        with pytest.raises(ValueError, match="read-only"):
            store.read_into("k", 0, memoryview(b"x"))

    def test_stat_says_size_and_time(self, store: Store) -> None:
        store.put("a/b", b"hello")
        info = store.stat("a/b")
        assert (info.key, info.size_bytes) == ("a/b", 5)
        assert info.modified_s > 1_000_000_000

    def test_list_is_sorted_by_whole_key(self, store: Store) -> None:
        keys = [
            "a",
            "a-b/x",
            "a.b",
            "a.b.c",
            "a0",
            "b/a",
            "b/a.x/y",
            "b/ab",
            "b/a0/z",
            "B/a",
            "c-d",
            "d-e",
            "d.e/y",
            "d/x",
        ]
        for key in reversed(keys):
            self.set_raw(store, key, key.encode())
        found = list(store.list(""))
        assert [info.key for info in found] == sorted(keys)
        assert [info.size_bytes for info in found] == [len(key) for key in sorted(keys)]

    def test_list_takes_only_what_is_under_the_prefix(self, store: Store) -> None:
        for key in ("a/1", "a/b/2", "ab/3", "a-/4", "b"):
            self.set_raw(store, key, b"")
        assert [info.key for info in store.list("a/")] == ["a/1", "a/b/2"]
        assert [info.key for info in store.list("a/b/")] == ["a/b/2"]
        assert list(store.list("a/c/")) == []
        assert list(store.list("b/")) == []
        assert list(store.list("a/1/")) == []

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_list_refuses_a_bad_prefix_at_once(self, store: Store, prefix: str) -> None:
        with pytest.raises(BadKey):
            store.list(prefix)
        with pytest.raises(BadKey):
            store.leftovers(prefix)

    def test_list_goes_on_while_objects_are_deleted(self, store: Store) -> None:
        keys = [f"d{i % 5}/k{i:03}" for i in range(100)]
        for key in keys:
            self.set_raw(store, key, b"x")
        seen = []
        for info in store.list(""):
            seen.append(info.key)
            store.delete(info.key)
        assert seen == sorted(keys)
        assert list(store.list("")) == []

    def test_delete_removes_one_object(self, store: Store) -> None:
        self.set_raw(store, "a/b", b"x")
        self.set_raw(store, "a/c", b"y")
        store.delete("a/b")
        assert self.get_raw(store, "a/b") is None
        assert self.get_raw(store, "a/c") == b"y"
        store.put("a/b", b"z")
        assert self.get_raw(store, "a/b") == b"z"

    @pytest.mark.parametrize("key", ["none", "a/none", "a", "a/b/c"])
    def test_delete_of_nothing_is_no_error(self, store: Store, key: str) -> None:
        self.set_raw(store, "a/b", b"x")
        store.delete(key)
        assert self.get_raw(store, "a/b") == b"x"

    @pytest.mark.parametrize("name", CALLS)
    def test_bad_keys_are_refused(self, store: Store, name: str) -> None:
        for key in BAD_KEYS:
            with pytest.raises(BadKey) as caught:
                CALLS[name](store, key)
            assert caught.value.operation == name
        assert list(store.list("")) == []

    @pytest.mark.parametrize("name", ["put", "put_stream", "put_if_absent"])
    def test_a_name_is_an_object_or_a_directory(self, store: Store, name: str) -> None:
        if name == "put_if_absent":
            self.needs_put_if_absent()
        self.set_raw(store, "a/b", b"x")
        written = {"a/b"}
        for key in ("a", "a/b/c", "a/b/c/d"):
            try:
                CALLS[name](store, key)
            except self.clash_errors:
                continue
            assert self.names_may_nest
            written.add(key)
        assert {key for key in ("a", "a/b/c", "a/b/c/d") if self.get_raw(store, key)} <= written
        assert self.get_raw(store, "a/b") == b"x"
        assert {info.key for info in store.list("")} == written
        assert list(store.leftovers("")) == []

    def test_readers_see_whole_objects_while_writers_replace(self, store: Store) -> None:
        size_bytes = 20_000
        allowed = {bytes([n]) * size_bytes for n in range(6)}
        store.put("d/k", bytes(size_bytes))
        done = threading.Event()
        read_once = threading.Semaphore(0)

        def write(n: int) -> None:
            for _ in range(self.turns // 3):
                store.put("d/k", bytes([n]) * size_bytes)

        def read() -> None:
            try:
                while not done.is_set():
                    assert store.get("d/k", size_bytes) in allowed
                    read_once.release()
            finally:
                read_once.release()

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                read_once.acquire()  # so that some reading is done, however busy the machine
                for future in [pool.submit(write, n) for n in range(1, 4)]:
                    future.result()
                read_once.acquire()
            finally:
                done.set()
            for reader in readers:
                reader.result()

    def test_puts_and_deletes_in_one_directory_do_not_fail_each_other(self, store: Store) -> None:
        def work(n: int) -> None:
            for turn in range(self.turns):
                store.put(f"deep/er/w{n}", b"%d" % turn)
                assert store.get(f"deep/er/w{n}", 10) == b"%d" % turn
                store.delete(f"deep/er/w{n}")

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, n) for n in range(4)]:
                future.result()
        assert list(store.list("")) == []

    def test_nothing_is_left_over_after_good_writes(self, store: Store) -> None:
        store.put("a/b", b"x")
        store.put_stream("a/s", [b"x"], 1)
        if self.can_put_if_absent:
            store.put_if_absent("a/c", b"x")
        assert list(store.leftovers("")) == []
        store.sweep(ObjectInfo("a/b", 1, 0.0))
        store.sweep(ObjectInfo("no/such", 1, 0.0))
        assert self.get_raw(store, "a/b") == b"x"

    def test_errors_say_what_and_where(self, store: Store) -> None:
        with pytest.raises(StoreError) as caught:
            store.get("a/b", 1)
        assert store.url in str(caught.value)
        assert "a/b" in str(caught.value)
