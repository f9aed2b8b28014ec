"""The live tensors behind an image, found anew at each capture without looking at each in full.

Torch and users put other tensors in the places of those that were registered, so every place is
looked at every time. But as a rule the same tensor is there, at the same address: that much is
cheap to see (a fraction of a microsecond), and then what was worked out the last time still holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from keepstep.ckpt.live import Constant, ModuleTensor, StateTensor
from keepstep.ckpt.region import Box, slices
from keepstep.ckpt.registry import Held


@dataclass(frozen=True, slots=True)
class Part:
    """What of a held tensor is wanted: `box` relative to the held part; None: all of it."""

    held: Held
    box: Box | None


@dataclass(slots=True)
class _Seen:
    """What was there the last time: the object, the memory behind it, and where that lay.

    `found` is None where the object tells nothing about the memory.
    """

    found: torch.Tensor | None = None
    near: torch.Tensor | None = None
    is_sharded: bool = False
    address: int = 0

    def is_same(self, found: torch.Tensor) -> bool:
        near = self.near
        if found is not self.found or near is None:
            return False
        if self.is_sharded and found._local_tensor is not near:  # type: ignore[attr-defined]
            return False
        return near.data_ptr() == self.address


def is_stable(held: Held) -> bool:
    """Whether what is read is a tensor that lives somewhere, and not one made by a function."""
    return isinstance(held.read.source, ModuleTensor | StateTensor | Constant)


class Parts:
    """Parts of stable tensors.

    The tensors of the last reading are kept, and so is their memory, even if they are replaced.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Read all for the first time. Raises NotRepresentable as `read`."""
        self._parts = tuple(parts)
        self._seen = [_Seen() for _ in parts]
        self._tensors: list[torch.Tensor] = []
        self._modules: dict[tuple[nn.Module, tuple[str, ...]], list[tuple[int, str]]] = {}
        self._states: dict[torch.optim.Optimizer, dict[torch.Tensor, list[tuple[int, str]]]] = {}
        self._constants: list[int] = []
        self.version = 0
        """Grows whenever a tensor is another one, or lies elsewhere, than before."""
        for index, part in enumerate(parts):
            source = part.held.read.source
            if isinstance(source, ModuleTensor):
                place = (source.root, source.path)
                self._modules.setdefault(place, []).append((index, source.key))
            elif isinstance(source, StateTensor):
                states = self._states.setdefault(source.optimizer, {})
                states.setdefault(source.param, []).append((index, source.key))
            else:
                self._constants.append(index)
            self._tensors.append(self._read(index))

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The parts, without autograd, sharing the live memory; as of the last `read`."""
        return self._tensors

    def read(self) -> None:
        """Look at every place, and read those anew where something has changed.

        Raises:
            NotRepresentable: naming a tensor that is not what was registered any more.
        """
        stale = [*self._stale_in_modules(), *self._stale_in_states(), *self._stale_constants()]
        for index in stale:
            self._tensors[index] = self._read(index)
        if stale:
            self.version += 1

    def _stale_in_modules(self) -> Iterator[int]:
        seen = self._seen
        for (root, path), entries in self._modules.items():
            owner: nn.Module | None = root
            for name in path:
                owner = None if owner is None else owner._modules.get(name)
            if owner is None:
                yield from (index for index, _ in entries)
                continue
            params, buffers = owner._parameters, owner._buffers
            for index, key in entries:
                found: torch.Tensor | None = params.get(key)
                if found is None:
                    found = buffers.get(key)
                if found is None or not seen[index].is_same(found):
                    yield index

    def _stale_in_states(self) -> Iterator[int]:
        seen = self._seen
        for optimizer, entries_of in self._states.items():
            states = optimizer.state
            for param, entries in entries_of.items():
                state = states.get(param, {})
                for index, key in entries:
                    found = state.get(key)
                    if found is None or not seen[index].is_same(found):
                        yield index

    def _stale_constants(self) -> Iterator[int]:
        for index in self._constants:
            if not self._seen[index].is_same(self._parts[index].held.read.source()):
                yield index

    def _read(self, index: int) -> torch.Tensor:
        part = self._parts[index]
        local = part.held.read()
        found = part.held.read.source()
        is_sharded = isinstance(found, DTensor)
        near = found._local_tensor if isinstance(found, DTensor) else found
        address = near.data_ptr()
        # FSDP may show a gathered parameter now, which says nothing about the shard.
        is_known = address == local.data_ptr()
        self._seen[index] = _Seen(found if is_known else None, near, is_sharded, address)
        return local if part.box is None else local[slices(part.box)]
