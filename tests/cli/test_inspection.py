"""ls, show, verify and gc as people and machines call them: output, exit status, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.kit.checkpoints import begin, save, write_images
from tests.kit.logs import bad, generation, state

from keepstep.ckpt.keys import image_key, manifest_key
from keepstep.cli import main
from keepstep.storage.file import FileStore


class Result(NamedTuple):
    status: int
    out: str
    err: str

    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.out)


Keepstep = Callable[..., Result]


@pytest.fixture
def keepstep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Keepstep]:
    """Runs a command in this process, as the console script does."""

    def call(*arguments: object, columns: int = 80) -> Result:
        monkeypatch.setattr(sys, "argv", ["keepstep", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        status = stopped.value.code
        return Result(status if isinstance(status, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with steps 10 and 20 live, 30 void, and a bad one at 40."""
    store = FileStore(tmp_path)
    log = begin(store, 10, 20, 30)
    log.append(generation(2, state(1, 20)))
    save(log, state(2, 30))
    save(log, state(2, 40))
    log.append(bad(2, 40, "loss exploded"))
    return tmp_path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_ls_lists_the_newest_first(keepstep: Keepstep, place: Path) -> None:
    result = keepstep("ls", place)
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["step", "gen", "layout", "size", "age", "state"]
    assert [line.split()[:2] for line in lines[1:] if line.split()[0].isdigit()] == [
        ["40", "2"],
        ["30", "2"],
        ["30", "1"],
        ["20", "1"],
        ["10", "1"],
    ]
    assert "bad: loss exploded" in result.out
    assert max(len(line) for line in lines) <= 80


def test_ls_json(keepstep: Keepstep, place: Path) -> None:
    document = keepstep("ls", place, "--json").json()
    assert document["job"] == "run-a"
    first = document["checkpoints"][0]
    assert {key: first[key] for key in ("step", "generation", "status", "verdict", "layout")} == {
        "step": 40,
        "generation": 2,
        "status": "bad",
        "verdict": "bad",
        "layout": "dp_shard=2",
    }
    assert first["age_s"] > 0
    one = keepstep("ls", f"{place}@20", "--json").json()
    assert [each["step"] for each in one["checkpoints"]] == [20]


def test_ls_of_other_places_says_what_is_there(keepstep: Keepstep, tmp_path: Path) -> None:
    empty = keepstep("ls", tmp_path)
    assert (empty.status, empty.err) == (0, "")
    assert "holds no checkpoints: no run has written to it yet" in " ".join(empty.out.split())
    assert keepstep("ls", tmp_path, "--json").json()["checkpoints"] == []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    foreign = keepstep("ls", tmp_path)
    assert foreign.status == 1
    assert foreign.out == ""
    assert "looks like a Hugging Face model" in foreign.err
    missing = keepstep("ls", tmp_path / "nowhere")
    assert missing.status == 2
    assert "no store at" in missing.err
    for result in (foreign, missing):
        assert result.err.count("\n") == 1
        assert result.err.startswith("keepstep: ")


def test_a_run_that_has_not_committed_yet_is_called_so(keepstep: Keepstep, tmp_path: Path) -> None:
    begin(FileStore(tmp_path))
    for command in ("ls", "show"):
        result = keepstep(command, tmp_path)
        assert result.status == 0
        assert "has not committed a checkpoint" in " ".join(result.out.split())


def test_an_unknown_step_is_a_usage_error_that_names_the_known_ones(
    keepstep: Keepstep, place: Path
) -> None:
    for command in ("ls", "show", "verify"):
        result = keepstep(command, f"{place}@99")
        assert result.status == 2
        assert "no checkpoint at step 99; it has 30, 20, 10" in result.err
        assert "Traceback" not in result.err


def test_show_answers_who_what_where(keepstep: Keepstep, place: Path) -> None:
    result = keepstep("show", place)
    assert result.status == 0
    for fact in ("run-a", "3 live, 2 void or bad", "step 30 of generation 2", "dp_shard=2"):
        assert fact in result.out
    assert "model/wq.weight" not in result.out
    void = keepstep("show", f"{place}@40")
    assert "bad (loss exploded" in void.out


def test_show_lists_tensors_norms_and_the_log_on_demand(keepstep: Keepstep, place: Path) -> None:
    tensors = keepstep("show", place, "--tensors").out
    assert "model/wq.weight" in tensors
    assert "dp_shard:0" in tensors
    some = keepstep("show", place, "--match", "model/wk*", "--norms").out
    assert "l2 norm" in some
    assert "model/wq.weight" not in some
    log = keepstep("show", place, "--log", columns=120).out
    assert "taken by trainer on host-a, pid 1" in log
    assert "step 40 of generation 2 is bad: loss exploded" in log
    nothing = keepstep("show", place, "--match", "zz*")
    assert (nothing.status, nothing.out) == (2, "")


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(keepstep: Keepstep, place: Path, columns: int) -> None:
    flip(place / image_key(state(1, 10), 0), -1)
    for arguments in (
        ("ls", place),
        ("show", place, "--tensors", "--log"),
        ("show", place, "--norms"),
        ("verify", place),
        ("gc", place, "--dry-run", "--keep-last", "1"),
    ):
        if "--norms" in arguments:
            arguments = ("show", f"{place}@20", "--norms")
        lines = keepstep(*arguments, columns=columns).out.splitlines()
        assert lines
        assert max(map(len, lines)) <= columns


def test_show_json(keepstep: Keepstep, place: Path) -> None:
    document = keepstep("show", f"{place}@20", "--norms", "--log", "--json").json()
    assert document["checkpoint"]["step"] == 20
    assert document["checkpoint"]["mesh"]["dp_shard"] == 2
    assert document["checkpoint"]["values"]["cursor"] == 160
    assert [row["name"] for row in document["tensors"]] == [
        "model/norm.weight",
        "model/wk.weight",
        "model/wq.weight",
        "optimizer/step",
    ]
    assert document["tensors"][0]["norms"]["not_finite"] == 0
    assert document["log"][0]["body"]["kind"] == "term"


def test_verify_ends_with_0_or_1_and_names_file_and_tensor(keepstep: Keepstep, place: Path) -> None:
    good = keepstep("verify", place)
    assert good.status == 0
    assert "every byte is as it was written" in " ".join(good.out.split())
    key = image_key(state(1, 10), 1)
    flip(place / key, -1)
    wrong = keepstep("verify", place)
    assert wrong.status == 1
    assert key in wrong.out
    assert "model/wk.weight" in wrong.out
    document = keepstep("verify", place, "--json")
    assert document.status == 1
    finding = document.json()["findings"][0]
    assert finding["file"] == key
    assert "model/wk.weight" in finding["tensors"]
    assert keepstep("verify", f"{place}@20").status == 0
    assert keepstep("verify", f"{place}@10").status == 1


def test_verify_lists_what_nothing_refers_to(keepstep: Keepstep, place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    write_images(FileStore(place), state(2, 50))
    document = keepstep("verify", place, "--json")
    assert document.status == 0
    assert {each["file"] for each in document.json()["unreferenced"]} == {
        "notes.txt",
        image_key(state(2, 50), 0),
        image_key(state(2, 50), 1),
    }
    assert "notes.txt" in keepstep("verify", place).out


def test_verify_of_a_damaged_log_goes_on_and_the_others_stop(
    keepstep: Keepstep, place: Path
) -> None:
    entry = "log/000000/000000003"
    flip(place / entry, 60)
    document = keepstep("verify", place, "--json")
    assert document.status == 1
    assert [each["file"] for each in document.json()["findings"]] == [entry]
    for command in ("ls", "show", "gc"):
        result = keepstep(command, place)
        assert result.status == 1
        assert entry in result.err
        assert "restore this file from a copy" in result.err
        assert result.err.count("\n") == 1


def test_gc_dry_run_then_gc(keepstep: Keepstep, place: Path) -> None:
    dry = keepstep("gc", place, "--keep-last", "1", "--dry-run", "--json").json()
    assert (place / manifest_key(state(1, 10))).exists()
    wet = keepstep("gc", place, "--keep-last", "1", "--json").json()
    assert dry["dry_run"]
    assert not wet["dry_run"]
    assert dry["deleted"] == wet["deleted"]
    assert dry["deleted_bytes"] == sum(each["size_bytes"] for each in dry["deleted"])
    assert wet["kept"] == [{"generation": 2, "step": 30}]
    assert not (place / "states/g000001").exists()
    again = keepstep("gc", place, "--keep-last", "1")
    assert again.status == 0
    assert "freed 0 B in 0 files; 1 checkpoint kept (step 30)" in again.out
    assert keepstep("verify", place).status == 0


def test_gc_keeps_what_the_run_itself_keeps(keepstep: Keepstep, tmp_path: Path) -> None:
    import msgspec
    from tests.kit.logs import open_log

    log = open_log(FileStore(tmp_path))
    log.take_term("trainer")
    config = {"run": {"keep": 2, "keep_every": 10}}
    log.append(msgspec.structs.replace(generation(1), config=config))
    for step in (10, 15, 20, 25, 26):
        save(log, state(1, step))
    document = keepstep("gc", tmp_path, "--dry-run", "--json").json()
    assert document["policy"] == {"keep_last": 2, "keep_every": 10}
    assert [each["step"] for each in document["kept"]] == [26, 25, 20, 10]
    assert keepstep("gc", tmp_path, "--keep-last", "0", "--json").json()["deleted"] == []


@pytest.mark.parametrize(
    "arguments", [("gc", "--keep-last", "-1"), ("gc", "--keep-every", "x"), ("ls", "--nonsense")]
)
def test_nonsense_is_a_usage_error(
    keepstep: Keepstep, place: Path, arguments: tuple[str, ...]
) -> None:
    assert keepstep(arguments[0], place, *arguments[1:]).status == 2


def test_gc_of_a_single_step_is_refused(keepstep: Keepstep, place: Path) -> None:
    result = keepstep("gc", f"{place}@10")
    assert result.status == 2
    assert "leave out @STEP" in result.err


def test_an_unknown_scheme_is_refused_in_a_sentence(keepstep: Keepstep) -> None:
    result = keepstep("ls", "gopher://x/y")
    assert result.status == 2
    assert "unknown kind of store 'gopher'" in result.err


def test_inspection_works_without_torch(place: Path) -> None:
    """One fresh process runs all four commands, and looks at what it imported."""
    program = """
import sys
from keepstep.cli import main
assert "torch" not in sys.modules, "import keepstep.cli"
for arguments in (
    ["ls", STORE], ["show", STORE, "--norms", "--log"], ["show", STORE, "--json"],
    ["verify", STORE], ["verify", STORE, "--json"], ["gc", STORE],
):
    sys.argv = ["keepstep", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, (arguments, stopped.code)
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"STORE = {str(place)!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_as_a_program(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "ls", f"{place}@99"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("keepstep: ")
