"""A slice of the zombies: who sleeps through a change of generation changes nothing afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.zombies import SLICE, Case, run_case


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", SLICE, ids=lambda case: case.name.replace(" ", "-"))
def test_a_sleeper_that_wakes_in_a_newer_generation_changes_nothing(
    tmp_path: Path, case: Case
) -> None:
    outcome = run_case(tmp_path, case, commits=False)
    assert outcome.wrong == []
    assert outcome.before == outcome.after
    assert outcome.before.log
    assert len(outcome.before.referred) == 3  # manifest and two images of the only commit kept
    assert len(outcome.before.held) >= 4
    assert outcome.landed is bool(case.lands)
