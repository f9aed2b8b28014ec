"""What a person sees; and that a run goes on when nobody can see it."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepstep.ckpt.events import Events
from keepstep.trainer.metrics import FILE_NAME, read_metrics
from keepstep.trainer.progress import Display, summary

STOP = {"kind": "stop_requested", "reason": "asked by SIGTERM"}
STEP: dict[str, Any] = {
    "kind": "step",
    "step": 1,
    "steps": 2,
    "loss": "1.5",
    "grad_norm": "2.5",
    "lr": 0.1,
    "tokens_per_s": 10.0,
    "step_ms": 3.0,
    "comm_bytes": {"dp": 4 << 20},
}


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_output_on_a_full_disk_ends_the_showing_and_not_the_run(is_terminal: bool) -> None:
    lost: list[str] = []
    display = Display(Console(file=Full(), force_terminal=is_terminal), lost.append)
    for _ in range(3):
        display.show(STEP)
        display.show(STOP)
    display.say(["done"])
    display.close()
    assert len(lost) == 1
    assert "No space left on device" in lost[0]


def test_a_reader_that_is_gone_ends_the_showing_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    lost: list[str] = []
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        display = Display(Console(file=pipe), lost.append)
        display.show(STOP)
        display.show(STOP)
        display.say(["done"])
        display.close()
    assert len(lost) == 1
    assert "Broken pipe" in lost[0]


def test_steps_and_lines_are_shown() -> None:
    file, lost = io.StringIO(), list[str]()
    display = Display(Console(file=file), lost.append)
    display.show(STEP)
    display.say(["run: x"])
    assert "step 1/2  loss 1.5000" in file.getvalue()
    assert file.getvalue().splitlines()[0].endswith("sent dp 4.19 MB")  # in the unit of `ls`
    assert file.getvalue().endswith("run: x\n")
    assert lost == []


def test_waiting_is_shown_in_its_own_words() -> None:
    shown = io.StringIO()
    display = Display(Console(file=shown), lambda why: None)
    reason = "waiting for step 7 to be durable: ..."
    display.show({"kind": "event", "event": "waiting", "reason": reason, "details": {"step": 7}})
    assert shown.getvalue() == f"{reason}\n"


def test_the_death_of_a_keeper_is_shown_though_the_launcher_tells_it() -> None:
    shown = io.StringIO()
    display = Display(Console(file=shown), lambda why: None)
    died = {"host": "a", "reason": "host h0: its keeper (pid 7) ended with SIGKILL"}
    display.show_keepers(
        [
            {"role": "launcher", "event": "keeper_died", **died},
            {"role": "launcher", "event": "repaired", "host": "a", "reason": "cut a torn line"},
        ]
    )
    assert shown.getvalue() == f"keeper died: {died['reason']}\n"


def test_the_time_that_is_left_is_never_cut_on_a_terminal_of_80_columns() -> None:
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=True, width=80), lambda why: None)
    for step in range(1, 5):
        display.show({**STEP, "step": step, "steps": 1000, "grad_norm": "3.472", "loss": "5.7731"})
    display.close()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.getvalue().split("loss")[-2]


def _line(generation: int, step: int, *, captured: bool) -> dict[str, Any]:
    loss = 10.0 * generation + step
    return {"step": step, "generation": generation, "loss": loss, "captured": captured}


def _write(run_dir: Path, *lines: dict[str, Any]) -> None:
    with (run_dir / FILE_NAME).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_summary_counts_the_steps_of_the_lineage_alone(tmp_path: Path) -> None:
    events = Events(tmp_path, role="rank", rank=0)
    events.append("started", "from nothing", generation=1, base=None)
    _write(tmp_path, *(_line(1, step, captured=True) for step in range(1, 11)))
    events.append("evaluated", "", step=10, loss=1.0)
    assert "steps: 10 done; loss 11.0000 -> 20.0000" in summary(tmp_path, "store")
    events.append("resumed", "from step 5", generation=2, base=[1, 5])
    assert "steps: 5 done; loss 11.0000 -> 15.0000" in summary(tmp_path, "store")
    _write(tmp_path, *(_line(2, step, captured=False) for step in (6, 7)))
    lines = summary(tmp_path, "store")
    assert lines[1:3] == [
        "steps: 7 done; loss 11.0000 -> 27.0000",
        "       5 of 7 steps captured into memory",
    ]
    assert not any("held-out" in line for line in lines)  # that of a step that is void
    _write(tmp_path, _line(1, 8, captured=True))  # of a run that did not know yet that it is over
    assert summary(tmp_path, "store") == lines


def test_lines_alone_show_where_a_generation_went_on(tmp_path: Path) -> None:
    _write(tmp_path, *(_line(1, step, captured=True) for step in range(1, 6)))
    _write(tmp_path, _line(2, 3, captured=True))
    counting = [(one["generation"], one["step"]) for one in read_metrics(tmp_path)]
    assert counting == [(1, 1), (1, 2), (2, 3)]
