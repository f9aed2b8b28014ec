"""What may change on resuming; and, with real ranks, that a killed run goes on to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.kit.runs import make_corpus
from tests.prove import resume as proof

from keepstep.trainer.config import config_tree, load_config
from keepstep.trainer.errors import ResumeRefused
from keepstep.trainer.resume import FIXED, check_resumable, differences


def tree(*settings: str) -> dict[str, dict[str, object]]:
    made = config_tree(load_config(None, settings))
    made["data"]["digest"] = "abc"
    return made


def test_an_unchanged_configuration_has_nothing_to_tell() -> None:
    assert check_resumable("x", tree(), tree()) == []
    assert differences(tree(), tree()) == {}


@pytest.mark.parametrize(
    "setting",
    [
        "run.seed=1",
        "model.layers=8",
        "model.tied=true",
        "model.rope_theta=1.0",
        "data.heldout_fraction=0.1",
        "batch.global_batch=32",
        "numerics.dtype=bf16",
    ],
)
def test_what_makes_another_run_is_refused_naming_key_and_values(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ResumeRefused) as refused:
        check_resumable("step 4", tree(), tree(setting))
    (line,) = refused.value.differences
    assert line.startswith(f"{key}: ")
    assert value in line.lower()
    assert "step 4" in str(refused.value)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(ResumeRefused) as refused:
        check_resumable("x", tree(), tree("run.seed=1", "model.dim=128", "optim.lr=1.0"))
    assert len(refused.value.differences) == 2


def test_a_key_that_one_side_lacks_is_a_difference() -> None:
    older = tree()
    del older["model"]["norm_eps"]
    with pytest.raises(ResumeRefused, match=r"norm_eps: None there, 1e-05 here"):
        check_resumable("x", older, tree())
    with pytest.raises(ResumeRefused, match=r"data\.digest"):
        check_resumable("x", {}, tree())


def test_other_changes_are_told_and_when_to_stop_is_none() -> None:
    changed = tree("optim.lr=1.0", "batch.micro_batch=1", "run.keep=0")
    assert check_resumable("x", tree(), changed) == [
        "run.keep: 5 there, 0 here",
        "batch.micro_batch: 4 there, 1 here",
        "optim.lr: 0.01 there, 1.0 here",
    ]
    assert check_resumable("x", tree(), tree("run.steps=9", "parallel.tp=1", "data.path=y")) == []


def test_every_fixed_key_exists() -> None:
    flat = {f"{section}.{key}" for section, keys in tree().items() for key in keys}
    for fixed in FIXED:
        assert any(name.startswith(fixed) for name in flat), fixed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_in_every_way_goes_on_from_the_newest_state_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """A slice of the proof: four ranks on two hosts, killed five times at random moments."""
    slice_of = proof.Plan(layout="dp=2,tp=2,pp=1", steps=30, base_step=8, save_every=3)
    corpus = make_corpus(tmp_path)
    unbroken = proof.uninterrupted(tmp_path, corpus, slice_of)
    found = proof.killed(tmp_path, corpus, unbroken, random.Random(2), 5, slice_of)
    assert found.wrong == ()
    assert len(found.kills) >= 3
    assert min(kill.processes for kill in found.kills) >= 1


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_layout_goes_on_within_the_fp32_bar_with_the_same_samples(tmp_path: Path) -> None:
    """A slice of the proof: from four ranks to two that split the pipeline."""
    slice_of = proof.Plan(layout="dp=2,tp=2,pp=1", steps=12, base_step=4, save_every=4)
    corpus = make_corpus(tmp_path)
    unbroken = proof.stopped_once(tmp_path, corpus, slice_of)
    found = proof.other_layout(tmp_path, corpus, unbroken, "dp=1,tp=1,pp=2", (), slice_of)
    assert found.same_samples
    assert found.steps == 8
    assert found.loss_worst_relative <= proof.FP32_BAR
