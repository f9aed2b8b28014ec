"""A whole run as a person starts it: what it writes, how it stops, what it refuses.

One rank where the layout does not matter: a start is most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.runs import (
    SETTINGS,
    end_keepers,
    exact_lines,
    host_dirs,
    is_keeper,
    kill,
    kill_tree,
    make_corpus,
    start,
    train,
    wait_for_lines,
)

from keepstep.ckpt.entry import Rewind
from keepstep.ckpt.events import read_events
from keepstep.ckpt.log import Log, read_entries
from keepstep.ckpt.manifest import State
from keepstep.storage.locate import open_store
from keepstep.trainer.metrics import FILE_NAME, read_metrics

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

ONE = ("--layout", "dp=1,tp=1,pp=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of six steps on one rank, due in the store every two."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    status, text = train(run_dir, corpus, *ONE, "--steps", "6", "--checkpoint-every", "2")
    assert status == 0, text
    run_dir.with_name("text").write_text(text)
    return run_dir


@pytest.fixture
def running(tmp_path: Path, corpus: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """A run that would go on for ever, in its third step or later; its directory and output."""
    run_dir, output = tmp_path / "run", tmp_path / "out"
    words = [*ONE, "--steps", "100000", "--checkpoint-every", "2"]
    process = start(run_dir, corpus, *words, output=output)
    assert wait_for_lines(process, run_dir, 3), output.read_text()
    yield process, run_dir, output
    kill_tree(process)
    end_keepers(run_dir)


def committed_steps(run_dir: Path) -> list[int]:
    log = Log(open_store(run_dir / "store"))
    return [commit.state.step for commit in reversed(log.read().live)]


def told(run_dir: Path, *roles: str) -> list[dict[str, Any]]:
    """The events of launcher and ranks, or of other roles."""
    return [one for one in read_events(run_dir) if one["role"] in (roles or ("launcher", "rank"))]


def keepers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if is_keeper(one)]


def ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if not is_keeper(one)]


def entries(run_dir: Path) -> int:
    return Log(open_store(run_dir / "store")).read().next_seq


# ---- what a run writes


def test_a_line_of_metrics_for_each_step(finished: Path) -> None:
    lines = read_metrics(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines] == [[16 * n, 16 * n + 16] for n in range(6)]
    for line in lines:
        assert line["tokens"] == 16 * 16
        assert line["applied"] is True
        assert line["generation"] == 1
        assert line["layout"] == {"dp": 1, "tp": 1, "pp": 1, "dp_replicate": 1}
        assert set(line["comm_bytes"]) == {"dp", "tp", "pp"}
        assert line["step_ms"] > 0
        assert line["capture_ms"] >= 0
        assert 0 < line["lag_steps"] <= line["step"]
        assert line["lag_s"] > 0
        assert 0 < line["loss"] < 7
        assert line["grad_norm"] > 0
    assert lines[0]["lr"] == pytest.approx(1e-2 / 5)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_events_tell_the_story_with_time_who_and_why(finished: Path) -> None:
    events = told(finished)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "stopped"
    committed = [event["step"] for event in read_events(finished, "checkpoint_committed")]
    assert committed == committed_steps(finished)
    assert committed[-1] == 6
    for event in read_events(finished):
        assert {"time", "host", "pid", "role", "reason"} <= set(event)
    assert "run.steps = 6" in events[-1]["reason"]
    assert events[0]["checkpoint_bytes"] > 100_000


def test_the_summary_has_commands_that_work_when_pasted(finished: Path) -> None:
    text = finished.with_name("text").read_text()
    steps = ", ".join(map(str, committed_steps(finished)))
    assert f"saved: steps {steps} (" in text
    commands = [line.split("keepstep ", 1)[1] for line in text.splitlines() if "keepstep " in line]
    assert [command.split()[0] for command in commands] == ["ls", "show", "verify"]
    for command in commands:
        words = [sys.executable, "-m", "keepstep.cli", *command.split()]
        assert subprocess.run(words, capture_output=True).returncode == 0


def test_steps_says_when_to_stop_and_changes_nothing_else(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    run_dir = tmp_path / "run"
    for steps in ("3", "6"):
        status, text = train(run_dir, corpus, *ONE, "--steps", steps)
        assert status == 0, text
    assert exact_lines(run_dir) == exact_lines(finished)
    assert committed_steps(run_dir) == [3, 6]
    assert [event["base"] for event in read_events(run_dir, "resumed")] == [[1, 3]]


def test_a_finished_run_started_again_does_nothing_and_says_so(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    before = (finished / FILE_NAME).read_bytes()
    status, text = train(finished, corpus, *ONE, "--steps", "6", "--checkpoint-every", "2")
    assert status == 0
    assert "step 6 had been done already" in text
    assert (finished / FILE_NAME).read_bytes() == before


# ---- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_commits_and_ends_well(
    running: tuple[subprocess.Popen[bytes], Path, Path], number: signal.Signals
) -> None:
    process, run_dir, output = running
    process.send_signal(number)
    assert process.wait(180) == 0
    last = read_metrics(run_dir)[-1]["step"]
    assert committed_steps(run_dir)[-1] == last
    assert told(run_dir)[-1]["event"] == "stopped"
    assert f"asked by {number.name}" in told(run_dir)[-1]["reason"]
    text = output.read_text()
    assert f"stopping: asked by {number.name}" in text
    assert f"stopped at step {last}" in text


def test_every_process_says_its_role_host_and_rank(
    running: tuple[subprocess.Popen[bytes], Path, Path],
) -> None:
    process, _, _ = running
    host = socket.gethostname()
    launcher = psutil.Process(process.pid)
    assert launcher.cmdline()[0] == f"keepstep: launcher host {host} run demo"
    assert [one.cmdline()[0] for one in ranks(process)] == [
        f"keepstep: rank 0 host {host} run demo"
    ]
    assert [one.cmdline()[0] for one in keepers(process)] == ["keepstep: keeper host h0 run demo"]


def test_a_killed_rank_ends_the_run_naming_the_cause(
    running: tuple[subprocess.Popen[bytes], Path, Path],
) -> None:
    process, run_dir, output = running
    ranks(process)[0].kill()
    assert process.wait(180) == 1
    said = output.read_text()
    assert "rank 0: killed by SIGKILL" in said
    assert "to go on: give the same command again" in said
    assert f"log of that rank: {run_dir / 'logs' / 'rank-00000.log'}" in said
    assert told(run_dir)[-1]["event"] == "failed"


# ---- keepers


def test_a_run_that_ended_well_leaves_no_keeper_and_no_memory(finished: Path) -> None:
    for ended in read_events(finished, "keeper_ended"):
        assert ended["is_removed"]
        assert not psutil.pid_exists(ended["pid"])
    assert host_dirs(finished) == []


def test_a_keeper_that_is_killed_is_started_anew_and_the_run_goes_on(
    running: tuple[subprocess.Popen[bytes], Path, Path],
) -> None:
    """Its successor takes up what was in memory; then steps are captured and committed again."""
    process, run_dir, _ = running
    assert wait_for_event(run_dir, "checkpoint_committed", 1)
    (keeper,) = keepers(process)
    keeper.kill()
    assert wait_for_event(run_dir, "keeper_started", 2)
    assert wait_for_event(run_dir, "adopted", 1)
    before = len(read_events(run_dir, "checkpoint_committed"))
    assert wait_for_event(run_dir, "checkpoint_committed", before + 1)
    (died,) = read_events(run_dir, "keeper_died")
    assert died["keeper_pid"] == keeper.pid
    assert "ended with SIGKILL" in died["reason"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0
    steps = [line["step"] for line in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(ranks_of_generations(run_dir)) == 1


def test_a_keeper_outlives_launcher_and_ranks_and_the_next_start_goes_on_from_its_memory(
    running: tuple[subprocess.Popen[bytes], Path, Path], corpus: Path
) -> None:
    process, run_dir, _ = running
    (keeper,) = keepers(process)
    kill(process, keepers=0)
    assert keeper.is_running()
    last = [line["step"] for line in read_metrics(run_dir) if line["captured"]][-1]
    status, text = train(run_dir, corpus, *ONE, "--steps", str(last + 2))
    assert status == 0, text
    (resumed,) = read_events(run_dir, "resumed")
    assert resumed["base"][1] in (last - 1, last, last + 1)
    assert set(resumed["read_bytes"]) == {"memory"} or resumed["is_committed"]
    assert not psutil.pid_exists(keeper.pid)
    assert host_dirs(run_dir) == []


def test_a_last_step_that_could_not_be_committed_is_committed_by_the_next_start(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    """The store takes no images until it is mended; the run waits for it, and gives up.

    Then the keeper that adopts the step's images commits them; or the step is done again.
    """
    run_dir, store = tmp_path / "run", tmp_path / "store"
    store.mkdir()
    (store / "states").write_text("in the way")
    words = [*ONE, "--steps", "6", "--store", str(store)]
    status, text = train(run_dir, corpus, *words, settings=["run.patience_s=20"])
    assert status == 1
    assert "stopped at step 6, which could not be saved" in text
    assert "the last good commit is none" in text
    (store / "states").unlink()
    status, text = train(run_dir, corpus, *words)
    assert status == 0, text
    (resumed,) = read_events(run_dir, "resumed")
    assert resumed["base"][1] < 6 or resumed["is_committed"]
    assert exact_lines(run_dir) == exact_lines(finished)
    assert [commit.state.step for commit in Log(open_store(store)).read().live] == [6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_its_store_says_so_and_a_second_signal_leaves_it_in_memory(
    running: tuple[subprocess.Popen[bytes], Path, Path], corpus: Path, number: signal.Signals
) -> None:
    process, run_dir, output = running
    elsewhere = (run_dir / "store").rename(run_dir / "elsewhere")
    (run_dir / "store").touch()  # as a mount that is gone, with a file in its place
    process.send_signal(number)
    assert wait_for_event(run_dir, "waiting", 1), output.read_text()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    text = output.read_text()
    assert "Ctrl-C again: leave it in memory)" in text
    assert f"keepstep: second {number.name}: ended at once" in text
    assert "to go on: give the same command again" in text
    last = read_metrics(run_dir)[-1]["step"]
    (run_dir / "store").unlink()
    elsewhere.rename(run_dir / "store")
    status, text = train(run_dir, corpus, *ONE, "--steps", str(last))
    assert status == 0, text
    assert read_events(run_dir, "resumed")[-1]["step"] == last


# ---- one run at a time


def test_a_second_start_on_a_live_run_directory_is_refused_with_host_and_pid(
    running: tuple[subprocess.Popen[bytes], Path, Path], corpus: Path
) -> None:
    process, run_dir, _ = running
    status, text = train(run_dir, corpus, *ONE)
    assert status == 1
    assert f"host {socket.gethostname()} pid {process.pid}" in text
    assert process.poll() is None
    assert read_events(run_dir, "refused")[-1]["reason"].startswith(str(run_dir))


def test_a_run_over_the_same_store_takes_over_and_the_older_one_ends_saying_so(
    running: tuple[subprocess.Popen[bytes], Path, Path], corpus: Path, tmp_path: Path
) -> None:
    process, run_dir, output = running
    newer, store = tmp_path / "newer", str(run_dir / "store")
    words = [*ONE, "--store", store, "--steps", "100000", "--checkpoint-every", "2"]
    second = start(newer, corpus, *words, output=tmp_path / "out2")
    try:
        assert wait_for_event(newer, "checkpoint_committed", 1)
        assert process.wait(180) == 1
        assert wait_for_event(run_dir, "superseded", 1)
        second.send_signal(signal.SIGTERM)
        assert second.wait(180) == 0
    finally:
        kill_tree(second)
    assert "this process is superseded" in output.read_text()
    assert "took term 2" in read_events(run_dir, "superseded")[-1]["reason"]
    assert "superseded" in told(run_dir)[-1]["reason"]
    lineage = Log(open_store(store)).read()
    assert lineage.live[0].state.generation == 2
    assert read_events(newer, "resumed")[0]["base"][0] == 1


# ---- what is not this run


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.seed=7", "run.seed: 0 there, 7 here"),
        ("model.dim=64", "model.dim: 32 there, 64 here"),
        ("batch.global_batch=32", "batch.global_batch: 16 there, 32 here"),
        ("numerics.dtype=fp64", "numerics.dtype: 'fp32' there, 'fp64' here"),
        ("data.heldout_fraction=0.25", "data.heldout_fraction: 0.02 there, 0.25 here"),
    ],
)
def test_a_changed_run_is_refused_by_name_and_the_log_is_not_touched(
    finished: Path, corpus: Path, setting: str, words: str
) -> None:
    before = entries(finished)
    status, text = train(finished, corpus, *ONE, "--steps", "9", settings=[setting])
    assert status == 1
    assert "is of another run" in text
    assert words in text
    assert entries(finished) == before
    assert told(finished)[-1]["event"] == "refused"


def test_other_data_is_refused_by_digest(finished: Path, tmp_path: Path) -> None:
    other = make_corpus(tmp_path, 70_000)
    status, text = train(finished, other, *ONE, "--steps", "9")
    assert status == 1
    assert "data.digest:" in text


def test_another_job_in_the_store_is_refused(finished: Path, corpus: Path, tmp_path: Path) -> None:
    words = [*ONE, "--store", str(finished / "store")]
    status, text = train(tmp_path / "x", corpus, *words, settings=["run.name=other"])
    assert status == 1
    assert "belongs to job 'demo', not to 'other'" in text


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, corpus: Path) -> None:
    status, text = train(tmp_path / "x", corpus, "--layout", "dp=1,tp=4,pp=1")
    assert status == 2
    assert "model.kv_heads 2 cannot be divided by parallel.tp 4" in text
    assert not (tmp_path / "x").exists()


# ---- beginning from another run


def test_init_from_takes_weights_and_optimizer_and_begins_at_zero(
    finished: Path, corpus: Path, tmp_path: Path
) -> None:
    store = str(finished / "store")
    lines = {}
    for name, words in (("whole", []), ("weights", ["--weights-only"])):
        arguments = [*ONE, "--init-from", f"{store}@4", *words, "--steps", "2"]
        status, text = train(tmp_path / name, corpus, *arguments)
        assert status == 0, text
        lines[name] = read_metrics(tmp_path / name)
        assert lines[name][0]["step"] == 1
        assert lines[name][0]["samples"] == [0, 16]
        generation = Log(open_store(tmp_path / name / "store")).read().generations[0]
        assert generation.parent is not None
        assert generation.parent.state.step == 4
        assert generation.parent.weights_only == (name == "weights")
    first = read_metrics(finished)[0]["loss"]
    assert lines["whole"][0]["loss"] == lines["weights"][0]["loss"] < first
    assert lines["whole"][1]["loss"] != lines["weights"][1]["loss"]


def test_init_from_over_a_run_is_refused(finished: Path, corpus: Path, tmp_path: Path) -> None:
    status, text = train(finished, corpus, *ONE, "--init-from", f"{tmp_path}/nowhere@4")
    assert status == 1
    assert "holds a run already" in text


# ---- broken ground


def test_a_damaged_newest_commit_is_passed_over_with_a_rewind(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    run_dir = tmp_path / "run"
    for steps in ("2", "4"):
        status, text = train(run_dir, corpus, *ONE, "--steps", steps)
        assert status == 0, text
    (image,) = (run_dir / "store").glob("states/*/s*4/r*.safetensors")
    data = bytearray(image.read_bytes())
    data[-5] ^= 1
    image.write_bytes(data)
    status, text = train(run_dir, corpus, *ONE, "--steps", "6")
    assert status == 0, text
    assert "checkpoint passed over" in text
    rewinds = [one.body for one in read_entries(open_store(run_dir / "store"))]
    assert [body.to for body in rewinds if isinstance(body, Rewind)] == [State(1, 2)]
    assert read_events(run_dir, "resumed")[-1]["base"] == [1, 2]
    lineage = Log(open_store(run_dir / "store")).read()
    assert [commit.state.step for commit in lineage.live] == [6, 2]
    assert exact_lines(run_dir) == exact_lines(finished)


def test_a_newest_commit_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, corpus: Path
) -> None:
    """A store that refuses is no proof of damage: going back would end with the commit deleted."""
    run_dir = tmp_path / "run"
    for steps in ("2", "4"):
        status, text = train(run_dir, corpus, *ONE, "--steps", steps)
        assert status == 0, text
    (image,) = (run_dir / "store").glob("states/*/s*4/r*.safetensors")
    elsewhere = image.rename(tmp_path / "elsewhere")
    image.symlink_to(elsewhere)
    status, text = train(run_dir, corpus, *ONE, "--steps", "6")
    assert status == 1
    assert "symbolic link" in text
    assert "no proof of damage" in text
    assert committed_steps(run_dir) == [2, 4]
    image.unlink()
    elsewhere.rename(image)
    status, text = train(run_dir, corpus, *ONE, "--steps", "6")
    assert status == 0, text
    assert read_events(run_dir, "resumed")[-1]["base"] == [2, 4]


def test_a_torn_line_of_metrics_is_cut_on_the_next_start(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, corpus, *ONE, "--steps", "3")[0] == 0
    with (run_dir / FILE_NAME).open("ab") as file:
        file.write(b'{"step": 4, "lo')
    status, text = train(run_dir, corpus, *ONE, "--steps", "6")
    assert status == 0, text
    assert exact_lines(run_dir) == exact_lines(finished)
    assert "metrics.jsonl" in read_events(run_dir, "repaired")[-1]["reason"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own, which root can mount."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_store_fails_and_not_the_run(tmp_path: Path, corpus: Path, small_disk: Path) -> None:
    """Fill the store's disk after the first commit; free it later: saves work again."""
    run_dir, output = tmp_path / "run", tmp_path / "out"
    words = [*ONE, "--store", str(small_disk / "store"), "--steps", "100000"]
    process = start(run_dir, corpus, *words, "--checkpoint-every", "4", output=output)
    try:
        assert wait_for_event(run_dir, "checkpoint_committed", 1)
        fill(small_disk / "filler")
        assert wait_for_event(run_dir, "drain_failed", 2)
        lines = len(read_metrics(run_dir))
        assert wait_for_lines(process, run_dir, lines + 3)
        (small_disk / "filler").unlink()
        before = len(read_events(run_dir, "checkpoint_committed"))
        assert wait_for_event(run_dir, "checkpoint_committed", before + 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0, output.read_text()
    finally:
        kill_tree(process)
        end_keepers(run_dir)
    failed = read_events(run_dir, "drain_failed")[0]
    assert (failed["errno"], failed["tier"]) == (28, "store")
    assert max(line["lag_steps"] for line in read_metrics(run_dir)) > 4
    steps = [line["step"] for line in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_read_only_store_fails_and_in_the_end_so_does_the_run(
    tmp_path: Path, corpus: Path, small_disk: Path
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "out"
    words = [*ONE, "--store", str(small_disk / "store"), "--checkpoint-every", "4"]
    impatient = ["run.patience_s=20"]
    process = start(run_dir, corpus, *words, "--steps", "100000", output=output, settings=impatient)
    try:
        assert wait_for_event(run_dir, "checkpoint_committed", 1)
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        while subprocess.run(remount, capture_output=True).returncode != 0:
            time.sleep(0.02)  # a file is open for writing just now
        assert wait_for_event(run_dir, "drain_failed", 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 1
    finally:
        kill_tree(process)
        end_keepers(run_dir)
    assert read_events(run_dir, "drain_failed")[0]["errno"] == 30
    assert "could not be saved" in output.read_text()
    assert "the last good commit is step" in output.read_text()
    status, text = train(tmp_path / "second", corpus, *words, "--steps", "9")
    assert status == 1
    assert "Read-only file system" in text


def ranks_of_generations(run_dir: Path) -> set[int]:
    return {line["generation"] for line in read_metrics(run_dir)}


def wait_for_event(run_dir: Path, kind: str, count: int) -> bool:
    deadline_s = time.monotonic() + 180
    while time.monotonic() < deadline_s:
        file = run_dir / "events.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if sum(line["event"] == kind for line in whole) >= count:
            return True
        time.sleep(0.05)
    return False


def fill(path: Path) -> None:
    """Write until the disk is full, and keep it so while the run deletes and writes."""
    with path.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        except OSError:
            pass


# ---- under torchrun


def test_the_same_run_under_torchrun(tmp_path: Path, corpus: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "keepstep.trainer", "--run-dir", str(run_dir), "--layout", "dp=2"]
    settings = [f"data.path={corpus}", *SETTINGS]
    command += ["--steps", "2", *(word for one in settings for word in ("--set", one))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2]
    assert committed_steps(run_dir) == [2]
    assert "saved: step 2" in ran.stdout
    assert host_dirs(run_dir) == []
