"""What is copied into a slot: the bytes of every dtype, and no more than a rank owns."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from tests.kit.states import STATE, Layout, save_alone, write_image

from keepstep.ckpt.keys import image_key
from keepstep.ckpt.load import stage
from keepstep.ckpt.placement import Placement
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.structure import HeldTensor, RankStructure, merge_structures
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore

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


def test_a_rank_that_owns_nothing_has_no_image() -> None:
    mesh = Layout(tp=2).mesh
    tensor = HeldTensor(shape=(3,), dtype="F32", placement=Placement())
    structure = merge_structures([RankStructure(rank, mesh, {"w": tensor}, {}) for rank in (0, 1)])
    store = MemoryStore()
    records = []
    for rank in (0, 1):
        registry = Registry(mesh, rank)
        registry.add_tensor("w", torch.zeros(3))
        records.append(write_image(registry, structure, store, STATE))
    assert records[0] is not None
    assert records[0].size_bytes == 4096 + 12
    assert records[1] is None
    assert len(list(store.list(""))) == 1
