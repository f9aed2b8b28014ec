"""A whole save that can be killed anywhere, and what a reader may find afterwards.

The store holds two committed states. Then a run takes over: it takes a term, begins a generation
from the newer state, writes the images and the manifest of a third, commits it, and lets retention
take the oldest. Whatever happens in between, a reader finds the old newest state or the new one,
whole, and the next run goes on from there and cleans up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.kit.checkpoints import TENSORS, write_images
from tests.kit.logs import generation, open_log

from keepstep.ckpt.commit import commit
from keepstep.ckpt.gc import collect
from keepstep.ckpt.keys import ImageKey, ManifestKey, parse_key, state_prefix
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State, TensorSpec
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.verify import verify
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store

OLDEST = State(generation=1, step=10)
OLD = State(generation=1, step=20)
NEW = State(generation=2, step=30)
POLICY = Policy(keep_last=2)
READ_BYTES_MAX = 1 << 24

BIGGER = TENSORS | {"model/w1.weight": TensorSpec(shape=(60, 500), dtype="F32", placement=1)}
"""Images of more blocks than are tried exhaustively."""

Files = dict[str, bytes]
Works = Sequence[Callable[[], None]]


def one_by_one(works: Works) -> None:
    """Do `works` in order."""
    for work in works:
        work()


def prepare(store: Store, tensors: dict[str, TensorSpec] = TENSORS) -> None:
    """Two committed states."""
    log = open_log(store)
    log.take_term("trainer on host-a, pid 1")
    log.append(generation(1))
    for state in (OLDEST, OLD):
        commit(log, write_images(store, state, tensors))


def save(
    store: Store,
    on_committed: Callable[[], None] = lambda: None,
    tensors: dict[str, TensorSpec] = TENSORS,
    do_all: Callable[[Works], None] = one_by_one,
) -> None:
    """The save that is to be killed. Calls `on_committed` when it has been acknowledged.

    `do_all` puts the ranks' images, in whatever order.
    """
    log = _take_over(store, 2, OLD)
    images = MemoryStore()
    manifest = write_images(images, NEW, tensors)
    data = {info.key: images.get(info.key, READ_BYTES_MAX) for info in images.list("")}
    do_all([partial(store.put, key, image) for key, image in data.items()])
    commit(log, manifest)
    on_committed()
    collect(log, POLICY)


def expected_files(tensors: dict[str, TensorSpec] = TENSORS) -> Files:
    """Every file of the three states, as a save that nobody disturbs writes them."""
    store = MemoryStore()
    prepare(store, tensors)
    files = _state_files(store)
    save(store, tensors=tensors)
    return files | _state_files(store)


def faults_found(store: Store, is_committed: bool, expected: Files) -> list[str]:
    """What a reader finds wrong in a store after the crash; [] if all is well.

    Args:
        store: as the crash left it.
        is_committed: whether the save had been told that the new state is committed.
        expected: of `expected_files`.
    """
    report = verify(store, threads=1)
    wrong = [str(finding) for finding in report.findings]
    if wrong:
        return wrong
    live = [committed.state for committed in Log(store).read().live]
    allowed = [[NEW, OLD, OLDEST], [NEW, OLD]]
    if not is_committed:
        allowed.append([OLD, OLDEST])
    if live not in allowed:
        return [f"live commits {live}, expected one of {allowed}"]
    for state in live:
        for key, data in expected.items():
            if key.startswith(state_prefix(state)) and store.get(key, READ_BYTES_MAX) != data:
                wrong.append(f"{key} differs from what was saved")
    return wrong


def faults_going_on(store: Store) -> list[str]:
    """Let the next run take over, save and collect; what is wrong or left over then."""
    newest = Log(store).read().live[0].state
    log = _take_over(store, 9, newest)
    last = State(generation=9, step=newest.step + 10)
    commit(log, write_images(store, last))
    # A further one, so that what lies above the last commit of a generation is past as well.
    log = _take_over(store, 10, last)
    commit(log, write_images(store, State(generation=10, step=last.step + 10)))
    collect(log, POLICY)
    report = verify(store, threads=1)
    wrong = [str(finding) for finding in report.findings]
    wrong += [f"not cleaned up: {left}" for left in report.unreferenced]
    live = [committed.state for committed in Log(store).read().live]
    if len(live) != POLICY.keep_last or live[1] != last:
        wrong.append(f"live commits after going on: {live}")
    return wrong


def _take_over(store: Store, number: int, base: State) -> Log:
    log = open_log(store)
    log.take_term("trainer on host-b, pid 2")
    log.append(generation(number, base=base))
    return log


def _state_files(store: Store) -> Files:
    keys = [info.key for info in store.list("")]
    return {
        key: store.get(key, READ_BYTES_MAX)
        for key in keys
        if isinstance(parse_key(key), ManifestKey | ImageKey)
    }
