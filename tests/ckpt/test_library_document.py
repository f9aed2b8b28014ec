"""The examples of docs/library.md: they run, and a stop and a new start change no bit."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ranks import run_ranks

from keepstep.ckpt.events import read_events
from keepstep.storage.token import TOKEN_VARIABLE

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "library.md"
STEPS, STOP = 9, 5
SHM = 'shm_dir=str(directory / "shm")'

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def _examples() -> dict[str, str]:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    named = [(re.match(r"# example: (.*)\n", block), block) for block in blocks]
    return {name.group(1): block for name, block in named if name is not None}


def _train(code: str) -> Callable[[Path, int], torch.nn.Module]:
    space: dict[str, Any] = {"__name__": "example"}
    assert code.count(SHM) == 1
    code = code.replace(SHM, f"{SHM}, patience_s=10.0")  # a failed test leaves no keeper for long
    exec(compile(code, str(DOCUMENT), "exec"), space)
    return space["train"]


def _values(model: torch.nn.Module) -> dict[str, list[float]]:
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.double().flatten().tolist()
    return found


def _twice(rank: int, world: int, code: str, directory: Path) -> bool:
    os.environ[TOKEN_VARIABLE] = "a-token-of-this-test-alone"
    straight = _values(_train(code)(directory / "straight", STEPS))
    _train(code)(directory / "stopped", STOP)
    again = _values(_train(code)(directory / "stopped", STEPS))
    return straight == again


def _alone(rank: int, world: int, code: str, directory: Path) -> bool:
    torch.distributed.destroy_process_group()
    same = _twice(rank, world, code, directory)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world
    )
    return same


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose sockets' paths are short enough, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="ks-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("name", "world"), [("one process", 1), ("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]
)
def test_a_stop_and_a_new_start_change_no_bit(name: str, world: int, short: Path) -> None:
    run = _alone if world == 1 else _twice
    assert run_ranks(world, run, _examples()[name], short, timeout_s=120) == [True] * world
    told = read_events(short / "stopped" / "run")
    kinds = [one["event"] for one in told]
    assert not {"capture_failed", "unserved", "unprotected"} & set(kinds), told
    (resumed,) = [one for one in told if one["event"] == "resumed"]
    assert resumed["step"] == STOP
    assert not list((short / "stopped" / "shm").glob("*"))  # nothing outlives a run that is over


def test_every_example_is_run() -> None:
    assert list(_examples()) == ["one process", "ddp", "fsdp2", "hsdp"]
