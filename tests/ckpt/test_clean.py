"""What dead jobs left: found, told from what is in use, and freed only when it is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.ckpt.clean import Kind, Leftover, find_leftovers, free
from keepstep.ckpt.hostdir import HostDir, make_host_dir
from keepstep.ckpt.manifest import State
from keepstep.ckpt.owned_temp import RENDEZVOUS_PREFIX
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_errors import HostDirRefused
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import this_process
from keepstep.ckpt.tiers import Due

DEAD = Writer(2**22 + 1, 77)
MB = 1 << 20


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


def make_host(shm: Path, host: str = "h0", writer: Writer = DEAD) -> HostDir:
    """A host directory as a keeper leaves it that was killed at step 8."""
    place = make_host_dir(shm, "job", host)
    place.hold().release()
    place.control.touch()
    with Pool.create(place.pool) as pool:
        pool.seats[3].take(5, writer, 2)
        for step in (7, 8, 9):
            slot = pool.add_slot(MB)
            slot.assign(writer, 5)
            slot.claim(writer, 5, State(2, step), Due.NOWHERE)
            if step < 9:
                slot.captured(b"{}", 1000)
                slot.sealed()
    return place


def found_in(shm: Path) -> list[Leftover]:
    return find_leftovers([shm], [])


def in_use(shm: Path) -> str:
    (leftover,) = found_in(shm)
    assert not leftover.is_dead
    assert leftover.in_use == free(leftover)
    assert leftover.path.is_dir()
    return leftover.in_use


def test_nothing_is_found_where_nothing_is(shm: Path, temp: Path) -> None:
    assert find_leftovers([shm], [temp]) == []


def test_a_dead_hosts_memory_is_found_with_its_size_and_newest_state(shm: Path) -> None:
    place = make_host(shm)
    (leftover,) = found_in(shm)
    assert (leftover.path, leftover.kind, leftover.in_use) == (place.path, Kind.HOST, "")
    assert leftover.newest == State(2, 8)
    assert 4 * MB < leftover.size_bytes < 6 * MB
    assert 0 <= leftover.idle_s < 60
    assert place.pool.exists()


def test_a_dead_hosts_memory_is_freed_with_the_directory_above(shm: Path) -> None:
    make_host(shm)
    (leftover,) = found_in(shm)
    assert free(leftover) == ""
    assert not shm.exists()
    assert free(leftover) == ""


def test_another_hosts_memory_stays(shm: Path) -> None:
    make_host(shm, "h0")
    other = make_host(shm, "h1")
    assert free(found_in(shm)[0]) == ""
    assert [leftover.path for leftover in found_in(shm)] == [other.path]


def test_a_living_keepers_directory_is_in_use(shm: Path) -> None:
    with make_host(shm).hold():
        assert in_use(shm) == f"its keeper, pid {os.getpid()}, is alive"


@pytest.mark.parametrize("content", ["", "junk"])
def test_a_held_lock_counts_whatever_it_says(shm: Path, content: str) -> None:
    place = make_host(shm)
    with place.hold():
        place.lock.write_text(content)
        assert in_use(shm) == "its keeper, pid unknown, is alive"


def test_a_living_rank_whose_keeper_died_keeps_its_memory(shm: Path) -> None:
    make_host(shm, writer=this_process())
    assert in_use(shm) == f"rank 5, pid {os.getpid()}, is alive"


def test_a_living_owner_of_a_slot_keeps_it_too(shm: Path) -> None:
    place = make_host(shm, writer=this_process())
    with Pool.open(place.pool) as pool:
        pool.seats[3].leave()
    assert "rank 5" in in_use(shm)


def test_what_comes_to_life_after_it_was_found_is_not_freed(shm: Path) -> None:
    place = make_host(shm)
    (leftover,) = found_in(shm)
    with Pool.open(place.pool) as pool:
        pool.seats[0].take(1, this_process(), 3)
    assert "rank 1" in free(leftover)
    with Pool.open(place.pool) as pool:
        pool.seats[0].leave()
    with place.hold():
        assert "keeper" in free(leftover)
    assert place.pool.exists()
    assert free(leftover) == ""


@pytest.mark.parametrize("content", [None, b"", b"\7" * 2 * MB])
def test_a_directory_without_a_good_pool_is_dead(shm: Path, content: bytes | None) -> None:
    place = make_host_dir(shm, "job", "h0")
    if content is not None:
        place.pool.write_bytes(content)
    (leftover,) = found_in(shm)
    assert (leftover.newest, leftover.is_dead) == (None, True)
    assert free(leftover) == ""
    assert not shm.exists()


def test_a_link_in_the_place_of_a_pool_stops_no_cleaning_and_is_not_followed(
    shm: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"kept")
    make_host_dir(shm, "job", "h0").pool.symlink_to(theirs)
    make_host(shm, "h1")
    found = found_in(shm)
    assert [leftover.is_dead for leftover in found] == [True, True]
    assert [free(leftover) for leftover in found] == ["", ""]
    assert theirs.read_bytes() == b"kept"
    assert not shm.exists()


def test_what_is_not_a_host_directory_is_left_alone(shm: Path, tmp_path: Path) -> None:
    make_host(shm)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    (shm / "job.h1").symlink_to(theirs)
    (shm / "job.h2").touch()
    (shm / "job.h3").mkdir(mode=0o755)
    (shm / "nodot").mkdir(mode=0o700)
    strange = [leftover for leftover in found_in(shm) if leftover.path.name != "job.h0"]
    assert [leftover.path.name for leftover in strange] == ["job.h1", "job.h2", "job.h3", "nodot"]
    for leftover in strange:
        assert leftover.kind is Kind.OTHER
        assert free(leftover) == leftover.in_use != ""
    assert (theirs / "file").exists()
    assert sorted(path.name for path in shm.iterdir()) == [f"job.h{n}" for n in range(4)] + [
        "nodot"
    ]


def test_a_directory_that_became_a_symlink_is_not_followed(shm: Path, tmp_path: Path) -> None:
    place = make_host(shm)
    (leftover,) = found_in(shm)
    place.path.rename(tmp_path / "moved")
    place.path.symlink_to(tmp_path / "moved")
    assert "symlink" in free(leftover)
    assert (tmp_path / "moved" / "pool").exists()


def test_an_unsafe_directory_of_all_is_refused(shm: Path, tmp_path: Path) -> None:
    shm.mkdir(mode=0o777)
    shm.chmod(0o777)
    with pytest.raises(HostDirRefused, match="chmod 700"):
        found_in(shm)
    link = tmp_path / "link"
    link.symlink_to(shm)
    with pytest.raises(HostDirRefused, match="symlink"):
        found_in(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_host_directory_is_left_alone(shm: Path) -> None:
    place = make_host(shm)
    os.chown(place.path, 12345, -1)
    assert "belongs to user 12345" in in_use(shm)


def test_temporary_directories_are_their_makers(temp: Path) -> None:
    me = this_process()
    alive = temp / f"{RENDEZVOUS_PREFIX}{me.pid}-{me.ticks}"
    dead = temp / f"{RENDEZVOUS_PREFIX}{me.pid}-{me.ticks + 1}"
    odd = temp / f"{RENDEZVOUS_PREFIX}x-1"
    for path in (alive, dead, odd):
        path.mkdir()
        (path / "file").write_text("x")
    found = find_leftovers([], [temp])
    assert [(one.path, one.is_dead) for one in found] == [(alive, False), (dead, True)]
    assert [free(one) for one in found] == [f"its launcher, pid {me.pid}, is alive", ""]
    assert sorted(temp.iterdir()) == sorted([alive, odd])


def test_a_symlink_with_the_name_of_a_temporary_directory_is_left_alone(
    temp: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (temp / f"{RENDEZVOUS_PREFIX}{DEAD.pid}-1").symlink_to(tmp_path / "theirs")
    (leftover,) = find_leftovers([], [temp])
    assert leftover.kind is Kind.OTHER
    assert free(leftover)
    assert (tmp_path / "theirs").is_dir()


# The command.


def run(*words: str, temp: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "clean", *words],
        env={**os.environ, "TMPDIR": str(temp), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def holder(place: HostDir) -> Iterator[int]:
    """A process that holds a host directory."""
    program = (
        "import sys; from pathlib import Path; from keepstep.ckpt.hostdir import HostDir\n"
        "lock = HostDir(Path(sys.argv[1])).hold(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(place.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            yield child.pid
        finally:
            child.send_signal(signal.SIGKILL)


@pytest.mark.ranks
def test_the_command_lists_first_and_frees_with_yes(shm: Path, temp: Path) -> None:
    dead, alive = make_host(shm, "h0"), make_host(shm, "h1")
    with holder(alive) as pid:
        listed = run("--shm-dir", str(shm), temp=temp)
        assert listed.returncode == 0, listed.stderr
        assert "step 8 of generation 2" in listed.stdout
        assert f"stays: its keeper, pid {pid}, is alive" in listed.stdout
        assert "1 of 2 are dead" in listed.stdout
        assert dead.pool.exists()
        freed = run("--shm-dir", str(shm), "--yes", temp=temp)
        assert "freed" in freed.stdout
        assert [path.name for path in shm.iterdir()] == ["job.h1"]
    again = run("--shm-dir", str(shm), "--yes", "--json", temp=temp)
    assert '"outcome": "freed"' in again.stdout
    assert '"step": 8' in again.stdout
    assert not shm.exists()
    nothing = run("--shm-dir", str(shm), temp=temp)
    assert nothing.stdout == "nothing is left by any job of this user on this host\n"


@pytest.mark.ranks
def test_the_command_refuses_an_unsafe_directory_in_one_line(shm: Path, temp: Path) -> None:
    shm.mkdir()
    shm.chmod(0o755)
    refused = run("--shm-dir", str(shm), temp=temp)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"keepstep: {shm} has mode 0755")
