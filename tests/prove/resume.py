"""Resume: from the newest state there is, bitwise equal to the run that never stopped.

Runs are killed at random moments, by SIGKILL, in five ways: all ranks; ranks and one keeper; all
processes; all processes with the memory of their hosts lost, as after a reboot; and with the disks
of the hosts lost too. In other layouts they go on within 5e-6.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kit.proof import print_report
from tests.kit.runs import (
    end_keepers,
    exact_lines,
    kill,
    make_corpus,
    start,
    train,
    wait_for_lines,
    worst_relative,
)

from keepstep.ckpt.address import find_live
from keepstep.ckpt.diff import diff
from keepstep.ckpt.events import read_events
from keepstep.ckpt.log import Log
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.storage.locate import open_store
from keepstep.trainer.metrics import FILE_NAME, read_metrics

FP32_BAR = 5e-6
OTHER_LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dp=1,tp=1,pp=1", ()),
    ("dp=4,tp=1,pp=2", ()),
    ("dp=2,tp=2,pp=1", ()),
    ("dp=1,tp=2,pp=4", ()),
    ("dp=4,tp=2,pp=1,dp_replicate=2", ()),
    ("dp=2,tp=1,pp=2", ("parallel.schedule=interleaved1f1b", "parallel.virtual=2")),
)


WAYS = ("ranks", "ranks and a keeper", "all", "all and memory", "all but the store")
"""What is killed or lost at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        layout: of the runs that are compared to the bit.
        steps: how far they go.
        base_step: from which the other layouts go on.
        save_every: steps between checkpoints.
        hosts: that share the ranks.
    """

    layout: str = "dp=2,tp=2,pp=2"
    steps: int = 40
    base_step: int = 20
    save_every: int = 3
    hosts: int = 2


WHOLE = Plan()


@dataclass(frozen=True, slots=True)
class Other:
    """How a run went on in another layout, beside the one that kept its own."""

    layout: str
    steps: int
    same_samples: bool
    loss_worst_relative: float
    grad_norm_worst_relative: float

    @property
    def is_good(self) -> bool:
        """Whether it kept the samples and the bar."""
        return self.same_samples and self.loss_worst_relative <= FP32_BAR


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, or several before the run had begun again.

    Attributes:
        way: the worst of `WAYS`.
        processes: how many were killed.
        noted: the last step that was noted before.
        floor: the oldest step that the next start may go on from: the last state that all ranks
            had captured wholly, if memory was left; else that of the newest commit.
        base: the step that it did go on from; 0: from nothing.
    """

    way: str
    processes: int
    noted: int
    floor: int
    base: int

    @property
    def is_good(self) -> bool:
        """Whether the run went on from the newest state there was."""
        return self.base >= self.floor


@dataclass(frozen=True, slots=True)
class Kills:
    """What became of a run that was killed again and again.

    Attributes:
        kills: one after the other.
        generations: how many it took to the end.
        redone: steps that were done more than once.
        wrong: what differs from the run that never stopped.
    """

    kills: tuple[Kill, ...]
    generations: int
    redone: int
    wrong: tuple[str, ...]


def uninterrupted(directory: Path, corpus: Path, plan: Plan = WHOLE) -> Path:
    """The run that never stops."""
    run_dir = directory / "uninterrupted"
    must_train(run_dir, corpus, plan.steps, plan.layout, plan)
    return run_dir


def stopped_once(directory: Path, corpus: Path, plan: Plan = WHOLE) -> Path:
    """A run that stops well at the base step, where it is copied to "base", and goes on."""
    run_dir = directory / "stopped"
    must_train(run_dir, corpus, plan.base_step, plan.layout, plan)
    shutil.copytree(run_dir, directory / "base")
    must_train(run_dir, corpus, plan.steps, plan.layout, plan)
    return run_dir


def must_train(
    run_dir: Path,
    corpus: Path,
    steps: int,
    layout: str,
    plan: Plan,
    settings: Sequence[str] = (),
) -> None:
    """Train to `steps`; RuntimeError with what was printed if that fails."""
    words = ["--steps", str(steps), "--layout", layout, *_words(plan, layout)]
    status, text = train(run_dir, corpus, *words, settings=settings, timeout_s=1200)
    if status != 0:
        raise RuntimeError(f"{layout} to step {steps} ended with {status}: {text[-2000:]}")


def killed(
    directory: Path,
    corpus: Path,
    unbroken: Path,
    rng: random.Random,
    kills: int,
    plan: Plan = WHOLE,
) -> Kills:
    """Kill a run `kills` times at random moments in all ways, let it end, and compare."""
    run_dir = directory / "killed"
    output = run_dir.with_suffix(".out")
    lines = run_dir / FILE_NAME
    words = ["--layout", plan.layout, "--steps", str(plan.steps), *_words(plan, plan.layout)]
    made: list[_Made] = []
    while len(made) < kills:
        process = start(run_dir, corpus, *words, output=output)
        done = lines.read_bytes().count(b"\n") if lines.exists() else 0
        # A moment of the start, or some steps later at any point within a step or a save. One
        # commit is made between two kills on average, so that the run gets on.
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 8))
        elif not wait_for_lines(process, run_dir, done + rng.randint(1, 2 * plan.save_every)):
            break
        time.sleep(rng.uniform(0, 0.4))
        made.append(_kill(process, run_dir, len(made) % len(WAYS)))
    process.wait(120)
    must_train(run_dir, corpus, plan.steps, plan.layout, plan)
    found = _judged(made, run_dir)
    wrong = [
        f"went on from an older state than there was: {one}" for one in found if not one.is_good
    ]
    return Kills(
        kills=tuple(found),
        generations=read_metrics(run_dir)[-1]["generation"],
        redone=lines.read_bytes().count(b"\n") - plan.steps,
        wrong=(*wrong, *differences(unbroken, run_dir, plan)),
    )


def _words(plan: Plan, layout: str) -> list[str]:
    hosts = plan.hosts if layout == plan.layout else 1
    return ["--checkpoint-every", str(plan.save_every), "--hosts", str(hosts)]


@dataclass(frozen=True, slots=True)
class _Made:
    """A kill as it was made: `begun` counts the beginnings before it."""

    way: int
    processes: int
    begun: int
    captured: tuple[int, ...]
    committed: int


def _kill(process: subprocess.Popen[bytes], run_dir: Path, way: int) -> _Made:
    """Kill in one of `WAYS`, and note what there was."""
    name = WAYS[way]
    processes = kill(process, keepers={"ranks": 0, "ranks and a keeper": 1}.get(name))
    if name in ("all and memory", "all but the store"):
        end_keepers(run_dir)
    if name == "all but the store":
        shutil.rmtree(run_dir / "hosts", ignore_errors=True)
    begun = _begun(run_dir)
    captured: tuple[int, ...] = ()
    if begun:
        now = begun[-1]
        of_it = [one for one in read_metrics(run_dir) if one["generation"] == now["generation"]]
        base = now["base"][1] if now["base"] else 0
        captured = (base, *(one["step"] for one in of_it if one["captured"]))
    return _Made(way, processes, len(begun), captured, _committed(run_dir))


def _judged(made: Sequence[_Made], run_dir: Path) -> list[Kill]:
    """The kills, those between two beginnings together, and what came of them."""
    begun, found = _begun(run_dir), []
    for count in sorted({one.begun for one in made}):
        of_it = [one for one in made if one.begun == count]
        worst = max(of_it, key=lambda one: one.way)
        captured = worst.captured or (0,)
        has_memory = worst.way < WAYS.index("all and memory")
        base = begun[count]["base"]
        found.append(
            Kill(
                way=WAYS[worst.way],
                processes=sum(one.processes for one in of_it),
                noted=captured[-1],
                floor=captured[-2:][0] if has_memory else worst.committed,
                base=base[1] if base else 0,
            )
        )
    return found


def _begun(run_dir: Path) -> list[dict[str, Any]]:
    """How the run began, each time."""
    return [one for one in read_events(run_dir) if one["event"] in ("started", "resumed")]


def _committed(run_dir: Path) -> int:
    """The step of the newest commit; 0: none."""
    if not (run_dir / "store" / "log").is_dir():
        return 0
    live = Log(open_store(run_dir / "store")).read().live
    return live[0].state.step if live else 0


def differences(unbroken: Path, run_dir: Path, plan: Plan = WHOLE) -> list[str]:
    """Where a run of the same layout is not bitwise equal to the one that never stopped."""
    found = []
    for ours, theirs in zip(exact_lines(run_dir), exact_lines(unbroken), strict=True):
        if ours != theirs:
            found.append(f"step {ours['step']}: {ours} instead of {theirs}")
    last = diff(open_at(unbroken, plan.steps), open_at(run_dir, plan.steps))
    found += [f"{one.name}: {one.differing} elements differ" for one in last.differing]
    return [*found, *last.only_in_a, *last.only_in_b, *last.changed, *last.values]


def open_at(run_dir: Path, step: int) -> CheckpointReader:
    """The checkpoint of a run at a step."""
    store = open_store(run_dir / "store")
    return open_checkpoint(store, find_live(Log(store).read(), step, store.url))


def other_layout(
    directory: Path,
    corpus: Path,
    unbroken: Path,
    layout: str,
    settings: Sequence[str],
    plan: Plan = WHOLE,
) -> Other:
    """Go on from the base step in another layout, and compare the next steps."""
    run_dir = directory / f"other-{layout}"
    shutil.copytree(directory / "base", run_dir)
    must_train(run_dir, corpus, plan.steps, layout, plan, settings)
    ours, theirs = (read_metrics(run)[plan.base_step :] for run in (run_dir, unbroken))
    return Other(
        layout=",".join((layout, *settings)),
        steps=len(ours),
        same_samples=[line["samples"] for line in ours] == [line["samples"] for line in theirs],
        loss_worst_relative=worst_relative(ours, theirs, "loss"),
        grad_norm_worst_relative=worst_relative(ours, theirs, "grad_norm"),
    )


def main(arguments: list[str]) -> int:
    """Run the proof whole; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-resume-") as name:
        directory = Path(name)
        corpus = make_corpus(directory)
        unbroken = uninterrupted(directory, corpus)
        stopped = stopped_once(directory, corpus)
        result = killed(directory, corpus, unbroken, random.Random(options.seed), options.kills)
        others = [
            other_layout(directory, corpus, unbroken, layout, settings)
            for layout, settings in OTHER_LAYOUTS
        ]
        wrong = [*result.wrong, *differences(unbroken, stopped)]
        wrong += [str(one) for one in others if not one.is_good]
        if not options.kills:
            wrong.append("nothing was killed")
        end_keepers()
    print_report(
        "resume",
        options.seed,
        {
            "steps": WHOLE.steps,
            "layout": WHOLE.layout,
            "hosts": WHOLE.hosts,
            "kills": [asdict(one) for one in result.kills],
            "generations": result.generations,
            "steps_redone": result.redone,
            "bar": FP32_BAR,
            "other_layouts": [asdict(one) for one in others],
            "wrong": len(wrong),
            "first_wrong": wrong[:5],
            "seconds": round(time.monotonic() - begun_s, 1),
        },
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
