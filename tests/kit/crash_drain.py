"""The save of `crash_save`, as a keeper makes it: drains and a committer, in threads of their own.

A process that dies takes all of them along: a store that says `Crashed` to one thread says it to
every other from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.kit.checkpoints import TENSORS
from tests.kit.crash_save import NEW, OLD, POLICY
from tests.kit.faulty_store import Crashed
from tests.kit.shelved import BOTH, JOB, Ear, Host, begin_generation, shelve, tenure_of

from keepstep.ckpt.drains import Drains
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.tiers import Due, TierPolicy
from keepstep.storage.store import Store

PATIENCE_S = 0.2
CLOSE_S = 20.0


class Listener(Ear):
    """Says so at once when a commit was acknowledged; never waits for a keeper that is dead."""

    def __init__(self, on_committed: Callable[[], None], is_dead: Callable[[], bool]) -> None:
        super().__init__()
        self._on_committed = on_committed
        self._is_dead = is_dead

    def committed(self, state: State) -> None:
        self._on_committed()
        super().committed(state)

    def wait_for_end(self, state: State) -> None:
        """Until `state` is committed, or the keeper is dead. Fails after `CLOSE_S`."""
        for _ in range(int(CLOSE_S / 0.01)):
            with self.changed:
                if self.changed.wait_for(lambda: state in self.commits, 0.01) or self._is_dead():
                    return
        raise AssertionError(f"neither committed nor dead: {self.events}")


def drain_save(
    store: Store,
    on_committed: Callable[[], None] = lambda: None,
    tensors: dict[str, TensorSpec] = TENSORS,
    disk: Store | None = None,
    is_dead: Callable[[], bool] = lambda: False,
    compresses: bool = False,
) -> None:
    """Take over from the older run, drain and commit a state, and let retention take the oldest.

    Returns also when the keeper is dead; raises Crashed if it died while it took over.
    """
    with crashes_are_silent():
        term = begin_generation(store, NEW.generation, base=OLD)
        ear = Listener(on_committed, is_dead)
        host = Host()
        drains = Drains(
            lambda: store,
            None if disk is None else lambda: disk,
            host.shelf,
            ear,
            job=JOB,
            patience_s=PATIENCE_S,
            compresses=compresses,
        )
        try:
            drains.enter(
                tenure_of(
                    NEW.generation,
                    term=term,
                    base=OLD,
                    store=TierPolicy(keep=POLICY.keep_last),
                    tensors=tensors,
                )
            )
            due = Due.STORE if disk is None else BOTH
            host.seal(shelve(NEW, due, tensors=tensors), drains.sealed)
            ear.wait_for_end(NEW)
        finally:
            drains.close(0.0 if is_dead() else CLOSE_S)
            _join()


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("keepstep-"):
            thread.join(CLOSE_S)
            assert not thread.is_alive(), thread.name


@contextmanager
def crashes_are_silent() -> Iterator[None]:
    """Threads that end with `Crashed` say nothing: their process is dead."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Crashed):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
