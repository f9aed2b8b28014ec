"""The rank runner itself: order of results, the true cause of a failure, time-outs."""

from __future__ import annotations

import os
import time

import pytest
import torch
from tests.kit.ranks import RankFailed, run_ranks
from torch import distributed as dist

pytestmark = pytest.mark.ranks


def _sum(rank: int, world: int, add: float) -> tuple[int, float]:
    value = torch.tensor(rank + add)
    dist.all_reduce(value)
    return rank, value.item()


def _second_fails(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(0.1)
        raise ValueError("the real cause")
    dist.barrier()


def _second_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(600)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(3, _sum, 0.5) == [(0, 4.5), (1, 4.5), (2, 4.5)]


def test_the_rank_that_failed_itself_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 failed:(.|\n)*the real cause") as caught:
        run_ranks(3, _second_fails)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="exit code 7"):
        run_ranks(2, _second_dies)


def test_a_hang_ends_with_the_stack_of_the_hanging_rank() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"_hangs"):
        run_ranks(2, _hangs, timeout_s=4)
    assert time.monotonic() - began_s < 300
