"""Many small copies in few calls: a call costs more than the bytes of a small tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SMALL_BYTES = 64 * 1024
"""Copies up to this size are put together."""


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
