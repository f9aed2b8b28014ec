"""A table of published runs: one CSV row becomes what the planner can price, or a reason why not.

Columns: source, table, model, params_B, layers, hidden, heads, seq, vocab, gpu, gpus, dp, tp, pp,
virtual_pp, micro_batch, global_batch, recompute, step_time_s, notes. Blank cells are the planner's
own choice. What no column says (precision, the network, sharding) is read from the notes' words.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from keepstep.planner.cluster import GIB, GPUS, Cluster, cluster_of
from keepstep.planner.errors import BadTable
from keepstep.planner.layout import RECOMPUTES, Layout, Recompute
from keepstep.planner.layouts import divisors
from keepstep.planner.model import ModelConfig, gpt, named_models
from keepstep.planner.stack import CLASSIC, MODERN, Stack

REQUIRED = ("model", "layers", "hidden", "heads", "seq", "gpu", "gpus", "dp", "tp", "pp")
COLUMNS = (*REQUIRED, "global_batch", "step_time_s")

CLASSIC_SOURCES = (
    "SC'21",
    "2104.04473",
    "Korthikanti",
    "2205.05198",
    "vTrain",
    "bigscience",
    "BLOOM",
    "MT-NLG",
    "NeoX",
    "OPT",
    "GLM",
)
"""Measured with the software of 2020-2022: scores in memory, no overlap, 2-byte reduction."""

OMNIPATH_SOURCES = ("bigscience", "BLOOM")
OMNIPATH_NODE_BYTES_PER_S = 4 * 12.5e9

HEAD_DIM, SEQ_LEN, VOCAB_SIZE = 128, 2048, 50432
"""For cells left blank."""

OTHER_PRECISION = re.compile(
    r"(?<!no-)(?<![a-z0-9])(float8|mxfp8|fp8|nvfp4|mxfp4|fp4|int8|tf32)", re.I
)
CONTEXT_PARALLEL = re.compile(r"\bCP\s*[=:]?\s*(\d+)")
EXPERT_PARALLEL = re.compile(r"\bEP\s*[=:]?\s*(\d+)|\bMoE\b|mixtral|-A\d+B\b", re.I)
NODE_NETWORK = re.compile(r"(\d+)\s*Gb/s inter-node")
GPU_NETWORK = re.compile(r"(\d+)\s*Gb/s RDMA per GPU")
ZERO_STAGE = re.compile(r"\b(?:ZeRO|ZS)[-= ]?([0-3])\b")


@dataclass(frozen=True)
class PublishedRun:
    """One measured row: the layouts that fit its cells (several where cells are blank)."""

    row: int
    source: str
    model: ModelConfig
    cluster: Cluster
    stack: Stack
    layouts: tuple[Layout, ...]
    global_batch: int
    step_time_s: float
    chosen: tuple[str, ...]

    @property
    def group(self) -> tuple[str, ModelConfig, Cluster, int]:
        """Rows of one group differ in nothing but the layout."""
        return self.source, self.model, self.cluster, self.global_batch


@dataclass(frozen=True)
class SkippedRun:
    """A row outside the model, and why."""

    row: int
    source: str
    model: str
    reason: str


def read_table(lines: Iterable[str]) -> list[PublishedRun | SkippedRun]:
    """Parse the CSV. Row numbers count from 2, as an editor shows them (1 is the header).

    Raises BadTable if columns are missing or a needed cell of a usable row is not a number.
    """
    reader = csv.DictReader(lines)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise BadTable(f"the table lacks the columns {', '.join(missing)}")
    runs: list[PublishedRun | SkippedRun] = []
    for number, raw in enumerate(reader, start=2):
        cells = {key: (value or "").strip() for key, value in raw.items() if key is not None}
        runs.append(_run(number, cells))
    return runs


def _run(number: int, cells: Mapping[str, str]) -> PublishedRun | SkippedRun:
    source = cells.get("source", "")
    reason = _outside(cells)
    if reason:
        return SkippedRun(number, source, cells["model"], reason)
    classic = any(word.lower() in source.lower() for word in CLASSIC_SOURCES)
    stack = CLASSIC if classic else MODERN
    model = _model(number, cells)
    layouts, chosen = _layouts(number, cells, classic, model)
    return PublishedRun(
        row=number,
        source=source,
        model=model,
        cluster=_cluster(number, cells),
        stack=stack,
        layouts=layouts,
        global_batch=_number(number, cells, "global_batch"),
        step_time_s=float(cells["step_time_s"]),
        chosen=chosen,
    )


def _outside(cells: Mapping[str, str]) -> str:
    """Why the row is not one that the planner prices, or nothing."""
    words = " ".join(cells.get(key, "") for key in ("table", "model", "notes"))
    if not cells["step_time_s"]:
        return "no step time"
    for key in ("layers", "hidden", "gpus", "global_batch"):
        if not cells[key]:
            return f"no {key}"
    if _gpu_kind(cells["gpu"]) is None:
        return f"GPU {cells['gpu']} is outside the model"
    precision = OTHER_PRECISION.search(cells.get("precision", "") or words)
    if precision:
        return f"precision {precision.group(1)} is outside the model"
    context = CONTEXT_PARALLEL.search(words)
    if context and int(context.group(1)) > 1:
        return f"CP {context.group(1)} is outside the model"
    if EXPERT_PARALLEL.search(words) and not re.search(r"\bEP\s*[=:]?\s*1\b", words):
        return "EP or a mixture of experts is outside the model"
    sizes = [cells[key] for key in ("dp", "tp", "pp", "gpus")]
    if all(size.isdigit() for size in sizes):
        dp, tp, pp, gpus = (int(size) for size in sizes)
        if dp * tp * pp != gpus:
            return f"dp x tp x pp = {dp * tp * pp} is not gpus = {gpus}: CP or EP outside the model"
    return ""


def _gpu_kind(name: str) -> str | None:
    words = re.split(r"[-_ ]", name.upper())
    if words[0] not in GPUS or any(word in ("500W", "PCIE", "NVL") for word in words):
        return None
    return words[0]


def _cluster(number: int, cells: Mapping[str, str]) -> Cluster:
    kind = _gpu_kind(cells["gpu"])
    gpus = _number(number, cells, "gpus")
    per_node = max(n for n in divisors(gpus) if n <= 8)
    cluster = cluster_of(str(kind), gpus, per_node)
    if "40G" in cells["gpu"].upper():
        small = replace(
            cluster.gpu, name="A100-40G", memory_bytes=40 * GIB, hbm_bytes_per_s=1.555e12
        )
        cluster = replace(cluster, gpu=small)
    notes = cells.get("notes", "")
    node, each = NODE_NETWORK.search(notes), GPU_NETWORK.search(notes)
    rate = cluster.nic_bytes_per_s
    if node:
        rate = float(node.group(1)) / 8 * 1e9
    elif each:
        rate = float(each.group(1)) / 8 * 1e9 * per_node
    elif any(word in cells.get("source", "") for word in OMNIPATH_SOURCES):
        rate = OMNIPATH_NODE_BYTES_PER_S
    return replace(cluster, nic_bytes_per_s=rate)


def _model(number: int, cells: Mapping[str, str]) -> ModelConfig:
    layers, dim = _number(number, cells, "layers"), _number(number, cells, "hidden")
    heads = _number(number, cells, "heads") if cells["heads"] else max(1, dim // HEAD_DIM)
    seq = _number(number, cells, "seq") if cells["seq"] else SEQ_LEN
    vocab = _number(number, cells, "vocab") if cells.get("vocab") else VOCAB_SIZE
    name = cells["model"]
    if "llama" in name.lower():
        for known in named_models().values():
            if known.gated and (known.layers, known.dim) == (layers, dim):
                return replace(known, name=name, seq_len=seq, vocab_size=vocab)
    return gpt(name, layers, dim, heads, seq, vocab)


def _layouts(
    number: int, cells: Mapping[str, str], classic: bool, model: ModelConfig
) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Every layout that the cells allow, and the columns whose value is the planner's choice."""
    gpus, batch = _number(number, cells, "gpus"), _number(number, cells, "global_batch")
    notes = cells.get("notes", "")
    words = cells.get("recompute", "").lower()
    base = Layout(
        sequence_parallel=not classic or "sp" in words.split("+"),
        zero=_zero(notes, classic),
        reduce_bytes=2 if classic or "FULL_SHARD" in notes or "SHARD_GRAD_OP" in notes else 4,
    )
    found = []
    virtuals, micros = _choices(cells, "virtual_pp"), _choices(cells, "micro_batch")
    recomputes = _recomputes(words)
    for dp, tp, pp in _sizes(cells, gpus):
        for virtual in virtuals or divisors(-(-model.layers // pp) if pp > 1 else 1):
            for micro in micros or divisors(max(1, batch // dp)):
                if not micros and (batch % (dp * micro) or micro > 32):
                    continue
                if not virtuals and virtual > 1 and batch // (dp * micro) % pp:
                    continue
                for recompute in recomputes:
                    found.append(
                        replace(
                            base,
                            dp_shard=dp,
                            tp=tp,
                            pp=pp,
                            virtual=virtual,
                            micro_batch=micro,
                            recompute=recompute,
                        )
                    )
    blank = [key for key in ("dp", "tp", "pp", "virtual_pp", "micro_batch") if not cells.get(key)]
    if len(recomputes) > 1:
        blank.append("recompute")
    if not found:
        raise BadTable(f"row {number}: no layout fits its cells")
    return tuple(found), tuple(blank)


def _sizes(cells: Mapping[str, str], gpus: int) -> list[tuple[int, int, int]]:
    """(dp, tp, pp) as given; blank ones run over the divisors of what is left."""
    sizes = []
    for tp in _choices(cells, "tp") or (1, 2, 4, 8):
        for pp in _choices(cells, "pp") or divisors(max(1, gpus // tp)):
            for dp in _choices(cells, "dp") or (gpus // (tp * pp),):
                if dp * tp * pp == gpus:
                    sizes.append((dp, tp, pp))
    return sizes


def _zero(notes: str, classic: bool) -> int:
    if "FULL_SHARD" in notes or "FSDP" in notes:
        return 3
    if "SHARD_GRAD_OP" in notes:
        return 2
    stage = ZERO_STAGE.search(notes)
    if stage:
        return int(stage.group(1))
    return 0 if classic else 1


def _recomputes(words: str) -> tuple[Recompute, ...]:
    for name in RECOMPUTES:
        if words.startswith(name):
            return (name,)
    return RECOMPUTES


def _choices(cells: Mapping[str, str], key: str) -> tuple[int, ...]:
    value = cells.get(key, "")
    return (int(float(value)),) if value else ()


def _number(row: int, cells: Mapping[str, str], key: str) -> int:
    try:
        return int(float(cells[key]))
    except ValueError as error:
        raise BadTable(
            f"row {row}, column {key}: expected a number, found {cells[key]!r}"
        ) from error
