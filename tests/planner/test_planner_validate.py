"""Accuracy on an excerpt of published step times, and what a table may hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.planner.calibrate import Measured, fit
from keepstep.planner.cluster import Cluster, Efficiency
from keepstep.planner.cost import CostModel
from keepstep.planner.errors import BadTable
from keepstep.planner.table import PublishedRun, SkippedRun, read_table
from keepstep.planner.validate import spearman, validate

EXCERPT = (Path(__file__).parent / "published.csv").read_text()
HEADER = (
    "source,table,model,layers,hidden,heads,seq,vocab,gpu,gpus,dp,tp,pp,virtual_pp,"
    "micro_batch,global_batch,recompute,step_time_s,notes\n"
)
ROW = "s,t,GPT,24,2048,16,2048,51200,A100-80G,8,8,1,1,1,4,64,full,2.0,bf16\n"


def runs(source: str) -> list[PublishedRun | SkippedRun]:
    return [run for run in read_table(EXCERPT.splitlines()) if source in run.source]


def one(**cells: str) -> PublishedRun | SkippedRun:
    names = HEADER.strip().split(",")
    values = {**dict(zip(names, ROW.strip().split(","), strict=True)), **cells}
    return read_table([HEADER, ",".join(values[name] for name in names)])[0]


@pytest.mark.parametrize(
    ("source", "rows", "bar"), [("Korthikanti", 8, 0.06), ("SC'21", 10, 0.10), ("vTrain", 14, 0.12)]
)
def test_step_times_of_each_source_are_near(source: str, rows: int, bar: float) -> None:
    found = validate(runs(source))
    assert len(found.priced) == rows
    assert found.mape <= bar


def test_what_is_outside_the_model_is_left_out_with_its_reason() -> None:
    skipped = validate(read_table(EXCERPT.splitlines())).skipped
    assert {one.reason for one in skipped} == {
        "no step time",
        "precision float8 is outside the model",
        "GPU H100-96G-HBM2e-500W is outside the model",
    }


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"notes": "amp_fp8 FULL_SHARD"}, "precision fp8"),
        ({"notes": "NVFP4 recipe"}, "precision NVFP4"),
        ({"notes": "CP 2", "dp": "4"}, "CP 2"),
        ({"dp": "4"}, "dp x tp x pp = 4 is not gpus = 8"),
        ({"model": "Mixtral 8x7B"}, "mixture of experts"),
        ({"gpu": "V100-32G"}, "GPU V100-32G"),
        ({"step_time_s": ""}, "no step time"),
        ({"global_batch": ""}, "no global_batch"),
        ({"step_time_s": "nan"}, "no step time"),
        ({"layers": "many"}, "no layers"),
        ({"dp": "", "tp": "3"}, "its sizes do not fit"),
    ],
)
def test_a_row_outside_the_model_is_skipped(cells: dict[str, str], reason: str) -> None:
    run = one(**cells)
    assert isinstance(run, SkippedRun)
    assert reason in run.reason


def test_words_that_only_mention_a_precision_do_not_skip_the_row() -> None:
    assert isinstance(one(notes="bf16; MFU stated for no-Float8; CP 1"), PublishedRun)


def test_blank_cells_are_the_planner_s_choice_and_named() -> None:
    run = one(micro_batch=">= 1", pp="2", dp="4", virtual_pp="", recompute="not stated")
    assert isinstance(run, PublishedRun)
    assert set(run.chosen) == {"virtual_pp", "micro_batch", "recompute"}
    assert len(run.layouts) > 20
    priced = validate([run]).priced[0]
    assert priced.layout in run.layouts


def test_a_batch_that_does_not_divide_is_priced_all_the_same() -> None:
    run = one(global_batch="63", micro_batch="")
    assert isinstance(run, PublishedRun)
    assert [layout.micro_batch for layout in run.layouts] == [1]


def test_notes_give_the_network_and_the_sharding() -> None:
    run = one(notes="FULL_SHARD; 800 Gb/s inter-node")
    assert isinstance(run, PublishedRun)
    assert run.cluster.nic_bytes_per_s == 100e9
    assert run.layouts[0].zero == 3


def test_groups_never_mix_sources_or_sequence_lengths() -> None:
    two = "".join(
        [HEADER, ROW, ROW.replace("s,t", "other,t"), ROW.replace(",2048,51200", ",1024,51200")]
    )
    assert validate(read_table(two.splitlines())).groups == ()
    same = HEADER + ROW + ROW.replace(",4,64,", ",8,64,")
    group = validate(read_table(same.splitlines())).groups[0]
    assert (group.rows, group.gpus, group.global_batch) == (2, 8, 64)


def test_a_chosen_row_that_was_slower_is_told() -> None:
    """The second row's layout is predicted faster, but its time is given as a fifth longer."""
    small = ROW.replace(",8,1,1,1,4,64,full,2.0", ",8,1,1,1,1,64,full,1.0")
    large = ROW.replace(",8,1,1,1,4,64,full,2.0", ",8,1,1,1,8,64,full,1.2")
    group = validate(read_table((HEADER + small + large).splitlines())).groups[0]
    assert group.slower == pytest.approx(0.2)


def test_a_table_without_the_columns_is_refused() -> None:
    with pytest.raises(BadTable, match="lacks the columns"):
        read_table(["a,b", "1,2"])


def test_rank_correlation_shares_ranks_among_equals() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [1, 1, 5]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [7, 7, 7]) is None
    assert spearman([1, 2], [1, 2]) is None


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    hidden = Efficiency(gemm=0.6, hbm=0.5, link=0.4, nic=0.7)
    made = []
    for run in runs("vTrain"):
        assert isinstance(run, PublishedRun)
        truth = CostModel(run.model, _with(run, hidden), run.stack)
        seconds = truth.step(run.layouts[0], run.global_batch).total_s
        made.append(
            Measured(run.model, run.cluster, run.stack, run.layouts[0], run.global_batch, seconds)
        )
    found = fit(made)
    assert found.mape < 0.01
    for name in ("gemm", "hbm", "link"):  # little of these runs' time is in the network
        assert getattr(found.efficiency, name) == pytest.approx(getattr(hidden, name), rel=0.10)


def _with(run: PublishedRun, efficiency: Efficiency) -> Cluster:
    return replace(run.cluster, efficiency=efficiency)


def test_no_runs_cannot_be_fitted() -> None:
    with pytest.raises(BadTable, match="no measured steps"):
        fit([])
