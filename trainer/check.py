"""Whether a model, a layout and a batch can work together: pure, before any process starts."""

from __future__ import annotations

from keepstep.trainer.model_config import BatchConfig, ModelConfig, ParallelConfig


def check(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchConfig,
    world_size: int | None = None,
) -> list[str]:
    """One sentence for each thing that cannot work, naming both numbers; empty if all is well.

    `world_size`: the number of ranks that were started, if it is known.
    """
    problems = _sizes(model, parallel, batch)
    if problems:
        return problems  # the rest would divide by zero
    problems = _model(model) + _tensor(model, parallel) + _pipeline(model, parallel, batch)
    problems += _data(parallel, batch)
    if world_size is not None and world_size != parallel.world_size:
        problems.append(
            f"parallel.dp {parallel.dp} x parallel.tp {parallel.tp} x parallel.pp {parallel.pp}"
            f" needs {parallel.world_size} ranks and {world_size} were started"
        )
    return problems


def _sizes(model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig) -> list[str]:
    sizes: dict[str, int] = {}
    for section, names in (
        (model, ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "seq_len")),
        (parallel, ("dp", "tp", "pp", "dp_replicate", "virtual")),
        (batch, ("global_batch", "micro_batch")),
    ):
        prefix = type(section).__name__.removesuffix("Config").lower()
        sizes.update({f"{prefix}.{name}": getattr(section, name) for name in names})
    return [f"{name} {size} is less than 1" for name, size in sizes.items() if size < 1]


def _indivisible(what: str, size: int, by: str, divisor: int, why: str) -> list[str]:
    if size % divisor == 0:
        return []
    above = -(-size // divisor) * divisor
    sentence = f"{what} {size} cannot be divided by {by} {divisor}: {why}"
    return [f"{sentence} (the next size that can be is {above})"]


def _model(model: ModelConfig) -> list[str]:
    problems = _indivisible(
        "model.dim", model.dim, "model.heads", model.heads, "heads have equal widths"
    )
    if not problems and model.head_dim % 2:
        problems.append(
            f"model.dim {model.dim} over model.heads {model.heads} gives heads of odd width"
            f" {model.head_dim}: rotary positions turn pairs of elements"
        )
    return problems + _indivisible(
        "model.heads",
        model.heads,
        "model.kv_heads",
        model.kv_heads,
        "each key/value head serves equally many query heads",
    )


def _tensor(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    problems: list[str] = []
    for name, why in (
        ("heads", "each tp rank holds whole heads"),
        ("kv_heads", "each tp rank holds whole key/value heads"),
        ("ffn_dim", "each tp rank holds an equal part of the feed-forward"),
        ("vocab_size", "each tp rank holds an equal part of the vocabulary, so pad it"),
        ("seq_len", "between blocks each tp rank holds an equal part of the sequence"),
    ):
        size = getattr(model, name)
        problems += _indivisible(f"model.{name}", size, "parallel.tp", parallel.tp, why)
    return problems


def _pipeline(model: ModelConfig, parallel: ParallelConfig, batch: BatchConfig) -> list[str]:
    problems: list[str] = []
    if parallel.virtual > 1 and (parallel.pp == 1 or parallel.schedule == "1f1b"):
        problems.append(
            f"parallel.virtual {parallel.virtual} needs parallel.schedule interleaved1f1b and"
            f" parallel.pp of at least 2, and they are {parallel.schedule} and {parallel.pp}"
        )
    if model.layers < parallel.stages:
        problems.append(
            f"model.layers {model.layers} are fewer than the {parallel.stages} stages of"
            f" parallel.pp {parallel.pp} x parallel.virtual {parallel.virtual}"
        )
    micro_batches = batch.micro_batches(parallel.dp)
    if parallel.pp > 1 and 0 < micro_batches < parallel.pp:
        problems.append(
            f"{micro_batches} micro-batches per step are fewer than parallel.pp {parallel.pp}:"
            f" raise batch.global_batch {batch.global_batch} or lower batch.micro_batch"
            f" {batch.micro_batch}"
        )
    elif parallel.pp > 1 and parallel.schedule == "interleaved1f1b":
        problems += _indivisible(
            "the number of micro-batches per step",
            micro_batches,
            f"the rounds of interleaved1f1b at parallel.pp {parallel.pp},",
            max(1, micro_batches // parallel.pp),
            "rounds have equal lengths",
        )
    return problems


def _data(parallel: ParallelConfig, batch: BatchConfig) -> list[str]:
    problems = _indivisible(
        "parallel.dp",
        parallel.dp,
        "parallel.dp_replicate",
        parallel.dp_replicate,
        "replicas have equally many ranks",
    )
    return problems + _indivisible(
        "batch.global_batch",
        batch.global_batch,
        f"parallel.dp {parallel.dp} x batch.micro_batch {batch.micro_batch} =",
        parallel.dp * batch.micro_batch,
        "all dp ranks run equally many whole micro-batches",
    )
