"""What is copied into one slot, and when: inside the call, or beside the training.

inside   what may change at any time: buffers (BatchNorm's change in the forward pass), frozen
         parameters, tensors that functions make (RNG)
behind   what changes only in a step of a registered optimizer, which the guard holds up
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from keepstep.ckpt.copy_jobs import Job, copy_jobs, image_view
from keepstep.ckpt.device_copies import DeviceCopies, SideStream
from keepstep.ckpt.image import ImageHeader, ImageItem
from keepstep.ckpt.manifest import State
from keepstep.ckpt.parts import Part, Parts, is_stable
from keepstep.ckpt.region import relative_to, slices
from keepstep.ckpt.registry import Registry


class Streams:
    """A side stream for each device that has tensors of the state, made when it is first met."""

    def __init__(self) -> None:
        self._of: dict[torch.device, SideStream] = {}

    def of(self, device: torch.device) -> SideStream:
        """The side stream of `device`."""
        if device not in self._of:
            self._of[device] = SideStream(device, torch.get_device_module(device))
        return self._of[device]


class ImageParts:
    """The tensors of an image, by the way in which they are copied.

    Args:
        registry: where the tensors are.
        header: the image's header.
    """

    def __init__(self, registry: Registry, header: ImageHeader) -> None:
        updated = registry.updated_names()
        self.made: list[tuple[Part, ImageItem]] = []
        inside: list[tuple[Part, ImageItem]] = []
        behind: list[tuple[Part, ImageItem]] = []
        for name, item in header.items.items():
            if not item.size_bytes:
                continue
            held = registry.tensors[name]
            box = None if item.box == held.box else relative_to(item.box, held.box)
            if not is_stable(held):
                place = self.made
            else:
                place = behind if name in updated else inside
            place.append((Part(held, box), item))
        self.inside = Parts([part for part, _ in inside])
        self.behind = Parts([part for part, _ in behind])
        self.inside_items = [item for _, item in inside]
        self.behind_items = [item for _, item in behind]
        self.inside_bytes = sum(item.size_bytes for _, item in (*inside, *self.made))
        """What each call copies before it returns."""

    def read(self) -> None:
        """Look all stable tensors up. Raises NotRepresentable, naming one that has changed."""
        self.inside.read()
        self.behind.read()

    def is_on_cuda(self) -> bool:
        """Whether any tensor is on a CUDA device."""
        return any(one.is_cuda for one in (*self.inside.tensors, *self.behind.tensors))


class SlotCopy:
    """The copies into one slot.

    Args:
        parts: read by the caller before `copy_inside` and `jobs`.
        header: of the image.
        memory: of the slot, from the image's first byte on.
        streams: shared by the slots of a rank.
    """

    def __init__(
        self, parts: ImageParts, header: ImageHeader, memory: memoryview, streams: Streams
    ) -> None:
        self._parts = parts
        self._header = header
        self._memory = memory
        self._streams = streams
        start = header.header_bytes
        image = torch.frombuffer(memory, dtype=torch.uint8)
        self._made = [image_view(image, item, start) for _, item in parts.made]
        self._inside = _Group(
            parts.inside, [image_view(image, item, start) for item in parts.inside_items]
        )
        self._behind = _Group(
            parts.behind, [image_view(image, item, start) for item in parts.behind_items]
        )

    def copy_inside(self) -> None:
        """Copy what may change at any time. On a device: the current stream has it in its order.

        Raises:
            NotRepresentable: for what a function made, and is not what was registered.
            RuntimeError: as torch says it.
        """
        with torch.no_grad():
            for (part, _), target in zip(self._parts.made, self._made, strict=True):
                local = part.held.read()
                target.copy_(local if part.box is None else local[slices(part.box)])
            self._inside.refresh()
            for job in self._inside.jobs:
                job()
            for copies in self._inside.on_devices.values():
                copies.launch()

    def jobs(self, state: State) -> tuple[list[Job], list[SideStream]]:
        """The rest, header included, and the streams that it uses. In the caller's stream order:
        copies on devices come after what is on the current streams now.
        """
        self._behind.refresh()
        jobs: list[Job] = []
        streams = []
        behind = self._behind.on_devices
        for device in {**self._inside.on_devices, **behind}:
            stream = self._streams.of(device)
            stream.mark()
            streams.append(stream)
            jobs.append(partial(stream.launch, behind.get(device)))
        jobs.append(partial(self._write_header, state))
        return [*jobs, *self._behind.jobs], streams

    def _write_header(self, state: State) -> None:
        self._memory[: self._header.header_bytes] = self._header.at(state).encoded


class _Group:
    """Parts and their targets; what to do is worked out anew only where tensors have moved."""

    def __init__(self, parts: Parts, targets: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._targets = targets
        self._version = -1
        self.jobs: Sequence[Job] = ()
        self.on_devices: dict[torch.device, DeviceCopies] = {}

    def refresh(self) -> None:
        """Bring `jobs` and `on_devices` up to date with the last reading of the parts."""
        if self._version == self._parts.version:
            return
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in zip(self._targets, self._parts.tensors, strict=True):
            by_device.setdefault(source.device, []).append((target, source))
        host = by_device.pop(torch.device("cpu"), [])
        self.jobs = copy_jobs(*_unzipped(host))
        self.on_devices = {
            device: DeviceCopies(*_unzipped(pairs)) for device, pairs in by_device.items()
        }
        self._version = self._parts.version


def _unzipped(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = list(pairs)
    return [target for target, _ in pairs], [source for _, source in pairs]
