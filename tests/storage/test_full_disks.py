"""A disk that is really full, out of inodes, or read-only: typed, nothing lost, and going on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.crash_save import faults_going_on, prepare, save
from tests.kit.logs import open_log
from tests.kit.mounts import remount, small_tmpfs
from tests.kit.store_suite import CALLS, page_aligned, pattern

from keepstep.ckpt.doctor import Verdict, check_disk, check_memory
from keepstep.ckpt.log import Log, read_entries
from keepstep.storage.disk_trial import try_disk
from keepstep.storage.errors import Denied, NoSpace, StoreError
from keepstep.storage.file import FileStore
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

SIZE_BYTES = 4 << 20
OLD = pattern(1 << 20, seed=1)
NEW = pattern(8 << 20, seed=2)

WRITES: dict[str, Callable[[Store], None]] = {
    "put": lambda store: store.put("a/k", page_aligned(NEW)),
    "put_stream": lambda store: store.put_stream("a/k", [NEW[:100], NEW[100:]], len(NEW)),
    "put_if_absent": lambda store: store.put_if_absent("a/fresh", NEW),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", f"size={SIZE_BYTES}") as place:
        yield place


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - it ends the loop


def files(place: Path) -> list[str]:
    return sorted(name for _, _, names in os.walk(place) for name in names)


@pytest.mark.parametrize("name", WRITES)
def test_what_does_not_fit_leaves_the_old_and_no_temporary(disk: Path, name: str) -> None:
    store = FileStore(disk)
    store.put("a/k", OLD)
    for _ in range(5):
        with pytest.raises(NoSpace) as caught:
            WRITES[name](store)
        assert caught.value.errno == errno.ENOSPC
        assert "free space or raise the quota" in str(caught.value)
    assert store.get("a/k", len(OLD)) == OLD
    assert files(disk) == ["k"]
    store.put("a/k", OLD[::-1])  # the space of what failed was given back
    assert store.get("a/k", len(OLD)) == OLD[::-1]


def test_a_full_disk_still_reads_and_deletes_and_then_writes_again(disk: Path) -> None:
    store = FileStore(disk)
    store.put("a/k", OLD)
    fill(disk / "filler")
    with pytest.raises(NoSpace):
        store.put("a/other", OLD)
    assert store.get_range("a/k", 5, 10) == OLD[5:15]
    assert [info.key for info in store.list("")] == ["a/k", "filler"]
    store.delete("filler")
    store.put("a/other", OLD)


def test_a_disk_without_inodes_is_out_of_space_too(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "size=4m,nr_inodes=6") as place:
        store = FileStore(place)
        put: list[str] = []
        number = None
        while number is None:
            try:
                store.put(f"k{len(put)}", b"x")
            except NoSpace as error:
                number = error.errno
            else:
                put.append(f"k{len(put)}")
        assert number == errno.ENOSPC
        assert 0 < len(put) < 6
        assert [info.key for info in store.list("")] == put
        assert list(store.leftovers("")) == []
        with pytest.raises(NoSpace):
            store.put_if_absent("fresh", b"x")
        with pytest.raises(NoSpace):
            store.put("new/directory/k", b"x")
        store.delete(put[0])
        store.put("again", b"x")


def test_a_save_on_a_disk_that_fills_up_leaves_the_old_commit_and_the_next_goes_on(
    disk: Path,
) -> None:
    store = FileStore(disk)
    prepare(store)
    live = [committed.state for committed in Log(store).read().live]
    fill(disk / "filler")
    with pytest.raises(NoSpace):
        save(store)
    assert [committed.state for committed in Log(store).read().live] == live
    with pytest.raises(NoSpace):
        open_log(store).take_term("too late")
    (disk / "filler").unlink()
    assert faults_going_on(store) == []


def test_a_read_only_disk_is_denied_and_read(disk: Path) -> None:
    plain, store = open_store(disk / "plain", create=True), open_store(disk / "run", create=True)
    plain.put("a/k", OLD)
    prepare(store)
    entries = len(list(read_entries(store)))
    remount(disk, "ro")
    for name in ("put", "put_stream", "put_if_absent", "delete"):
        key = "a/fresh" if name == "put_if_absent" else "a/k"
        with pytest.raises(Denied) as caught:
            CALLS[name](plain, key)
        assert caught.value.errno == errno.EROFS, name
        assert "mount options" in str(caught.value)
    with pytest.raises(Denied):
        save(store)
    with pytest.raises(StoreError) as made:
        open_store(disk / "new/store", create=True)
    assert made.value.errno == errno.EROFS
    assert plain.get("a/k", len(OLD)) == OLD
    assert len(list(read_entries(store))) == entries
    remount(disk, "rw")
    assert faults_going_on(store) == []


def test_doctor_sees_a_disk_that_is_full_small_or_read_only(disk: Path) -> None:
    with pytest.raises(NoSpace, match="leaves"):
        try_disk(str(disk), 16 << 20)
    assert check_disk(str(disk), 16 << 20, 0).verdict is Verdict.FAILED
    memory, directory = check_memory(str(disk / "pools"), 0)
    assert memory.verdict is Verdict.FAILED
    assert memory.figures["size_bytes"] == SIZE_BYTES
    assert memory.figures["mount"] == str(disk)
    assert "--shm-size" in memory.fix
    assert directory.verdict is Verdict.GOOD
    assert files(disk) == []
