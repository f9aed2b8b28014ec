"""Whichever system call fails, and however: nothing half, the number kept, no temporary left."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kit.store_suite import page_aligned, pattern

from keepstep.storage.errors import (
    Denied,
    NoSpace,
    OutcomeUnknown,
    Permanent,
    StoreError,
    Transient,
)
from keepstep.storage.file import FileStore
from keepstep.storage.posix import Posix

CALLS = [name for name in vars(Posix) if not name.startswith("_")]


class FailingPosix(Posix):
    """Counts its calls, and lets one of them fail: instead of, or after, doing it."""

    def __init__(
        self, name: str = "", at: int = 0, number: int = 0, *, do_it_first: bool = False
    ) -> None:
        self.counts: Counter[str] = Counter()
        for call in CALLS:
            setattr(self, call, self._wrapped(call, name, at, number, do_it_first))

    def _wrapped(
        self, call: str, name: str, at: int, number: int, do_it_first: bool
    ) -> Callable[..., object]:
        real = getattr(super(), call)

        def wrapper(*args: object) -> object:
            nth = self.counts[call]
            self.counts[call] += 1
            if call != name or nth != at:
                return real(*args)
            # A close that fails has closed.
            if do_it_first or call == "close":
                real(*args)
            raise OSError(number, os.strerror(number))

        return wrapper


OLD = pattern(6_000, seed=1)
NEW = pattern((1 << 20) + 5_000, seed=2)

WRITES: dict[str, Callable[[FileStore], None]] = {
    "put": lambda store: store.put("a/b/k", page_aligned(NEW)),
    "put_stream": lambda store: store.put_stream("a/b/k", [NEW[:100], NEW[100:]], len(NEW)),
    "put_if_absent": lambda store: store.put_if_absent("a/b/k", NEW),
    "delete": lambda store: store.delete("a/b/k"),
}


def prepare(root: Path, name: str) -> bytes | None:
    """The object before: none where the operation needs a free key."""
    root.mkdir()
    if name == "put_if_absent":
        return None
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/k").write_bytes(OLD)
    return OLD


def content(root: Path) -> bytes | None:
    path = root / "a/b/k"
    return path.read_bytes() if path.exists() else None


def temporaries(root: Path) -> list[str]:
    return [f for _, _, files in os.walk(root) for f in files if f.startswith(".keepstep-tmp-")]


@pytest.mark.parametrize("do_it_first", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_whichever_call_fails_the_object_is_old_or_new(
    tmp_path: Path, name: str, do_it_first: bool
) -> None:
    counting = FailingPosix()
    prepare(tmp_path / "count", name)
    WRITES[name](FileStore(tmp_path / "count", posix=counting))
    new = content(tmp_path / "count")
    struck = 0
    before = len(os.listdir("/proc/self/fd"))
    for call, count in counting.counts.items():
        for at in range(count):
            for number in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ETIMEDOUT):
                if do_it_first and (number in (errno.ENOSPC, errno.EACCES) or _opens(call)):
                    continue  # with these a system says that it did not do it
                root = tmp_path / f"{call}-{at}-{number}"
                old = prepare(root, name)
                error = None
                try:
                    WRITES[name](FileStore(root, posix=FailingPosix(
                        call, at, number, do_it_first=do_it_first)))  # fmt: skip
                except StoreError as caught:
                    error = caught
                where = (call, at, errno.errorcode[number], error)
                assert error is None or error.errno == number, where
                struck += 1
                assert content(root) in (old, new), where
                if error is None:
                    assert content(root) == new, where
                elif not isinstance(error, OutcomeUnknown):
                    assert content(root) == old, where
                if call != "unlink":
                    assert temporaries(root) == [], where
                assert len(os.listdir("/proc/self/fd")) == before, where
    assert struck >= 20


def _opens(call: str) -> bool:
    """A call that hands out a descriptor: one that fails has handed out none."""
    return call.startswith("open") or call == "create"


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("pwrite", errno.ENOSPC, NoSpace),
        ("pwrite", errno.EDQUOT, NoSpace),
        ("pwrite", errno.EFBIG, NoSpace),
        ("create", errno.EROFS, Denied),
        ("create", errno.EACCES, Denied),
        ("create", errno.EMFILE, Transient),
        ("open_root", errno.ESTALE, Transient),
        ("pwrite", errno.EIO, Permanent),
        ("fsync", errno.EIO, Permanent),
        ("fsync", errno.ENOSPC, NoSpace),
        ("close", errno.EDQUOT, NoSpace),
        ("rename", errno.ENOSPC, NoSpace),
        ("rename", errno.EIO, OutcomeUnknown),
        ("rename", errno.ETIMEDOUT, OutcomeUnknown),
        ("rename", errno.ENOENT, OutcomeUnknown),
    ],
)
def test_put_says_what_kind_of_failure_it_was(
    tmp_path: Path, call: str, number: int, kind: type[StoreError]
) -> None:
    store = FileStore(tmp_path, posix=FailingPosix(call, 0, number))
    with pytest.raises(kind) as caught:
        store.put("k", b"x")
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert errno.errorcode[number] in str(caught.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_a_directory_fsync_that_fails_after_the_rename_leaves_the_outcome_unknown(
    tmp_path: Path, number: int
) -> None:
    store = FileStore(tmp_path, posix=FailingPosix("fsync", 1, number))
    with pytest.raises(OutcomeUnknown):
        store.put("k", b"x")
    assert (tmp_path / "k").read_bytes() == b"x"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named_as_such(tmp_path: Path, number: int) -> None:
    store = FileStore(tmp_path, posix=FailingPosix("link", 0, number))
    with pytest.raises(Permanent, match="no hard links") as caught:
        store.put_if_absent("k", b"x")
    assert type(caught.value) is Permanent
    assert os.listdir(tmp_path) == []


def test_a_link_whose_answer_was_lost_and_which_was_asked_for_again_is_a_success(
    tmp_path: Path,
) -> None:
    posix = FailingPosix("link", 0, errno.EEXIST, do_it_first=True)
    FileStore(tmp_path, posix=posix).put_if_absent("k", b"x")
    assert (tmp_path / "k").read_bytes() == b"x"
    assert os.listdir(tmp_path) == ["k"]


@pytest.mark.parametrize("call", ["preadv", "fstat", "open_read", "open_root"])
def test_reads_keep_the_number(tmp_path: Path, call: str) -> None:
    (tmp_path / "k").write_bytes(b"hello")
    store = FileStore(tmp_path, posix=FailingPosix(call, 0, errno.EIO))
    with pytest.raises(Permanent) as caught:
        store.read_into("k", 0, memoryview(bytearray(5)))
    assert caught.value.errno == errno.EIO


def test_a_listing_that_cannot_be_read_is_no_empty_listing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/k").write_bytes(b"x")
    store = FileStore(tmp_path, posix=FailingPosix("entries", 1, errno.EACCES))
    with pytest.raises(Denied):
        list(store.list(""))


class StingyPosix(Posix):
    """Moves few bytes at a time, and never the same number."""

    def __init__(self) -> None:
        self.turn = 0

    def _some(self, length: int) -> int:
        self.turn += 1
        return min(length, 1 + self.turn * 7_919 % 300_000)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return super().pwrite(fd, data[: self._some(data.nbytes)], offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return super().pread(fd, self._some(length), offset)

    def preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        (target,) = targets
        return super().preadv(fd, [target[: self._some(target.nbytes)]], offset)


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path) -> None:
    store = FileStore(tmp_path, posix=StingyPosix())
    store.put("k", page_aligned(NEW))
    assert (tmp_path / "k").read_bytes() == NEW
    assert store.get("k", len(NEW)) == NEW
    assert store.get_range("k", 77, 900_000) == NEW[77:900_077]
    target = bytearray(900_000)
    store.read_into("k", 77, memoryview(target))
    assert target == NEW[77:900_077]


class CutShort(Posix):
    """The file is cut by somebody else between the look at its size and the read."""

    def fstat(self, fd: int) -> os.stat_result:
        status = super().fstat(fd)
        os.truncate(f"/proc/self/fd/{fd}", 2)
        return status


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    for read in (
        lambda store: store.get("k", 10),
        lambda store: store.get_range("k", 0, 5),
        lambda store: store.read_into("k", 0, memoryview(bytearray(5))),
    ):
        (tmp_path / "k").write_bytes(b"hello")
        with pytest.raises(Permanent, match="the object has 2"):
            read(FileStore(tmp_path, posix=CutShort()))


class SweptPosix(Posix):
    """Somebody sweeps the temporary file just before it is renamed or linked."""

    def rename(self, source: str, target: str, dir_fd: int) -> None:
        os.unlink(source, dir_fd=dir_fd)
        super().rename(source, target, dir_fd)


def test_a_temporary_that_is_swept_too_early_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"old")
    with pytest.raises(OutcomeUnknown):
        FileStore(tmp_path, posix=SweptPosix()).put("k", b"new")
    assert (tmp_path / "k").read_bytes() == b"old"


class VanishingPosix(Posix):
    """Somebody removes the empty directory each of the first times it is about to be used."""

    def __init__(self, times: int) -> None:
        self.times = times

    def create(self, name: str, dir_fd: int) -> int:
        if self.times > 0:
            self.times -= 1
            os.rmdir(os.readlink(f"/proc/self/fd/{dir_fd}"))
        return super().create(name, dir_fd)


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    FileStore(tmp_path, posix=VanishingPosix(5)).put("a/b/k", b"x")
    assert (tmp_path / "a/b/k").read_bytes() == b"x"


def test_a_directory_that_always_vanishes_is_transient(tmp_path: Path) -> None:
    with pytest.raises(Transient, match="removed each time"):
        FileStore(tmp_path, posix=VanishingPosix(10**6)).put("a/b/k", b"x")
