"""Keepers as processes: an older one is replaced, a dead one started anew, none is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from keepstep.ckpt.hostdir import HostDir, make_host_dir
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_process import (
    Backoff,
    KeeperFailed,
    KeeperMinder,
    KeeperProcess,
    Silence,
    host_dir_of,
    replace_older,
)

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


def test_a_keeper_is_silent_after_a_patience_of_looks_without_a_new_beat() -> None:
    silence = Silence(8.0)
    assert silence.look_every_s == 1.0
    assert not any(silence.is_over(0, now_s) for now_s in range(100)), "it has yet to begin"
    assert not any(silence.is_over(1000 + now_s, now_s) for now_s in range(100, 200))
    over = [silence.is_over(1199, now_s) for now_s in range(200, 220)]
    assert over == [number == 7 for number in range(20)], "said once"
    assert not silence.is_over(5, 300)
    assert not silence.is_over(5, 1000), "who looks was stopped too"


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


# ---- real ones


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperConfig]:
    """Of a keeper that goes soon when nobody comes."""
    monkeypatch.setenv("KEEPSTEP_TOKEN", "test-token-test-token")
    (tmp_path / "store").mkdir()
    made = KeeperConfig(
        job="demo",
        host="h0",
        store_url=str(tmp_path / "store"),
        shm_dir=str(tmp_path / "shm"),
        events_path=str(tmp_path / "events.jsonl"),
        patience_s=5.0,
    )
    yield made
    replace_older(host_dir_of(made), "h0")


def started(config: KeeperConfig, directory: Path) -> KeeperProcess:
    process = KeeperProcess(config, directory)
    process.start()
    process.wait_ready()
    return process


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.mark.ranks
def test_a_second_start_replaces_the_first_and_the_first_knows_that_it_ended(
    config: KeeperConfig, tmp_path: Path
) -> None:
    first = started(config, tmp_path / "first")
    second = started(config, tmp_path / "second")
    assert first.pid != second.pid
    assert first.reap()[0] == "exit code 0"
    holder = HostDir(second.host_dir).holder()
    assert holder is not None
    assert holder.pid == second.pid
    second.let_go()


@pytest.mark.ranks
def test_a_keeper_that_cannot_start_is_told_with_its_last_words(
    config: KeeperConfig, tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir(mode=0o777)
    (tmp_path / "shm").chmod(0o777)
    process = KeeperProcess(config, tmp_path / "first")
    process.spawn()
    with pytest.raises(KeeperFailed, match=r"exit code 2 before it was ready: .*has mode 0777"):
        process.wait_ready()
    assert process.reap()[0] == "exit code 2"
    (tmp_path / "shm").chmod(0o700)


@pytest.mark.ranks
def test_a_keeper_outlives_who_started_it_and_a_signal_to_its_group(
    config: KeeperConfig, tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from keepstep.ckpt.keeper_config import read_config\n"
        "from keepstep.ckpt.keeper_process import KeeperProcess\n"
        "process = KeeperProcess(read_config(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "process.start(); process.wait_ready(); print(process.pid, flush=True); input()\n"
    )
    config.write(tmp_path / "config.json")
    words = [sys.executable, "-c", script, str(tmp_path / "config.json"), str(tmp_path / "d")]
    parent = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    keeper = psutil.Process(int(parent.stdout.readline()))
    os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=10)
    assert keeper.is_running()
    assert keeper.status() != psutil.STATUS_ZOMBIE


@pytest.mark.ranks
def test_a_minder_starts_a_dead_keeper_anew_until_it_is_closed(
    config: KeeperConfig, tmp_path: Path
) -> None:
    told: list[tuple[str, str]] = []
    process = started(config, tmp_path / "first")
    minder = KeeperMinder(process, lambda kind, reason, **details: told.append((kind, reason)))
    for _ in range(2):
        dead = process.pid
        os.kill(dead, signal.SIGKILL)
        wait_for(lambda dead=dead: process.pid != dead, "no keeper was started anew")  # type: ignore[misc]
        process.wait_ready()
    assert [kind for kind, _ in told] == ["keeper_died", "keeper_died"]
    assert "ended with SIGKILL" in told[0][1]
    assert not minder.close()
    last = process.pid
    os.kill(last, signal.SIGKILL)
    time.sleep(0.5)
    assert process.pid == last
    assert HostDir(process.host_dir).holder() is None


@pytest.mark.ranks
def test_a_keeper_that_nobody_comes_to_ends_and_is_waited_for(
    config: KeeperConfig, tmp_path: Path
) -> None:
    process = started(msgspec.structs.replace(config, patience_s=1.0), tmp_path / "first")
    assert not process.wait_end(0.0)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait_end(20.0)
    assert process.pidfd == -1
    assert process.wait_end(0.0)


@pytest.mark.ranks
def test_a_keeper_that_is_stopped_is_killed_after_a_patience_and_started_anew(
    config: KeeperConfig, tmp_path: Path
) -> None:
    told: list[str] = []
    process = started(msgspec.structs.replace(config, patience_s=2.0), tmp_path / "first")
    minder = KeeperMinder(process, lambda kind, reason, **details: told.append(kind))
    place = HostDir(process.host_dir)
    before = place.beat_of(process.pid)
    wait_for(lambda: place.beat_of(process.pid) not in (0, before), "no sign of life")
    time.sleep(3.0)
    assert told == [], "a keeper that nobody enters lives all the same"
    stopped = process.pid
    began_s = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: process.pid != stopped, "no keeper was started anew")
    assert time.monotonic() - began_s > 1.5
    process.wait_ready()
    assert told == ["keeper_hung", "keeper_died"]
    minder.close()


@pytest.mark.ranks
def test_a_keeper_that_ended_by_itself_says_why(config: KeeperConfig, tmp_path: Path) -> None:
    process = started(config, tmp_path / "first")
    os.kill(process.pid, signal.SIGTERM)
    wait_for(lambda: HostDir(process.host_dir).holder() is None, "it has not ended")
    os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
    with pytest.raises(
        KeeperFailed, match="by itself, before a rank came to it: keeper: ended: it was asked to"
    ):
        process.wait_ready()
    process.reap()


def test_a_lock_that_is_a_link_is_told_with_what_to_do(place: HostDir, tmp_path: Path) -> None:
    place.lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeeperFailed, match=r"h0: .*lock: Too many levels.*`keepstep clean"):
        replace_older(place.path, "h0")
