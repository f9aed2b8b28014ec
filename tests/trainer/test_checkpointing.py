"""Saving beside training: what goes wrong is told, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keepstep.ckpt.entry import Generation
from keepstep.ckpt.errors import Superseded
from keepstep.ckpt.keys import entry_key
from keepstep.ckpt.log import Log
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.save import Saver
from keepstep.ckpt.structure import merge_structures
from keepstep.storage.memory import MemoryStore
from keepstep.trainer.checkpointing import Checkpointing

ONE = Mesh((MeshAxis("dp_shard", 1),))


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
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
