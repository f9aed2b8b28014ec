"""Sizes, ages and counts as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from keepstep.ckpt.sizes import size_text
from keepstep.views import age_s, age_text, count_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_073_741_824, "1.07 GB"),
        (5_000_000_000_000_000, "5000 TB"),
    ],
)
def test_sizes_have_three_digits(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_ages_have_one_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_an_age_is_never_negative_whatever_the_clocks_say() -> None:
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    assert age_s("2026-01-01T00:00:00.500Z", now) == 29.5
    assert age_s("2026-01-01T00:00:00Z", now) == 30
    assert age_s("2026-01-02T00:00:00Z", now) == 0


def test_counts_agree_with_their_nouns() -> None:
    assert count_text(1, "image") == "1 image"
    assert count_text(2048, "image") == "2,048 images"
    assert count_text(2, "entry", "entries") == "2 entries"
