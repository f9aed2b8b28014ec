"""Capture and save: the bytes of the moment, every dtype, failures that leave the saver usable."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.kit.states import STATE, Layout, save_alone

from keepstep.ckpt.arena import Arena, ArenaTooLarge
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.load import stage
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Placement
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.save import Saver, WrongMoment
from keepstep.ckpt.structure import HeldTensor, RankStructure, merge_structures
from keepstep.storage.errors import NoSpace
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Buffer

ONE = Layout().mesh

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def odd_tensors() -> dict[str, torch.Tensor]:
    """One of each dtype and several shapes, random bits (NaNs with payloads among them)."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for dtype in DTYPES:
        for shape in ((), (1,), (0,), (0, 3), (3, 0), (5, 7), (300, 129)):
            count = max(1, torch.Size(shape).numel()) * dtype.itemsize
            high = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
            whole = raw.view(dtype)[: torch.Size(shape).numel()].view(shape)
            tensors[f"{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, shape)) or '0d'}"] = (
                whole
            )
    base = torch.randn(8, 9, 10, generator=generator)
    tensors["transposed"] = base.transpose(0, 2)
    tensors["every-other"] = base[::2, 1:7:3]
    tensors["conj"] = torch.randn(3, dtype=torch.complex64, generator=generator).conj()
    return tensors


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def registry_of(tensors: dict[str, torch.Tensor]) -> Registry:
    registry = Registry(ONE, 0)
    for name, tensor in tensors.items():
        registry.add_tensor(name, tensor)
    return registry


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    made = saver_of({"w": torch.arange(100_000.0)}, FileStore(tmp_path))
    yield made
    made.close()


def saver_of(tensors: dict[str, torch.Tensor], store: FileStore | MemoryStore) -> Saver:
    registry = registry_of(tensors)
    return Saver(registry, merge_structures([registry.structure()]), store, "test")


def test_every_dtype_and_shape_comes_back_bit_for_bit() -> None:
    tensors = odd_tensors()
    store = MemoryStore()
    registry = registry_of(tensors)
    manifest = save_alone(registry, store)
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.copy_(torch.ones((), dtype=torch.uint8))
    structure = merge_structures([registry.structure()])
    with stage(registry, structure, manifest, store) as staged:
        staged.apply()
    assert {name: bits(tensor) for name, tensor in tensors.items()} == expected


def test_an_independent_reader_finds_the_same_tensors(tmp_path: Path) -> None:
    tensors = odd_tensors()
    save_alone(registry_of(tensors), FileStore(tmp_path))
    with safe_open(tmp_path / image_key(STATE, 0), "pt") as file:
        for name in ("float32/300x129", "int64/0d", "bool/5x7", "transposed", "conj"):
            assert bits(file.get_tensor(name)) == bits(tensors[name])


def test_a_slice_of_a_big_tensor_makes_a_small_image(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    save_alone(registry_of({"slice": torch.zeros(1_000_000)[:10]}), store)
    assert store.stat(image_key(STATE, 0)).size_bytes == 4096 + 40


def test_what_changes_after_capture_is_not_saved(tmp_path: Path) -> None:
    big, small = torch.arange(100_000.0), torch.arange(10)
    saver = saver_of({"big": big, "small": small}, FileStore(tmp_path))
    saver.capture(STATE)
    big.zero_()
    small.zero_()
    saver.start()
    saver.wait()
    saver.close()
    with safe_open(tmp_path / image_key(STATE, 0), "pt") as file:
        assert torch.equal(file.get_tensor("big"), torch.arange(100_000.0))
        assert torch.equal(file.get_tensor("small"), torch.arange(10))


class Full(MemoryStore):
    """A store whose disk is full for the first `failures` puts, and waits for `go` before each."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.go = threading.Event()

    def put(self, key: str, data: Buffer) -> None:
        self.go.wait(10)
        if self.failures:
            self.failures -= 1
            raise NoSpace("disk full", operation="put", key=key, errno=errno.ENOSPC)
        super().put(key, data)


def test_a_failed_write_keeps_its_errno_and_the_saver_goes_on() -> None:
    store = Full(failures=1)
    saver = saver_of({"w": torch.arange(5.0)}, store)
    saver.capture(STATE)
    saver.start()
    store.go.set()
    with pytest.raises(NoSpace) as caught:
        saver.wait(10)
    assert caught.value.errno == errno.ENOSPC
    assert not saver.is_running
    saver.capture(State(1, 21))
    saver.start()
    assert saver.wait(10) is not None
    saver.close()
    assert [info.key for info in store.list("")] == [image_key(State(1, 21), 0)]


def test_capture_waits_for_nobody_and_refuses_while_a_write_goes_on() -> None:
    store = Full(failures=0)
    saver = saver_of({"w": torch.arange(5.0)}, store)
    with pytest.raises(WrongMoment):
        saver.start()
    saver.capture(STATE)
    saver.start()
    assert not saver.poll()
    with pytest.raises(WrongMoment, match="still going on"):
        saver.capture(State(1, 21))
    with pytest.raises(TimeoutError):
        saver.wait(0.01)
    assert saver.is_running
    store.go.set()
    assert saver.wait(10) is not None
    assert not saver.is_running
    saver.close()


def test_a_structure_that_has_grown_since_the_plan_is_refused() -> None:
    registry = registry_of({"w": torch.zeros(3)})
    saver = Saver(registry, merge_structures([registry.structure()]), MemoryStore(), "test")
    registry.add_tensor("late", torch.zeros(1))
    with pytest.raises(WrongMoment, match="structure has changed"):
        saver.capture(STATE)
    saver.close()


def test_a_rank_that_owns_nothing_writes_nothing() -> None:
    mesh = Layout(tp=2).mesh
    tensor = HeldTensor(shape=(3,), dtype="F32", placement=Placement())
    views = [RankStructure(rank, mesh, {"w": tensor}, {}) for rank in (0, 1)]
    store = MemoryStore()
    sizes = []
    for rank in (0, 1):
        registry = Registry(mesh, rank)
        registry.add_tensor("w", torch.zeros(3))
        saver = Saver(registry, merge_structures(views), store, "test")
        saver.capture(STATE)
        saver.start()
        sizes.append((saver.size_bytes, saver.wait() is None))
        saver.close()
    assert sizes == [(4096 + 12, False), (0, True)]
    assert len(list(store.list(""))) == 1


def test_an_arena_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ArenaTooLarge, match=r"rank 3 needs .*4,503,599,627,370,496.*available"):
        Arena(2**52, "rank 3")


def test_an_arena_is_whole_pages() -> None:
    for size in (0, 1, 4096, 4097, 3 << 20):
        with Arena(size) as arena:
            assert arena.capacity_bytes % 4096 == 0
            assert size <= arena.capacity_bytes < size + 4097
            assert arena.view.nbytes == arena.capacity_bytes


def test_a_closed_arena_is_unmapped_with_the_last_tensor_that_looks_into_it() -> None:
    before = resident_bytes()
    arena = Arena(64 << 20)
    tensor = torch.frombuffer(arena.view, dtype=torch.uint8)
    tensor.fill_(3)
    arena.close()
    assert tensor.sum().item() == 3 * (64 << 20)
    del tensor
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_two_hundred_saves_and_loads_leave_files_threads_and_memory_as_they_were(
    tmp_path: Path,
) -> None:
    tensors = {f"t{number}": torch.zeros(1_000) for number in range(200)}
    tensors["big"] = torch.zeros(2_000_000)
    registry = registry_of(tensors)
    structure = merge_structures([registry.structure()])
    store = FileStore(tmp_path)
    saver = Saver(registry, structure, store, "test")
    seen: list[tuple[int, int, int]] = []
    for step in range(200):
        state = State(1, step % 3)
        saver.capture(state)
        saver.start()
        saver.wait()
        if step in (20, 199):
            gc.collect()
            open_files = len(os.listdir("/proc/self/fd"))
            seen.append((open_files, threading.active_count(), resident_bytes()))
    saver.close()
    (files, threads, rss), (files_after, threads_after, rss_after) = seen
    assert (files_after, threads_after) == (files, threads)
    assert rss_after - rss < 4 << 20
