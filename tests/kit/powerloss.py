"""Every disk that POSIX allows to be found after a power loss, for what a `FileStore` did.

`RecordingPosix` writes down each call that changes the disk. Until an fsync of the file, each 4 KiB
block written and each change of size is *outstanding*; until an fsync of the directory, each of its
creations, links, renames, removals is. A power loss keeps any subset of what is outstanding. A
rename inside one directory is one operation. A block that is within the file's size and was never
written reads as zeros.

`disk_states` yields every subset of up to 12 outstanding operations; of more, 1,000 subsets drawn
with a seed, and those with all, none, all but one, and only one. It looks where something is about
to become certain (an fsync, a mark, the end): a loss between two such moments leaves a subset of
what is outstanding at the later one. Above 12, where that one is only sampled, it looks also at the
last moment with 12 and before each directory operation. A state that was yielded before, after the
same marks, is not yielded again.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from keepstep.storage.posix import Posix

BLOCK_BYTES = 4_096
EXHAUSTIVE_MAX = 12
SAMPLES = 1_000

ROOT = 0


@dataclass(frozen=True, slots=True)
class Create:
    directory: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    directory: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Link:
    directory: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Rename:
    directory: int
    source: str
    target: str
    node: int


@dataclass(frozen=True, slots=True)
class Remove:
    directory: int
    name: str


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes `data` at `offset`, which lie within one block."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Size:
    node: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sync:
    node: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Not a disk operation: the caller notes how far it has come."""

    label: str


DirectoryOperation: TypeAlias = Create | MakeDirectory | Link | Rename | Remove
Outstanding: TypeAlias = DirectoryOperation | Block | Size
Operation: TypeAlias = Outstanding | Sync | Mark
Tree: TypeAlias = dict[str, bytes | None]
"""Path from the root -> a file's bytes, or None for a directory."""


class RecordingPosix(Posix):
    """Does what `Posix` does, and keeps the list of what it did to the disk under `root`."""

    def __init__(self, root: Path) -> None:
        self.base = _Disk.read(root)
        self.operations: list[Operation] = []
        self._node_of_inode = dict(self.base.inodes)
        self._node_of_fd: dict[int, int] = {}
        self._size_of_node: dict[int, int] = {n: len(d) for n, d in self.base.files.items()}
        self._names = {node: dict(names) for node, names in self.base.directories.items()}
        self._next_node = max(self._node_of_inode.values()) + 1

    def mark(self, label: str) -> None:
        """Note that the caller has come this far."""
        self.operations.append(Mark(label))

    def _new(self, fd_or_status: os.stat_result) -> int:
        node = self._next_node
        self._next_node += 1
        self._node_of_inode[fd_or_status.st_ino] = node
        return node

    def _opened(self, fd: int) -> int:
        self._node_of_fd[fd] = self._node_of_inode[os.fstat(fd).st_ino]
        return fd

    def open_root(self, path: str) -> int:
        return self._opened(super().open_root(path))

    def open_dir(self, name: str, dir_fd: int) -> int:
        return self._opened(super().open_dir(name, dir_fd))

    def create(self, name: str, dir_fd: int) -> int:
        fd = super().create(name, dir_fd)
        node = self._new(os.fstat(fd))
        self._node_of_fd[fd] = node
        self._size_of_node[node] = 0
        directory = self._node_of_fd[dir_fd]
        self._names[directory][name] = node
        self.operations.append(Create(directory, name, node))
        return fd

    def mkdir(self, name: str, dir_fd: int) -> None:
        super().mkdir(name, dir_fd)
        node = self._new(self.lstat(name, dir_fd))
        directory = self._node_of_fd[dir_fd]
        self._names[directory][name] = node
        self._names[node] = {}
        self.operations.append(MakeDirectory(directory, name, node))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        written = super().pwrite(fd, data, offset)
        node = self._node_of_fd[fd]
        start, end = offset, offset + written
        while start < end:
            stop = min(end, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
            self.operations.append(Block(node, start, bytes(data[start - offset : stop - offset])))
            start = stop
        if end > self._size_of_node[node]:
            self._size_of_node[node] = end
            self.operations.append(Size(node, end))
        return written

    def fsync(self, fd: int) -> None:
        # Not the real one: no test here cuts the power, and it is slow.
        self.operations.append(Sync(self._node_of_fd[fd]))

    def rename(self, source: str, target: str, dir_fd: int) -> None:
        super().rename(source, target, dir_fd)
        directory = self._node_of_fd[dir_fd]
        node = self._names[directory].pop(source)
        self._names[directory][target] = node
        self.operations.append(Rename(directory, source, target, node))

    def link(self, source: str, target: str, dir_fd: int) -> None:
        super().link(source, target, dir_fd)
        directory = self._node_of_fd[dir_fd]
        node = self._names[directory][source]
        self._names[directory][target] = node
        self.operations.append(Link(directory, target, node))

    def unlink(self, name: str, dir_fd: int) -> None:
        super().unlink(name, dir_fd)
        self._removed(name, dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        super().rmdir(name, dir_fd)
        self._removed(name, dir_fd)

    def _removed(self, name: str, dir_fd: int) -> None:
        directory = self._node_of_fd[dir_fd]
        del self._names[directory][name]
        self.operations.append(Remove(directory, name))


@dataclass(slots=True)
class _Disk:
    """What is on the disk for certain: directories' names, files' bytes, by node."""

    directories: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    inodes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> _Disk:
        disk = cls()

        def visit(path: Path) -> int:
            status = path.lstat()
            node = disk.inodes.setdefault(status.st_ino, len(disk.inodes))
            if stat.S_ISDIR(status.st_mode):
                disk.directories[node] = {}
                for child in sorted(path.iterdir()):
                    disk.directories[node][child.name] = visit(child)
            else:
                disk.files[node] = path.read_bytes()
            return node

        visit(root)
        return disk

    def with_applied(self, operations: list[Outstanding]) -> _Disk:
        """A new disk, on which these have reached the platter too."""
        disk = _Disk({n: dict(names) for n, names in self.directories.items()}, dict(self.files))
        blocks: dict[int, list[Block]] = {}
        for operation in operations:
            if isinstance(operation, Block):
                blocks.setdefault(operation.node, []).append(operation)
            elif isinstance(operation, Size):
                old = disk.files.get(operation.node, b"")
                disk.files[operation.node] = old.ljust(operation.size_bytes, b"\0")
            else:
                disk._apply_name(operation)
        for node, written in blocks.items():
            data = bytearray(disk.files.get(node, b""))
            for block in written:
                end = min(block.offset + len(block.data), len(data))
                if end > block.offset:  # what lies beyond the size is not seen
                    data[block.offset : end] = block.data[: end - block.offset]
            disk.files[node] = bytes(data)
        return disk

    def _apply_name(self, operation: DirectoryOperation) -> None:
        names = self.directories.setdefault(operation.directory, {})
        if isinstance(operation, Remove):
            names.pop(operation.name, None)
            return
        if isinstance(operation, Rename):
            names.pop(operation.source, None)
            names[operation.target] = operation.node
            return
        names[operation.name] = operation.node
        if isinstance(operation, MakeDirectory):
            self.directories.setdefault(operation.node, {})

    def tree(self) -> Tree:
        """What can be reached from the root."""
        found: Tree = {}

        def visit(node: int, path: str) -> None:
            for name, child in self.directories[node].items():
                below = f"{path}/{name}" if path else name
                if child in self.directories:
                    found[below] = None
                    visit(child, below)
                else:
                    found[below] = self.files.get(child, b"")

        visit(ROOT, "")
        return found


@dataclass(frozen=True, slots=True)
class DiskState:
    """One disk that may be found.

    Attributes:
        after: how many of the recorded operations had been called when the power failed.
        marks: the labels that had been noted by then.
        kept: which of the outstanding operations survived, `outstanding` of how many.
        tree: what is on the disk.
    """

    after: int
    marks: tuple[str, ...]
    kept: int
    outstanding: int
    tree: Tree

    def write_to(self, directory: Path) -> None:
        """Make `directory` (new) such a disk."""
        directory.mkdir()
        for path, data in sorted(self.tree.items()):
            if data is None:
                (directory / path).mkdir()
            else:
                (directory / path).write_bytes(data)


def disk_states(recording: RecordingPosix, seed: int = 0) -> Iterator[DiskState]:
    """All allowed disks, for a power loss before the first and after each operation."""
    return _states(recording.base, recording.operations, random.Random(seed))


def _states(base: _Disk, operations: list[Operation], rng: random.Random) -> Iterator[DiskState]:
    certain = base
    waiting: list[Outstanding] = []
    marks: tuple[str, ...] = ()
    seen: set[int] = set()
    for after in range(len(operations) + 1):
        if after > 0:
            operation = operations[after - 1]
            if isinstance(operation, Mark):
                marks = (*marks, operation.label)
                seen.clear()  # the same disk may be wrong once more has been promised
            elif isinstance(operation, Sync):
                synced = [o for o in waiting if _belongs(o, operation.node)]
                waiting = [o for o in waiting if not _belongs(o, operation.node)]
                certain = certain.with_applied(synced)
            else:
                waiting.append(operation)
        if not _worth_a_look(waiting, operations[after : after + 1]):
            continue
        for kept in _subsets(waiting, rng):
            tree = certain.with_applied(kept).tree()
            fingerprint = hash(tuple(sorted(tree.items(), key=lambda item: item[0])))
            if fingerprint not in seen:
                seen.add(fingerprint)
                yield DiskState(after, marks, len(kept), len(waiting), tree)


def _worth_a_look(waiting: list[Outstanding], coming: list[Operation]) -> bool:
    """Whether the states here are not all among those of a later moment."""
    if not coming or isinstance(coming[0], Sync | Mark) or len(waiting) == EXHAUSTIVE_MAX:
        return True
    return len(waiting) > EXHAUSTIVE_MAX and not isinstance(coming[0], Block | Size)


def _belongs(operation: Outstanding, node: int) -> bool:
    """Whether an fsync of `node` makes `operation` durable."""
    if isinstance(operation, Block | Size):
        return operation.node == node
    return operation.directory == node


def _subsets(waiting: list[Outstanding], rng: random.Random) -> Iterator[list[Outstanding]]:
    count = len(waiting)
    if count <= EXHAUSTIVE_MAX:
        choices: Iterator[int] = iter(range(1 << count))
    else:
        choices = _sampled(count, rng)
    for choice in choices:
        yield [operation for i, operation in enumerate(waiting) if choice >> i & 1]


def _sampled(count: int, rng: random.Random) -> Iterator[int]:
    everything = (1 << count) - 1
    yield 0
    yield everything
    for i in range(count):
        yield 1 << i
        yield everything & ~(1 << i)
    for _ in range(SAMPLES):
        # How many survive is drawn first; else nearly all samples would keep about half.
        share = rng.random()
        yield sum(1 << i for i in range(count) if rng.random() < share)
