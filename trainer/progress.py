"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a last summary."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from keepstep.ckpt.events import read_events
from keepstep.ckpt.sizes import size_text
from keepstep.trainer.metrics import read_metrics

LINE_EVERY_STEPS = 10
_QUIET_EVENTS = frozenset(
    ("retired", "keeper_started", "keeper_ended", "hint_failed", "client_refused")
)
_SPEAK_FOR_THEMSELVES = frozenset(("waiting",))
_AT_STEP = frozenset(("evaluated", "stopped"))


class Display:
    """Shows what rank 0 reports. Starts no thread, so that ranks may be forked beside it.

    When nobody can be shown anything any more (the pipe's reader or the terminal is gone, the disk
    that output goes to is full), the showing ends, and the run does not.
    """

    def __init__(self, console: Console, on_lost: Callable[[str], None]) -> None:
        """Show on `console`; `on_lost` is called once, with the reason, if that fails."""
        self._console = console
        self._on_lost = on_lost
        self._is_lost = False
        self._bar: Progress | None = None
        self._task: Any = None

    def show(self, report: Mapping[str, Any]) -> None:
        """Show one report of a rank, or of the launcher."""
        with self._losable():
            self._show(report)

    def show_keepers(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Show what keepers have written to the event file, and that one has died."""
        for event in events:
            if event["role"] == "keeper" or event["event"] == "keeper_died":
                details = {"host": event["host"], **event}
                self.show({"kind": "event", **event, "details": details})

    def say(self, lines: Iterable[str]) -> None:
        """Print lines as they are."""
        with self._losable():
            for line in lines:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def _losable(self) -> Iterator[None]:
        self._console.quiet = self._is_lost
        try:
            yield
        except (OSError, SystemExit) as error:  # rich makes SystemExit of a broken pipe
            self._is_lost = self._console.quiet = True
            self._bar = None
            self._on_lost(f"output is shown no more: {error.__context__ or error!s}")

    def _show(self, report: Mapping[str, Any]) -> None:
        if self._is_lost:
            return
        if report["kind"] == "step":
            self._step(report)
        elif report["kind"] == "event" and report["event"] not in _QUIET_EVENTS:
            self._console.print(_event_line(report), highlight=False, markup=False, soft_wrap=True)
        elif report["kind"] == "stop_requested":
            self._console.print(
                f"stopping: {report['reason']}; finishing the step and committing "
                "(a second signal ends at once)",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _step(self, report: Mapping[str, Any]) -> None:
        words = (
            f"loss {float(report['loss']):.4f}  norm {float(report['grad_norm']):.3f}  "
            f"lr {report['lr']:.2e}  {report['tokens_per_s']:,.0f} tokens/s"
        )
        step, steps = report["step"], report["steps"]
        if self._console.is_terminal:
            self._advance(step, steps, words)
        elif step == 1 or step % LINE_EVERY_STEPS == 0 or step == steps:
            sent = "  ".join(f"{axis} {size_text(n)}" for axis, n in report["comm_bytes"].items())
            self._console.print(
                f"step {step}/{steps}  {words}  {report['step_ms']:.0f} ms  sent {sent}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _advance(self, step: int, steps: int, words: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
                TextColumn("{task.fields[words]}"),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=steps, words="")
        self._bar.update(self._task, completed=step, words=words)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the terminal as it was."""
        with self._losable():
            if self._bar is not None:
                self._bar.stop()


def _event_line(report: Mapping[str, Any]) -> str:
    details = report["details"]
    if report["event"] in _SPEAK_FOR_THEMSELVES:
        return str(report["reason"])
    step = f" at step {details['step']}" if report["event"] in _AT_STEP else ""
    line = f"{report['event'].replace('_', ' ')}{step}: {report['reason']}"
    if "checkpoint_bytes" in details:
        sizes = details["layout"]
        layout = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        line += (
            f"; layout {layout}; generation {details['generation']}; "
            f"a checkpoint has {size_text(details['checkpoint_bytes'])}"
        )
    return line


def way_on(patience_s: float, log_path: Path | None = None) -> list[str]:
    """What to do after a rank has failed (its log is named), or a person has cut a run short."""
    lines = [
        "to go on: give the same command again; it resumes from the newest state that is left",
        f"          within {patience_s:g} s one in memory; later, one on disk or in the store",
    ]
    return lines if log_path is None else [*lines, f"log of that rank: {log_path}"]


def summary(run_dir: Path, store: str) -> list[str]:
    """Where the run is, what was saved, how to look at it: the commands work as pasted."""
    lines = [f"run:   {run_dir}"]
    steps = read_metrics(run_dir)
    if steps:
        first, last = steps[0], steps[-1]
        lines.append(
            f"steps: {last['step']} done; loss {float(first['loss']):.4f} -> "
            f"{float(last['loss']):.4f}"
        )
        captured = sum(line.get("captured", False) for line in steps)
        lines.append(f"       {captured} of {len(steps)} steps captured into memory")
    done = steps[-1]["step"] if steps else 0
    evaluated = [one for one in read_events(run_dir, "evaluated") if one["step"] <= done]
    if evaluated:
        lines.append(
            f"       held-out loss {float(evaluated[-1]['loss']):.4f} after step "
            f"{evaluated[-1]['step']}"
        )
    committed = read_events(run_dir, "checkpoint_committed")
    if not committed:
        return [*lines, "saved: nothing"]
    retired = {
        tuple(state)
        for event in read_events(run_dir, "retired")
        for state in event.get("states", ())
    }
    states = {(event["generation"], event["step"]) for event in committed}
    kept = sorted({step for _, step in states - retired})
    last = committed[-1]
    lines.append(
        f"saved: step{'s' if len(kept) > 1 else ''} {', '.join(map(str, kept))} "
        f"({size_text(last['size_bytes'])} each) in {store}"
    )
    name = shlex.quote(store)
    newest = shlex.quote(f"{store}@{last['step']}")
    return [
        *lines,
        "look:  " + f"keepstep ls {name}",
        "       " + f"keepstep show {newest}",
        "       " + f"keepstep verify {name}",
    ]
