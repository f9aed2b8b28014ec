"""`keepstep plan`: what it prints, its JSON, and its exit status."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from keepstep.plan_cli import plan_app
from keepstep.planner.cluster import cluster_from_document, cluster_of
from keepstep.planner.cost import CostModel
from keepstep.planner.layouts import parse_layout
from keepstep.planner.measured import measured_run
from keepstep.planner.model import model_from_section
from keepstep.planner.stack import SHARED_CORES

RUN = """
[model]
vocab_size = 256
dim = 64
layers = 4
heads = 4
kv_heads = 2
ffn_dim = 192
seq_len = 128
rope_theta = 10000.0
norm_eps = 1e-5
tied = false

[batch]
global_batch = 16
micro_batch = 2
"""
MACHINE = """
[cluster]
nodes = 1
gpus_per_node = 8
nic_bytes_per_s = 1e9
cores_per_node = 2

[gpu]
name = "core"
peak_flops = 5e10
memory_bytes = 4e9
hbm_bytes_per_s = 1e10
sms = 0
link_bytes_per_s = 2e9
"""


def plan(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(plan_app, list(words))
    assert result.exit_code == status, result.output + result.stderr
    return result


def plan_json(*words: str, status: int = 0) -> dict[str, Any]:
    found = json.loads(plan(*words, "--json", status=status).stdout)
    assert isinstance(found, dict)
    return found


def test_the_best_layouts_come_with_all_their_figures() -> None:
    report = plan_json(
        "--model", "llama3-70b", "--gpus", "256", "--gpu", "H100", "--tokens", "2e12"
    )
    assert len(report["best"]) == 10
    first = report["best"][0]
    assert sum(first["seconds"].values()) == pytest.approx(first["step_s"])
    assert set(first["traffic"]) == {"dp", "tp", "pp"}
    assert first["memory_gib"]["total"] <= 80
    assert first["dollars"] == pytest.approx(first["days"] * 24 * 256 * 2.5)
    assert first["layout"] in report["why"]
    assert report["refusals"]


def test_your_own_layout_stands_beside_the_best() -> None:
    words = ("--gpus", "256", "--explain", "dp=8,tp=8,pp=4,recompute=full")
    assert plan_json(*words)["own"]["step_s"] > 0
    printed = plan(*words).stdout
    assert "Yours, and the first" in printed
    assert "% longer than the first" in " ".join(printed.split())


def test_a_layout_of_yours_that_cannot_run_exits_1_with_the_reason() -> None:
    report = plan_json("--gpus", "256", "--explain", "dp=8,tp=16", status=1)
    assert "tp 16 is more than 8" in report["own_refusal"]
    assert "It cannot run" in plan("--gpus", "256", "--explain", "dp=8,tp=16", status=1).stdout


def test_nothing_that_can_run_exits_1() -> None:
    report = plan_json("--model", "llama3-405b", "--gpus", "8", status=1)
    assert report["best"] == []
    assert "No layout can run" in report["why"]


def test_refused_layouts_are_listed_on_request() -> None:
    report = plan_json("--gpus", "16", "--model", "llama3-8b", "--refused")
    assert len(report["refused"]) == sum(one["count"] for one in report["refusals"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nope"), "neither a file nor one of"),
        (("--gpu", "V100"), "unknown; known"),
        (("--gpus", "12"), "no multiple of the 8 GPUs"),
        (("--explain", "tp"), "is not key=value"),
        (("--global-batch", "0"), "needs >= 1"),
        (("--cluster", "/nonexistent.toml"), "No such file"),
        (("survive", "--rate", "often"), "must be a number or one of"),
        (("survive", "--placement", "heap"), "must be ring or group"),
        (("survive", "--copies", "9", "--hosts", "4"), "9 copies need as many hosts"),
        (("validate", "/nonexistent.csv"), "No such file"),
        (("--tokens", "nan"), "--tokens nan: must be more than 0, and finite"),
        (("--seq-len", "0"), "seq_len is 0; needs >= 1"),
        (("--explain", "dp=\u00b2"), "must be N or REPLICATExSHARD"),
        (("--explain", "tp=\u0663"), "must be a number from 1"),
        (("survive", "--hosts", "0"), "a job of 0 hosts"),
        (("survive", "--rate", "inf"), "--rate inf: must be more than 0"),
        (("survive", "--days", "0"), "--days 0.0: must be more than 0"),
        (("survive", "--step", "0"), "--step 0.0: must be more than 0"),
        (("survive", "--again", "inf"), "--again inf: must be more than 0"),
        (("survive", "--copies", "0"), "0 copies"),
        (("survive", "--detect", "-1"), "detect_s is -1.0"),
        (("survive", "--repair", "nan"), "repair_s is nan"),
        (("survive", "--spares", "-1"), "-1 spares"),
        (("survive", "--tier", "a=nan,1,several"), "capture_s is nan"),
        (("survive", "--tier", "a=1,1,several,0"), "interval_s is 0.0"),
    ],
)
def test_what_cannot_be_meant_exits_2_in_one_line(words: tuple[str, ...], message: str) -> None:
    result = plan(*words, status=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [("--best", "0"), ("survive", "--runs", "0")])
def test_a_count_below_one_exits_2(words: tuple[str, ...]) -> None:
    assert words[-2] in plan(*words, status=2).stderr


def test_a_run_s_file_and_a_cluster_s_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "box.toml").write_text(MACHINE)
    report = plan_json(
        "--model", str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "box.toml")
    )
    assert report["global_batch"] == 16
    assert report["cluster"] == {"name": "box", "gpu": "core", "gpus": 8}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 1", "nodse = 1", "did you mean nodes"),
        ("nodes = 1", "nodes = 0", "needs > 0"),
        ("nodes = 1", 'nodes = "1"', "expected int"),
        ("[gpu]", "[gpus]", "unknown section"),
        ("sms = 0", "", "sms"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    (tmp_path / "box.toml").write_text(MACHINE.replace(old, new, 1))
    assert message in plan("--cluster", str(tmp_path / "box.toml"), status=2).stderr


def test_a_known_gpu_can_be_changed_in_part() -> None:
    document = tomllib.loads(
        '[cluster]\ngpu = "H100"\nnodes = 2\ngpus_per_node = 8\nnic_bytes_per_s = 4e11\n'
        "[gpu]\nmemory_bytes = 9e10\n[efficiency]\nnic = 0.5\n"
    )
    cluster = cluster_from_document(document, "mine")
    assert (cluster.gpu.name, cluster.gpu.memory_bytes) == ("H100", 9e10)
    assert (cluster.efficiency.nic, cluster.gpus) == (0.5, 16)


def test_survival_is_told_with_its_spread() -> None:
    words = ("survive", "--hosts", "2048", "--days", "54", "--runs", "16")
    report = plan_json(*words)
    simulated = report["simulated"]
    assert simulated["effective_p5"] <= simulated["effective"] <= simulated["effective_p95"]
    assert report["expected_failures"] == pytest.approx(419)
    assert "Effective training time" in plan(*words).stdout


def test_validation_prints_the_agreed_keys() -> None:
    table = str(Path(__file__).parent / "published.csv")
    report = plan_json("validate", table)
    assert {"mape_pct", "median_ape_pct", "rows", "groups", "skipped"} <= set(report)
    assert report["rows"] == 32
    assert {"row", "reason"} <= set(report["skipped"][0])
    assert "mean absolute error" in plan("validate", table, "--rows").stdout


def test_calibration_prints_a_cluster_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "box.toml").write_text(MACHINE)
    times = {(8, 1, 1): 80.0, (2, 2, 2): 130.0, (1, 8, 1): 260.0}
    for (dp, tp, pp), milliseconds in times.items():
        lines = [
            {
                "step": step,
                "layout": {"dp": dp, "tp": tp, "pp": pp, "dp_replicate": 1},
                "samples": [16 * step - 16, 16 * step],
                "step_ms": milliseconds * (9.0 if step == 1 else 1.0),
            }
            for step in range(1, 9)
        ]
        directory = tmp_path / f"run{dp}"
        directory.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "metrics.jsonl").write_text(text)
    paths = [str(tmp_path / f"run{dp}") for dp, _, _ in times]
    common = ("--model", str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "box.toml"))
    printed = plan("calibrate", *paths, *common).stdout
    fitted = cluster_from_document(tomllib.loads(printed), "fitted")
    assert fitted.cores_per_node == 2
    (tmp_path / "fitted.toml").write_text(printed)
    words = ("--cluster", str(tmp_path / "fitted.toml"), "--explain", "dp=8,micro=2,zero=3")
    model = model_from_section(tomllib.loads(RUN)["model"])
    fit_s = CostModel(model, fitted, SHARED_CORES).step(parse_layout(words[-1]), 16).total_s
    assert plan_json(*common[:2], *words)["own"]["step_s"] == pytest.approx(fit_s)
    report = plan_json("calibrate", *paths, *common)
    assert report["fit"]["mape_pct"] < 25
    assert any("0.0800 s" in run for run in report["fit"]["runs"])


def test_the_first_steps_are_left_out_of_the_measurement() -> None:
    sizes = {"dp": 2, "tp": 1, "pp": 1, "dp_replicate": 1}
    lines = [
        json.dumps({"layout": sizes, "samples": [0, 16], "step_ms": 1000.0 * milliseconds})
        for milliseconds in (9, 9, 9, 2, 2)
    ]
    model = model_from_section(tomllib.loads(RUN)["model"])
    run = measured_run(model, cluster_of("H100", 8), {}, "m", lines, skip=3)
    assert (run.seconds, run.global_batch, run.layout.zero) == (2.0, 16, 3)


def test_metrics_without_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    words = ("calibrate", str(tmp_path), "--model", str(tmp_path / "run.toml"))
    assert "line 1: lacks layout" in plan(*words, status=2).stderr
