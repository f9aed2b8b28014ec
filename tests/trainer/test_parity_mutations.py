"""A parity test is worth what it catches: each breaks when the collective it guards is gone."""

from __future__ import annotations

import pytest
from tests.kit.mutations import GUARDS, NAMES
from tests.kit.parity import CASES, ParityBroken, check_parity


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "removed"), GUARDS)
def test_parity_breaks_without(name: str, removed: str) -> None:
    with pytest.raises(ParityBroken):
        check_parity(CASES[name], "fp32", 1, removed)


def test_every_mutation_is_tried() -> None:
    assert {removed for _, removed in GUARDS} == set(NAMES)
