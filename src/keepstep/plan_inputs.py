"""What `keepstep plan` reads: models, clusters, metrics, and the words of its options."""

from __future__ import annotations

import tomllib
from math import inf
from pathlib import Path
from typing import Any

from keepstep.planner.cluster import Cluster, cluster_from_document, cluster_of
from keepstep.planner.errors import BadCluster, BadModel, PlannerError
from keepstep.planner.model import ModelConfig, model_from_section, named_models
from keepstep.planner.survive import RATES_PER_HOST_DAY

RUN_DEFAULTS = Path(__file__).parent / "trainer" / "default.toml"
"""Every key of a run's file with its default; a user's file holds only what differs."""


def rate(text: str) -> float:
    """Failures per host-day from a number per 1,000, or the name of a published run."""
    if text in RATES_PER_HOST_DAY:
        return RATES_PER_HOST_DAY[text]
    try:
        rate = float(text) / 1000.0
    except ValueError as error:
        known = ", ".join(RATES_PER_HOST_DAY)
        raise PlannerError(f"--rate {text}: must be a number or one of {known}") from error
    return positive("--rate", rate, text)


def positive(option: str, number: float, text: str = "") -> float:
    """`number`, given by `option`, if it is finite and above 0. Raises PlannerError."""
    if not 0 < number < inf:
        raise PlannerError(f"{option} {text or number}: must be more than 0, and finite")
    return number


def read_model(text: str, vocab_size: int | None) -> tuple[ModelConfig, int | None]:
    """The model, and the global batch of a run's file."""
    models = named_models()
    if text in models:
        return models[text], None
    path = Path(text)
    if not path.is_file():
        raise BadModel(f"--model {text}: neither a file nor one of {', '.join(models)}")
    section, rest = read_config(path, vocab_size)
    batch = rest.get("batch", {}).get("global_batch")
    return model_from_section(section, path.stem), batch if isinstance(batch, int) else None


def read_config(
    path: Path, vocab_size: int | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The [model] section of a run's file and its other sections, defaults filled in."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    if not isinstance(document.get("model"), dict):
        raise BadModel(f"{path}: has no [model] section")
    merged: dict[str, dict[str, Any]] = {}
    if RUN_DEFAULTS.is_file():
        with RUN_DEFAULTS.open("rb") as file:
            merged = tomllib.load(file)
    for name, section in document.items():
        merged[name] = {**merged.get(name, {}), **section} if isinstance(section, dict) else {}
    model = merged.pop("model")
    if vocab_size is not None:
        model["vocab_size"] = vocab_size
    if model.get("vocab_size") == 0:
        raise BadModel(f"{path}: vocab_size is 0, that is the corpus's; give it by --vocab-size")
    return model, merged


def read_cluster(path: Path | None, gpu: str, gpus: int) -> Cluster:
    """The cluster of a file, or of a kind of GPU. Raises BadCluster, OSError."""
    if path is None:
        return cluster_of(gpu, gpus)
    with path.open("rb") as file:
        try:
            return cluster_from_document(tomllib.load(file), path.stem)
        except BadCluster as error:
            raise BadCluster(f"{path}: {error}") from error


def metrics_lines(path: Path) -> list[str]:
    """Lines of a metrics file, or of the one in a run directory."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    return file.read_text(encoding="utf-8").splitlines()
