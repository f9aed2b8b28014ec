"""The configuration of a run: TOML, nested frozen dataclasses, one default for every key.

`default.toml` names every key with its default; a user's file overlays it, and `--set` overlays
both. Nothing else supplies a default, and nothing below this file reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from keepstep.ckpt.names import job_fault
from keepstep.trainer.errors import ConfigError
from keepstep.trainer.model_config import (
    BatchConfig,
    Dtype,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    ParallelConfig,
)

DEFAULT_PATH = Path(__file__).with_name("default.toml")

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig:
    """When to stop, save and evaluate; see default.toml for each key."""

    name: str
    seed: int
    steps: int
    checkpoint_every: int
    checkpoint_every_s: float
    keep: int
    keep_every: int
    evaluate_every: int
    evaluate_batches: int
    device: Literal["auto", "cpu", "cuda"]
    patience_s: float


@dataclass(frozen=True)
class HostsConfig:
    """Hosts that the launcher plays, and the racks of hosts; see default.toml for each key."""

    count: int
    ranks_per_host: int
    racks: str


@dataclass(frozen=True)
class TiersConfig:
    """Where states are kept besides the store; see default.toml for each key."""

    capture_every: int
    slots: Literal[3, 2]
    shm_dir: str
    peers: int
    disk_dir: str
    disk_every: int
    disk_every_s: float
    disk_keep: int
    disk_keep_every: int
    compress: Literal["", "zstd"]


@dataclass(frozen=True)
class NumericsSection:
    """Number formats, and what is recomputed."""

    dtype: Dtype
    activation_checkpointing: bool


@dataclass(frozen=True)
class DataConfig:
    """Which token file, and how it is parted."""

    path: str
    heldout_fraction: float
    vocab_multiple: int
    verify: bool


@dataclass(frozen=True)
class Config:
    """A whole run. Sections are those of the TOML file."""

    run: RunConfig
    hosts: HostsConfig
    tiers: TiersConfig
    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optim: OptimConfig
    numerics: NumericsSection
    data: DataConfig

    def numerics_config(self) -> NumericsConfig:
        """What `build` takes."""
        return NumericsConfig(
            model=self.model,
            parallel=self.parallel,
            batch=self.batch,
            optim=self.optim,
            dtype=self.numerics.dtype,
            activation_checkpointing=self.numerics.activation_checkpointing,
            seed=self.run.seed,
        )


def load_config(path: Path | None, settings: Iterable[str] = ()) -> Config:
    """The configuration of a file (None: the defaults) with `section.key=value` settings on top.

    Raises:
        ConfigError: not TOML, an unknown section or key (with the near one suggested), a value
            of another type, or one that is out of its range.
    """
    tree = _read_toml(DEFAULT_PATH)
    if path is not None:
        _overlay(tree, _read_toml(path), str(path))
    for setting in settings:
        _overlay(tree, _parse_setting(setting), f"--set {setting}")
    config = _build(Config, tree, "")
    _check_ranges(config)
    return config


def config_tree(config: Config) -> dict[str, Any]:
    """The configuration as nested JSON values, as manifests and the log keep it."""
    return dataclasses.asdict(config)


def replace(config: Config, section: str, **values: object) -> Config:
    """`config` with some keys of one section changed."""
    changed = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: changed})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _parse_setting(setting: str) -> dict[str, Any]:
    """`section.key=value` as a tree; a value that is no TOML is taken as a string."""
    name, equals, text = setting.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {setting}: expected section.key=value, such as run.steps=200")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return {section: {key: value}}


def _overlay(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> None:
    """Write `changes` into `tree`, which has every key that exists."""
    for section, keys in changes.items():
        _check_known(section, tree, origin, "section")
        if not isinstance(keys, dict):
            raise ConfigError(f"{origin}: {section} is a section of keys, not a value")
        for key, value in keys.items():
            _check_known(key, tree[section], origin, f"key of [{section}]")
            tree[section][key] = value


def _check_known(name: str, known: Mapping[str, Any], origin: str, what: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"{origin}: {name!r} is no {what}; {hint}")


def _build(cls: type[T], tree: Mapping[str, Any], where: str) -> T:
    """The dataclass `cls` of a tree, every value checked against its annotation."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        name = f"{where}{field.name}"
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            values[field.name] = _build(kind, tree[field.name], f"{name}.")
        else:
            values[field.name] = _checked(tree[field.name], kind, name)
    return cls(**values)


def _checked(value: object, kind: object, name: str) -> object:
    """`value` if it is of `kind`; a whole number is also a float."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            listed = ", ".join(map(repr, choices))
            raise ConfigError(f"{name}: expected one of {listed}, found {value!r}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    expected = getattr(kind, "__name__", str(kind))
    raise ConfigError(f"{name}: expected {expected}, found {value!r} ({type(value).__name__})")


_PATIENCE_MAX_S = 604_800.0
"""Beyond it the time-outs derived from it do not fit what the system counts in."""

_LEAST: dict[str, float] = {
    "run.seed": 0,
    "run.steps": 0,
    "run.checkpoint_every": 0,
    "run.checkpoint_every_s": 0,
    "run.keep": 0,
    "run.keep_every": 0,
    "run.evaluate_every": 0,
    "run.evaluate_batches": 1,
    "run.patience_s": 1,
    "hosts.count": 1,
    "hosts.ranks_per_host": 0,
    "tiers.capture_every": 0,
    "tiers.peers": 0,
    "tiers.disk_every": 0,
    "tiers.disk_every_s": 0,
    "tiers.disk_keep": 0,
    "tiers.disk_keep_every": 0,
    "model.vocab_size": 0,
    "model.norm_eps": 0,
    "optim.lr": 0,
    "optim.lr_min_ratio": 0,
    "optim.warmup_steps": 0,
    "optim.schedule_steps": 0,
    "optim.beta1": 0,
    "optim.beta2": 0,
    "optim.eps": 0,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "data.vocab_multiple": 1,
    "data.heldout_fraction": 0,
}


def _check_ranges(config: Config) -> None:
    """Ranges of single keys; `check.py` judges what must fit together."""
    for name, least in _LEAST.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if not value >= least:
            raise ConfigError(f"{name}: expected at least {least:g}, found {value}")
        if math.isinf(value):
            raise ConfigError(f"{name}: expected a finite number, found {value}")
    if config.run.patience_s > _PATIENCE_MAX_S:
        raise ConfigError(
            f"run.patience_s: expected at most {_PATIENCE_MAX_S:g} (a week), "
            f"found {config.run.patience_s:g}"
        )
    for name, value in (("beta1", config.optim.beta1), ("beta2", config.optim.beta2)):
        if value >= 1:
            raise ConfigError(f"optim.{name}: expected below 1, found {value}")
    if not 0 < config.model.rope_theta < math.inf:
        raise ConfigError(f"model.rope_theta: expected above 0, found {config.model.rope_theta}")
    if config.run.seed >= 1 << 63:
        raise ConfigError(f"run.seed: expected below 2^63, found {config.run.seed}")
    if config.data.heldout_fraction > 0.5:
        raise ConfigError(
            f"data.heldout_fraction: expected at most 0.5, found {config.data.heldout_fraction}"
        )
    if config.data.heldout_fraction == 0 and config.run.evaluate_every:
        raise ConfigError(
            f"run.evaluate_every is {config.run.evaluate_every} but data.heldout_fraction is 0: "
            "nothing is held out to evaluate on; set one of them"
        )
    fault = job_fault(config.run.name)
    if fault is not None:
        raise ConfigError(f"run.name: {config.run.name[:200]!r} {fault}")
