"""The file store behaves as a store, and as a careful guest of the file system."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from tests.kit.store_suite import CALLS, READS, StoreSuite, page_aligned, pattern

from keepstep.storage.errors import Denied, NotFound, Permanent
from keepstep.storage.file import FileStore
from keepstep.storage.store import ObjectInfo, Store


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestFileStore(StoreSuite):
    def make(self, directory: Path) -> Store:
        root = directory / "store"
        root.mkdir()
        return FileStore(root)

    def root(self, store: Store) -> Path:
        return Path(store.url.removeprefix("file://"))

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        path = self.root(store) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        path = self.root(store) / key
        return path.read_bytes() if path.is_file() else None

    def test_says_that_it_lasts(self, store: Store) -> None:
        assert store.capabilities.put_if_absent
        assert store.capabilities.durable

    def test_a_relative_root_stays_where_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "s").mkdir()
        monkeypatch.chdir(tmp_path)
        store = FileStore("s")
        monkeypatch.chdir("/")
        store.put("k", b"x")
        assert (tmp_path / "s" / "k").read_bytes() == b"x"

    def test_temporaries_are_never_listed_but_left_over(self, store: Store) -> None:
        self.set_raw(store, "a/k", b"x")
        torn = self.root(store) / "a" / ".keepstep-tmp-k.txt~0123456789abcdef"
        torn.write_bytes(b"half")
        assert [info.key for info in store.list("")] == ["a/k"]
        (found,) = store.leftovers("a/")
        assert (found.key, found.size_bytes) == ("a/k.txt", 4)
        assert list(store.leftovers("b/")) == []
        store.sweep(found)
        assert list(store.leftovers("")) == []
        assert self.get_raw(store, "a/k") == b"x"

    def test_sweep_spares_a_temporary_that_has_grown(self, store: Store) -> None:
        torn = self.root(store) / ".keepstep-tmp-k~0123456789abcdef"
        torn.write_bytes(b"half")
        (found,) = store.leftovers("")
        torn.write_bytes(b"half and more")
        store.sweep(found)
        assert torn.exists()

    def test_foreign_files_are_neither_listed_nor_left_over(self, store: Store) -> None:
        root = self.root(store)
        for name in (".hidden", "with space", ".keepstep-tmp-k~short", "a~"):
            (root / name).write_bytes(b"theirs")
        (root / "lost+found").mkdir(mode=0o000)
        (root / ".snapshot").mkdir()
        (root / ".snapshot" / "k").write_bytes(b"old")
        os.mkfifo(root / "pipe")
        assert list(store.list("")) == []
        assert list(store.leftovers("")) == []

    def test_a_pipe_is_refused_and_not_waited_for(self, store: Store) -> None:
        os.mkfifo(self.root(store) / "pipe")
        for name in READS:
            with pytest.raises(Permanent, match="pipe"):
                CALLS[name](store, "pipe")

    def test_links_are_not_followed_out_of_the_root(self, store: Store, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        (self.root(store) / "dir").symlink_to(outside)
        (self.root(store) / "file").symlink_to(outside / "secret")
        for name in (*READS, "put", "put_stream", "put_if_absent", "delete"):
            with pytest.raises(Denied, match="'dir' is a symbolic link"):
                CALLS[name](store, "dir/secret")
        for name in READS:
            with pytest.raises(Denied, match="'file' is a symbolic link"):
                CALLS[name](store, "file")
        assert list(store.list("")) == []
        store.put("file", b"mine")
        store.delete("dir")
        assert (outside / "secret").read_bytes() == b"secret"
        assert sorted(os.listdir(outside)) == ["secret"]
        assert self.get_raw(store, "file") == b"mine"

    def test_the_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        FileStore(tmp_path / "link").put("k", b"x")
        assert (tmp_path / "real" / "k").read_bytes() == b"x"

    def test_a_store_whose_root_is_gone_is_not_an_empty_one(self, store: Store) -> None:
        self.root(store).rmdir()
        for name, call in CALLS.items():
            with pytest.raises(Permanent, match="directory is not there") as caught:
                call(store, "a/k")
            assert not isinstance(caught.value, NotFound), name
        for listing in (store.list(""), store.list("a/"), store.leftovers("")):
            with pytest.raises(Permanent, match="directory is not there"):
                list(listing)

    def test_delete_removes_the_directories_that_it_empties(self, store: Store) -> None:
        for key in ("a/b/c/1", "a/b/c/2", "a/d"):
            self.set_raw(store, key, b"")
        store.delete("a/b/c/1")
        assert (self.root(store) / "a/b/c").is_dir()
        store.delete("a/b/c/2")
        assert os.listdir(self.root(store) / "a") == ["d"]
        store.delete("a/d")
        assert os.listdir(self.root(store)) == []

    def test_sweep_removes_the_directories_that_it_empties(self, store: Store) -> None:
        self.set_raw(store, "a/b/.keepstep-tmp-k~0123456789abcdef", b"")
        (found,) = store.leftovers("")
        store.sweep(found)
        assert os.listdir(self.root(store)) == []

    def test_no_descriptor_is_left_open(self, store: Store) -> None:
        before = descriptors()
        for name, call in CALLS.items():
            for key in ("a/b/k", "a/b", "../x", "none", "a/b/k/x"):
                with suppress(Permanent):
                    call(store, key)
                assert descriptors() == before, (name, key)
        store.put("a/k", b"x")
        listing = store.list("")
        next(listing)
        assert descriptors() == before

    def test_files_have_the_mode_that_the_umask_leaves(self, store: Store) -> None:
        old = os.umask(0o027)
        try:
            store.put("k", b"x")
        finally:
            os.umask(old)
        assert stat.S_IMODE((self.root(store) / "k").stat().st_mode) == 0o640

    def test_an_empty_object_has_an_empty_range(self, store: Store) -> None:
        store.put("k", b"")
        assert store.get("k", 0) == b""
        assert store.get_range("k", 0, 0) == b""
        store.read_into("k", 0, memoryview(bytearray(0)))

    @pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
    def test_works_where_direct_writes_are_not_possible(self) -> None:
        root = Path("/dev/shm") / f"keepstep-test-{os.getpid()}"
        root.mkdir()
        try:
            store = FileStore(root)
            data = pattern((2 << 20) + 5)
            store.put("k", page_aligned(data))
            assert (root / "k").read_bytes() == data
            store.sweep(ObjectInfo("k", 0, 0.0))
        finally:
            (root / "k").unlink(missing_ok=True)
            root.rmdir()
