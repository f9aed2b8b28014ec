"""docs/operations.md tells the truth: figures follow from its rules, its options and keys exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_table import TABLE_BYTES, VALUES_BYTES
from keepstep.cli import app
from keepstep.storage.s3_client import S3Options

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"
TEXT = DOCUMENT.read_text()
WORDS = " ".join(TEXT.split())

STATE_BYTES = 70.6e9 * 12
IMAGE_BYTES = STATE_BYTES / 512


def commands() -> list[list[str]]:
    """Each `keepstep ...` line of the document, split as a shell does."""
    lines = [line.strip() for line in TEXT.splitlines() if line.startswith("    keepstep ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_every_command_and_option_of_it_exists() -> None:
    found = commands()
    assert len(found) >= 8
    for words in found:
        if words[0] == "clean" and not has_command("clean"):
            pytest.skip("keepstep clean is not there yet")
        shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        for word in words[1:]:
            if word.startswith("--"):
                assert word in shown.output, words


def has_command(name: str) -> bool:
    return any(command.name == name for command in app.registered_commands)


def test_every_key_of_a_configuration_exists() -> None:
    keys = tomllib.loads((ROOT / "trainer/default.toml").read_text())
    named = re.findall(r"`(run|tiers)\.([a-z_]+)`", TEXT)
    assert len(named) >= 8
    for section, key in named:
        assert key in keys[section], (section, key)


def pool_bytes(slots: int, ranks: int, image_bytes: float) -> float:
    """The rule of section 1."""
    return (1 << 20) + slots * ranks * (image_bytes + (256 << 10))


@pytest.mark.parametrize(
    ("slots", "ranks", "words"),
    [(3, 16, "79.4 GB"), (2, 16, "53.0 GB"), (3, 8, "39.7 GB")],
)
def test_the_examples_pools_follow_from_the_rule(slots: int, ranks: int, words: str) -> None:
    assert f"{pool_bytes(slots, ranks, IMAGE_BYTES) / 1e9:.1f} GB" == words
    assert words in WORDS


def test_the_other_figures_of_the_example_follow_too() -> None:
    assert f"{STATE_BYTES / 1e9:.0f} GB" == "847 GB"
    assert f"{IMAGE_BYTES / 1e9:.2f} GB" == "1.65 GB"
    assert f"{8 * IMAGE_BYTES / (5 * 16) / 1e6:.0f} MB/s" == "165 MB/s"
    assert f"{3 * 8 * IMAGE_BYTES / 1e9:.0f} GB" == "40 GB"
    requests = 512 * (IMAGE_BYTES / S3Options().part_bytes + 4)
    assert f"{requests / 1e3:.0f},000" == "53,000"
    assert f"{8 * IMAGE_BYTES / 1e9:.1f} GB" == "13.2 GB"
    assert f"{8 * IMAGE_BYTES / 16 / 1e9:.2f} GB/s" == "0.83 GB/s"
    assert f"{8 * IMAGE_BYTES / 16 * 8 / 1e9:.1f} Gbit/s" == "6.6 Gbit/s"
    for figure in (
        "847 GB",
        "1.65 GB",
        "165 MB/s",
        "40 GB",
        "about 53,000",
        "13.2 GB",
        "0.83 GB/s",
        "6.6 Gbit/s",
    ):
        assert figure in WORDS


def test_the_rule_is_that_of_the_pool(tmp_path: Path) -> None:
    image_bytes = 1 << 16
    with Pool.create(tmp_path / "pool") as pool:
        for _ in range(6):
            pool.add_slot(image_bytes)
        assert pool.header.data_end == pool_bytes(3, 2, image_bytes)
    assert (TABLE_BYTES, VALUES_BYTES) == (1 << 20, 256 << 10)


def test_the_figures_of_uploads_are_those_of_the_client() -> None:
    options = S3Options()
    assert f"{options.parts_at_once} at once x {options.part_bytes >> 20} MiB" in WORDS


def rules() -> list[dict[str, Any]]:
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    return [rule for block in blocks for rule in json.loads(block)["Rules"]]


def test_no_lifecycle_rule_of_it_touches_what_is_current() -> None:
    found = rules()
    assert any("AbortIncompleteMultipartUpload" in rule for rule in found)
    for rule in found:
        assert rule["Status"] == "Enabled"
        assert "Transition" not in json.dumps(rule)
        # Days and Date expire current objects; a marker of a deleted one is nobody's.
        assert set(rule.get("Expiration", {})) <= {"ExpiredObjectDeleteMarker"}
    assert "Never let a rule expire or move anything under `states/` or `log/`" in WORDS
