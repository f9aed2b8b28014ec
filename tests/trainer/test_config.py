"""The configuration: one default for every key, and refusals that help."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path

import pytest

from keepstep.trainer.config import DEFAULT_PATH, Config, config_tree, load_config
from keepstep.trainer.errors import ConfigError


def test_default_toml_names_every_key_and_no_other() -> None:
    tree = tomllib.loads(DEFAULT_PATH.read_text())
    hints = typing.get_type_hints(Config)
    keys = {name: {field.name for field in dataclasses.fields(hints[name])} for name in hints}
    assert {section: set(values) for section, values in tree.items()} == keys


def test_a_file_overlays_the_defaults_and_settings_overlay_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nsteps = 7\nseed = 3\n[optim]\nlr = 1\n")
    config = load_config(file, ["run.seed=4", "parallel.schedule=interleaved1f1b"])
    assert (config.run.steps, config.run.seed, config.optim.lr) == (7, 4, 1.0)
    assert type(config.optim.lr) is float
    assert config.parallel.schedule == "interleaved1f1b"
    assert config.model == load_config(None).model


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.stps=3", ["'stps'", "[run]", "did you mean 'steps'?"]),
        ("rnu.steps=3", ["'rnu'", "did you mean 'run'?"]),
        ("model.zzz=3", ["'zzz'", "there are vocab_size, dim"]),
        ("run.steps=many", ["run.steps", "expected int", "'many'"]),
        ("run.steps=true", ["run.steps", "expected int", "True (bool)"]),
        ("run.steps=1.5", ["run.steps", "expected int", "1.5"]),
        ("parallel.schedule=gpipe", ["'1f1b', 'interleaved1f1b'", "'gpipe'"]),
        ("run.steps=-1", ["run.steps", "at least 0", "-1"]),
        ("run.patience_s=inf", ["run.patience_s", "finite", "inf"]),
        ("run.patience_s=1e300", ["run.patience_s", "at most 604800", "1e+300"]),
        ("run.name=../x", ["run.name", "'../x'", "ASCII letters"]),
        ("model.rope_theta=0", ["model.rope_theta", "above 0"]),
        ("optim.lr=nan", ["optim.lr", "at least 0", "nan"]),
        ("optim.lr=-1", ["optim.lr", "at least 0", "-1"]),
        ("optim.beta2=1", ["optim.beta2", "below 1", "1.0"]),
        ("optim.clip_norm=-1", ["optim.clip_norm", "at least 0", "-1"]),
        ("optim.warmup_steps=-1", ["optim.warmup_steps", "at least 0", "-1"]),
        ("data.heldout_fraction=nan", ["data.heldout_fraction", "nan"]),
        ("data.heldout_fraction=0", ["run.evaluate_every is 25", "data.heldout_fraction is 0"]),
        ("run.name=''", ["run.name", "''", "ASCII letters"]),
        ("steps=3", ["section.key=value"]),
        ("run.steps", ["section.key=value"]),
    ],
)
def test_what_cannot_be_is_refused_in_words_that_help(setting: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [setting])
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: cannot read"):
        load_config(tmp_path / "no.toml")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        load_config(bad)
    bad.write_text("run = 3\n")
    with pytest.raises(ConfigError, match="run is a section"):
        load_config(bad)


def test_the_tree_of_a_config_is_plain_json() -> None:
    tree = config_tree(load_config(None))
    assert tree["run"]["steps"] == 100
    assert tree["model"]["kv_heads"] == 2
