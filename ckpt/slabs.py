"""Cutting a box into pieces of bounded size, so that a tensor of any size can be worked through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from keepstep.ckpt.region import Box, strides

SLAB_BYTES = 8 << 20
"""Default size of a piece: many checksum chunks, and little beside the memory bound."""


def slabs(
    box: Box, itemsize: int, bytes_max: int = SLAB_BYTES, within: Box | None = None
) -> Iterator[Box]:
    """Pieces of `box` in row-major order, each a contiguous run of its bytes; none if it is empty.

    Each piece spans at most `bytes_max` bytes, or is one single element. With `within`, the
    bound is on the span from a piece's first to its last byte in the larger box `within` (what a
    reader of that box has to fetch), not on the piece itself.
    """
    sizes = (within or box).sizes
    if 0 in box.sizes:
        return
    if not box.sizes:
        yield box
        return
    steps = strides(sizes, itemsize)
    last = len(sizes) - 1
    cut = next((dim for dim, stride in enumerate(steps) if stride <= bytes_max), last)
    rows = max(1, bytes_max // steps[cut])
    outer = (range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    first, end = box.offsets[cut], box.offsets[cut] + box.sizes[cut]
    for index in itertools.product(*itertools.islice(outer, cut)):
        for start in range(first, end, rows):
            yield Box(
                (*index, start, *box.offsets[cut + 1 :]),
                (*(1 for _ in index), min(rows, end - start), *box.sizes[cut + 1 :]),
            )
