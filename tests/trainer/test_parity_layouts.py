"""Every layout computes what one process computes. The whole matrix: `make prove NAME=parity`."""

from __future__ import annotations

import pytest
from tests.kit.parity import CASES, check_parity

LONG = (
    "dp3-uneven",
    "hsdp2x2",
    "tp4-gqa8:4",
    "tied-pp4",
    "dp2-accumulation-4",
    "dp2-tp2-checkpointing",
    "dp2-tp2-pp2",
    "tied-dp2-tp2-pp2-interleaved",
)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_loss_norm_and_every_gradient_equal_one_process_in_fp64(name: str) -> None:
    check_parity(CASES[name], "fp64", 2)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_twenty_losses_equal_one_process_in_fp32(name: str) -> None:
    check_parity(CASES[name], "fp32", 20)
