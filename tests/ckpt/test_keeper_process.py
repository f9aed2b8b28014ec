"""Keepers as processes: an older one is replaced, a dead one started anew, none is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep.ckpt.hostdir import HostDir, make_host_dir
from keepstep.ckpt.keeper_process import Backoff, KeeperFailed, replace_older

HOLDER = """
import signal, sys, time
from pathlib import Path
from keepstep.ckpt.hostdir import HostDir
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = HostDir(Path(sys.argv[1])).hold()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> HostDir:
    return make_host_dir(tmp_path / "shm", "demo", "h0")


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for one in started:
        one.kill()
        one.communicate(timeout=60)


def hold(place: HostDir, how: str, holders: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(place.path), how]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    holders.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_healthy_life() -> None:
    backoff = Backoff(first_s=1.0, most_s=5.0, healthy_s=30.0)
    assert [backoff.pause_s(0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [backoff.pause_s(30.0), backoff.pause_s(0.1)] == [1.0, 2.0]


def test_nobody_there_is_nothing_to_replace(tmp_path: Path, place: HostDir) -> None:
    assert replace_older(tmp_path / "none" / "demo.h0", "h0") == 0
    assert replace_older(place.path, "h0") == 0


def test_an_older_keeper_is_asked_to_end(
    place: HostDir, holders: list[subprocess.Popen[str]]
) -> None:
    older = hold(place, "gentle", holders)
    assert replace_older(place.path, "h0") == older.pid
    assert older.wait(60) == -signal.SIGTERM
    assert place.holder() is None


def test_an_older_keeper_that_does_not_end_is_killed(
    place: HostDir, holders: list[subprocess.Popen[str]]
) -> None:
    older = hold(place, "stubborn", holders)
    began_s = time.monotonic()
    assert replace_older(place.path, "h0", timeout_s=0.3) == older.pid
    assert older.wait(60) == -signal.SIGKILL
    assert time.monotonic() - began_s < 30


def test_a_stopped_keeper_is_replaced_too(
    place: HostDir, holders: list[subprocess.Popen[str]]
) -> None:
    older = hold(place, "gentle", holders)
    older.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, older.pid, os.WSTOPPED)  # until then a SIGTERM would come first
    assert replace_older(place.path, "h0", timeout_s=0.3) == older.pid
    assert older.wait(60) == -signal.SIGKILL


def test_a_process_that_only_has_the_pid_of_a_dead_keeper_is_let_alone(
    place: HostDir, holders: list[subprocess.Popen[str]]
) -> None:
    """The lock is held, but the file names another process with a wrong start time."""
    older = hold(place, "gentle", holders)
    bystander = hold(make_host_dir(place.path.parent, "demo", "h1"), "gentle", holders)
    place.lock.write_text(f"{bystander.pid} 1\n")
    with pytest.raises(KeeperFailed, match="names no process that lives"):
        replace_older(place.path, "h0", timeout_s=0.2)
    assert older.poll() is None
    assert psutil.pid_exists(bystander.pid)
    assert bystander.poll() is None
