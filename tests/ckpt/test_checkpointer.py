"""The library with real keepers: killed, asked for the wrong thing, surprised by new state."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import keepstep
from keepstep.ckpt.errors import NotCommitted, NotRepresentable, WrongMoment
from keepstep.ckpt.events import read_events
from keepstep.trainer.config import load_config


def _made(directory: Path) -> keepstep.Checkpointer:
    return keepstep.Checkpointer(
        str(directory / "store"),
        job="library",
        run_dir=directory / "run",
        tiers=keepstep.Tiers(peers=0),
        keeper=keepstep.KeeperOptions(shm_dir=str(directory / "shm"), patience_s=10.0),
    )


def test_memory_is_held_by_default_as_long_as_the_trainer_holds_it() -> None:
    assert keepstep.KeeperOptions().patience_s == load_config(None).run.patience_s


def test_the_package_is_light_until_it_is_used() -> None:
    code = (
        "import sys, keepstep\n"
        "assert 'Checkpointer' in dir(keepstep)\n"
        "assert not {'torch', 'numpy', 'msgspec'} & set(sys.modules), 'heavy'\n"
        "assert keepstep.Tiers is keepstep.Tiers and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        keepstep.Nothing  # noqa: B018


@pytest.mark.ranks
def test_what_is_asked_at_the_wrong_moment_is_refused_and_a_late_save_says_so(
    tmp_path: Path,
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = _made(tmp_path)
    checkpointer.add_module(model)
    checkpointer.add_optimizer(optimizer)
    with pytest.raises(WrongMoment, match="begin"):
        checkpointer.capture(1)
    with checkpointer:
        assert checkpointer.begin() == 0
        with pytest.raises(WrongMoment, match="begun already"):
            checkpointer.begin()
        assert checkpointer.capture(0).skipped == ""  # before the first step
        assert checkpointer.capture(3).due == keepstep.Tiers().due(3, 0.0, 0.0)
        for late in (3, 2):
            with pytest.raises(WrongMoment, match="does not come after step 3"):
                checkpointer.capture(late)
        with pytest.raises(WrongMoment, match="does not come after step 3"):
            checkpointer.save(3)
        with pytest.raises(NotCommitted, match=r"step 4 is not committed.*the time is over"):
            checkpointer.save(4, timeout_s=0.0)
        checkpointer.save(5, timeout_s=60.0)
        assert checkpointer.committed == 5
        assert checkpointer.generation == 1
    with pytest.raises(WrongMoment, match="closed"):
        checkpointer.capture(6)
    checkpointer.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not list((tmp_path / "shm").glob("*"))


@pytest.mark.ranks
@pytest.mark.slow
def test_memory_that_takes_longer_than_patience_to_make_is_waited_for(tmp_path: Path) -> None:
    checkpointer = keepstep.Checkpointer(
        str(tmp_path / "store"),
        job="library",
        run_dir=tmp_path / "run",
        tiers=keepstep.Tiers(peers=0),
        keeper=keepstep.KeeperOptions(shm_dir=str(tmp_path / "shm"), patience_s=0.01),
    )
    checkpointer.add_module(nn.ParameterDict({"w": torch.zeros(10_000_000)}))
    with checkpointer:
        assert checkpointer.begin() == 0
        assert checkpointer.capture(1).skipped == ""


KILLED = """
import os, sys, time, signal
from pathlib import Path
import torch, keepstep
directory, steps, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Dropout(0.5), torch.nn.Linear(50, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
checkpointer = keepstep.Checkpointer(
    str(directory / "store"), job="killed", run_dir=directory / "run",
    tiers=keepstep.Tiers(peers=0, store=keepstep.TierPolicy(every_steps=4)),
    keeper=keepstep.KeeperOptions(shm_dir=str(directory / "shm"), patience_s=60.0),
)
checkpointer.add_module(model)
checkpointer.add_optimizer(optimizer)
step = checkpointer.begin()
print("begun", step, flush=True)
while step < steps:
    step += 1
    optimizer.zero_grad()
    model(torch.full((2, 4), float(step))).square().mean().backward()
    optimizer.step()
    if step == steps:
        break
    assert not checkpointer.capture(step).skipped
    snapshots = checkpointer._living().snapshots
    while snapshots.level().acked < step or step == 4 and checkpointer.committed < 4:
        time.sleep(0.01)
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer.save(step)
checkpointer.close()
print("end", [float(p.double().sum()) for p in model.parameters()], flush=True)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_killed_run_goes_on_from_memory_to_the_same_end(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def run(name: str, kill_at: int) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / name), "9", str(kill_at)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout.splitlines()

    code, straight = run("straight", 0)
    assert (code, straight[0]) == (0, "begun 0")
    # The second is killed before any commit could tell which state the optimizer makes.
    for name, kill_at in (("killed", 6), ("early", 3)):
        assert run(name, kill_at) == (-signal.SIGKILL, ["begun 0"])
        code, again = run(name, 0)
        assert (code, again[0]) == (0, f"begun {kill_at}")
        assert again[1] == straight[1]
        (resumed,) = read_events(tmp_path / name / "run", "resumed")
        assert resumed["is_committed"] is False
        assert set(resumed["read_bytes"]) == {"memory"}
        assert not list((tmp_path / name / "shm").glob("*"))


def _late(rank: int, world: int, directory: Path) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = nn.ParameterDict({"early": torch.ones(3), "late": torch.ones(1000)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    momentum = []
    for is_second in (False, True):
        checkpointer = _made(directory)
        checkpointer.add_module(model)
        checkpointer.add_optimizer(optimizer)
        assert checkpointer.begin() == (6 if is_second else 0)
        if is_second:
            momentum.append(float(optimizer.state[model["late"]]["momentum_buffer"].sum()))
            model["late"].data.zero_()
        for step in () if is_second else range(1, 6):
            model["early"].grad = torch.ones(3)
            model["late"].grad = torch.ones(1000) if step >= 3 else None
            optimizer.step()
            checkpointer.capture(step)
        if not is_second:
            checkpointer.save(6)
            optimizer.state.clear()
        checkpointer.close()
    told = read_events(directory / "run", "capture_failed")
    return [one["reason"] for one in told], momentum[0]


@pytest.mark.ranks
def test_state_that_an_optimizer_makes_late_is_planned_for_and_restored(tmp_path: Path) -> None:
    (told, momentum), _ = run_ranks(2, _late, tmp_path)
    assert momentum == pytest.approx(1000 * 2.71, rel=1e-6)  # of three steps
    assert {one.split()[1] for one in told} == {"3"}  # that step is nowhere, the next one is whole


def _nameless(rank: int, world: int, directory: Path) -> list[str]:
    found = []
    meshes = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,), mesh_dim_names=("a",))]
    half = dist.device_mesh.DeviceMesh("cpu", [rank], mesh_dim_names=("b",))
    for mesh in (meshes[0], half):
        try:
            keepstep.Checkpointer(str(directory), job="j", run_dir=directory, mesh=mesh)
        except NotRepresentable as error:
            found.append(str(error))
    keepstep.Checkpointer(str(directory), job="j", run_dir=directory, mesh=meshes[1])
    return found


@pytest.mark.ranks
def test_a_mesh_without_names_or_of_some_ranks_only_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, _nameless, tmp_path)
    assert "mesh_dim_names" in first[0]
    assert "ranks [1]" in second[1]
