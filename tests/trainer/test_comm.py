"""Counted bytes are those issued: against a second counter, hand formulae, and the least."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.kit.comm_oracle import CommOracle
from tests.kit.parity import CASES, LR, Case, slice_of
from tests.kit.ranks import run_ranks

from keepstep.trainer.budget import least_bytes
from keepstep.trainer.comm import CommError, Meter, payload_bytes, ring_bytes
from keepstep.trainer.layout import coordinates
from keepstep.trainer.mesh import make_grid
from keepstep.trainer.train_step import build

LAYOUTS = (
    "dp2",
    "dp2-replicas",
    "hsdp2x2",
    "dp2-accumulation-4",
    "tp2",
    "pp2",
    "pp2-interleaved",
    "tied-pp4",
    "dp2-tp2",
    "tied-dp2-tp2",
    "tp2-pp2",
    "dp2-tp2-pp2",
    "tied-dp2-tp2-pp2-interleaved",
    "tied-hsdp2x2-pp2",
)
Sent = dict[tuple[int, ...], float]


def _rank(rank: int, world: int, case: Case) -> tuple[list[dict[str, int]], list[Sent]]:
    grid = make_grid(case.parallel, torch.device("cpu"))
    trainable = build(case.config("fp32"), grid)
    counted, seen = [], []
    for step in range(3):
        with CommOracle() as oracle:
            counted.append(trainable.step(slice_of(case, trainable, step), LR).comm_bytes)
        seen.append(dict(oracle.sent))
        if step == 0:  # not counted; torch's stages agree on shapes anew in the step after it
            trainable.evaluate([slice_of(case, trainable, 99)])
    return counted, seen


def _axis(case: Case, ranks: tuple[int, ...]) -> str:
    """The axis along which the ranks of a group differ."""
    places = [vars(coordinates(case.parallel, rank)) for rank in ranks]
    return next(a for a in ("tp", "dp", "pp") if len({p[a] for p in places}) > 1)


def _by_hand(case: Case) -> dict[str, int]:
    """Bytes of a step that follows a step, in fp32, all sizes even: summed over ranks."""
    model, parallel, batch = case.model, case.parallel, case.batch
    t, p, r, s = parallel.tp, parallel.pp, parallel.dp_replicate, parallel.dp_shard
    d, world, head = r * s, parallel.world_size, model.dim // model.heads
    tokens = batch.global_batch * model.seq_len
    block = 2 * model.dim * (model.heads + model.kv_heads) * head + 3 * model.dim * model.ffn_dim
    norms = (2 * model.layers + 1) * model.dim
    ends = (1 if model.tied and p == 1 else 2) * model.vocab_size * model.dim
    blocks = model.layers * (block + 2 * model.dim * t)  # norm weights are whole on each tp rank
    everything = blocks + ends + model.dim * t
    gathers = everything
    if p == 1:  # blocks are gathered for each forward and each backward, the ends once for both
        gathers = batch.micro_batches(d) * (2 * blocks + ends + model.dim * t)
    reduction = 5 * 8 * world  # loss, squared norm, bytes of three axes: fp64, gathered per axis
    dp = r * (s - 1) * 4 * (gathers + everything) + 2 * (r - 1) * 4 * everything
    dp += 2 * (d - 1) * 8 * t * p + (d - 1) * reduction
    stream = tokens * model.dim * 4
    tp = (t - 1) * (8 * model.layers + 4) * stream
    tp += 2 * (t - 1) * 3 * tokens * 4 + 2 * (t - 1) * norms * 4 * r + (t - 1) * reduction
    pp = 2 * (parallel.stages - 1) * stream + (p - 1) * reduction
    if model.tied and p > 1:
        pp += 2 * model.vocab_size * model.dim * 4 * r
    return {"dp": dp if d > 1 else 0, "tp": tp if t > 1 else 0, "pp": pp if p > 1 else 0}


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_counted_bytes_are_those_that_the_dispatcher_sees_and_that_the_formulae_give(
    name: str,
) -> None:
    case = CASES[name]
    results = run_ranks(case.parallel.world_size, _rank, case, timeout_s=120)
    for step in range(3):
        seen = dict.fromkeys(("dp", "tp", "pp"), 0.0)
        for _, per_step in results:
            for ranks, size_bytes in per_step[step].items():
                if len(ranks) > 1:
                    seen[_axis(case, ranks)] += size_bytes
        counted = {tuple(sorted(c[step].items())) for c, _ in results}
        assert counted == {tuple(sorted((a, round(b)) for a, b in seen.items()))}
    assert results[0][0][2] == _by_hand(case)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_least_bytes_are_no_more_than_the_formulae_and_close_under_a_pipeline(
    name: str,
) -> None:
    case = CASES[name]
    least, found = least_bytes(case.config("fp32")), _by_hand(case)
    for axis in ("dp", "tp", "pp"):
        assert least[axis] <= found[axis]
        if case.parallel.pp > 1:
            assert found[axis] - least[axis] <= 0.02 * found[axis]


def test_gradients_are_sent_once_however_many_micro_batches_there_are() -> None:
    one = _by_hand(CASES["dp2-pp2"])["dp"]
    many = replace(CASES["dp2-pp2"], batch=replace(CASES["dp2-pp2"].batch, micro_batch=1))
    assert _by_hand(many)["dp"] == one


def test_ring_formulae() -> None:
    assert ring_bytes(2, 1200, 3) == 1600
    assert ring_bytes(1, 1200, 3) == 800
    assert ring_bytes(None, 1200, 3) == 1200


def test_payload_of_nested_tensors_is_counted_and_of_other_things_refused() -> None:
    assert payload_bytes([[torch.zeros(3)], torch.zeros(2, dtype=torch.int64)]) == 28
    with pytest.raises(CommError, match="found str"):
        payload_bytes("tensor")


def _meter_rank(rank: int, world: int) -> tuple[str, dict[str, float]]:
    both, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(world)][rank]
    assert both is not None
    meter = Meter({(0, 1): "dp"})
    with pytest.raises(CommError) as refused:
        Meter({(0, 2): "dp"}).add(both, 2, 100)
    meter.add(alone, 2, 100)  # one rank sends nothing
    dist.all_reduce(torch.zeros(3))  # not counted
    with meter.counting():
        dist.all_reduce(torch.zeros(3))
        dist.all_reduce(torch.zeros(3), group=alone)
    return str(refused.value), meter.take()


@pytest.mark.ranks
def test_a_meter_counts_what_its_body_issues_and_refuses_a_group_of_no_axis() -> None:
    for message, sent in run_ranks(2, _meter_rank):
        assert "ranks [0, 1], which belongs to no axis" in message
        assert sent == {"dp": 12, "tp": 0, "pp": 0}
