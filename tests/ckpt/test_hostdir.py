"""The host directory: names, owners, modes, symlinks, and who holds it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keepstep.ckpt.errors import BadName
from keepstep.ckpt.hostdir import (
    SOCKET_PATH_BYTES_MAX,
    HostDir,
    default_shm_dir,
    make_host_dir,
    shm_dir_of_run,
    shm_dirs_of_runs,
)
from keepstep.ckpt.keeper_errors import KeeperRunning
from keepstep.ckpt.pool_errors import HostDirRefused
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.process import is_running, process_start_ticks, this_process


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def place(shm: Path) -> HostDir:
    return make_host_dir(shm, "job", "h0")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_both_directories_are_made_for_us_alone(shm: Path) -> None:
    before = os.umask(0o777)
    os.umask(0)
    try:
        place = make_host_dir(shm, "run-7.b", "h0")
    finally:
        os.umask(before)
    assert place.path == shm / "run-7.b.h0"
    assert (mode(shm), mode(place.path)) == (0o700, 0o700)
    assert make_host_dir(shm, "run-7.b", "h0") == place


def test_the_default_is_in_shared_memory_and_has_the_users_number() -> None:
    assert default_shm_dir() == Path(f"/dev/shm/keepstep-{os.geteuid()}")


@pytest.mark.parametrize("host", ["", "a/b", "..", ".h", "h.0", "h 0", "h\n", "x" * 41, "ü"])
def test_a_host_id_that_could_be_a_path_is_refused(shm: Path, host: str) -> None:
    with pytest.raises(HostDirRefused, match="host id"):
        make_host_dir(shm, "job", host)
    assert not shm.exists()


def test_a_bad_job_name_is_refused(shm: Path) -> None:
    with pytest.raises(BadName):
        make_host_dir(shm, "../job", "h0")


def test_a_path_too_long_for_a_socket_is_refused_with_numbers(tmp_path: Path) -> None:
    longest = SOCKET_PATH_BYTES_MAX - len("/j.h0/control")
    shm = Path(str(tmp_path) + "/" + "x" * (longest - len(str(tmp_path)) - 1))
    place = make_host_dir(shm, "j", "h0")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.control))
    with pytest.raises(HostDirRefused, match=r"control has 108 bytes, .* at most 107"):
        make_host_dir(shm, "jj", "h0")
    assert [path.name for path in shm.iterdir()] == ["j.h0"]


@pytest.mark.parametrize("is_above", [False, True])
def test_a_symlink_in_the_place_of_a_directory_is_refused(
    shm: Path, tmp_path: Path, is_above: bool
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if is_above:
        shm.symlink_to(theirs)
    else:
        shm.mkdir(mode=0o700)
        (shm / "job.h0").symlink_to(theirs)
    with pytest.raises(HostDirRefused, match="is a symlink or no directory"):
        make_host_dir(shm, "job", "h0")
    assert list(theirs.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_refused(shm: Path) -> None:
    shm.write_text("")
    with pytest.raises(HostDirRefused, match="is a symlink or no directory"):
        make_host_dir(shm, "job", "h0")


@pytest.mark.parametrize("bits", [0o710, 0o701, 0o755, 0o777, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(place: HostDir, bits: int) -> None:
    place.path.chmod(bits)
    with pytest.raises(HostDirRefused, match=f"chmod 700 {place.path}"):
        make_host_dir(place.path.parent, "job", "h0")
    place.path.chmod(0o700)
    place.path.parent.chmod(bits)
    with pytest.raises(HostDirRefused, match=f"chmod 700 {place.path.parent}$"):
        place.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(place: HostDir) -> None:
    os.chown(place.path, 12345, -1)
    with pytest.raises(HostDirRefused, match="belongs to user 12345, expected 0"):
        make_host_dir(place.path.parent, "job", "h0")


def test_the_names_of_files(place: HostDir) -> None:
    digest = "0" * 32
    names = [
        path.name
        for path in (
            place.pool,
            place.lock,
            place.control,
            place.bell,
            place.keeper_json,
            place.structure(digest),
            place.stage(3),
        )
    ]
    assert names == [
        *("pool", "lock", "control", "bell", "keeper.json"),
        f"structure-{digest}.json",
        "stage-3",
    ]
    with pytest.raises(HostDirRefused, match="32 hex digits"):
        place.structure("../../../../etc/passwd")


def test_nobody_holds_a_new_directory(place: HostDir) -> None:
    assert place.holder() is None
    assert not place.lock.exists()


def test_who_holds_it_is_named_and_keeps_others_out(place: HostDir) -> None:
    with place.hold() as lock:
        assert place.holder() == this_process()
        assert mode(place.lock) == 0o600
        with pytest.raises(KeeperRunning, match=f"living keeper, pid {os.getpid()}") as caught:
            place.hold()
        assert caught.value.pid == os.getpid()
        lock.release()
    assert place.holder() is None
    place.hold().release()


def test_a_lock_whose_content_is_nonsense_is_a_lock(place: HostDir) -> None:
    with place.hold():
        for content in ("", "junk", "1 2 3", "99999999 1", f"{os.getpid()} 1"):
            place.lock.write_text(content)
            assert place.holder() == Writer(0, 0)
            with pytest.raises(KeeperRunning, match="pid unknown"):
                place.hold()


def test_who_only_looks_whether_it_is_held_does_not_keep_a_keeper_out(place: HostDir) -> None:
    place.hold().release()
    place.lock.write_text("")
    fd = os.open(place.lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    looker = threading.Timer(0.2, os.close, [fd])
    looker.start()
    try:
        with place.hold():
            assert place.holder() == this_process()
    finally:
        looker.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_the_lock_goes_last(place: HostDir) -> None:
    """Something that cannot be removed, behind the lock by name: nobody may begin there yet."""
    place.hold().release()
    stuck = place.path / "z"
    stuck.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(stuck)], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(OSError, match="busy"):
            place.remove()
        assert place.lock.exists()
    finally:
        subprocess.run(["umount", "-l", str(stuck)], check=True)
    place.remove()
    assert not place.path.exists()


def test_a_lock_that_is_a_symlink_is_not_followed(place: HostDir, tmp_path: Path) -> None:
    place.lock.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        place.hold()
    assert not (tmp_path / "victim").exists()


HOLD = """
import sys
from pathlib import Path
from keepstep.ckpt.hostdir import HostDir
place = HostDir(Path(sys.argv[1]))
lock = place.hold()
print("held", flush=True)
sys.stdin.read()
place.remove()
"""


def start_holder(place: HostDir) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


@pytest.mark.ranks
def test_a_killed_holder_lets_go(place: HostDir) -> None:
    with start_holder(place) as child:
        try:
            holder = place.holder()
            assert holder is not None
            assert (holder.pid, is_running(holder)) == (child.pid, True)
            with pytest.raises(KeeperRunning, match=f"pid {child.pid}"):
                place.hold()
        finally:
            child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert place.holder() is None
    with place.hold():
        assert place.holder() == this_process()


@pytest.mark.ranks
def test_a_holder_that_removes_the_directory_leaves_nothing(place: HostDir, shm: Path) -> None:
    (place.path / "control").touch()
    (place.path / "deep").mkdir()
    (place.path / "deep" / "file").touch()
    with start_holder(place) as child:
        child.communicate(timeout=30)
    assert not shm.exists()
    with pytest.raises(FileNotFoundError):
        place.hold()


def test_removing_follows_no_symlink(place: HostDir, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    (place.path / "link").symlink_to(theirs)
    place.remove()
    assert (theirs / "file").exists()
    place.remove()


def test_removing_leaves_the_directories_of_other_hosts(shm: Path, place: HostDir) -> None:
    other = make_host_dir(shm, "job", "h1")
    place.remove()
    assert [path.name for path in shm.iterdir()] == [other.path.name]


def test_a_pid_with_another_start_time_is_another_process() -> None:
    me = this_process()
    assert is_running(me)
    assert not is_running(Writer(me.pid, me.ticks + 1))
    assert not is_running(Writer(2**22 + 1, 5))
    assert process_start_ticks(2**22 + 1) is None


def test_runs_have_directories_beside_the_shared_one_which_are_found_again(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    assert shm_dirs_of_runs(shared) == []
    places = [shm_dir_of_run(shared, tag) for tag in ("a1", "b2")]
    for place in (shared, *places, tmp_path / "shmothers"):
        place.mkdir()
    assert shm_dirs_of_runs(shared) == [shared, *places]


def test_a_host_begins_while_the_last_one_of_its_directory_ends(shm: Path) -> None:
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            make_host_dir(shm, "job", "h0").remove()

    other = threading.Thread(target=come_and_go)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        other.start()
        for _ in range(300):
            make_host_dir(shm, "job", "h1").remove()
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(interval_s)
