"""The launcher: who failed first, who dies with whom, and what two signals do.

Each test runs a small launcher in a fresh process, because only a process that has run nothing
else may fork ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.ranks

PATIENCE_S = 120.0
"""For what must happen at some time, on a machine that may be busy."""
GRACE_S = 2.0

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from keepstep.trainer import launch
from keepstep.trainer.errors import RankFailed
from keepstep.trainer.launch import run_ranks
from keepstep.trainer.signals import StopNow, StopRequest
directory = Path(sys.argv[1])
launch.GRACE_S = @GRACE_S@
def main(start):
    stop = StopRequest(exit_on_second=False)
    (directory / f"rank-{start.rank}").write_text(str(os.getpid()))
    print("hello from", start.rank)
@BODY@
try:
    run_ranks(3, main, run="test", log_path=lambda rank: directory / f"log-{rank}",
              on_report=lambda report: print("report", report["kind"], flush=True))
    print("all well", flush=True)
except RankFailed as error:
    print("failed:", error, flush=True)
    sys.exit(1)
except StopNow as error:
    print("stopped:", error, flush=True)
    sys.exit(error.exit_code)
"""


def start(directory: Path, body: str, grace_s: float = GRACE_S) -> subprocess.Popen[str]:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    script = directory / "launcher.py"
    script.write_text(LAUNCHER.replace("@BODY@", lines).replace("@GRACE_S@", str(grace_s)))
    return subprocess.Popen(
        [sys.executable, str(script), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output.splitlines()


def rank_pids(directory: Path) -> list[int]:
    deadline_s = time.monotonic() + PATIENCE_S
    files = [directory / f"rank-{rank}" for rank in range(3)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_is_left(directory: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in rank_pids(directory)):
        assert time.monotonic() < deadline_s, "a rank outlived its launcher"
        time.sleep(0.02)


def test_ranks_that_end_well_end_the_launcher_well(tmp_path: Path) -> None:
    code, lines = finish(start(tmp_path, 'start.report("hello")'))
    assert code == 0
    assert lines.count("report hello") == 3
    assert lines[-1] == "all well"
    assert (tmp_path / "log-2").read_text() == "hello from 2\n"
    assert list(tmp_path.glob("keepstep-rendezvous-*")) == []


def test_leftovers_of_dead_launchers_are_removed_and_odd_names_are_left_alone(
    tmp_path: Path,
) -> None:
    dead = tmp_path / "keepstep-rendezvous-999999999-1"
    odd = tmp_path / "keepstep-rendezvous-\u00b2-1"
    dead.mkdir()
    odd.mkdir()
    code, _ = finish(start(tmp_path, 'start.report("hello")'))
    assert code == 0
    assert not dead.exists()
    assert odd.exists()


def test_the_cause_is_named_not_its_consequences(tmp_path: Path) -> None:
    """Rank 1 fails at once; 0 and 2 say earlier and later that their sockets closed."""
    body = """
if start.rank > 0:
    while not (directory / f"failing-{start.rank - 1}").exists():
        time.sleep(0.01)
(directory / f"failing-{start.rank}").touch()
if start.rank == 1:
    raise ValueError("the loss is\\n not what it was")
raise RuntimeError("[enforce fail] Connection closed by peer [127.0.0.1]:1234")
"""
    code, lines = finish(start(tmp_path, body, grace_s=PATIENCE_S))
    assert code == 1
    assert lines == ["failed: rank 1: ValueError: the loss is not what it was"]
    assert "Traceback" in (tmp_path / "log-1").read_text()
    assert_nothing_is_left(tmp_path)


def test_a_rank_that_is_killed_is_the_cause_and_the_others_are_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(60)")
    os.kill(rank_pids(tmp_path)[2], signal.SIGKILL)
    code, lines = finish(process)
    assert (code, lines) == (1, ["failed: rank 2: killed by SIGKILL"])
    assert_nothing_is_left(tmp_path)


def test_a_rank_that_leaves_without_a_word_is_a_failure(tmp_path: Path) -> None:
    code, lines = finish(start(tmp_path, "os._exit(7) if start.rank == 0 else time.sleep(60)"))
    assert (code, lines) == (1, ["failed: rank 0: ended with exit code 7 and without a word"])


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(60)")
    rank_pids(tmp_path)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert_nothing_is_left(tmp_path)
    (stale,) = tmp_path.glob("keepstep-rendezvous-*")
    for rank in range(3):
        (tmp_path / f"rank-{rank}").unlink()
    assert finish(start(tmp_path, "pass"))[0] == 0
    assert not stale.exists()  # the next launcher removes what a killed one left


def test_the_first_signal_reaches_rank_0_and_lets_it_finish(tmp_path: Path) -> None:
    body = """
while not stop.is_requested and start.rank == 0:
    time.sleep(0.01)
start.report("seen")
"""
    process = start(tmp_path, body)
    rank_pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    code, lines = finish(process)
    assert code == 0
    assert "report stop_requested" in lines
    assert lines[-1] == "all well"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "time.sleep(60)\ntime.sleep(60)")
    rank_pids(tmp_path)
    process.send_signal(number)
    assert process.stdout is not None
    while process.stdout.readline() != "report stop_requested\n":  # two at once would be one
        assert process.poll() is None
    process.send_signal(number)
    code, lines = finish(process)
    assert code == 128 + number
    assert lines[-1] == f"stopped: second {number.name}: ended at once"
    assert_nothing_is_left(tmp_path)


def test_a_process_with_threads_is_not_forked() -> None:
    script = (
        "import threading, time; from keepstep.trainer import launch; "
        "launch.WARM_MODULES = (); threading.Thread(target=time.sleep, args=(1,)).start(); "
        "launch.warm_up()"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "this process has 2 threads, 1 is needed" in found.stderr
