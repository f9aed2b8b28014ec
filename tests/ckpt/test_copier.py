"""The copy thread, its jobs and the guard: who waits for whom, and what a failure does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from keepstep.ckpt.copier import Copier, Copying
from keepstep.ckpt.copy_jobs import MemoryTaken, copy_jobs
from keepstep.ckpt.device_copies import DeviceCopies, SideStream
from keepstep.ckpt.guard import UpdateGuard

PATIENCE_S = 20.0


@pytest.fixture
def copier() -> Iterator[Copier]:
    one = Copier()
    yield one
    one.close()


class Ending:
    """Takes down how a copying ended."""

    def __init__(self) -> None:
        self.problems: list[Exception | None] = []

    def __call__(self, problem: Exception | None) -> None:
        self.problems.append(problem)


def _in_thread(act: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()

    def run() -> None:
        act()
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, done


def test_the_next_step_waits_for_a_slow_copy_and_nothing_else_does(copier: Copier) -> None:
    gate, began = threading.Event(), threading.Event()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = UpdateGuard([optimizer], copier.hold_update)
    ending = Ending()

    def slow() -> None:
        began.set()
        assert gate.wait(PATIENCE_S)

    copier.begin(Copying([slow], [], ending))
    assert began.wait(PATIENCE_S)
    (weight * 2.0).sum().backward()  # forward and backward go on
    thread, stepped = _in_thread(optimizer.step)
    assert not stepped.wait(0.2)
    assert weight.tolist() == [1.0, 1.0, 1.0]
    gate.set()
    assert stepped.wait(PATIENCE_S)
    thread.join()
    assert weight.tolist() == [-1.0, -1.0, -1.0]
    copier.wait()
    assert ending.problems == [None]
    guard.close()
    copier.begin(Copying([lambda: gate.clear()], [], ending))
    copier.wait()
    optimizer.step()  # without hooks


def test_who_waits_helps(copier: Copier) -> None:
    gate = threading.Event()
    doers: list[str] = []

    def hold() -> None:
        doers.append(threading.current_thread().name)
        assert gate.wait(PATIENCE_S)

    def note() -> None:
        doers.append(threading.current_thread().name)
        gate.set()

    copier.begin(Copying([hold, note], [], Ending()))
    copier.hold_update()
    assert len(set(doers)) == 2


def test_an_update_goes_on_before_the_end_is_told(copier: Copier) -> None:
    gate = threading.Event()

    def slow(problem: Exception | None) -> None:
        assert gate.wait(PATIENCE_S)

    copier.begin(Copying([], [], slow))
    copier.hold_update()
    gate.set()
    copier.wait()


def test_the_first_failure_is_told_and_what_is_left_is_not_done(copier: Copier) -> None:
    done: list[int] = []
    ending = Ending()

    def fail() -> None:
        raise ValueError("bad memory")

    began = threading.Event()
    jobs = [began.set, fail, *(lambda number=number: done.append(number) for number in range(9))]
    copying = Copying(jobs, [], ending)
    copier.begin(copying)
    copier.wait()
    (problem,) = ending.problems
    assert str(problem) == "bad memory"
    assert copying.problem is problem
    assert done == []
    copier.hold_update()
    copier.begin(Copying([lambda: done.append(1)], [], ending))  # and the thread lives
    copier.wait()
    assert done == [1]
    assert ending.problems[1] is None


def test_a_failure_to_report_does_not_end_the_thread(copier: Copier) -> None:
    def fail(problem: Exception | None) -> None:
        raise OSError("no table")

    copying = Copying([], [], fail)
    copier.begin(copying)
    copier.wait()
    assert isinstance(copying.problem, OSError)
    ending = Ending()
    copier.begin(Copying([], [], ending))
    copier.wait()
    assert ending.problems == [None]


def test_in_a_forked_process_nothing_is_being_copied(copier: Copier) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert gate.wait(PATIENCE_S)

    copier.begin(Copying([slow], [], Ending()))
    assert began.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))  # a child that waits for ever must not stay
        copier.hold_update()
        copier.wait()
        copier.close()
        os._exit(7)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    copier.wait()


SOURCES = {
    "big": lambda: torch.randn(1_000_000),
    "big of two pieces": lambda: torch.randn(1_500_001),
    "small": lambda: torch.randn(5, 3),
    "scalar": lambda: torch.tensor(3),
    "strided": lambda: torch.randn(300, 200).t(),
    "small strided": lambda: torch.randn(6, 5).t(),
    "part": lambda: torch.randn(400, 100)[100:300],
    "conj": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "big conj": lambda: torch.randn(40_000, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "fp8": lambda: torch.randn(70_000).to(torch.float8_e4m3fn),
    "bool": lambda: torch.rand(100_000) > 0.5,
}


def _targets(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """One piece of memory for all, each right behind the one before, as in an image."""
    memory = torch.zeros(sum(one.nbytes for one in sources), dtype=torch.uint8)
    targets, start = [], 0
    for one in sorted(sources, key=lambda one: -one.element_size()):
        data = memory[start : start + one.nbytes].view(one.dtype)
        targets.append((id(one), data.view(one.shape)))
        start += one.nbytes
    by_source = dict(targets)
    return [by_source[id(one)] for one in sources]


def _same(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for name, target, source in zip(SOURCES, targets, sources, strict=True):
        if source.dtype is torch.float8_e4m3fn:
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        assert torch.equal(target, source), name


def test_jobs_copy_tensors_of_every_kind() -> None:
    sources = [make() for make in SOURCES.values()]
    targets = _targets(sources)
    jobs = copy_jobs(targets, sources)
    assert len(jobs) == 1 + 3 + 3  # what is small; pieces of what is big; what is conjugated
    for job in reversed(jobs):
        job()
    _same(targets, sources)


def test_copies_from_a_device_copy_tensors_of_every_kind() -> None:
    sources = [make() for make in SOURCES.values()]
    targets = _targets(sources)
    stream = SideStream(torch.device("cpu"), torch.get_device_module("cpu"))
    stream.hold_current()  # nothing launched yet
    stream.mark()
    stream.launch(DeviceCopies(targets, sources))
    stream.hold_current()
    stream.settle()
    _same(targets, sources)


def test_small_ones_that_follow_each_other_come_from_a_device_in_one_transfer() -> None:
    sources = [torch.full((3,), float(number)) for number in range(100)]
    memory = torch.zeros(301)
    targets = [memory[3 * n : 3 * n + 3] for n in range(50)]
    targets += [memory[3 * n + 1 : 3 * n + 4] for n in range(50, 100)]
    copies = DeviceCopies(targets, sources)
    assert [len(join.sources) for join in copies._joins] == [50, 50]
    copies.launch()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


def test_memory_that_was_taken_away_is_not_read() -> None:
    for count in (100, 300_000):
        source = torch.randn(count)
        (job,) = copy_jobs([torch.empty(count)], [source])
        source.untyped_storage().resize_(0)
        with pytest.raises(MemoryTaken, match=rf"cut from {4 * count} to 0 bytes"):
            job()
