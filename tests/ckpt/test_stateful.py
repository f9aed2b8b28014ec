"""Schedulers and scalers as values: they come back such that they go on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler as schedules

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.stateful import add_stateful

ONE = Mesh((MeshAxis("dp", 1),))

MAKERS: dict[str, Callable[[torch.optim.Optimizer], schedules.LRScheduler]] = {
    "multi": lambda one: schedules.MultiStepLR(one, [2, 3, 3]),
    "cosine": lambda one: schedules.CosineAnnealingLR(one, 5),
    "cycle": lambda one: schedules.OneCycleLR(one, 0.1, total_steps=20),
    "lambda": lambda one: schedules.LambdaLR(one, lambda epoch: 0.9**epoch),
    "restarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 3),
    "sequence": lambda one: schedules.SequentialLR(
        one, [schedules.ConstantLR(one), schedules.LinearLR(one)], [2]
    ),
}


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


def _saved(registry: Registry) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(registry.read_values()))


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_goes_on_where_it_was(name: str) -> None:
    rates: list[list[float]] = []
    saved: dict[str, object] = {}
    for is_second in (False, True):
        optimizer = _optimizer()
        schedule = MAKERS[name](optimizer)
        registry = Registry(ONE, 0)
        add_stateful(registry, "schedule", schedule)
        registry.add_value(
            "lr",
            lambda optimizer=optimizer: optimizer.param_groups[0]["lr"],
            lambda lr, optimizer=optimizer: optimizer.param_groups[0].update(lr=lr),
        )
        if is_second:
            for key, value in saved.items():
                assert registry.values[key].refuse(value) is None
                registry.values[key].write(value)
        else:
            for _ in range(2):
                optimizer.step()
                schedule.step()
            saved = _saved(registry)
        rates.append([])
        for _ in range(6):
            optimizer.step()
            schedule.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


def test_infinity_and_the_scaler_come_back() -> None:
    plateau = schedules.ReduceLROnPlateau(_optimizer())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    registry = Registry(ONE, 0)
    add_stateful(registry, "plateau", plateau)
    add_stateful(registry, "scaler", scaler)
    saved = _saved(registry)
    plateau.best, before = 1.0, plateau.best
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    for key, value in saved.items():
        registry.values[key].write(value)
    assert plateau.best == before == float("inf")
    assert scaler.get_scale() == 8.0


def test_what_is_not_plain_is_refused_by_name() -> None:
    class Held:
        def state_dict(self) -> dict[str, object]:
            return {"big": torch.ones(3)}

        def load_state_dict(self, state_dict: dict[str, object], /) -> None:
            raise NotImplementedError

    registry = Registry(ONE, 0)
    with pytest.raises(NotRepresentable, match=r"held.*big.*Tensor"):
        add_stateful(registry, "held", Held())
    add_stateful(registry, "schedule", MAKERS["cosine"](_optimizer()))
    assert registry.values["schedule"].refuse([1]) is not None
