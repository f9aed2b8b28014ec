"""The power-loss model yields exactly the disks that POSIX allows."""

from __future__ import annotations

from pathlib import Path

from tests.kit.posixes import InterleavedPosix
from tests.kit.powerloss import BLOCK_BYTES, DiskState, RecordingPosix, Tree, disk_states

from keepstep.storage.directories import opened
from keepstep.storage.file import FileStore


def trees(recording: RecordingPosix, after_last: bool = False) -> list[Tree]:
    states = list(disk_states(recording))
    if after_last:
        states = [s for s in states if s.after == len(recording.operations)]
    return [state.tree for state in states]


def test_a_new_file_may_be_absent_empty_zero_torn_or_whole(tmp_path: Path) -> None:
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        fd = posix.create("f", root)
        data = b"a" * BLOCK_BYTES + b"b" * 10
        assert posix.pwrite(fd, memoryview(data), 0) == len(data)
        posix.close(fd)
    zeros, size = b"\0" * BLOCK_BYTES, len(data)
    allowed = [
        {},
        {"f": b""},
        {"f": bytes(size)},
        {"f": b"a" * BLOCK_BYTES + bytes(10)},
        {"f": zeros + b"b" * 10},
        {"f": data},
    ]
    found = trees(posix)
    assert len(found) == len(allowed)
    assert all(tree in found for tree in allowed)


def test_fsync_of_the_file_fixes_its_bytes_but_not_its_name(tmp_path: Path) -> None:
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        fd = posix.create("f", root)
        posix.pwrite(fd, memoryview(b"xy"), 0)
        posix.fsync(fd)
        posix.mark("synced")
        posix.close(fd)
    found = [s.tree for s in disk_states(posix) if s.marks == ("synced",)]
    assert found == [{}, {"f": b"xy"}]


def test_fsync_of_the_directory_fixes_its_names_but_not_the_bytes(tmp_path: Path) -> None:
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        fd = posix.create("f", root)
        posix.pwrite(fd, memoryview(b"xy"), 0)
        posix.fsync(root)
        posix.mark("synced")
        posix.close(fd)
    found = [s.tree for s in disk_states(posix) if s.marks == ("synced",)]
    assert sorted(found, key=str) == sorted([{"f": b""}, {"f": b"\0\0"}, {"f": b"xy"}], key=str)


def test_a_rename_is_one_operation_and_a_link_and_an_unlink_are_two(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        posix.rename("a", "b", root)
    assert trees(posix) == [{"a": b"new", "b": b"old"}, {"b": b"new"}]

    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        posix.link("b", "c", root)
        posix.unlink("b", root)
    both, one, other = {"b": b"new", "c": b"new"}, {"b": b"new"}, {"c": b"new"}
    found = trees(posix)
    assert len(found) == 4
    assert all(tree in found for tree in (both, one, other, {}))


def test_a_directory_that_is_not_durable_takes_its_files_with_it(tmp_path: Path) -> None:
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        posix.mkdir("d", root)
    with opened(posix, str(tmp_path), ("d",)) as (root, directory):
        posix.close(posix.create("f", directory))
        posix.fsync(directory)
        posix.mark("inner")
        posix.fsync(root)
        posix.mark("both")
    found = {marks: [] for marks in [(), ("inner",), ("inner", "both")]}
    for state in disk_states(posix):
        found[state.marks].append(state.tree)
    assert found["inner",] == [{}, {"d": None, "d/f": b""}]
    assert found["inner", "both"] == [{"d": None, "d/f": b""}]


def test_a_removed_directory_and_a_new_one_of_the_same_name_are_two(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_bytes(b"")
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ("d",)) as (_, directory):
        posix.unlink("old", directory)
    with opened(posix, str(tmp_path), ()) as (root,):
        posix.rmdir("d", root)
        posix.mkdir("d", root)
    assert {"d": None} in trees(posix)
    assert {"d": None, "d/old": b""} in trees(posix)


def test_more_than_twelve_outstanding_are_sampled_the_same_way_each_time(tmp_path: Path) -> None:
    posix = RecordingPosix(tmp_path)
    with opened(posix, str(tmp_path), ()) as (root,):
        fd = posix.create("f", root)
        posix.fsync(root)
        data = b"".join(bytes([65 + i]) * BLOCK_BYTES for i in range(14))
        posix.pwrite(fd, memoryview(data), 0)
        posix.close(fd)
    last = [s for s in disk_states(posix, seed=3) if s.after == len(posix.operations)]
    assert last[0].outstanding == 15
    assert 300 < len(last) <= 1_032
    again = [s for s in disk_states(posix, seed=3) if s.after == len(posix.operations)]
    assert [s.tree for s in last] == [s.tree for s in again]
    other = [s for s in disk_states(posix, seed=4) if s.after == len(posix.operations)]
    assert [s.tree for s in last] != [s.tree for s in other]
    assert {"f": data} in [s.tree for s in last]


def test_a_state_can_be_made_real(tmp_path: Path) -> None:
    state = DiskState(0, (), 0, 0, {"d": None, "d/f": b"xy", "e": None, "g": b""})
    state.write_to(tmp_path / "disk")
    assert RecordingPosix(tmp_path / "disk").base.tree() == state.tree


def test_what_was_there_before_the_recording_is_durable(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"xy")
    assert trees(RecordingPosix(tmp_path)) == [{"d": None, "d/f": b"xy"}]


def test_interleaved_threads_are_recorded_the_same_way_for_the_same_seed(tmp_path: Path) -> None:
    def recorded(seed: int, name: str) -> list[str]:
        root = tmp_path / name
        root.mkdir()
        posix = InterleavedPosix(root, seed)
        store = FileStore(root, posix=posix)
        posix.run([lambda n=n: store.put(f"d/{n}", b"x") for n in "abc"])  # type: ignore[misc]
        return [type(operation).__name__ for operation in posix.operations]

    assert recorded(1, "first") == recorded(1, "again")
    assert recorded(1, "once more") != recorded(2, "other")
