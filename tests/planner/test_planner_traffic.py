"""The planner's byte counts are those that the trainer counts on real runs, axis by axis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kit.parity import Case, slice_of
from tests.kit.ranks import run_ranks

from keepstep.planner.layout import Layout
from keepstep.planner.model import ModelConfig as PlannedModel
from keepstep.planner.traffic import trainer_traffic
from keepstep.trainer.mesh import make_grid
from keepstep.trainer.model_config import BatchConfig, ModelConfig, ParallelConfig
from keepstep.trainer.train_step import build

EVEN = ModelConfig(vocab_size=64, dim=32, layers=4, heads=4, kv_heads=2, ffn_dim=64, seq_len=16)
UNEVEN = replace(EVEN, vocab_size=66, layers=5, ffn_dim=68)
TIED = replace(EVEN, tied=True)
LOOPED = ParallelConfig(pp=2, schedule="interleaved1f1b", virtual=2)
CASES = [
    Case("dp2", ParallelConfig(dp=2), EVEN),
    Case("dp3 uneven", ParallelConfig(dp=3), UNEVEN, BatchConfig(6, 1)),
    Case("dp2 of replicas", ParallelConfig(dp=2, dp_replicate=2), EVEN),
    Case("dp2x2", ParallelConfig(dp=4, dp_replicate=2), EVEN),
    Case("tp2", ParallelConfig(tp=2), EVEN),
    Case("pp2", ParallelConfig(pp=2), EVEN),
    Case("pp3 uneven", ParallelConfig(pp=3), UNEVEN),
    Case("dp2 tp2", ParallelConfig(dp=2, tp=2), EVEN),
    Case("tp2 pp2", ParallelConfig(tp=2, pp=2), EVEN),
    Case("dp2 pp2 tied", ParallelConfig(dp=2, pp=2), TIED),
    Case("dp2 tied", ParallelConfig(dp=2), TIED),
    Case("pp2 looped", LOOPED, EVEN),
    Case("dp2 tp2 pp2", ParallelConfig(dp=2, tp=2, pp=2), EVEN),
    Case("all, doing blocks again", ParallelConfig(dp=2, tp=2, pp=2), TIED, checkpointing=True),
]


def counted(rank: int, world: int, case: Case) -> dict[str, int]:
    """The bytes of a run's second step, summed over ranks by the trainer itself."""
    config = case.config("fp32")
    trainable = build(config, make_grid(config.parallel, torch.device("cpu")))
    trainable.step(slice_of(case, trainable, 1), 1e-3)
    return trainable.step(slice_of(case, trainable, 2), 1e-3).comm_bytes


def planned(case: Case) -> dict[str, int]:
    model, parallel = case.model, case.parallel
    sizes = (model.vocab_size, model.dim, model.layers, model.heads, model.kv_heads)
    known = PlannedModel(*sizes, model.ffn_dim, model.seq_len, model.tied)
    layout = Layout(
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        tp=parallel.tp,
        pp=parallel.pp,
        virtual=parallel.virtual,
        micro_batch=case.batch.micro_batch,
        recompute="full" if case.checkpointing else "none",
    )
    traffic = trainer_traffic(known, layout, case.batch.global_batch)
    return {"dp": traffic.dp, "tp": traffic.tp, "pp": traffic.pp}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_bytes_are_the_counted_bytes(case: Case) -> None:
    found = run_ranks(case.parallel.world_size, counted, case, timeout_s=240)
    assert found[0] == planned(case)
