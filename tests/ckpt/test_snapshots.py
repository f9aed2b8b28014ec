"""Captures of a live training: each image is the state of its moment, and nothing waits long."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.kit.slots import JOB, NOBODY, Shelves, opened, shelves
from torch import nn

from keepstep.ckpt.errors import NotRepresentable, WrongMoment
from keepstep.ckpt.keeper_errors import Stale
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin
from keepstep.ckpt.pool_table import VALUES_BYTES, SlotStatus
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slots import OWNS_NOTHING, Level
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.structure import merge_structures
from keepstep.ckpt.tiers import Due

ONE = Mesh((MeshAxis("dp", 1),))
PATIENCE_S = 20.0


class Net(nn.Module):
    """Has a big tensor, small ones, buffers that change in forward, a frozen and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.randn(300, 200))
        self.layers = nn.Sequential(nn.Linear(200, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return self.layers(self.big).sum() + self.frozen.sum()


class Training:
    """A net, its optimizer, and the registry of both."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        self.net = Net()
        params = [one for one in self.net.parameters() if one.requires_grad]
        self.optimizer = (
            torch.optim.AdamW(params, lr=0.1, fused=True) if make is None else make(params)
        )
        self.step_count = 0
        self.registry = Registry(ONE, 0)
        self.registry.add_module("model/", self.net)
        self.registry.add_optimizer("optimizer/", self.optimizer)
        self.registry.add_rank_tensor("rng", torch.get_rng_state, torch.set_rng_state)
        self.registry.add_value("step", lambda: self.step_count, self._set)

    def _set(self, value: int) -> None:
        self.step_count = value

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net().backward()
        self.optimizer.step()
        self.step_count += 1

    def now(self) -> dict[str, torch.Tensor]:
        return {name: held.read().clone() for name, held in self.registry.tensors.items()}


def _check(place: Shelves, step: int, wanted: dict[str, torch.Tensor]) -> None:
    found = place.tensors(step)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_an_image_is_the_state_of_its_moment_whatever_comes_after(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        for step in range(1, 30):
            training.step()
            wanted = training.now()
            done = snapshots.capture(State(1, step), Due.NOWHERE, snapshots.level())
            assert done.skipped == ""
            training.step()  # forward changes buffers at once, the optimizer all else
            training.net.frozen.data.add_(1.0)
            snapshots.wait()
            _check(place, step, wanted)
            assert place.of(step).values == b'{"param_groups":' + _groups(training) + (
                b',"step":%d}' % (2 * step - 1)
            )
            place.seal()
        assert snapshots.take_problems() == []
        assert place.seat.captured == 29
        assert "medians of 12" in snapshots.take_choice()
        assert snapshots.take_choice() == ""


def _groups(training: Training) -> bytes:
    return msgspec.json.encode(training.registry.values["param_groups"].read())


def test_the_slots_go_round_by_the_rule_and_a_full_house_is_skipped(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        state = State(1, 1)
        assert snapshots.capture(state, Due.STORE, NOBODY).due is Due.STORE
        done = snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level())
        assert "one slot until" in done.skipped
        snapshots.wait()
        place.seal()
        assert snapshots.level() == Level(1, -1, -1)
        for step in (3, 4):
            assert not snapshots.capture(State(1, step), Due.NOWHERE, snapshots.level()).skipped
        snapshots.wait()
        place.seal(acked=False)
        assert (
            "no free slot" in snapshots.capture(State(1, 5), Due.NOWHERE, snapshots.level()).skipped
        )
        place.seal()
        place.seat.drained = 1
        done = snapshots.capture(State(1, 6), Due.NOWHERE, snapshots.level())
        assert not done.skipped
        snapshots.wait()
        assert {one.state.step for one in place.slots} == {3, 4, 6}
        assert place.seat.skipped == 2
        assert (place.seat.agreed_acked, place.seat.agreed_drained) == (4, 1)


def test_a_tensor_that_is_not_what_was_registered_loses_the_capture_and_is_told(
    tmp_path: Path,
) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        good = training.net.frozen.data
        training.net.frozen.data = torch.randn(6)
        snapshots.capture(State(1, 1), Due.DISK, NOBODY)
        ((state, words),) = snapshots.take_problems()
        assert state == State(1, 1)
        assert "model/frozen" in words
        assert snapshots.take_problems() == []
        assert snapshots.level() == Level(-1, 1, 1)  # lost, so that nobody waits for its drain
        assert place.slots[0].status is SlotStatus.FREE
        training.net.frozen.data = good
        done = snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level())
        assert not done.skipped
        wanted = training.now()
        training.step()
        snapshots.wait()
        _check(place, 2, wanted)


def test_a_failure_behind_the_call_frees_the_slot_and_is_told(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        storage = training.net.big.untyped_storage()
        data = training.net.big.detach().clone()
        storage.resize_(240_000 - 4)  # in place: same object, same address
        snapshots.capture(State(1, 1), Due.STORE, NOBODY)
        snapshots.wait()
        ((state, words),) = snapshots.take_problems()
        assert state.step == 1
        assert "MemoryTaken" in words
        assert snapshots.level() == Level(-1, 1, 1)
        assert place.slots[0].status is SlotStatus.FREE
        storage.resize_(240_000)
        training.net.big.data.copy_(data)
        training.step()
        wanted = training.now()
        assert not snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level()).skipped
        snapshots.wait()
        _check(place, 2, wanted)


def test_optimizers_of_every_kind_are_held_up(tmp_path: Path) -> None:
    def closure_of(training: Training) -> Callable[[], float]:
        def closure() -> float:
            training.optimizer.zero_grad()
            loss = training.net()
            loss.backward()
            return float(loss.detach())

        return closure

    for number, make in enumerate(
        (
            lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda params: torch.optim.Rprop(params),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        training = Training(make)
        training.step()
        training.registry.refresh()
        with opened(directory, training.registry) as (snapshots, place):
            wanted = training.now()
            snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
            training.optimizer.step(closure_of(training))  # the closure runs behind the guard
            snapshots.wait()
            _check(place, 1, wanted)
        assert not training.optimizer._optimizer_step_pre_hooks


def test_a_step_that_fails_or_is_rejected_changes_nothing_for_captures(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):

        def bad() -> float:
            raise ZeroDivisionError

        wanted = training.now()
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        with pytest.raises(ZeroDivisionError):
            training.optimizer.step(bad)
        snapshots.wait()
        place.seal()
        _check(place, 1, wanted)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(training.net() * float("inf")).backward()
        scaler.step(training.optimizer)
        scaler.update()
        wanted = training.now()
        snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level())
        training.step()
        snapshots.wait()
        _check(place, 2, wanted)
        assert torch.equal(wanted["model/big"], place.tensors(1)["model/big"])


def test_several_optimizers_all_wait(tmp_path: Path) -> None:
    left, right = nn.Parameter(torch.randn(200_000)), nn.Parameter(torch.randn(200_000))
    module = nn.ParameterDict({"left": left, "right": right})
    registry = Registry(ONE, 0)
    registry.add_module("model/", module)
    optimizers = [torch.optim.SGD([one], lr=1.0) for one in (left, right)]
    for number, one in enumerate(optimizers):
        registry.add_optimizer(f"optimizer{number}/", one, groups_name=f"groups{number}")
    with opened(tmp_path, registry) as (snapshots, place):
        assert snapshots.inside_bytes == 0
        wanted = {name: held.read().clone() for name, held in registry.tensors.items()}
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        for one in (right, left):
            one.grad = torch.ones_like(one)
        for optimizer in reversed(optimizers):
            optimizer.step()
        snapshots.wait()
        _check(place, 1, wanted)


def test_state_that_comes_to_exist_later_is_never_left_out_silently(tmp_path: Path) -> None:
    training = Training(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    with opened(tmp_path, training.registry) as (snapshots, place):
        assert training.registry.has_absent_state()
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)  # before the first step: whole
        snapshots.wait()
        place.seal()
        assert "model/big" in place.tensors(1)
        assert not snapshots.has_new_state
        training.step()
        assert snapshots.has_new_state
        snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level())
        ((state, words),) = snapshots.take_problems()
        assert state.step == 2
        assert "made anew" in words
        assert snapshots.level().lost == 2
    training.registry.refresh()
    (tmp_path / "2").mkdir()
    with opened(tmp_path / "2", training.registry) as (snapshots, place):
        assert not snapshots.has_new_state
        wanted = training.now()
        assert "optimizer/big/momentum_buffer" in wanted
        snapshots.capture(State(1, 3), Due.NOWHERE, NOBODY)
        training.step()
        assert not snapshots.has_new_state
        snapshots.wait()
        _check(place, 3, wanted)


def test_an_older_generation_is_told_to_end(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        place.pool.header.raise_fence(2)
        with pytest.raises(Stale, match="promised"):
            snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        with pytest.raises(WrongMoment, match="generation 1"):
            snapshots.capture(State(2, 1), Due.NOWHERE, NOBODY)


def test_a_slot_that_is_not_ours_any_more_loses_the_capture(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        place.slots[0].claim(place.slots[0].owner.writer, 0, State(1, 1), Due.NOWHERE)
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        ((_, words),) = snapshots.take_problems()
        assert "expected FREE or SEALED, found FILLING" in words


def test_values_that_are_too_long_are_refused_at_the_beginning(tmp_path: Path) -> None:
    training = Training()
    training.registry.add_value("text", lambda: "x" * VALUES_BYTES, lambda value: None)
    with (
        pytest.raises(NotRepresentable, match="put what is large"),
        opened(tmp_path, training.registry),
    ):
        pass


def test_values_that_grow_too_long_lose_the_capture(tmp_path: Path) -> None:
    training, text = Training(), ["short"]
    training.registry.add_value("text", lambda: text[0], lambda value: None)
    with opened(tmp_path, training.registry) as (snapshots, place):
        text[0] *= VALUES_BYTES
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        assert "put what is large" in snapshots.take_problems()[0][1]
        assert place.slots[0].status is SlotStatus.FREE


def test_a_rank_that_owns_nothing_holds_nobody_up(tmp_path: Path) -> None:
    two = Mesh((MeshAxis("pp", 2),))
    registries = [Registry(two, rank) for rank in range(2)]
    registries[0].add_tensor("t", torch.ones(3), at=[Pin("pp", (0,))])
    structure = merge_structures([one.structure() for one in registries])
    snapshots = Snapshots(registries[1], structure, JOB)
    assert (snapshots.header, snapshots.size_bytes, snapshots.owns_bytes) == (b"", 0, False)
    with shelves(tmp_path, 4096, slots=0, rank=1) as place:
        snapshots.open(place.entered, 1, 3)
        assert snapshots.level() == OWNS_NOTHING
        done = snapshots.capture(State(1, 1), Due.STORE, NOBODY)
        assert (done.skipped, done.due) == ("", Due.STORE)
        assert snapshots.level() == OWNS_NOTHING
        snapshots.close()


def test_the_keeper_is_rung_and_nobody_minds_if_it_does_not_hear(tmp_path: Path) -> None:
    training = Training()
    with opened(tmp_path, training.registry) as (snapshots, place):
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        snapshots.wait()
        place.seal()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.bind(str(tmp_path / "bell"))
            bell.settimeout(PATIENCE_S)
            snapshots.capture(State(1, 2), Due.NOWHERE, snapshots.level())
            assert bell.recv(10)
        assert snapshots.take_problems() == []


def test_closing_waits_for_the_copy_and_leaves_no_hook_and_no_thread(tmp_path: Path) -> None:
    training = Training()
    threads = threading.active_count()
    with opened(tmp_path, training.registry) as (snapshots, place):
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        snapshots.close()
        assert place.slots[0].status is SlotStatus.CAPTURED
        snapshots.close()
        with pytest.raises(WrongMoment, match="not open"):
            snapshots.capture(State(1, 2), Due.NOWHERE, NOBODY)
        assert threading.active_count() == threads
        training.step()


def test_many_small_tensors_are_all_there(tmp_path: Path) -> None:
    registry = Registry(ONE, 0)
    tensors = [torch.randn(256) for _ in range(5_000)]
    for number, tensor in enumerate(tensors):
        registry.add_tensor(f"t{number:04}", tensor)
    with opened(tmp_path, registry) as (snapshots, place):
        snapshots.capture(State(1, 1), Due.NOWHERE, NOBODY)
        wanted = [one.clone() for one in tensors]
        for one in tensors:
            one.zero_()  # nothing updates them but the user, so all was copied inside the call
        snapshots.wait()
        found = place.tensors(1)
        assert all(torch.equal(found[f"t{n:04}"], one) for n, one in enumerate(wanted))
