"""From verified bytes to the live tensors: here alone a load changes anything."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from keepstep.ckpt.region import relative_to, slices
from keepstep.ckpt.registry import Held, Registry
from keepstep.ckpt.restore import Piece
from keepstep.ckpt.small_copies import SMALL_BYTES, copy_small
from keepstep.ckpt.torch_dtypes import torch_dtype


@dataclass(frozen=True, slots=True)
class Application:
    """Pieces and values to be applied together.

    Attributes:
        registry: where to.
        pieces: what of which image goes where; together all of each tensor that is among them.
        data: by rank, the verified data of each image, from its first byte on.
        values: JSON values by name.
    """

    registry: Registry
    pieces: Sequence[Piece]
    data: Mapping[int, memoryview]
    values: Mapping[str, object]

    def run(self) -> None:
        """Look up every target first, since that may fail; then copy; then set the values."""
        with torch.no_grad():
            assembled: dict[str, tuple[Held, torch.Tensor]] = {}
            targets: dict[str, torch.Tensor] = {}
            for piece in self.pieces:
                if piece.name in targets:
                    continue
                held = self.registry.tensors[piece.name]
                local = held.read()
                if held.write is not None:
                    local = torch.empty_like(local)
                    assembled[piece.name] = (held, local)
                targets[piece.name] = local
            self._copy(targets)
            for held, local in assembled.values():
                if held.write is not None:
                    held.write(local)
        for name, value in self.values.items():
            self.registry.values[name].write(value)

    def _copy(self, targets: Mapping[str, torch.Tensor]) -> None:
        small_targets, small_sources = [], []
        images: dict[tuple[int, str], torch.Tensor] = {}
        for piece in self.pieces:
            target = targets[piece.name]
            box = self.registry.tensors[piece.name].box
            if piece.box != box:
                target = target[slices(relative_to(piece.box, box))]
            source = self._staged(piece, images)
            if source.nbytes <= SMALL_BYTES:
                small_targets.append(target)
                small_sources.append(source)
            else:
                target.copy_(source)
        copy_small(small_targets, small_sources)

    def _staged(self, piece: Piece, images: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor:
        """The piece as a strided view of its image. `images`: each, as elements of a type."""
        kind = torch_dtype(piece.dtype)
        image = images.get((piece.image, piece.dtype))
        if image is None:
            flat = _bytes_of(self.data[piece.image])
            whole = len(flat) // kind.itemsize * kind.itemsize
            image = images[piece.image, piece.dtype] = flat[:whole].view(kind)
        start = piece.offset // kind.itemsize
        return image.as_strided(piece.box.sizes, piece.strides, start)


def _bytes_of(data: memoryview) -> torch.Tensor:
    """A tensor over memory that nobody here writes to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)
