"""The S3 store behaves as a store, on two real servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.kit.logs import open_log
from tests.kit.servers import BUCKET, PART_BYTES, SECRET_KEY, Place, small_options
from tests.kit.store_suite import StoreSuite, pattern

from keepstep.ckpt.errors import LogError
from keepstep.storage.errors import (
    AlreadyExists,
    BadKey,
    Denied,
    NotFound,
    Permanent,
)
from keepstep.storage.locate import open_store
from keepstep.storage.store import Capabilities, SingleWriterWarning, Store

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")

from keepstep.storage.s3 import MARKER, S3Store
from keepstep.storage.s3_client import S3Client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.servers,
]  # two servers to start, and a request for every line


class S3Suite(StoreSuite):
    """The suite on one server; each test has a prefix of its own."""

    names_may_nest = True
    turns = 9

    @pytest.fixture(autouse=True)
    def _clients(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.raw = place.client, place.raw
        for name, value in place.server.environment.items():
            monkeypatch.setenv(name, value)

    def make(self, directory: Path) -> Store:
        self.prefix = f"{type(self).__name__}/{secrets.token_hex(8)}"
        return self.another()

    def another(self, single_writer: bool = False) -> S3Store:
        return S3Store(self.client, self.prefix, single_writer=single_writer)

    @contextmanager
    def stranger(self) -> Iterator[S3Store]:
        """A store of a client of its own: with the environment as it is now."""
        client = S3Client(BUCKET, small_options())
        yield S3Store(client, self.prefix)
        client.close()

    def set_raw(self, store: Store, key: str, data: bytes) -> None:
        self.raw.put(f"{self.prefix}/{key}", data)

    def get_raw(self, store: Store, key: str) -> bytes | None:
        return self.raw.get(f"{self.prefix}/{key}")

    def test_parts_of_any_size_make_the_object(self, store: Store) -> None:
        for size_bytes in (PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5):
            data = pattern(size_bytes, seed=size_bytes)
            store.put("p", data)
            assert self.get_raw(store, "p") == data
            halves = [data[: size_bytes // 2], data[size_bytes // 2 :]]
            store.put_stream("s", halves, size_bytes)
            assert self.get_raw(store, "s") == data
        assert self.raw.uploads(self.prefix) == []

    @pytest.mark.parametrize("wrong", [-1, 1])
    def test_a_long_stream_of_another_size_leaves_no_upload(self, store: Store, wrong: int) -> None:
        self.set_raw(store, "k", b"old")
        size_bytes = 2 * PART_BYTES
        with pytest.raises(ValueError, match=str(size_bytes)):
            store.put_stream("k", [bytes(PART_BYTES), bytes(PART_BYTES + wrong)], size_bytes)
        assert self.get_raw(store, "k") == b"old"
        assert self.raw.uploads(self.prefix) == []

    def test_dangling_uploads_are_left_over_and_swept(self, store: Store) -> None:
        self.raw.begin_upload(f"{self.prefix}/a/torn", b"x" * 100, b"y" * 11)
        self.raw.begin_upload(f"{self.prefix}/b/empty")
        self.raw.begin_upload(f"{self.prefix}-other/a/torn", b"theirs")
        assert list(store.list("")) == []
        found = {info.key: info for info in store.leftovers("")}
        assert {key: info.size_bytes for key, info in found.items()} == {
            "a/torn": 111,
            "b/empty": 0,
        }
        assert [info.key for info in store.leftovers("a/")] == ["a/torn"]
        for info in found.values():
            store.sweep(info)
            store.sweep(info)
        assert list(store.leftovers("")) == []
        assert self.raw.uploads(f"{self.prefix}-other") == [f"{self.prefix}-other/a/torn"]

    def test_sweep_spares_an_upload_that_has_grown(self, store: Store) -> None:
        upload = self.raw.begin_upload(f"{self.prefix}/k", b"x")
        (found,) = store.leftovers("")
        self.raw.client.upload_part(
            Bucket=BUCKET, Key=f"{self.prefix}/k", UploadId=upload, PartNumber=2, Body=b"y"
        )
        store.sweep(found)
        assert [info.size_bytes for info in store.leftovers("")] == [2]

    def test_foreign_objects_are_not_listed(self, store: Store) -> None:
        for name in (".hidden", "with space"):
            self.set_raw(store, name, b"")
        self.raw.put(f"{self.prefix}-other/k", b"")
        assert [info.key for info in store.list("")] == []

    def test_other_credentials_are_refused_plainly(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.set_raw(store, "k", b"x")
        for name, value in (("AWS_SECRET_ACCESS_KEY", "another"), ("AWS_ACCESS_KEY_ID", "nobody")):
            monkeypatch.setenv(name, value)
            with self.stranger() as other:
                for call in (
                    lambda: other.get("k", 1),
                    lambda: other.put("k", b"y"),
                    lambda: list(other.list("")),
                    lambda: other.stat("k"),
                    lambda: other.put_if_absent("new", b"y"),
                ):
                    with pytest.raises(Denied, match="credentials are refused") as caught:
                        call()
                    assert SECRET_KEY not in str(caught.value)
        assert self.get_raw(store, "k") == b"x"

    def test_no_credentials_are_said_plainly(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        with (
            self.stranger() as other,
            pytest.raises(Denied, match="there are no credentials: set AWS_ACCESS_KEY_ID"),
        ):
            other.get("k", 1)

    def test_open_store_finds_what_a_run_made(self, store: Store) -> None:
        url = f"s3://{BUCKET}/{self.prefix}"
        with pytest.raises(NotFound, match="nothing under this prefix"):
            open_store(url)
        made = open_store(url + "/", create=True)
        assert made.url == url
        assert list(made.list("")) == []
        made.put("a/k", b"x")
        assert open_store(url).get("a/k", 1) == b"x"


class TestSeaweedFS(S3Suite):
    clash_errors = (BadKey, AlreadyExists)  # on a condition it takes a directory for an object

    @pytest.fixture
    def place(self, seaweedfs_place: Place) -> Place:
        return seaweedfs_place

    def test_probes_once_and_leaves_its_mark(self, store: Store) -> None:
        assert store.capabilities == Capabilities(put_if_absent=True, durable=True)
        assert b"Keepstep" in (self.get_raw(store, MARKER) or b"")
        assert list(store.list("")) == []
        assert self.another().capabilities.put_if_absent

    def test_single_writer_is_not_needed_and_changes_nothing(self, store: Store) -> None:
        both = [self.another(single_writer=True), self.another(single_writer=True)]
        both[0].put_if_absent("k", b"first")
        with pytest.raises(AlreadyExists):
            both[1].put_if_absent("k", b"second")


class TestRclone(S3Suite):
    """A server that ignores conditions, and keeps its objects as files."""

    can_put_if_absent = False

    @pytest.fixture
    def place(self, rclone_place: Place) -> Place:
        return rclone_place

    def test_a_name_is_an_object_or_a_directory(self) -> None:
        pytest.skip("rclone tries for a minute before it says that a file is no directory")

    def test_puts_and_deletes_in_one_directory_do_not_fail_each_other(self) -> None:
        pytest.skip("rclone answers 500: it removes a directory while a put to it is going on")

    def test_readers_see_whole_objects_while_writers_replace(self) -> None:
        pytest.skip("rclone overwrites a file in place, and cuts the answer to its reader short")

    @pytest.mark.parametrize("key", ["none", "a/none"])
    def test_delete_of_nothing_is_no_error(self, store: Store, key: str) -> None:
        """Not of the directory "a": rclone answers 500."""
        super().test_delete_of_nothing_is_no_error(store, key)

    def test_single_writer_warns_of_what_is_lost(self, store: Store) -> None:
        mine = self.another(single_writer=True)
        assert mine.url.endswith("?single_writer=true")
        with pytest.warns(SingleWriterWarning, match="committed checkpoints are lost"):
            assert mine.capabilities.put_if_absent
        mine.put_if_absent("k", b"first")
        with pytest.raises(AlreadyExists):
            mine.put_if_absent("k", b"second")
        assert self.get_raw(store, "k") == b"first"

    def test_a_log_is_read_here_and_not_appended_to_without_single_writer(
        self, store: Store
    ) -> None:
        log = open_log(store)
        assert log.read().next_seq == 0
        with pytest.raises(LogError, match=r"add \?single_writer=true"):
            log.take_term("trainer")
        assert list(store.list("")) == []
        with pytest.warns(SingleWriterWarning):
            assert open_log(self.another(single_writer=True)).take_term("trainer") == 1

    def test_a_missing_bucket_is_not_an_empty_one(self, store: Store) -> None:
        client = S3Client("no-such-bucket", small_options())
        nowhere = S3Store(client, "p")
        for call in (
            lambda: nowhere.get("k", 1),
            lambda: nowhere.put("k", b""),
            lambda: list(nowhere.list("")),
            nowhere.exists,
        ):
            with pytest.raises(Permanent, match="bucket is not there") as caught:
                call()
            assert not isinstance(caught.value, NotFound)
        client.close()
