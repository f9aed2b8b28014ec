"""Settings for all tests: property tests repeat exactly, and a busy machine fails none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "keepstep",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("keepstep")


@pytest.fixture(scope="session", autouse=True)
def _no_keeper_is_left() -> Iterator[None]:
    """Keepers outlive a killed run by its patience: those of runs that tests killed end here."""
    yield
    runs = sys.modules.get("tests.kit.runs")
    if runs is not None:
        runs.end_keepers()
