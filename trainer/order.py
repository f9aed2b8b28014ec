"""Which window of the corpus a global sample index means: a pure function (DESIGN D10).

A *global sample index* counts on across epochs, from 0: epoch = index // epoch size. Within an
epoch, windows are visited in a pseudo-random order that is a function of (seed, epoch) alone, so
the data position of a run is one integer, whatever the layout: a rank only decides which of a
step's samples *it* reads (`share`), never which samples the step has.

The order is a Feistel network over the next power of four, walked along its cycles until it lands
inside the epoch: a permutation that needs no memory and answers any index at once. The constants
are part of what a resumed run relies on: tests pin them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Skipped = tuple[tuple[int, int], ...]
"""Half-open ranges [first, end) of global sample indices that are not to be consumed."""

_ROUNDS = 6  # 4 make a strong pseudo-random permutation in theory; 2 more for small halves
_MASK = (1 << 64) - 1


def _mix(word: int) -> int:
    """The splitmix64 finaliser on a Python integer: 64 bits in, 64 well-mixed bits out."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _mix_array(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` on each element (unsigned 64-bit arithmetic of numpy arrays wraps)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    """One 64-bit key a round, a function of (seed, epoch)."""
    state = _mix((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK)
    state = _mix(state ^ ((epoch * 0xA0761D6478BD642F + 1) & _MASK))
    return [_mix((state + k * 0x9E3779B97F4A7C15) & _MASK) for k in range(1, _ROUNDS + 1)]


def permute(size: int, seed: int, epoch: int, index: Indices) -> Indices:
    """Where each `index` (0 <= index < size) lies in the order of this epoch.

    A bijection of range(size) for every (size, seed, epoch). Expected work: under four Feistel
    passes an index.

    Raises:
        ValueError: an index outside the epoch, or an empty epoch.
    """
    if size < 1:
        raise ValueError(f"an epoch of {size} samples has no order")
    if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
        raise ValueError(
            f"sample {int(index.min())}..{int(index.max())} outside an epoch of {size}"
        )
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = [np.uint64(key) for key in _round_keys(seed, epoch)]
    words = index.astype(np.uint64)
    outside = np.ones(words.shape, dtype=bool)
    while outside.any():
        moving = words[outside]
        left, right = moving >> half_bits, moving & half_mask
        for key in keys:
            left, right = right, left ^ (_mix_array(right ^ key) & half_mask)
        words[outside] = (left << half_bits) | right
        outside = words >= np.uint64(size)
    return words.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a corpus of `epoch_size` windows under `seed`."""

    epoch_size: int
    seed: int

    def windows(self, indices: Indices) -> Indices:
        """The window of each global sample index; the indices may span epochs."""
        epochs, within = np.divmod(indices, self.epoch_size)
        result = np.empty_like(indices)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(self.epoch_size, self.seed, int(epoch), within[chosen])
        return result


def take(cursor: int, count: int, skipped: Skipped = ()) -> tuple[Indices, int]:
    """The next `count` global sample indices from `cursor` on, and the cursor after them.

    Indices in a skipped range are passed over, so a step's samples are [cursor, new cursor) less
    the skip list. The cursor counts on for ever; each index is taken exactly once.
    """
    taken: list[int] = []
    position = cursor
    ranges = sorted(skipped)
    while len(taken) < count:
        end = next((end for first, end in ranges if first <= position < end), None)
        if end is not None:
            position = end
            continue
        taken.append(position)
        position += 1
    return np.asarray(taken, dtype=np.int64), position


def share(indices: Indices, dp: int, dp_rank: int) -> Indices:
    """The part of a step's samples that data-parallel rank `dp_rank` of `dp` reads.

    Shares are consecutive and equal. Raises ValueError if they cannot be equal.
    """
    if indices.size % dp:
        raise ValueError(f"{indices.size} samples cannot be shared equally by dp={dp}")
    each = indices.size // dp
    return indices[dp_rank * each : (dp_rank + 1) * each]
