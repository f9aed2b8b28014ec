"""Copying what a rank owns of the live tensors into an arena, in the order of the image.

A big tensor is one copy. Small ones go together in one call, for a call costs more than their
bytes. What a save copies is settled once; only the tensors themselves are looked up each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.region import Box, relative_to, slices
from keepstep.ckpt.registry import Held, Registry
from keepstep.ckpt.torch_dtypes import torch_dtype

SMALL_BYTES = 64 * 1024
"""Copies up to this size are put together."""


class Capture:
    """The copies of one plan.

    Args:
        registry: where the tensors are.
        header: the image's header; its items are what is copied.
        target: writable memory of the whole file, header included; a data item lies at the
            header's length + its offset.
    """

    def __init__(self, registry: Registry, header: ImageHeader, target: memoryview) -> None:
        self._small: list[tuple[Held, Box | None]] = []
        self._small_targets: list[torch.Tensor] = []
        self._big: list[tuple[Held, Box | None]] = []
        self._big_targets: list[torch.Tensor] = []
        for name, item in header.items.items():
            if not item.size_bytes:
                continue
            held = registry.tensors[name]
            part = None if item.box == held.box else relative_to(item.box, held.box)
            view = tensor_view(
                target, item.dtype.name, item.box.sizes, header.header_bytes + item.offset
            )
            if item.size_bytes <= SMALL_BYTES:
                self._small.append((held, part))
                self._small_targets.append(view)
            else:
                self._big.append((held, part))
                self._big_targets.append(view)

    def run(self) -> None:
        """Copy everything. Blocking; on return the target has the bytes of this moment.

        Raises:
            NotRepresentable: naming a tensor that is not what was registered any more. The target
                may then have been written in part.
        """
        with torch.no_grad():
            for (held, part), target in zip(self._big, self._big_targets, strict=True):
                target.copy_(_part(held, part))
            sources = [_part(held, part) for held, part in self._small]
            copy_small(self._small_targets, sources)


def tensor_view(
    memory: memoryview, dtype: str, sizes: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A tensor of these sizes that shares `memory` from byte `offset` on. Not for empty ones."""
    kind = torch_dtype(dtype)
    return torch.frombuffer(memory, dtype=kind, count=prod(sizes), offset=offset).view(sizes)


def copy_small(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in few calls; what is on a device comes in one transfer."""
    together: list[int] = []
    far: dict[torch.device, list[int]] = {}
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
            target.copy_(source)  # the joint copy refuses tensors that are lazily conjugated
        elif source.device == target.device:
            together.append(index)
        else:
            far.setdefault(source.device, []).append(index)
    if together:
        torch._foreach_copy_([targets[i] for i in together], [sources[i] for i in together])
    for device, indices in far.items():
        if device.type == "cpu" or any(targets[i].device.type != "cpu" for i in indices):
            torch._foreach_copy_([targets[i] for i in indices], [sources[i] for i in indices])
        else:
            _gather_to_host([targets[i] for i in indices], [sources[i] for i in indices])


def _gather_to_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """From one device to the CPU: joined there, for a transfer costs more than the bytes."""
    flat = [source.reshape(-1).view(torch.uint8) for source in sources]
    near = torch.cat(flat).cpu()
    pieces = torch.split(near, [one.nbytes for one in flat])
    torch._foreach_copy_([target.view(-1).view(torch.uint8) for target in targets], pieces)


def _part(held: Held, part: Box | None) -> torch.Tensor:
    local = held.read()
    if part is None:
        return local
    return local[slices(part)]
