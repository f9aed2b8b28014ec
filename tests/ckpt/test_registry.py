"""What can be registered, how it is described, and what is refused by name."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from tests.kit.states import Layout, Uneven, full_values
from torch import nn

from keepstep.ckpt.errors import BadName, NotRepresentable, PlanMismatch
from keepstep.ckpt.placement import Mesh, MeshAxis, Pin, Placement, Split
from keepstep.ckpt.region import Box
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.structure import HeldTensor, RankStructure, merge_structures

ONE = Layout().mesh
TWO = Mesh((MeshAxis("pp", 2), MeshAxis("tp", 2)))


def _tied() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(5, 3)
    model.output = nn.Linear(3, 5, bias=False)
    model.output.weight = model.embed.weight
    return model


def test_tied_parameters_are_one_tensor_and_an_alias() -> None:
    registry = Registry(ONE, 0)
    registry.add_module("model/", _tied())
    structure = registry.structure()
    assert list(structure.tensors) == ["model/embed.weight"]
    assert structure.aliases == {"model/output.weight": "model/embed.weight"}


def test_two_tensors_over_the_same_memory_are_one() -> None:
    registry = Registry(ONE, 0)
    base = torch.arange(6.0)
    registry.add_tensor("a", base)
    registry.add_tensor("b", base.detach())
    registry.add_tensor("part", base[2:])
    assert registry.structure().aliases == {"b": "a"}
    assert set(registry.tensors) == {"a", "part"}


def test_a_slice_is_its_own_elements_only() -> None:
    registry = Registry(ONE, 0)
    registry.add_tensor("slice", torch.zeros(1_000_000)[:10])
    registry.add_tensor("column", torch.arange(12.0).view(3, 4)[:, 1])
    assert registry.structure().tensors["slice"].shape == (10,)
    assert registry.tensors["column"].read().tolist() == [1, 5, 9]


def test_what_replaces_a_registered_tensor_is_what_is_read() -> None:
    model = nn.Linear(2, 2)
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    model.weight = nn.Parameter(torch.full((2, 2), 7.0))
    assert registry.tensors["model/weight"].read().tolist() == [[7, 7], [7, 7]]


def test_a_tensor_that_was_replaced_is_not_kept_alive() -> None:
    model = nn.Linear(2, 2)
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    gc.collect()
    assert old() is None


def test_a_tensor_that_has_changed_shape_is_refused_when_read() -> None:
    model = nn.Linear(2, 2)
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    model.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(NotRepresentable, match=r"model/weight.*\(2, 2\).*\(3, 2\)"):
        registry.tensors["model/weight"].read()


def test_only_persistent_buffers_belong_to_the_state() -> None:
    registry = Registry(ONE, 0)
    registry.add_module("model/", Uneven())
    assert "model/counter" in registry.tensors
    assert "model/scratch" not in registry.tensors


def test_a_plain_part_of_a_tensor_is_placed_by_its_splits() -> None:
    registry = Registry(TWO, 1)
    registry.add_tensor("part", torch.zeros(3, 4), splits=[Split("tp", 0)], shape=(7, 4))
    assert registry.tensors["part"].box == Box((4, 0), (3, 4))


def test_a_plain_part_of_the_wrong_size_is_refused() -> None:
    registry = Registry(TWO, 1)
    with pytest.raises(NotRepresentable, match=r"'?part'?.*\(3, 4\).*\(4, 4\)"):
        registry.add_tensor("part", torch.zeros(4, 4), splits=[Split("tp", 0)], shape=(7, 4))


def test_a_pin_elsewhere_is_refused() -> None:
    registry = Registry(TWO, 0)
    with pytest.raises(NotRepresentable, match="nothing on rank 0"):
        registry.add_tensor("t", torch.zeros(1), at=[Pin("pp", (1,))])


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(2, 3).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(1).expand(5), "expanded"),
        (nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        (torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {})), "Odd"),
    ],
    ids=["sparse", "meta", "expanded", "uninitialized", "subclass"],
)
def test_what_could_not_be_given_back_is_refused_by_name(tensor: torch.Tensor, says: str) -> None:
    registry = Registry(ONE, 0)
    with pytest.raises(NotRepresentable, match=f"the-name.*{says}"):
        registry.add_tensor("the-name", tensor)
    assert not registry.tensors


def test_a_name_can_be_used_once() -> None:
    registry = Registry(ONE, 0)
    registry.add_tensor("a", torch.zeros(1))
    with pytest.raises(NotRepresentable, match=r"a: .*already"):
        registry.add_value("a", lambda: 1, lambda value: None)
    with pytest.raises(BadName):
        registry.add_tensor("../a", torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "not a finite number"),
        (2**63, "63 bits"),
        ((1, 2), "tuple"),
        ({"a": [{1: 2}]}, r"\['a'\]\[0\] has the key 1"),
        ({"a": torch.zeros(1)}, r"\['a'\] is a torch.Tensor"),
        ("\ud800", "Unicode"),
        (b"bytes", "bytes"),
    ],
    ids=repr,
)
def test_values_that_json_would_not_give_back_are_refused(value: object, says: str) -> None:
    registry = Registry(ONE, 0)
    with pytest.raises(NotRepresentable, match=f"cursor: .*{says}"):
        registry.add_value("cursor", lambda: value, lambda value: None)


def test_values_that_json_gives_back_are_kept() -> None:
    registry = Registry(ONE, 0)
    value = {"a": [1, -(2**63) + 1, 0.1, None, True, "é"], "": {}}
    registry.add_value("cursor", lambda: value, lambda value: None)
    assert registry.read_values() == {"cursor": value}


# The optimizer's state.


def _trained(steps: int, made_early: bool, amsgrad: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(
        [*model.parameters(), frozen, unused], fused=True, amsgrad=amsgrad
    )
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    registry.add_tensor("model/frozen", frozen)
    registry.add_tensor("model/unused", unused)
    if made_early:
        registry.add_optimizer("optimizer/", optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return [*model.parameters(), frozen, unused]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_making_the_state_early_changes_no_bit_of_training(amsgrad: bool) -> None:
    early = _trained(3, made_early=True, amsgrad=amsgrad)
    late = _trained(3, made_early=False, amsgrad=amsgrad)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


def test_the_state_of_a_fused_adam_exists_after_registration() -> None:
    model = Uneven()
    full_values(model)
    before = [param.clone() for param in model.parameters()]
    grads = [torch.full_like(param, 3.0) for param in model.parameters()]
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    registry.add_optimizer("optimizer/", optimizer)
    assert not registry.has_absent_state()
    assert registry.tensors["optimizer/up.weight/exp_avg"].read().abs().sum() == 0
    assert registry.tensors["optimizer/up.weight/step"].read().item() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert not hasattr(optimizer, "found_inf")
    assert stepped == []


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"amsgrad": True}, {"fused": True}, {"capturable": False}]
)
def test_state_made_early_is_the_one_that_the_first_step_would_make(
    kind: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    models = [Uneven(), Uneven()]
    optimizers = [kind(model.parameters(), lr=0.1, **options) for model in models]  # type: ignore[call-arg]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizers[0].param_groups
    ]
    registry = Registry(ONE, 0)
    registry.add_module("model/", models[0])
    registry.add_optimizer("optimizer/", optimizers[0])
    assert not registry.has_absent_state()
    for group, before in zip(optimizers[0].param_groups, groups, strict=True):
        assert {key: value for key, value in group.items() if key != "params"} == before
    for model in models:
        full_values(model)
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5 + number)
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        states = optimizers[0].state[one], optimizers[1].state[other]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key])
            assert (value.dtype, value.device) == (states[1][key].dtype, states[1][key].device)


def test_state_that_cannot_be_made_early_is_found_after_the_first_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    registry.add_optimizer("optimizer/", optimizer)
    assert registry.has_absent_state()
    assert not registry.refresh()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert registry.refresh()
    assert not registry.has_absent_state()
    assert "optimizer/weight/momentum_buffer" in registry.tensors


def test_state_of_a_frozen_parameter_is_not_made() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    registry = Registry(ONE, 0)
    registry.add_module("model/", model)
    registry.add_optimizer("optimizer/", optimizer)
    assert "optimizer/weight/exp_avg" in registry.tensors
    assert "optimizer/bias/exp_avg" not in registry.tensors


def test_a_parameter_that_nobody_registered_is_refused() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))], fused=True)
    registry = Registry(ONE, 0)
    with pytest.raises(NotRepresentable, match=r"parameter 0 of shape \(3,\)"):
        registry.add_optimizer("optimizer/", optimizer)


def test_group_options_come_back_as_what_they_were() -> None:
    weight = nn.Parameter(torch.zeros(3))
    lr = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": lr, "mine": "x"}], fused=True)
    registry = Registry(ONE, 0)
    registry.add_tensor("model/w", weight)
    registry.add_optimizer("optimizer/", optimizer)
    saved = registry.read_values()["param_groups"]
    assert saved[0]["lr"] == lr.item()
    group = optimizer.param_groups[0]
    lr.fill_(0.5)
    group.update(betas=(0.1, 0.2), mine="y")
    registry.values["param_groups"].write(saved)
    assert group["lr"] is lr
    assert lr.item() == torch.tensor(0.1).item()
    assert group["betas"] == (0.9, 0.999)
    assert group["mine"] == "x"


def test_a_group_option_that_is_no_json_is_refused_by_group_and_name() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([{"params": [weight], "rule": object()}], fused=True)
    registry = Registry(ONE, 0)
    registry.add_tensor("model/w", weight)
    with pytest.raises(NotRepresentable, match=r"param_groups\[0\]\['rule'\]"):
        registry.add_optimizer("optimizer/", optimizer)


# The ranks' views together.


def _view(rank: int, mesh: Mesh = TWO, **tensors: HeldTensor) -> RankStructure:
    return RankStructure(rank=rank, mesh=mesh, tensors=tensors, aliases={})


EVERYWHERE = HeldTensor(shape=(4,), dtype="F32", placement=Placement())
FIRST = HeldTensor(shape=(4,), dtype="F32", placement=Placement(at=(Pin("pp", (0,)),)))


def test_views_of_stages_join_into_one_structure_in_any_order() -> None:
    views = [_view(0, a=FIRST), _view(1, a=FIRST), _view(2), _view(3)]
    assert merge_structures(views) == merge_structures(views[::-1])
    assert list(merge_structures(views).tensors) == ["a"]


@pytest.mark.parametrize(
    ("views", "says", "ranks"),
    [
        (
            [_view(0, a=EVERYWHERE), _view(1, a=EVERYWHERE), _view(2, a=EVERYWHERE), _view(3)],
            r"'a' lies on ranks \[0, 1, 2, 3\], but ranks \[3\] do not hold it",
            (3,),
        ),
        (
            [_view(0, a=FIRST), _view(1, a=FIRST), _view(2, a=FIRST), _view(3)],
            r"ranks \[2\] hold it besides",
            (2,),
        ),
        (
            [
                _view(0, a=EVERYWHERE),
                _view(1, a=EVERYWHERE),
                _view(2, a=EVERYWHERE),
                _view(3, a=HeldTensor(shape=(5,), dtype="F32", placement=Placement())),
            ],
            r"'a' has shape \(4,\) on rank 0, but \(5,\) on rank 3",
            (3,),
        ),
        ([_view(0), _view(1), _view(2)], r"ranks 0 to 3, but .*\[0, 1, 2\]", (0, 1, 2)),
        ([_view(0), _view(1), _view(2), _view(3, ONE)], r"ranks \[3\] have another mesh", (3,)),
    ],
    ids=["missing", "besides", "shape", "rank", "mesh"],
)
def test_contradictions_name_tensor_and_ranks(
    views: list[RankStructure], says: str, ranks: tuple[int, ...]
) -> None:
    with pytest.raises(PlanMismatch, match=says) as caught:
        merge_structures(views)
    assert caught.value.ranks == ranks
