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

MICRO_BATCH_MAX = 32
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

    Raises BadTable if columns are missing.
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
    model = _model(cells)
    layouts, chosen = _layouts(cells, classic, model)
    if not layouts:
        return SkippedRun(number, source, cells["model"], "its sizes do not fit: CP or EP outside")
    return PublishedRun(
        row=number,
        source=source,
        model=model,
        cluster=_cluster(cells),
        stack=stack,
        layouts=layouts,
        global_batch=int(float(cells["global_batch"])),
        step_time_s=float(cells["step_time_s"]),
        chosen=chosen,
    )


def _outside(cells: Mapping[str, str]) -> str:
    """Why the row is not one that the planner prices, or nothing."""
    words = " ".join(cells.get(key, "") for key in ("table", "model", "notes"))
    if not _positive(cells["step_time_s"]):
        return "no step time"
    for key in ("layers", "hidden", "gpus", "global_batch"):
        if not _positive(cells[key]):
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


def _cluster(cells: Mapping[str, str]) -> Cluster:
    kind = _gpu_kind(cells["gpu"])
    gpus = int(float(cells["gpus"]))
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


def _model(cells: Mapping[str, str]) -> ModelConfig:
    layers, dim = int(float(cells["layers"])), int(float(cells["hidden"]))
    heads = (*_choices(cells, "heads"), max(1, dim // HEAD_DIM))[0]
    heads = heads if dim % heads == 0 else 1  # no width to be had: attention's FLOPs are the same
    seq = (*_choices(cells, "seq"), SEQ_LEN)[0]
    vocab = (*_choices(cells, "vocab"), VOCAB_SIZE)[0]
    name = cells["model"]
    if "llama" in name.lower():
        for known in named_models().values():
            if known.gated and (known.layers, known.dim) == (layers, dim):
                return replace(known, name=name, seq_len=seq, vocab_size=vocab)
    return gpt(name, layers, dim, heads, seq, vocab)


def _layouts(
    cells: Mapping[str, str], classic: bool, model: ModelConfig
) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Every layout that the cells allow, and the columns whose value is the planner's choice."""
    gpus, batch = int(float(cells["gpus"])), int(float(cells["global_batch"]))
    notes = cells.get("notes", "")
    words = cells.get("recompute", "").lower()
    base = Layout(
        sequence_parallel=not classic or "sp" in words.split("+"),
        zero=_zero(notes, classic),
        reduce_bytes=2 if classic or "FULL_SHARD" in notes or "SHARD_GRAD_OP" in notes else 4,
    )
    recomputes = _recomputes(words)
    found = [
        replace(
            base,
            dp_shard=dp,
            tp=tp,
            pp=pp,
            virtual=virtual,
            micro_batch=micro,
            recompute=recompute,
        )
        for dp, tp, pp in _sizes(cells, gpus)
        for micro in _choices(cells, "micro_batch") or _micro_batches(batch, dp)
        for virtual in _choices(cells, "virtual_pp") or _virtuals(model, pp, batch // (dp * micro))
        for recompute in recomputes
    ]
    keys = ("dp", "tp", "pp", "virtual_pp", "micro_batch")
    blank = [key for key in keys if not _choices(cells, key)]
    if len(recomputes) > 1:
        blank.append("recompute")
    return tuple(found), tuple(blank)


def _micro_batches(batch: int, dp: int) -> tuple[int, ...]:
    """What a blank micro batch may be: up to 32, dividing the replica's part of the batch."""
    each = batch // dp if batch % dp == 0 else 1
    return tuple(n for n in divisors(each) if n <= MICRO_BATCH_MAX)


def _virtuals(model: ModelConfig, pp: int, count: int) -> tuple[int, ...]:
    """What blank virtual stages may be: whole layers each, and whole rounds of micro batches."""
    if pp == 1 or model.layers % pp or count % pp:
        return (1,)
    return divisors(model.layers // pp)


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
    """The cell's number; nothing for a blank cell, or one that is not one number (">= 2")."""
    value = _positive(cells.get(key, ""))
    return (int(value),) if value else ()


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
