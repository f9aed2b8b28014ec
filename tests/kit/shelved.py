"""Sealed images of a little state, as a keeper has them on its shelf; and a reporter that listens.

The bytes are those of `checkpoints.write_images`: two ranks, a few tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.checkpoints import PLACEMENTS, TENSORS, write_images
from tests.kit.logs import MESH, generation, open_log

from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.plan import plan_digest
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Due, TierPolicy, Tiers
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

JOB = "run-a"
BOTH = Due.DISK | Due.STORE
WAIT_S = 60.0
READ_BYTES_MAX = 1 << 24


def structure_of(tensors: dict[str, TensorSpec] = TENSORS) -> Structure:
    """What both ranks registered."""
    return Structure(
        mesh=MESH,
        placements=PLACEMENTS,
        tensors=tensors,
        aliases={"model/output.weight": min(tensors)},
        digest=plan_digest(MESH, PLACEMENTS, tensors),
    )


def shelve(
    state: State,
    due: Due = BOTH,
    ranks: Sequence[int] = (0, 1),
    tensors: dict[str, TensorSpec] = TENSORS,
) -> list[Shelved]:
    """The sealed images of these ranks, in memory of their own."""
    source = MemoryStore()
    manifest = write_images(source, state, tensors, JOB)
    made = []
    for record in manifest.images:
        if record.rank not in ranks:
            continue
        data = bytearray(source.get(image_key(state, record.rank), READ_BYTES_MAX))
        head = bytes(data[: header_size(data, "image", len(data))])
        made.append(
            Shelved(
                state=state,
                rank=record.rank,
                is_own=True,
                header=parse(head, "image", len(data)),
                record=record,
                due=due,
                slot=record.rank,
                view=memoryview(data),
                values=manifest.values,
                structure=structure_of(tensors),
            )
        )
    return made


def tenure_of(
    number: int = 1,
    *,
    term: int = 1,
    base: State | None = None,
    hosts: Sequence[int] = (0, 0),
    host: int = 0,
    disk: TierPolicy | None = None,
    store: TierPolicy | None = None,
    tensors: dict[str, TensorSpec] = TENSORS,
) -> Tenure:
    """Generation `number` as host `host` sees it; rank r is on host `hosts[r]`, host 0 commits."""
    return Tenure(
        job=JOB,
        host=f"h{host}",
        generation=number,
        term=term,
        ranks=tuple(rank for rank, at in enumerate(hosts) if at == host),
        hosts=tuple(hosts),
        addresses=tuple(HostAddress(f"h{at}", "", "") for at in range(max(hosts) + 1)),
        committer=0,
        base=base,
        structure=structure_of(tensors),
        tiers=Tiers(disk=disk or TierPolicy(keep=2), store=store or TierPolicy(keep=5)),
    )


def begin_generation(store: Store, number: int = 1, base: State | None = None) -> int:
    """Take a term, and begin a generation in it, as rank 0 does. Returns the term."""
    log = open_log(store, job=JOB)
    term = log.take_term("rank 0 on host-a, pid 1")
    log.append(generation(number, base=base))
    return term


@dataclass
class Ear:
    """A `Reporter` that remembers, and can be waited on."""

    drained_steps: dict[int, list[int]] = field(default_factory=dict)
    commits: list[State] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    failures: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def acked(self, rank: int, step: int) -> None:
        raise NotImplementedError

    def superseded(self, generation: int) -> None:
        with self.changed:
            self.over.append(generation)
            self.changed.notify_all()

    def drained(self, rank: int, step: int) -> None:
        with self.changed:
            self.drained_steps.setdefault(rank, []).append(step)
            self.changed.notify_all()

    def committed(self, state: State) -> None:
        with self.changed:
            self.commits.append(state)
            self.changed.notify_all()

    def event(self, kind: str, reason: str, **details: object) -> None:
        with self.changed:
            self.events.append((kind, reason, details))
            self.changed.notify_all()

    def failed(self, rank: int) -> None:
        with self.changed:
            self.failures += 1
            self.changed.notify_all()

    def kinds(self) -> list[str]:
        """The kinds of all events so far."""
        with self.changed:
            return [kind for kind, _, _ in self.events]

    def reasons(self, kind: str) -> list[str]:
        """Why, of all events of a kind."""
        with self.changed:
            return [reason for one, reason, _ in self.events if one == kind]

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until `is_so`; fails after `WAIT_S`, with what was heard."""
        with self.changed:
            assert self.changed.wait_for(is_so, WAIT_S), f"no {what}: {self.events}"

    def wait_drained(self, rank: int, step: int) -> None:
        """Wait until slots of `rank` are free up to `step`."""
        self.wait(lambda: step in self.drained_steps.get(rank, []), f"drained({rank}, {step})")

    def wait_committed(self, state: State) -> None:
        """Wait until a commit of `state` was heard of."""
        self.wait(lambda: state in self.commits, f"commit of {state}")

    def wait_event(self, kind: str, times: int = 1) -> None:
        """Wait until so many events of a kind were heard of."""
        self.wait(lambda: [each[0] for each in self.events].count(kind) >= times, kind)


class Host:
    """A shelf, and the drains under test: `seal` does what a keeper's core does."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        self.shelf = shelf or Shelf()

    def seal(self, images: Sequence[Shelved], sealed: Callable[[Shelved], None]) -> None:
        """Put images up and pass them on, by rank."""
        for shelved in images:
            self.shelf.add(shelved)
            sealed(shelved)
