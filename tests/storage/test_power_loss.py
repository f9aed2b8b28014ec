"""After a power loss at any moment, a file store shows the old object or the new one, whole.

What was acknowledged is there. Each fsync that this rests on is shown to be needed: without it some
disk breaks the promise.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.posixes import InterleavedPosix
from tests.kit.powerloss import ROOT, RecordingPosix, Sync, disk_states
from tests.kit.store_suite import page_aligned, pattern

from keepstep.storage.errors import NotFound
from keepstep.storage.file import FileStore

OLD = pattern(5_000, seed=1)
NEW = pattern(9_000, seed=2)
BIG = pattern((1 << 20) + 4_096 * 3 + 7, seed=3)


class NoFileSync(RecordingPosix):
    """Forgets to fsync files."""

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


class NoDirectorySync(RecordingPosix):
    """Forgets to fsync the directory that holds the object."""

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode) or self._node_of_fd[fd] == ROOT:
            super().fsync(fd)


class NoParentSync(RecordingPosix):
    """Forgets to fsync the root, in which a new directory was made."""

    def fsync(self, fd: int) -> None:
        if self._node_of_fd[fd] != ROOT:
            super().fsync(fd)


def found(state_directory: Path, key: str) -> bytes | None:
    try:
        return FileStore(state_directory).get(key, 1 << 30)
    except NotFound:
        return None


def broken_promises(
    tmp_path: Path,
    posix_class: type[RecordingPosix],
    act: Callable[[FileStore], None],
    before: bytes | None,
    after: bytes | None,
    key: str = "d/k",
) -> list[str]:
    """Do `act` on a store that holds `before`, and say what is wrong with any disk found then."""
    root = tmp_path / "store"
    root.mkdir()
    if before is not None:
        (root / key).parent.mkdir(parents=True)
        (root / key).write_bytes(before)
    posix = posix_class(root)
    act(FileStore(root, posix=posix))
    posix.mark("acknowledged")
    wrong = []
    count = 0
    for number, state in enumerate(disk_states(posix, seed=7)):
        count += 1
        disk = tmp_path / f"disk{number}"
        state.write_to(disk)
        allowed = [after] if state.marks else [before, after]
        seen = found(disk, key)
        if seen not in allowed:
            size = "nothing" if seen is None else f"{len(seen)} bytes"
            wrong.append(f"after operation {state.after}, {state.marks}: {size}")
        keys = [info.key for info in FileStore(disk).list("")]
        assert keys in ([], [key]), "a temporary file is listed"
    assert count > 2
    return wrong


def put(data: bytes) -> Callable[[FileStore], None]:
    return lambda store: store.put("d/k", page_aligned(data))


def put_if_absent(data: bytes) -> Callable[[FileStore], None]:
    return lambda store: store.put_if_absent("d/k", data)


def put_stream(data: bytes) -> Callable[[FileStore], None]:
    return lambda store: store.put_stream("d/k", [data[:4_100], data[4_100:]], len(data))


def delete(store: FileStore) -> None:
    store.delete("d/k")


WRITES = {
    "put over": (put(NEW), OLD, NEW),
    "put new": (put(NEW), None, NEW),
    "put nothing": (put(b""), OLD, b""),
    "put_stream over": (put_stream(NEW), OLD, NEW),
    "put_if_absent": (put_if_absent(NEW), None, NEW),
    "delete": (delete, OLD, None),
}


@pytest.mark.parametrize("name", WRITES)
def test_old_or_new_whole_and_new_once_acknowledged(tmp_path: Path, name: str) -> None:
    act, before, after = WRITES[name]
    assert broken_promises(tmp_path, RecordingPosix, act, before, after) == []


def test_a_big_direct_write_is_sampled(tmp_path: Path) -> None:
    act, before, after = put(BIG), OLD, BIG
    assert broken_promises(tmp_path, RecordingPosix, act, before, after) == []


@pytest.mark.parametrize(
    ("posix_class", "names"),
    [
        (NoFileSync, ["put over", "put new", "put_stream over", "put_if_absent"]),
        (NoDirectorySync, ["put over", "put new", "put nothing", "put_if_absent", "delete"]),
        (NoParentSync, ["put new", "put_if_absent"]),
    ],
)
def test_without_one_of_its_fsyncs_some_disk_is_wrong(
    tmp_path: Path, posix_class: type[RecordingPosix], names: list[str]
) -> None:
    for name in names:
        act, before, after = WRITES[name]
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        assert broken_promises(directory, posix_class, act, before, after) != [], name


def test_a_directory_that_another_process_has_just_made_is_made_durable(tmp_path: Path) -> None:
    def act(store: FileStore) -> None:
        posix = store._posix
        root = posix.open_root(store._root)
        posix.mkdir("d", root)  # by somebody who has not yet fsynced its parent
        posix.close(root)
        store.put("d/k", NEW)

    assert broken_promises(tmp_path, RecordingPosix, act, None, NEW) == []


def test_a_key_that_is_reported_as_taken_stays_taken(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    posix = RecordingPosix(root)
    store = FileStore(root, posix=posix)
    store.put("d/other", b"")
    # The first writer linked its entry, and died before the fsync of the directory.
    store.put_if_absent("d/k", NEW)
    del posix.operations[max(i for i, o in enumerate(posix.operations) if isinstance(o, Sync))]
    with pytest.raises(FileExistsError):
        store.put_if_absent("d/k", OLD)
    posix.mark("taken")
    for number, state in enumerate(disk_states(posix)):
        if state.marks:
            state.write_to(tmp_path / f"disk{number}")
            assert found(tmp_path / f"disk{number}", "d/k") == NEW


@pytest.mark.parametrize("seed", range(6))
def test_writers_in_one_new_directory_at_once_keep_their_promises(
    tmp_path: Path, seed: int
) -> None:
    """Also while a third empties that directory, and so may remove it under their hands."""
    root = tmp_path / "store"
    (root / "d").mkdir(parents=True)
    (root / "d/gone").write_bytes(OLD)
    posix = InterleavedPosix(root, seed)
    store = FileStore(root, posix=posix)

    def write(name: str, act: Callable[[str, bytes], None]) -> None:
        act(f"d/{name}", NEW)
        posix.mark(name)

    def remove() -> None:
        store.delete("d/gone")
        posix.mark("gone")

    posix.run([lambda: write("a", store.put), lambda: write("b", store.put_if_absent), remove])
    wrong = []
    for number, state in enumerate(disk_states(posix, seed)):
        disk = tmp_path / f"disk{number}"
        state.write_to(disk)
        for name in ("a", "b"):
            allowed = [NEW] if name in state.marks else [None, NEW]
            if found(disk, f"d/{name}") not in allowed:
                wrong.append((state.after, state.marks, name))
        if found(disk, "d/gone") not in ([None] if "gone" in state.marks else [OLD, None]):
            wrong.append((state.after, state.marks, "gone"))
    assert number > 40
    assert wrong == []
