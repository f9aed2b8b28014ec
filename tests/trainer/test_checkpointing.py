"""Saving beside training: what goes wrong is told, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.ranks import run_ranks

from keepstep.ckpt.agree import gather_structure
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.errors import Superseded
from keepstep.ckpt.keys import entry_key, image_key, state_prefix
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.save import Saver
from keepstep.ckpt.structure import merge_structures
from keepstep.storage.errors import NoSpace
from keepstep.storage.locate import open_store
from keepstep.storage.memory import MemoryStore
from keepstep.trainer.checkpointing import Checkpointing

ONE = Mesh((MeshAxis("dp_shard", 1),))


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ranks"):
        yield
        return
    rendezvous = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """One rank that saves into a memory store."""

    def __init__(self, keep: int = 0) -> None:
        self.store = MemoryStore()
        self.log = Log(self.store, job="run-a")
        self.log.take_term("a test")
        self.log.append(Generation(1, ("here",), ONE, None, None, {}))
        self.told: list[tuple[str, str]] = []
        registry = Registry(ONE, 0)
        registry.add_tensor("model/w", torch.arange(8.0))
        structure = merge_structures([registry.structure()])
        self.checkpointing = Checkpointing(
            Saver(registry, structure, self.store, "run-a"),
            structure,
            self.store,
            job_name="run-a",
            generation=1,
            log=self.log,
            policy=Policy(keep_last=keep),
            control=None,
            tell=lambda kind, reason, **_: self.told.append((kind, reason)),
            last=None,
        )

    def save(self, step: int) -> bool:
        self.checkpointing.save(step)
        return self.checkpointing.finish()

    def damage_next_entry(self) -> None:
        self.store.put(entry_key(self.log.read().next_seq), b"\0" * 100)


def test_a_log_that_somebody_damaged_fails_the_save_and_not_the_run() -> None:
    run = Run()
    assert run.save(10)
    run.damage_next_entry()
    assert not run.save(20)
    kind, reason = run.told[-1]
    assert kind == "checkpoint_failed"
    assert "step 20 was not saved: log/000000/000000003" in reason
    assert "the last good commit is step 10" in reason
    run.checkpointing.close()


def test_a_log_that_somebody_damaged_fails_retention_and_not_the_run() -> None:
    run = Run(keep=1)
    assert run.save(10)
    run.damage_next_entry()
    run.checkpointing.collect()
    assert run.told[-1][0] == "retention_failed"
    run.checkpointing.close()


def test_a_run_that_was_superseded_ends_at_its_next_commit() -> None:
    run = Run()
    Log(run.store, job="run-a").take_term("a newer run")
    with pytest.raises(Superseded, match="a newer run took term 2"):
        run.save(10)
    run.checkpointing.close()


def _save_while_the_other_rank_cannot(rank: int, world: int, root: str) -> list[str]:
    mesh = Mesh((MeshAxis("dp_shard", world),))
    refuses = Fault(Action.FAIL, operations=frozenset({"put"}), error=NoSpace, errno=28)
    inner = open_store(root)
    store = FaultyStore(inner, *([refuses] if rank == 1 else []))
    log = Log(inner, job="run-a") if rank == 0 else None
    if log is not None:
        log.take_term("a test")
        log.append(Generation(1, ("here",), mesh, None, None, {}))
    registry = Registry(mesh, rank)
    registry.add_tensor("model/w", torch.arange(1 << 18).float())
    structure = gather_structure(None, registry)
    checkpointing = Checkpointing(
        Saver(registry, structure, store, "run-a"),
        structure,
        store,
        job_name="run-a",
        generation=1,
        log=log,
        policy=Policy(),
        control=None,
        tell=lambda *_, **__: None,
        last=None,
    )
    found = []
    for step in (10, 20):
        checkpointing.save(step)
        made = checkpointing.finish()
        dist.barrier()
        files = [info.key for info in inner.list("states/")]
        found.append(f"{made} {len(files)}")
    checkpointing.close()
    return found


@pytest.mark.ranks
def test_a_save_that_failed_on_one_rank_leaves_no_image_of_another(tmp_path: Path) -> None:
    results = run_ranks(2, _save_while_the_other_rank_cannot, str(tmp_path))
    assert results == [["False 0", "True 3"]] * 2


def test_what_an_earlier_run_left_goes_at_the_start_and_no_commit_with_it() -> None:
    run = Run(keep=1)
    assert run.save(10)
    assert run.save(20)
    run.store.put(image_key(State(1, 15), 0), b"left")
    run.checkpointing.collect(leftovers_only=True)
    assert [commit.state.step for commit in run.log.read().live] == [20, 10]
    assert not list(run.store.list(state_prefix(State(1, 15))))
    run.checkpointing.close()
