"""`keepstep doctor`: each check passes on this machine, and fails, with a fix, when it should."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sides import TOKEN_OF_KIT, no_threads_stay, side
from typer.testing import CliRunner

from keepstep.ckpt import doctor
from keepstep.ckpt.doctor import (
    Finding,
    Verdict,
    check_disk,
    check_memory,
    check_store,
    check_token,
    place_for_store,
)
from keepstep.ckpt.doctor_peers import Peer, check_peers, hinted_peers
from keepstep.ckpt.host_hints import HostHint, publish_hint
from keepstep.ckpt.memory_room import MemoryRoom, memory_room
from keepstep.cli import app
from keepstep.storage.disk_trial import try_disk
from keepstep.storage.errors import AlreadyExists, NoSpace
from keepstep.storage.file import FileStore
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Buffer, Capabilities
from keepstep.storage.token import Token, make_token_file
from keepstep.storage.trial import try_appends, try_puts

TOKEN = "a-token-of-the-tests-0123456789"


def run(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *words], env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def findings(*words: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    code, text = run(*words, "--json", env=env)
    document = json.loads(text)
    found = {one["check"]: one for one in document["findings"]}
    assert document["is_good"] is (code == 0)
    for one in found.values():
        assert bool(one["fix"]) is (one["verdict"] == "failed"), one
    return code, found


@pytest.fixture
def tmpfs() -> str:
    """A name in shared memory that is not there; big enough where a container's is not."""
    if memory_room("/dev/shm").size_bytes < doctor.SHM_BYTES_MIN:
        pytest.skip("/dev/shm of this machine has less than 1 GiB")
    return f"/dev/shm/keepstep-doctor-test-{os.getpid()}"


# ---- the command


def test_a_fit_host_is_told_so_in_numbers(tmp_path: Path, tmpfs: str) -> None:
    words = ("--store", str(tmp_path), "--disk", str(tmp_path), "--disk-mb", "16")
    code, found = findings(*words, "--disk-mb-per-s", "0", "--shm-dir", tmpfs)
    assert code == 0
    assert found["memory"]["figures"]["kind"] == "tmpfs"
    assert found["memory"]["figures"]["room_bytes"] > 0
    assert found["disk"]["figures"]["size_bytes"] == 16 << 20
    assert found["disk"]["figures"]["write_bytes_per_s"] > 0
    assert found["conditional puts"]["figures"]["winners"] == 1
    assert found["store"]["figures"]["put_ms"] > 0
    assert abs(found["clock"]["figures"]["ahead_s"]) < 60
    assert found["token"]["verdict"] == found["peers"]["verdict"] == "note"
    assert os.listdir(tmp_path) == []


def test_a_sick_host_is_told_what_to_do_and_the_status_is_1(tmp_path: Path) -> None:
    code, text = run("--store", str(tmp_path), "--shm-dir", str(tmp_path), "--pool-gb", "1e9")
    assert code == 1
    words = " ".join(text.split())
    assert "FAIL memory:" in words or "FAIL memory" in words
    assert "-> " in words
    assert "failed" in words


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path, tmpfs: str) -> None:
    code, found = findings("--store", str(tmp_path / "a/b"), "--shm-dir", tmpfs)
    assert code == 0
    assert found["store"]["figures"]["url"] == tmp_path.as_uri()
    assert found["conditional puts"]["verdict"] == "good"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "memory://x", ""])
def test_what_no_store_can_be_is_refused_as_typed(url: str) -> None:
    code = (
        "import sys; from keepstep.cli import main;"
        f"sys.argv = ['keepstep', 'doctor', '--store', {url!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "cannot open the store" in done.stderr
    assert done.stdout == ""


def test_without_the_package_of_its_store_all_else_is_checked_still(tmpfs: str) -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None; import importlib.util as u;"
        "find = u.find_spec; u.find_spec = lambda name, *a: None if name == 's3fs' else find(name);"
        "from keepstep.cli import main;"
        f"sys.argv = ['keepstep', 'doctor', '--store', 's3://bucket/x', '--shm-dir', {tmpfs!r},"
        "'--json']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["store"]["verdict"] == "failed"
    assert "s3fs" in found["store"]["what"]
    assert "pip install 'keepstep[s3]'" in found["store"]["fix"]
    assert found["memory"]["verdict"] == "good"
    assert "token" in found


def test_a_file_in_the_place_of_a_store_fails(tmp_path: Path, tmpfs: str) -> None:
    (tmp_path / "f").write_bytes(b"")
    code, found = findings("--store", str(tmp_path / "f"), "--shm-dir", tmpfs)
    assert code == 1
    assert "is not a directory" in found["store"]["what"]


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from keepstep.ckpt import doctor, doctor_peers; from keepstep import cli;"
        "print(sorted({'torch', 'numpy', 'aiohttp'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


# ---- memory


def room(**changes: int | None) -> MemoryRoom:
    gib = 1 << 30
    figures: dict[str, Any] = {
        "size_bytes": 8 * gib,
        "free_bytes": 8 * gib,
        "available_bytes": 16 * gib,
        "limit_left_bytes": None,
    }
    return MemoryRoom("/dev/shm", "tmpfs", **(figures | changes))


@pytest.mark.parametrize(
    ("changes", "pool_gib", "verdict", "fix"),
    [
        ({}, 0, Verdict.GOOD, ""),
        ({}, 8, Verdict.GOOD, ""),
        ({}, 9, Verdict.FAILED, "--shm-size=9g"),
        ({"size_bytes": 64 << 20, "free_bytes": 64 << 20}, 0, Verdict.FAILED, "--shm-size=1g"),
        ({"available_bytes": 1 << 30}, 4, Verdict.FAILED, "free memory on this host"),
        (
            {"limit_left_bytes": 3 << 30},
            4,
            Verdict.FAILED,
            "raise the container's memory limit",
        ),
    ],
)
def test_the_tightest_limit_is_the_one_to_be_raised(
    changes: dict[str, int | None], pool_gib: int, verdict: Verdict, fix: str
) -> None:
    found = doctor._memory("/dev/shm/x", room(**changes), pool_gib << 30)
    assert found.verdict is verdict
    assert fix in found.fix


def test_a_directory_on_a_disk_is_no_shared_memory(tmp_path: Path) -> None:
    if memory_room(str(tmp_path)).kind == "tmpfs":
        pytest.skip("the tests' directory is on a tmpfs here")
    memory, directory = check_memory(str(tmp_path / "pools"), 0)
    assert memory.verdict is Verdict.FAILED
    assert "tmpfs" in memory.fix
    assert directory.verdict is Verdict.GOOD


def directory_of(path: Path) -> Finding:
    return check_memory(str(path), 0)[1]


def test_a_directory_that_others_may_enter_fails(tmp_path: Path) -> None:
    path = tmp_path / "pools"
    path.mkdir(mode=0o700)
    assert directory_of(path).verdict is Verdict.GOOD
    path.chmod(0o755)
    found = directory_of(path)
    assert (found.verdict, found.figures["mode"]) == (Verdict.FAILED, "0755")
    assert f"chmod 0700 {path}" in found.fix


def test_a_link_or_a_file_in_its_place_fails(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    assert "symbolic link" in directory_of(tmp_path / "link").what
    assert directory_of(tmp_path / "link").verdict is Verdict.FAILED
    assert directory_of(tmp_path / "file").verdict is Verdict.FAILED


def test_a_directory_of_another_user_fails(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path = tmp_path / "pools"
    path.mkdir(mode=0o700)
    os.chown(path, 12_345, -1)
    found = directory_of(path)
    assert found.verdict is Verdict.FAILED
    assert found.figures["owner"] == 12_345


# ---- disk


def test_a_disk_is_measured_within_bounds_and_left_clean(tmp_path: Path) -> None:
    trial = try_disk(str(tmp_path), 20 << 20)
    assert trial.size_bytes == 32 << 20  # whole pieces
    assert trial.write_bytes_per_s > 0
    assert trial.read_bytes_per_s > 0
    assert 0 < trial.free_bytes <= trial.total_bytes
    assert os.listdir(tmp_path) == []
    assert try_disk(str(tmp_path), 1 << 40, seconds_max=0.0).size_bytes == 16 << 20


def test_a_slow_disk_or_none_fails(tmp_path: Path) -> None:
    slow = check_disk(str(tmp_path), 16 << 20, 1e15)
    assert (slow.verdict, slow.check) == (Verdict.FAILED, "disk")
    assert "expected at least" in slow.fix
    none = check_disk(str(tmp_path / "none"), 16 << 20, 0)
    assert none.verdict is Verdict.FAILED
    assert none.what == f"there is no directory {tmp_path / 'none'}"
    assert none.fix.startswith("mkdir -p ")


def test_a_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.storage.disk_trial._SPARED_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match="leaves"):
        try_disk(str(tmp_path), 16 << 20)
    assert "free space" in check_disk(str(tmp_path), 16 << 20, 0).fix
    assert os.listdir(tmp_path) == []


# ---- store


class Careless(MemoryStore):
    """Takes every conditional put."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.put(key, data)


class Quarrelsome(MemoryStore):
    """Tells everybody that somebody else was first, and takes nothing but the first alone."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, data)
        if "race" in key:
            raise AlreadyExists("another was first")


class Flattering(MemoryStore):
    """Keeps the first, and tells those who come at the same time that they were first too."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        try:
            super().put_if_absent(key, data)
        except AlreadyExists:
            if bytes(data) == b"late":
                raise


class Forgetful(MemoryStore):
    """Keeps writers apart who come at the same time, not one who comes later."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if bytes(data) != b"late":
            super().put_if_absent(key, data)


class Honest(MemoryStore):
    """Says that it cannot."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=False, durable=True)


class Garbled(MemoryStore):
    """Gives back other bytes."""

    def get(self, key: str, bytes_max: int) -> bytes:
        return super().get(key, bytes_max)[::-1]


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {one.check: one for one in found}


@pytest.mark.parametrize("make", [Careless, Quarrelsome, Flattering, Forgetful, Honest])
def test_a_store_that_cannot_keep_writers_apart_fails(make: type[MemoryStore]) -> None:
    store = make()
    found = by_check(check_store(store))
    assert found["conditional puts"].verdict is Verdict.FAILED
    assert found["conditional puts"].fix
    assert found["store"].verdict is Verdict.GOOD
    assert list(store.list("")) == []


def test_a_store_that_gives_back_other_bytes_fails() -> None:
    assert by_check(check_store(Garbled()))["store"].verdict is Verdict.FAILED


def test_a_store_that_may_not_be_written_fails_with_its_error(tmp_path: Path) -> None:
    root = tmp_path / "gone"
    root.mkdir()
    store = FileStore(root)
    root.rmdir()
    (found,) = check_store(store)
    assert found.verdict is Verdict.FAILED
    assert "directory is not there" in found.what


def test_trials_give_numbers_and_leave_nothing() -> None:
    store = MemoryStore()
    appends, puts = try_appends(store), try_puts(store)
    assert (appends.writers, appends.winners, appends.is_kept) == (4, 1, True)
    assert appends.is_good
    assert puts.is_same
    assert abs(puts.ahead_s) <= puts.within_s
    assert list(store.list("")) == []


def test_the_clock_of_a_store_in_whole_seconds_is_known_to_half_of_one() -> None:
    class Seconds(MemoryStore):
        ahead_s = 100.0

        def _put(self, operation: str, key: str, data: bytes, *, replace: bool) -> None:
            super()._put(operation, key, data, replace=replace)
            kept, modified_s = self._objects[key]
            self._objects[key] = (kept, float(int(modified_s + self.ahead_s)))

    trial = try_puts(Seconds())
    assert abs(trial.ahead_s - Seconds.ahead_s) <= trial.within_s
    assert trial.within_s >= 0.5


def test_the_place_of_a_store_to_be_made_is_the_nearest_directory(tmp_path: Path) -> None:
    assert place_for_store(str(tmp_path / "a/b/c")) == str(tmp_path)
    (tmp_path / "f").touch()
    assert place_for_store(str(tmp_path / "f/b")) == str(tmp_path)


# ---- token


def test_a_token_is_found_and_never_shown(tmp_path: Path) -> None:
    found, token = check_token({"KEEPSTEP_TOKEN": TOKEN}, None, is_needed=True)
    assert (found.verdict, token is not None) == (Verdict.GOOD, True)
    assert TOKEN not in found.what
    made = make_token_file(tmp_path / "token")
    found, token = check_token({}, str(tmp_path / "token"), is_needed=False)
    assert found.verdict is Verdict.GOOD
    assert token is not None
    assert token.text == made.text
    assert made.text not in str(found)


def test_a_token_that_others_may_read_is_missing_or_makes_no_sense_fails(tmp_path: Path) -> None:
    file = tmp_path / "token"
    make_token_file(file)
    file.chmod(0o644)
    found, token = check_token({}, str(file), is_needed=False)
    assert (found.verdict, token) == (Verdict.FAILED, None)
    assert "0644" in found.what
    assert "chmod 0600" in found.fix
    for environment, name in (({}, str(tmp_path / "none")), ({"KEEPSTEP_TOKEN": "short"}, None)):
        found, token = check_token(environment, name, is_needed=False)
        assert (found.verdict, token) == (Verdict.FAILED, None)
    assert check_token({}, None, is_needed=True)[0].verdict is Verdict.FAILED
    assert check_token({}, None, is_needed=False)[0].verdict is Verdict.NOTE


# ---- peers


@contextmanager
def keeper(token: str | None, path: str = "/v1/status") -> Iterator[str]:
    """Something that answers as a keeper's data plane does; without a token, anybody."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            may = token is None or self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(404 if self.path != path else 200 if may else 401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def of_peer(address: str) -> Finding:
    (found,) = check_peers([Peer(address, address)], Token(TOKEN), timeout_s=60.0)
    return found


def test_a_keeper_that_knows_the_token_and_refuses_strangers_is_good() -> None:
    with keeper(TOKEN) as address:
        found = of_peer(address)
    assert found.verdict is Verdict.GOOD
    assert found.figures["ms"] is not None
    assert TOKEN not in str(found)


def test_a_real_keepers_data_plane_is_good_and_another_jobs_token_is_refused(
    tmp_path: Path,
) -> None:
    with no_threads_stay(), side(tmp_path, "h0") as real:
        peers = [Peer("h0", real.address)]
        (good,) = check_peers(peers, TOKEN_OF_KIT, timeout_s=60.0)
        (bad,) = check_peers(peers, Token(TOKEN), timeout_s=60.0)
    assert (good.verdict, good.fix) == (Verdict.GOOD, "")
    assert "refuses this token" in bad.what


@pytest.mark.parametrize(
    ("token", "path", "words"),
    [
        ("another-token-0123456789", "/v1/status", "refuses this token"),
        (None, "/v1/status", "without a token with 200"),
        (TOKEN, "/else", "expected 200"),
    ],
)
def test_who_answers_otherwise_fails(token: str | None, path: str, words: str) -> None:
    with keeper(token, path) as address:
        found = of_peer(address)
    assert found.verdict is Verdict.FAILED
    assert words in found.what


def test_nobody_there_and_no_address_fail() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # held, and nobody listens
        found = of_peer(f"127.0.0.1:{closed.getsockname()[1]}")
    assert found.verdict is Verdict.FAILED
    assert "firewall" in found.fix
    for text in ("nowhere", "host:", "host:99999", ":80", "host:-1"):
        assert "no HOST:PORT" in of_peer(text).what


def test_one_who_listens_and_says_nothing_fails_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (found,) = check_peers([Peer("h0", address)], Token(TOKEN), timeout_s=0.2)
    assert found.verdict is Verdict.FAILED
    assert "timed out" in found.what


def test_peers_come_from_the_hints_of_the_newest_generation(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for host, generation in (("h0", 2), ("h1", 1), ("h2", 2)):
        publish_hint(store, HostHint(host, f"{host}:80", "2026-01-01T00:00:00Z", generation))
    store.put("hosts/h3.json", b"not JSON")
    store.put("hosts/h4.json", b"[]")
    assert hinted_peers(store) == [Peer("h0", "h0:80", 2), Peer("h2", "h2:80", 2)]
    assert hinted_peers(MemoryStore()) == []


def test_the_command_asks_the_hinted_and_the_named(tmp_path: Path, tmpfs: str) -> None:
    with keeper(TOKEN) as one, keeper("another-token-0123456789") as two:
        hint = HostHint("h0", one, "2026-01-01T00:00:00Z", 1)
        publish_hint(FileStore(tmp_path), hint)
        words = ("--store", str(tmp_path), "--shm-dir", tmpfs, "--timeout", "60")
        env = {"KEEPSTEP_TOKEN": TOKEN}
        code, found = findings(*words, env=env)
        assert (code, found["peer h0"]["verdict"]) == (0, "good")
        code, found = findings(*words, "--peer", two, env=env)
        assert (code, found[f"peer {two}"]["verdict"]) == (1, "failed")
        code, found = findings(*words, "--no-hints", env=env)
        assert (code, found["peers"]["verdict"]) == (0, "note")


def test_a_token_is_wanted_only_where_another_host_is_to_be_reached(
    tmp_path: Path, tmpfs: str
) -> None:
    store, env = FileStore(tmp_path), {"KEEPSTEP_TOKEN": ""}
    words = ("--store", str(tmp_path), "--shm-dir", tmpfs)
    for host, address in (("h0", "127.0.0.1:4000"), ("h1", "[::1]:4001"), ("h2", "localhost:1")):
        publish_hint(store, HostHint(host, address, "2026-01-01T00:00:00Z", 1))
    code, found = findings(*words, env=env)
    assert (code, found["token"]["verdict"], found["peers"]["verdict"]) == (0, "note", "note")
    assert found["peers"]["what"] == "3 on this host not asked, for want of a token"
    code, found = findings(*words, "--peer", "127.0.0.1:4000", env=env)
    assert (code, found["token"]["verdict"]) == (1, "failed")
    publish_hint(store, HostHint("h3", "10.0.0.3:4000", "2026-01-01T00:00:00Z", 1))
    code, found = findings(*words, env=env)
    assert (code, found["token"]["verdict"]) == (1, "failed")
    assert found["peers"]["what"] == "4 not asked, for want of a token"
    code, found = findings(*words, "--no-hints", env=env)
    assert (code, found["token"]["verdict"]) == (0, "note")
