"""Copies from live tensors into an image on the CPU, as jobs that any thread may do in any order.

A job holds the GIL for a few microseconds and then copies without it. A big tensor is moved by the
C library: as fast as torch's own copy in one thread, and it starts no team of threads, which would
take the cores away from the step that goes on meanwhile. Small ones go together, for a call costs
more than their bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch

from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.image import ImageItem
from keepstep.ckpt.torch_dtypes import torch_dtype

Job = Callable[[], object]

SMALL_BYTES = 64 * 1024
"""Copies from a device up to this size are put together."""
_ALONE_BYTES = 1 << 20  # below it, tensors on the CPU go together: each job takes the GIL anew
_TOGETHER_BYTES = 4 << 20
_PIECE_BYTES = 4 << 20  # so that two threads share the work, and none waits long for the other


class MemoryTaken(CheckpointError):
    """The memory of a tensor was freed or made smaller while it was to be copied."""


def image_view(image: torch.Tensor, item: ImageItem, header_bytes: int) -> torch.Tensor:
    """The place of `item` in an image, whose bytes are given. Not for empty ones."""
    start = header_bytes + item.offset
    data = image[start : start + item.size_bytes]
    return data.view(torch_dtype(item.dtype.name)).view(item.box.sizes)


def copy_jobs(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[Job]:
    """Jobs that copy each source into its target, all on the CPU. Small ones come first."""
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    together: list[Job] = []
    jobs: list[Job] = []
    pending_bytes = 0
    for target, source in zip(targets, sources, strict=True):
        is_plain = not (source.is_conj() or source.is_neg())
        if is_plain and source.nbytes <= _ALONE_BYTES:
            small.append((target, source))
            pending_bytes += source.nbytes
            if pending_bytes >= _TOGETHER_BYTES:
                together.append(_small_job(small))
                small, pending_bytes = [], 0
        elif is_plain and source.is_contiguous():
            jobs.extend(_moves(target, source))
        else:
            jobs.append(partial(target.copy_, source))
    if small:
        together.append(_small_job(small))
    return together + jobs


def _small_job(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Job:
    targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    return partial(_copy_together, targets, sources, [_end_of(source) for source in sources])


def _copy_together(
    targets: list[torch.Tensor], sources: list[torch.Tensor], ends: list[int]
) -> None:
    for source, end in zip(sources, ends, strict=True):
        _check_memory(source, end)
    torch._foreach_copy_(targets, sources)


def _moves(target: torch.Tensor, source: torch.Tensor) -> list[Job]:
    return [
        partial(_move, target, source, start, min(_PIECE_BYTES, source.nbytes - start))
        for start in range(0, source.nbytes, _PIECE_BYTES)
    ]


def _move(target: torch.Tensor, source: torch.Tensor, start: int, size_bytes: int) -> None:
    _check_memory(source, _end_of(source))
    ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, size_bytes)


def _end_of(source: torch.Tensor) -> int:
    """How many bytes of its storage a tensor needs to be there."""
    last = sum(
        (size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)
    )
    return int(source.storage_offset() + last + 1) * source.element_size()


def _check_memory(source: torch.Tensor, end: int) -> None:
    found = source.untyped_storage().nbytes()
    if found < end:
        raise MemoryTaken(
            f"a tensor of shape {tuple(source.shape)} had its memory cut from {end} to "
            f"{found} bytes while it was being captured; resize no storage of "
            f"registered tensors between the optimizer's steps"
        )
