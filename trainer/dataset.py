"""Windows of a token file: what a sample is, and which samples are held out for evaluation.

The token stream of all documents is cut into windows of `seq_len` inputs, each with the token
after it, so that consecutive windows share one token and every token but the first is a label
once. Labels are shifted here, before anything is split over ranks. The last window of a part may
be short: it is filled up with the end-of-document id, and the filled labels are IGNORED.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keepstep.trainer.errors import DataError
from keepstep.trainer.model_config import IGNORED
from keepstep.trainer.order import Indices, Order, share
from keepstep.trainer.tokenfile import TokenFile

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and labels, both of shape (samples, seq_len)."""

    inputs: Ids
    labels: Ids

    @property
    def valid_tokens(self) -> int:
        """Labels that count in the loss."""
        return int((self.labels != IGNORED).sum())


class Windows:
    """The windows of tokens [first, end) of a file."""

    def __init__(self, tokens: TokenFile, first: int, end: int, seq_len: int) -> None:
        self.tokens = tokens
        self.first = first
        self.end = end
        self.seq_len = seq_len

    def __len__(self) -> int:
        """How many windows; none if there are fewer than two tokens."""
        return max(0, -(-(self.end - self.first - 1) // self.seq_len))

    def read(self, windows: Indices) -> Samples:
        """The samples of `windows`, in that order; one beyond the last has IGNORED labels only.

        Raises:
            DataError: a token that the vocabulary does not have.
        """
        shape = (len(windows), self.seq_len)
        inputs = np.full(shape, self.tokens.info.end_of_document, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            start = self.first + window * self.seq_len
            end = min(start + self.seq_len + 1, self.end)
            if end - start > 1:
                ids = self.tokens.read(start, end)
                inputs[row, : ids.size - 1] = ids[:-1]
                labels[row, : ids.size - 1] = ids[1:]
        return Samples(inputs, labels)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A token file parted into training and held-out windows, with the order of the former."""

    training: Windows
    heldout: Windows
    order: Order

    def batch(self, indices: Indices) -> Samples:
        """The samples of global sample indices."""
        return self.training.read(self.order.windows(indices))

    def heldout_batches(self, batch: int, batches_max: int) -> int:
        """How many batches of held-out windows there are, at most `batches_max`."""
        return min(batches_max, -(-len(self.heldout) // batch))

    def heldout_batch(self, number: int, batch: int, dp: int, dp_rank: int) -> Samples:
        """This dp rank's share of held-out batch `number`; windows beyond the last are IGNORED."""
        windows = np.arange(number * batch, (number + 1) * batch, dtype=np.int64)
        return self.heldout.read(share(windows, dp, dp_rank))


def open_corpus(
    path: Path, *, seq_len: int, seed: int, heldout_fraction: float, batch: int
) -> Corpus:
    """Open a token file, part it, and check that it can fill a step.

    The held-out part is the last documents with at least `heldout_fraction` of the tokens (of a
    single document: its last windows). With a fraction of 0 nothing is held out.

    Args:
        path: NAME of a token file.
        seq_len: tokens a sample.
        seed: of the order.
        heldout_fraction: 0 to below 1.
        batch: samples a step, for the check alone.

    Raises:
        DataError: a damaged file, or too few windows; the numbers are named.
    """
    tokens = TokenFile(path)
    cut = _heldout_from(tokens, seq_len, heldout_fraction)
    training = Windows(tokens, 0, cut, seq_len)
    heldout = Windows(tokens, cut, tokens.token_count, seq_len)
    if len(training) < batch:
        raise DataError(
            f"{tokens.path}: {tokens.token_count} tokens give {len(training)} training windows of "
            f"{seq_len}, fewer than the {batch} of one step; give more text, or lower "
            "batch.global_batch or model.seq_len",
            file=str(tokens.path),
            field="tokens",
            expected=f"at least {batch} windows of {seq_len}",
            found=f"{len(training)} windows from {cut} tokens",
        )
    if heldout_fraction > 0 and len(heldout) < 1:
        raise DataError(
            f"{tokens.path}: {tokens.token_count} tokens leave none to hold out for evaluation; "
            "give more text, or set data.heldout_fraction = 0",
            file=str(tokens.path),
            field="tokens",
            expected="at least 1 held-out window",
            found="0",
        )
    return Corpus(training, heldout, Order(len(training), seed))


def _heldout_from(tokens: TokenFile, seq_len: int, fraction: float) -> int:
    """The first held-out token: where a document begins, or in a single one, a window."""
    if fraction <= 0:
        return tokens.token_count
    wanted = int(tokens.token_count * (1 - fraction))
    at = int(np.searchsorted(tokens.pointers, wanted, side="right")) - 1
    cut = int(tokens.pointers[at])
    return cut if cut > 0 else wanted // seq_len * seq_len
