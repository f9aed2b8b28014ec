"""From verified bytes in staging to the live tensors: here alone a load changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from keepstep.ckpt.capture import SMALL_BYTES, copy_small
from keepstep.ckpt.region import relative_to, slices
from keepstep.ckpt.registry import Held, Registry
from keepstep.ckpt.restore import Piece
from keepstep.ckpt.torch_dtypes import torch_dtype


@dataclass(frozen=True, slots=True)
class Application:
    """Pieces and values to be applied together.

    Attributes:
        registry: where to.
        pieces: what of the staging goes where; together all of each tensor that is among them.
        staging: the verified bytes.
        values: JSON values by name.
    """

    registry: Registry
    pieces: Sequence[Piece]
    staging: memoryview
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
        for piece in self.pieces:
            target = targets[piece.name]
            box = self.registry.tensors[piece.name].box
            if piece.box != box:
                target = target[slices(relative_to(piece.box, box))]
            source = self._staged(piece)
            if source.nbytes <= SMALL_BYTES:
                small_targets.append(target)
                small_sources.append(source)
            else:
                target.copy_(source)
        copy_small(small_targets, small_sources)

    def _staged(self, piece: Piece) -> torch.Tensor:
        """The piece as a strided view of the staging."""
        dtype = torch_dtype(piece.dtype)
        last = sum(
            (size - 1) * stride for size, stride in zip(piece.box.sizes, piece.strides, strict=True)
        )
        flat = torch.frombuffer(
            self.staging, dtype=dtype, count=last + 1, offset=piece.stage_offset
        )
        return flat.as_strided(piece.box.sizes, piece.strides)
