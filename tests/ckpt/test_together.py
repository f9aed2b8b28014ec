"""Ranks of one host bring a state together: each needed chunk once, and nothing live before all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.kit.begins import Came, Site, Toy, begin_here, came
from tests.kit.faulty_store import Action, Fault, FaultyStore
from tests.kit.keepers import JOB
from tests.kit.logs import open_log
from tests.kit.ranks import run_ranks
from tests.kit.states import manifest_of, write_image

from keepstep.ckpt.agree import agree, all_gather_bytes, gather_structure
from keepstep.ckpt.begin import BeginRefused
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.commit import commit
from keepstep.ckpt.entry import Generation
from keepstep.ckpt.errors import NotRestorable
from keepstep.ckpt.keys import entry_key, image_key, manifest_key, state_prefix
from keepstep.ckpt.load import Loading
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import MANIFEST_BYTES_MAX, Manifest, State, decode_manifest
from keepstep.ckpt.sources import Origin
from keepstep.ckpt.structure import merge_structures
from keepstep.ckpt.tiers import Tier
from keepstep.ckpt.together import Crew, Together
from keepstep.storage.errors import Denied
from keepstep.storage.file import FileStore
from keepstep.storage.store import Store

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


class CountingStore(FaultyStore):
    """Notes which bytes of which object were read. Not in place, as a bucket is not."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        super().__init__(inner, *faults)
        self.read: list[tuple[str, int, int]] = []
        self._noting = threading.Lock()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._noting:
            self.read.append((key, offset, length))
        return super().get_range(key, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        with self._noting:
            self.read.append((key, offset, len(target)))
        super().read_into(key, offset, target)


def saved(root: Path, *steps: int, dp: int = 1, tp: int = 2, job: str = JOB) -> Manifest:
    """Commits of these steps in `root`, made by one process for all ranks; the last manifest."""
    root.mkdir(exist_ok=True)
    store = FileStore(root)
    toys = [Toy(dp, tp, rank) for rank in range(dp * tp)]
    structure = merge_structures([toy.registry.structure() for toy in toys])
    log = open_log(store, job=job)
    log.take_term("test")
    log.append(
        Generation(
            number=1,
            hosts=("h0",) * len(toys),
            mesh=structure.mesh,
            base=None,
            parent=None,
            config={},
        )
    )
    for step in steps:
        state = State(1, step)
        records = []
        for toy in toys:
            toy.advance(step)
            records.append(write_image(toy.registry, structure, store, state, job=job))
        values: dict[str, object] = dict(toys[0].registry.read_values())
        manifest = manifest_of(structure, records, values, state, job)
        commit(log, manifest)
    return manifest


def damage(root: Path, state: State, rank: int, place: int = 2_000_000) -> None:
    path = root / image_key(state, rank)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


# Sharing.


def share(
    rank: int, world: int, root: str, directory: str, sizes: tuple[int, int], near: str
) -> tuple[int | None, list[tuple[str, int, int]], dict[str, int], list[Any]]:
    """All ranks are of one host. `near`: root of a nearer copy, used in place; "" for none."""
    toy = Toy(*sizes, rank)
    structure = gather_structure(None, toy.registry)
    store = CountingStore(FileStore(root))
    state = State(1, 9)
    data = FileStore(root).get(manifest_key(state), MANIFEST_BYTES_MAX)
    manifest = decode_manifest(data, "manifest")
    events: list[Any] = []
    origins = [Origin(Place(Tier.STORE, ""), store, is_in_place=False)]
    if near:
        origins.insert(0, Origin(Place(Tier.DISK, "h0"), FileStore(near), is_in_place=True))
    crew = Crew(tuple(range(world)), rank, Path(directory))
    together = Together(None, crew, "stage-2", lambda *args, **details: events.append(details))
    outcome = together.load(lambda: Loading(toy.registry, structure, manifest, lambda _: origins))
    agree(None, "test", None if outcome.staged else f"{outcome}")
    assert outcome.staged is not None
    assert list(Path(directory).iterdir()) == []
    before = toy.shows
    all_gather_bytes(None, b"before")
    assert before == 0
    with outcome.staged as staged:
        staged.apply()
    return toy.shows, store.read, outcome.staged.read_bytes, events


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)])
def test_each_byte_comes_once_for_all_ranks_of_a_host(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    manifest = saved(tmp_path / "store", 9)
    (tmp_path / "shm").mkdir()
    found = run_ranks(4, share, str(tmp_path / "store"), str(tmp_path / "shm"), sizes, "")
    assert [shows for shows, *_ in found] == [9] * 4
    read = [one for _, each, _, _ in found for one in each]
    data = [one for one in read if one[1] > 0]
    spans = sorted((key, offset, offset + length) for key, offset, length in data)
    for (key, _, end), (next_key, start, _) in itertools.pairwise(spans):
        assert key != next_key or end <= start  # no byte twice
    total = sum(length for *_, length in read)
    assert total <= 1.05 * sum(image.size_bytes for image in manifest.images)
    assert sum(sum(counted.values()) for *_, counted, _ in found) == total


def test_what_is_wrong_in_place_for_one_rank_is_staged_for_all_of_its_host(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "store", 9)
    saved(tmp_path / "near", 9)
    (tmp_path / "shm").mkdir()
    damage(tmp_path / "near", State(1, 9), 0)
    roots = (str(tmp_path / "store"), str(tmp_path / "shm"), (2, 2), str(tmp_path / "near"))
    found = run_ranks(4, share, *roots)
    assert [shows for shows, *_ in found] == [9] * 4
    events = [details for *_, each in found for details in each]
    assert [(one["tier"], one["image"], one["offset"]) for one in events] == [
        ("disk", 0, 4096 + (1 << 20))
    ]
    # One chunk, and the header beside it, come from afar; all else was at hand.
    far = [one for _, each, _, _ in found for one in each]
    assert sum(length for _, offset, length in far if offset > 0) == 1 << 20


def test_a_header_that_is_wrong_in_place_does_not_cost_the_state(tmp_path: Path) -> None:
    """Another copy has it right."""
    saved(tmp_path / "store", 9)
    saved(tmp_path / "near", 9)
    (tmp_path / "shm").mkdir()
    damage(tmp_path / "near", State(1, 9), 0, place=3_000)
    roots = (str(tmp_path / "store"), str(tmp_path / "shm"), (2, 2), str(tmp_path / "near"))
    found = run_ranks(4, share, *roots)
    assert [shows for shows, *_ in found] == [9] * 4
    told = {(one["tier"], one["image"], one["offset"]) for *_, each in found for one in each}
    assert told == {("disk", 0, 0)}


# Beginning from a store.


def start(
    rank: int, world: int, place: Site, sizes: tuple[int, int], faults: tuple[Fault, ...]
) -> Came | tuple[str, str, int | None]:
    """Begin; or the error's type and words, and which state this rank has then."""
    toy = Toy(*sizes, rank)

    def wrap(store: Store) -> Store:
        return FaultyStore(store, *faults) if faults else store

    with contextlib.ExitStack() as stack:
        try:
            begun, _, events = begin_here(rank, toy, place, stack, wrap)
        except (BeginRefused, NotRestorable) as error:
            return type(error).__name__, str(error), toy.shows
    return came(begun, toy, events)


def alone(root: Path, world: int, init_from: str = "") -> Site:
    """Ranks without keepers."""
    return Site(
        store=str(root),
        hosts=("h0",) * world,
        host_dirs={},
        has_keepers=False,
        init_from=init_from,
    )


def test_a_commit_is_restored_without_any_keeper_into_another_layout(tmp_path: Path) -> None:
    saved(tmp_path / "store", 3, 9)
    found = run_ranks(2, start, alone(tmp_path / "store", 2), (2, 1), ())
    for one in found:
        assert (one.base, one.shows, one.generation) == (State(1, 9), 9, 2)
        assert one.is_committed
    (newest,) = list(Log(FileStore(tmp_path / "store")).read().generations[1:])
    assert newest.base == State(1, 9)


def test_a_damaged_commit_sends_all_to_the_one_before_with_a_rewind_in_the_log(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    saved(root, 3, 9)
    damage(root, State(1, 9), 1)
    found = run_ranks(2, start, alone(root, 2), (1, 2), ())
    for one in found:
        assert (one.base, one.shows) == (State(1, 3), 3)
        (passed,) = one.passed_over
        assert image_key(State(1, 9), 1) in passed
    lineage = Log(FileStore(root)).read()
    assert [commit.state for commit in lineage.live] == [State(1, 3)]
    assert "rewound" in next(c for c in lineage.commits if c.state == State(1, 9)).reason


def test_commits_that_are_all_damaged_end_the_start_and_change_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    saved(root, 3, 9)
    for step in (3, 9):
        damage(root, State(1, step), 0)
    found = run_ranks(2, start, alone(root, 2), (1, 2), ())
    for kind, text, shows in found:
        assert (kind, shows) == ("NotRestorable", 0)
        assert "step 9" in text
        assert "step 3" in text
    assert len(Log(FileStore(root)).read().generations) == 1


def test_a_store_that_cannot_be_read_passes_no_commit_over(tmp_path: Path) -> None:
    root = tmp_path / "store"
    saved(root, 3, 9)
    prefix = state_prefix(State(1, 9)) + "r"
    refusing = Fault(Action.FAIL, times=10_000, key_prefix=prefix, error=Denied)
    found = run_ranks(2, start, alone(root, 2), (1, 2), (refusing,))
    for kind, text, shows in found:
        assert (kind, shows) == ("BeginRefused", 0)
        assert "no proof of damage" in text
    assert [commit.state.step for commit in Log(FileStore(root)).read().live] == [9, 3]


def test_weights_of_another_run_are_applied_only_once_the_generation_is_in_the_log(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "theirs", 9, job="other")
    (tmp_path / "store").mkdir()
    place = alone(tmp_path / "store", 2, init_from=str(tmp_path / "theirs"))
    # Entry 0 is the term; entry 1, the generation, is refused.
    refusing = Fault(Action.FAIL, times=99, key_prefix=entry_key(1), error=Denied)
    refused = run_ranks(2, start, place, (1, 2), (refusing,))
    assert [shows for *_, shows in refused] == [0, 0]
    found = run_ranks(2, start, place, (1, 2), ())
    for one in found:
        assert one.base is None
        assert one.shows is None  # their weights, and step 0
    (generation,) = Log(FileStore(tmp_path / "store")).read().generations
    assert generation.parent is not None
    assert generation.parent.state == State(1, 9)


def test_the_store_of_another_run_is_refused_before_a_term_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "store"
    saved(root, 3)
    place = alone(root, 2, init_from=str(tmp_path / "elsewhere"))
    found = run_ranks(2, start, place, (1, 2), ())
    for kind, text, shows in found:
        assert (kind, shows) == ("BeginRefused", 0)
        assert "did not begin from" in text


def test_a_state_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "store"
    saved(root, 3)
    found = run_ranks(2, other_model, alone(root, 2))
    for kind, text in found:
        assert kind == "BeginRefused"
        assert "ranks 0, 1: " in text
        assert "model/more" in text


def other_model(rank: int, world: int, place: Site) -> tuple[str, str]:
    toy = Toy(1, 2, rank)
    toy.registry.add_tensor("model/more", toy.vector[:5].clone())
    with contextlib.ExitStack() as stack, pytest.raises(BeginRefused) as refused:
        begin_here(rank, toy, place, stack)
    return type(refused.value).__name__, str(refused.value)
