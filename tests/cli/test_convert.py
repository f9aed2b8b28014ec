"""The commands diff, reshard, export and import: their answers and exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.make_store import Content, llama_state, make_store

from keepstep.ckpt.layout import Layout
from keepstep.cli import main
from keepstep.storage.locate import open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in `tmp_path`: status, stdout, stderr."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["keepstep", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return command


@pytest.fixture
def a(tmp_path: Path) -> Content:
    """A store "a" of a Llama in layout dp=2,tp=2,pp=2, at steps 10 and 20."""
    first, second = llama_state(Layout(2, 2, 2)), llama_state(Layout(2, 2, 2))
    second.tensors["model/norm.weight"] = first.tensors["model/norm.weight"] + np.float32(0.5)
    make_store(open_store(tmp_path / "a", create=True), first, second, steps=(10, 20))
    return first


def answer(out: tuple[int, str, str], status: int) -> Any:  # noqa: ANN401 - JSON
    assert out[0] == status, out
    return json.loads(out[1])


def test_reshard_then_diff_says_same_and_the_steps_differ(run: Run, a: Content) -> None:
    done = answer(run("reshard", "a@10", "b", "--layout", "dp=1,tp=1,pp=4", "--json"), 0)
    assert (done["step"], done["generation"], len(done["dropped"])) == (10, 2, 8)
    found = answer(run("diff", "a@10", "b", "--json"), 0)
    assert found["same"]
    assert len(found["not_compared"]) == 8
    found = answer(run("diff", "a", "b", "--json"), 1)
    assert [each["name"] for each in found["differing"]] == ["model/norm.weight"]
    assert found["differing"][0]["max_abs"] == pytest.approx(0.5)
    status, out, _ = run("diff", "a", "a@10")
    assert status == 1
    assert out.splitlines()[-1].startswith("different: ")
    assert "model/norm.weight" in out
    assert answer(run("verify", "b", "--json"), 0)["findings"] == []


def test_export_then_import_gives_the_same_weights(run: Run, a: Content) -> None:
    done = answer(run("export", "a@10", "out", "--format", "hf", "--json"), 0)
    assert done["files"] == ["model.safetensors", "config.json"]
    done = answer(run("import", "out", "c", "--format", "hf", "--json"), 0)
    assert (done["step"], done["dtype"]) == (0, "F32")
    found = answer(run("diff", "a@10", "c", "--json"), 1)
    assert found["differing"] == []
    assert found["identical"] == sum(name.startswith("model/") for name in a.tensors)
    assert all(name.startswith("optimizer/") for name in found["only_in_a"])
    status, out, _ = run("export", "a@10", "cast", "--format", "hf", "--dtype", "bf16")
    assert status == 0
    assert "with rounding" in out
    assert "the tokenizer is bytes" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reshard", "a", "b", "--layout", "tp=3"), "heads 4 is no multiple of tp 3"),
        (("reshard", "a", "b", "--layout", "cp=3"), "cp=3"),
        (("reshard", "a", "a", "--layout", "tp=1"), "already holds a run of job 'kit'"),
        (("reshard", "a@15", "b", "--layout", "tp=1"), "no checkpoint at step 15; it has 20, 10"),
        (("reshard", "none", "b", "--layout", "tp=1"), "none"),
        (("diff", "a", "none"), "none"),
        (("export", "a", "a", "--format", "hf"), "is not empty"),
        (("export", "a", "out", "--format", "gguf"), "unknown format 'gguf'"),
        (("export", "a", "out", "--format", "hf", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("import", "a", "b", "--format", "hf", "--job", "a job"), "job name 'a job'"),
        (("import", "a", "b", "--format", "hf", "--dtype", "bf16"), "unknown dtype 'bf16'"),
    ],
)
def test_what_cannot_be_meant_is_status_2_and_one_line(
    run: Run, a: Content, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "b").exists()


def test_what_is_no_llama_is_status_1(run: Run, a: Content) -> None:
    status, _, err = run("import", "a", "b", "--format", "hf")
    assert status == 1
    assert "config.json" in err


@pytest.mark.parametrize("name", ["ckpt.reader", "ckpt.reshard", "ckpt.diff", "ckpt.hf_export"])
def test_conversion_needs_no_torch(name: str) -> None:
    code = f"import sys, keepstep.{name}, keepstep.ckpt.hf_import; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
