"""The run directory's lock, and its append-only files."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.ckpt.events import Events, read_events
from keepstep.ckpt.jsonlines import JsonLines, LinesError, read_lines
from keepstep.ckpt.process import process_start_ticks
from keepstep.trainer.errors import RunDirError, RunIsLive
from keepstep.trainer.metrics import Metrics, StepMetrics, read_metrics
from keepstep.trainer.rundir import hold_run_dir


def in_child(body: Callable[[], None]) -> int:
    """Fork, run `body`, and wait to be killed; the pid, once `body` is done."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)  # whatever happens, it ends
            body()
            os.write(writing, b"x")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
    finally:
        os.close(reading)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_live_run_directory_is_refused_with_host_and_pid(tmp_path: Path) -> None:
    pid = in_child(lambda: hold_run_dir(tmp_path, "first") and None)
    try:
        with pytest.raises(RunIsLive) as refused:
            hold_run_dir(tmp_path, "second")
        assert (refused.value.host, refused.value.pid) == (socket.gethostname(), pid)
        assert f"host {socket.gethostname()} pid {pid} (first)" in str(refused.value)
    finally:
        kill(pid)
    hold_run_dir(tmp_path, "second").release()  # a dead run's lock is no obstacle


def test_a_rank_that_outlives_its_launcher_is_waited_for(tmp_path: Path) -> None:
    """The launcher is dead, a child of it still holds the lock, and goes soon."""

    def launcher() -> None:
        hold_run_dir(tmp_path, "first")
        if os.fork() == 0:
            signal.alarm(1)  # SIGALRM ends it in a second
            signal.pause()

    kill(in_child(launcher))
    hold_run_dir(tmp_path, "second", dying_s=10).release()


def test_a_rank_that_never_dies_keeps_the_directory(tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"

    def launcher() -> None:
        hold_run_dir(tmp_path, "first")
        child = os.fork()
        if child == 0:
            signal.pause()
        grandchild.write_text(str(child))

    kill(in_child(launcher))
    try:
        with pytest.raises(RunIsLive):
            hold_run_dir(tmp_path, "second", dying_s=0.2)
    finally:
        os.kill(int(grandchild.read_text()), signal.SIGKILL)


def test_a_pid_used_again_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    """The lock's record names a living pid with another start time: the record is stale."""
    held = hold_run_dir(tmp_path, "first")
    record = json.loads((tmp_path / "lock").read_text())
    assert record["start_ticks"] == process_start_ticks(os.getpid())
    (tmp_path / "lock").write_text(json.dumps(record | {"start_ticks": 1}))
    with pytest.raises(RunIsLive):
        hold_run_dir(tmp_path, "second", dying_s=0.1)  # the kernel's lock decides in the end
    held.release()
    hold_run_dir(tmp_path, "second").release()


def test_a_directory_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="Not a directory"):
        hold_run_dir(tmp_path / "file" / "run", "x")


# ---- lines


def test_a_torn_last_line_is_cut_and_whole_ones_stay(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    whole = b'{"a": 1}\n{"a": 2}\n'
    for torn in (b"", b'{"a"', b'{"a": 3}', b"\x00" * 70_000):
        file.write_bytes(whole + torn)
        lines = JsonLines(file)
        assert lines.repair() == len(torn)
        lines.append({"a": 4})
        lines.close()
        assert [line["a"] for line in read_lines(file)] == [1, 2, 4]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"torn" * 40_000)
    lines = JsonLines(file)
    lines.repair()
    lines.close()
    assert file.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\nxx\n{"a": 2}\n')
    with pytest.raises(LinesError, match=r"x\.jsonl:2: not JSON"):
        read_lines(file)


def test_floats_round_trip_exactly_and_those_json_lacks_as_strings(tmp_path: Path) -> None:
    values = [
        0.1,
        1 / 3,
        5e-324,
        1.7976931348623157e308,
        struct.unpack("<f", b"\x01\x02\x03\x3f")[0],
    ]
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"values": values, "odd": [math.nan, math.inf, -math.inf]})
    lines.close()
    (line,) = read_lines(tmp_path / "x.jsonl")
    assert [value.hex() for value in line["values"]] == [value.hex() for value in values]
    assert line["odd"] == ["nan", "inf", "-inf"]
    assert math.isnan(float(line["odd"][0]))


def test_lines_wait_for_a_full_disk_and_none_is_lost_or_torn(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk; it is hit in the middle of a line."""
    file = tmp_path / "x.jsonl"

    def write_beyond_the_limit() -> None:
        lines = JsonLines(file)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (105, hard))
        for number in range(50):
            lines.append({"n": number})
        lines.sync()
        assert file.stat().st_size == 105
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        lines.append({"n": 50})

    kill(in_child(write_beyond_the_limit))
    assert [line["n"] for line in read_lines(file)] == list(range(51))


def step(number: int, generation: int, loss: float) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        tokens=4,
        samples=(0, 4),
        applied=True,
        generation=generation,
        layout={"dp": 1, "tp": 1, "pp": 1, "dp_replicate": 1},
        comm_bytes={"dp": 0, "tp": 0, "pp": 0},
        comm_bytes_least={"dp": 0, "tp": 0, "pp": 0},
        step_ms=1.0,
        capture_ms=0.0,
        captured=True,
        lag_steps=1,
        lag_s=0.5,
        tokens_per_s=4000.0,
        flops_utilisation=None,
    )


def test_of_a_step_done_again_the_highest_generation_counts_and_the_last_of_equals(
    tmp_path: Path,
) -> None:
    metrics = Metrics(tmp_path)
    for number, generation, loss in [(1, 1, 0.1), (2, 1, 0.2), (2, 2, 0.3), (2, 2, 0.4), (2, 1, 9)]:
        metrics.append(step(number, generation, loss))
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.4)]


def test_events_say_when_who_and_why(tmp_path: Path) -> None:
    Events(tmp_path, role="rank", rank=3).append("stopped", "asked by SIGTERM", step=7)
    Events(tmp_path, role="launcher").append("failed", "rank 1: killed by SIGKILL")
    stopped, failed = read_events(tmp_path)
    assert stopped["event"] == "stopped"
    assert (stopped["role"], stopped["rank"], stopped["step"]) == ("rank", 3, 7)
    assert stopped["host"] == socket.gethostname()
    assert stopped["time"].endswith("+00:00")
    assert failed["reason"] == "rank 1: killed by SIGKILL"
    assert [line["event"] for line in read_events(tmp_path, "failed")] == ["failed"]
