"""Short ways to write a log in a test: entries by kind, and a log object with a counted clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keepstep.ckpt.entry import (
    Body,
    Commit,
    Generation,
    Record,
    Retire,
    Rewind,
    Term,
    Verdict,
)
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.storage.store import Store

MESH = Mesh((MeshAxis("pp", 1), MeshAxis("dp_replicate", 1), MeshAxis("dp_shard", 2)))


def state(generation: int, step: int) -> State:
    return State(generation=generation, step=step)


def term(number: int, by: str = "trainer on host-a, pid 1") -> Term:
    return Term(number=number, by=by)


def generation(number: int, base: State | None = None) -> Generation:
    return Generation(
        number=number, hosts=("host-a", "host-a"), mesh=MESH, base=base, parent=None, config={}
    )


def commit(generation: int, step: int, size_bytes: int = 1000) -> Commit:
    return Commit(state=state(generation, step), manifest_digest="0" * 32, size_bytes=size_bytes)


def bad(generation: int, step: int, reason: str = "loss exploded") -> Verdict:
    return Verdict(state=state(generation, step), good=False, reason=reason)


def good(generation: int, step: int) -> Verdict:
    return Verdict(state=state(generation, step), good=True, reason="evaluated")


def rewind(to: State | None, reason: str = "operator asked") -> Rewind:
    return Rewind(to=to, reason=reason)


def retire(*states: State) -> Retire:
    return Retire(states=states, reason="retention")


def records(bodies: Iterable[Body], job: str = "run-a") -> list[Record]:
    """A log of these entries, each under the last term taken before it."""
    made = []
    current = 0
    for seq, body in enumerate(bodies):
        if isinstance(body, Term):
            current = body.number
        made.append(record(seq, current, body, job))
    return made


def record(seq: int, term_number: int, body: Body, job: str = "run-a") -> Record:
    at = f"2026-01-01T00:00:{seq % 60:02}.000Z"
    return Record(seq=seq, id=f"{seq:032x}", job=job, term=term_number, at=at, body=body)


def open_log(
    store: Store,
    job: str | None = "run-a",
    pauses: list[float] | None = None,
    between_tries: Callable[[], None] | None = None,
) -> Log:
    """A log that never really sleeps: it notes its pauses, and lets `between_tries` act."""

    def sleep(seconds: float) -> None:
        if pauses is not None:
            pauses.append(seconds)
        if between_tries is not None:
            between_tries()

    return Log(store, job=job, clock=lambda: "2026-01-01T00:00:00.000Z", sleep=sleep)
