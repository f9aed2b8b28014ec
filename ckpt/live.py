"""Reading tensors where they live at this moment: in a module, in an optimizer, behind a function.

What is registered outlives the tensors themselves: torch and users put others in their places. So
nothing here keeps a tensor alive, except `Constant`, which was given just that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.sharding import local_tensor

_Memory: TypeAlias = tuple[torch.device, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class LocalPart:
    """Reads the local part, and sees to it that it is still what was registered."""

    __slots__ = ("_dtype", "_name", "_shape", "_sharded", "source")

    def __init__(
        self,
        name: str,
        read: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        now: torch.Tensor,
    ) -> None:
        self._name = name
        self.source = read
        """What gives the whole tensor, as it was registered."""
        self._shape = shape
        self._dtype = now.dtype
        self._sharded = TensorWeakRef(now) if isinstance(now, DTensor) else None

    def __call__(self) -> torch.Tensor:
        tensor = self.source()
        if self._sharded is not None and not isinstance(tensor, DTensor):
            # FSDP shows the gathered parameter between forward and backward; the shard lives on.
            shard = self._sharded()
            tensor = tensor if shard is None else shard
        local = local_tensor(tensor)
        if local.shape != self._shape or local.dtype != self._dtype:
            raise NotRepresentable(
                self._name,
                f"since registration it has changed from {self._dtype} {self._shape} to "
                f"{local.dtype} {tuple(local.shape)}; register it anew and plan again",
            )
        return local


class ModuleTensor:
    """Reads a parameter or buffer by its path from the root module, as it is at this moment."""

    __slots__ = ("key", "path", "root")

    def __init__(self, root: nn.Module, path: tuple[str, ...], key: str) -> None:
        self.root = root
        self.path = path
        self.key = key

    def __call__(self) -> torch.Tensor:
        owner: nn.Module | None = self.root
        for name in self.path:
            owner = None if owner is None else owner._modules.get(name)
        found: torch.Tensor | None = None
        if owner is not None:
            found = owner._parameters.get(self.key)
            if found is None:
                found = owner._buffers.get(self.key)
        if found is None:
            name = ".".join((*self.path, self.key))
            raise NotRepresentable(name, "the module has no such tensor any more")
        return found


class StateTensor:
    """Reads a tensor of an optimizer's state, of this moment."""

    __slots__ = ("key", "optimizer", "param")

    def __init__(self, optimizer: torch.optim.Optimizer, param: torch.Tensor, key: str) -> None:
        self.optimizer = optimizer
        self.param = param
        self.key = key

    def __call__(self) -> torch.Tensor:
        found = self.optimizer.state.get(self.param, {}).get(self.key)
        if not isinstance(found, torch.Tensor):
            raise NotRepresentable(self.key, f"the optimizer has put a {type(found)} in its place")
        return found


class Constant:
    """Reads the one tensor, which is kept alive."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor


def persistent(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(name, path to the owner, key) of all parameters, tied ones each time, and of all
    persistent buffers.
    """
    for name, owner in module.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        for key, param in owner._parameters.items():
            if param is not None:
                yield ".".join((*path, key)), path, key
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield ".".join((*path, key)), path, key


class KnownTensors:
    """Which name a tensor was registered under first: by the object, or by its very memory.

    An empty part has no memory, so only the object tells. A tensor that is gone is not found.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[TensorWeakRef, str]] = {}
        self._by_memory: dict[_Memory, tuple[TensorWeakRef, str]] = {}

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Remember `tensor` as `name`."""
        entry = (TensorWeakRef(tensor), name)
        self._by_object[id(tensor)] = entry
        memory = _memory(tensor)
        if memory is not None:
            self._by_memory[memory] = entry

    def find(self, tensor: torch.Tensor) -> str | None:
        """The name of `tensor`, or None."""
        entry = self._by_object.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        memory = _memory(tensor)
        entry = None if memory is None else self._by_memory.get(memory)
        if entry is not None:
            other = entry[0]()
            if other is not None and _memory(other) == memory:
                return entry[1]
        return None


def _memory(tensor: torch.Tensor) -> _Memory | None:
    local = local_tensor(tensor)
    if local.layout is not torch.strided or not local.numel() or local.device.type == "meta":
        return None
    return (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
