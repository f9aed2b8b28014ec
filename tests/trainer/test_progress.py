"""What a person sees; and that a run goes on when nobody can see it."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import pytest
from rich.console import Console

from keepstep.trainer.progress import Display

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
