"""Where a run begins: the newest state that is all there, in whatever tiers; or nothing.

One collective over all ranks, used by the trainer and by the library. Rank 0 takes a term, so that
an older run can append nothing more; each host's keeper promises its inventory to the new
generation; the newest candidate is staged and verified on all ranks before any of them applies it
(S6), and if it cannot be had wholly, all go one state older together. Then the generation is
appended, and only then anything is changed in memory; last the ranks enter it at their keepers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch.distributed as dist

from keepstep.ckpt.agree import (
    OtherRanksFailed,
    agree,
    all_gather_bytes,
    broadcast_bytes,
    gather_structure,
    rank_in,
)
from keepstep.ckpt.beginning import BeginRefused, Begun, Home, Wanted
from keepstep.ckpt.candidates import Place
from keepstep.ckpt.choice import NO_PROOF, Chooser, Told
from keepstep.ckpt.control import Enter, Entered
from keepstep.ckpt.errors import CheckpointError, NotRestorable, StructureMismatch
from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.inventory import HostAddress, Inventory
from keepstep.ckpt.keeper_line import KeeperLine
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.load import Loading, Staged
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import decode_manifest
from keepstep.ckpt.mosaic import Distance
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_store import PoolStore
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.restore import Options
from keepstep.ckpt.sources import Sources
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.survey import decode_inventories, racks_of
from keepstep.ckpt.together import Crew, Outcome, Together, words
from keepstep.storage.errors import StoreError
from keepstep.storage.locate import open_store
from keepstep.storage.store import Store

__all__ = ["BeginRefused", "Begun", "Home", "Wanted", "begin"]


def begin(
    group: dist.ProcessGroup | None,
    registry: Registry,
    structure: Structure,
    store: Store,
    log: Log | None,
    home: Home,
    wanted: Wanted,
) -> Begun:
    """Take a term, restore what there is to restore, begin a generation, enter it. Blocking.

    A collective over all ranks of `group` (which moves CPU tensors; None: the default one). On
    return the generation is in the log, durably, and this rank's state is that of `base`.

    Args:
        registry, structure: what this rank, and what all ranks, registered.
        store: the durable one, open on every rank.
        log: on rank 0 alone, opened for this job.

    Raises:
        BeginRefused: what is there is not this run, or cannot be taken; on all ranks alike.
        NotRestorable: there are states, and none could be restored; likewise.
        CheckpointError, StoreError: otherwise.
    """
    keeper = None
    if home.keeper is not None:
        if home.host_dir is None:
            raise ValueError("a keeper has a host directory: give both, or neither")
        keeper = KeeperLine(home.keeper, home.host_dir, wanted.job, rank_in(group), home.timeout_s)
    chooser = None if log is None else Chooser(store, log, home, wanted, keeper)
    beginning = _Beginning(group, registry, structure, store, chooser, home, wanted, keeper)
    try:
        return beginning.run()
    finally:
        if keeper is not None:
            keeper.close()


class _Member(msgspec.Struct, frozen=True):
    """What a rank says of its host."""

    host: str
    rack: str
    address: str
    problem: str = ""


class _Beginning:
    """The collective, step by step, on one rank."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        registry: Registry,
        structure: Structure,
        store: Store,
        chooser: Chooser | None,
        home: Home,
        wanted: Wanted,
        keeper: KeeperLine | None,
    ) -> None:
        self._keeper = keeper
        self._group = group
        self._registry = registry
        self._structure = structure
        self._store = store
        self._chooser = chooser
        self._home = home
        self._wanted = wanted
        self._header = wanted.header
        self._image_bytes_max = wanted.image_bytes_max
        self._rank = rank_in(group)
        self._passed_over: list[str] = []
        self._inventories: tuple[Inventory, ...] = ()

    def run(self) -> Begun:
        """All of it."""
        started_s = time.monotonic()
        members = self._meet()
        hosts, ordered = _hosts_of(members)
        crew = self._crew(hosts)
        told = self._tell(lambda chooser: chooser.take_term())
        generation, term = told.generation, told.term
        self._inventories = self._take_inventories(generation, term, crew, ordered)
        base, staged = None, None
        with contextlib.closing(_Pool(self._home, self._wanted.tell)) as pool:
            try:
                base, staged = self._stage(generation, crew, pool.store)
                chosen = base
                self._tell(
                    lambda chooser: chooser.append(
                        chosen, generation, self._structure.mesh, hosts, ordered, self._passed_over
                    )
                )
                self._apply(staged)
            finally:
                if staged is not None:
                    staged.close()
        entered = self._enter(base, generation, term, crew, ordered, hosts)
        read_bytes = self._sum({} if staged is None else staged.read_bytes)
        return Begun(
            generation=generation,
            term=term,
            base=base.state,
            manifest=None if base.state is None else decode_manifest(base.manifest, "manifest"),
            is_committed=base.is_committed,
            parent=base.parent,
            passed_over=tuple(self._passed_over),
            addresses=ordered,
            hosts=hosts,
            entered=entered,
            restore_s=time.monotonic() - started_s,
            read_bytes=read_bytes,
        )

    # Who is there.

    def _meet(self) -> list[_Member]:
        """Attach to this host's keeper, and learn where everybody is."""
        home = self._home
        member = _Member(home.host, home.rack, "")
        if self._keeper is not None:
            try:
                attached = self._keeper.attach()
                member = _Member(attached.host, attached.rack, attached.address)
                if attached.host != home.host:
                    member = _Member(
                        home.host, "", "", f"{home.host_dir} is that of host {attached.host}"
                    )
            except CheckpointError as error:
                member = _Member(home.host, home.rack, "", str(error))
        said = all_gather_bytes(self._group, msgspec.json.encode(member))
        members = [msgspec.json.decode(data, type=_Member) for data in said]
        problems = {rank: one.problem for rank, one in enumerate(members) if one.problem}
        if problems:
            raise BeginRefused(f"attaching to the keepers failed: {words(problems)}")
        return members

    def _crew(self, hosts: tuple[int, ...]) -> Crew:
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == hosts[self._rank])
        if self._home.host_dir is None:  # nothing that they could share
            return Crew((self._rank,), 0, None)
        return Crew(ranks, ranks.index(self._rank), self._home.host_dir)

    def _tell(self, decide: Callable[[Chooser], Told]) -> Told:
        """Rank 0's decision on every rank; its refusal is raised on every rank."""
        error: Exception | None = None
        told = Told()
        if self._chooser is not None:
            try:
                told = decide(self._chooser)
            except (CheckpointError, StoreError) as caught:
                error = caught
                told = Told(refused=str(caught), kind=type(caught).__name__)
        data = broadcast_bytes(self._group, msgspec.json.encode(told))
        told = msgspec.json.decode(data, type=Told)
        if told.refused:
            kind = NotRestorable if told.kind == NotRestorable.__name__ else BeginRefused
            raise kind(told.refused) from error
        return told

    def _take_inventories(
        self, generation: int, term: int, crew: Crew, ordered: Sequence[HostAddress]
    ) -> tuple[Inventory, ...]:
        """Have all keepers promise, and learn what they have. On every rank: where to read."""
        data, problem = b"", ""
        keeper = self._keeper
        if keeper is not None and crew.index == 0:
            try:
                data = msgspec.json.encode(keeper.take_inventory(generation, term))
            except CheckpointError as error:
                problem = str(error)
        _agree(self._group, "asking the keepers what they have", problem or None)
        found = decode_inventories(all_gather_bytes(self._group, data))
        members = [one.host for one in ordered]

        told = self._tell(lambda chooser: chooser.ask_others(members, generation, term))
        return (*found, *told.others)

    # What to go on from.

    def _stage(self, generation: int, crew: Crew, pool: Store | None) -> tuple[Told, Staged | None]:
        """Stage the newest state that can be had wholly; note what was wrong with newer ones."""
        while True:
            told = self._tell(lambda chooser: chooser.next(self._inventories, self._passed_over))
            self._passed_over += told.passed_over
            if told.parent is not None:
                return told, self._stage_parent(told, generation, crew)
            if told.state is None:
                return told, None
            self._make_absent(told)
            here = Distance(self._home.host, racks_of(self._inventories))
            sources = Sources(
                here,
                store=self._store,
                pool=pool,
                disk_dir=self._home.disk_dir,
                addresses={one.host: one.address for one in self._inventories},
                token=self._home.token,
                timeout_s=self._home.timeout_s,
            )
            with sources:
                outcome = self._load(told, sources, generation, crew, Options(), str)
            if outcome.staged is not None:
                return told, outcome.staged
            doing = f"restoring {state_words(told.state)}"
            if outcome.misfit:
                raise BeginRefused(f"{doing}: {words(outcome.misfit)}")
            if outcome.trouble:
                raise BeginRefused(f"{doing}: {words(outcome.trouble)}. {NO_PROOF}")
            self._passed_over.append(
                f"{doing} failed, and nothing was changed on any rank: {words(outcome.lost)}"
            )

    def _make_absent(self, told: Told) -> None:
        """Have optimizers make the state that the told one has, and nobody registered yet."""
        tensors = decode_manifest(told.manifest, "the manifest that rank 0 told").tensors
        replan = self._wanted.replan
        if replan is None or set(tensors) <= set(self._structure.tensors):
            return
        problem = None
        try:
            self._registry.create_absent(tensors)
        except CheckpointError as error:
            problem = str(error)
        _agree(self._group, "making the optimizers' state", problem)
        self._structure = gather_structure(self._group, self._registry)
        self._header, self._image_bytes_max = replan(self._structure)

    def _load(
        self,
        told: Told,
        sources: Sources,
        generation: int,
        crew: Crew,
        options: Options,
        explain: Callable[[StructureMismatch], str],
    ) -> Outcome:
        manifest = decode_manifest(told.manifest, "the manifest that rank 0 told")
        sources.see(manifest)
        places = {
            image: tuple(Place(tier, host) for tier, host in where)
            for image, where in told.places.items()
        }

        def make() -> Loading:
            return Loading(
                self._registry,
                self._structure,
                manifest,
                lambda image: sources.origins(places[image], image + crew.ranks[0]),
                options,
                self._wanted.threads,
            )

        together = Together(self._group, crew, f"stage-{generation}", self._wanted.tell)
        return together.load(make, explain)

    def _stage_parent(self, told: Told, generation: int, crew: Crew) -> Staged:
        """Another run's weights, with its optimizer state if that was asked for."""
        parent = told.parent
        assert parent is not None
        prefixes = ("model/",) if parent.weights_only else ("model/", "optimizer/")
        theirs, problem = None, None
        try:
            theirs = open_store(parent.store)
        except StoreError as error:
            problem = str(error)
        doing = f"--init-from {parent.store}@{parent.state.step}"
        _agree(self._group, doing, problem)
        with Sources(Distance(self._home.host, {}), store=theirs) as sources:
            options = Options(prefixes=prefixes)
            outcome = self._load(told, sources, generation, crew, options, _explain_parent)
        if outcome.staged is None:
            problems = outcome.misfit | outcome.lost | outcome.trouble
            raise BeginRefused(f"{doing}: {words(problems)}; nothing was changed")
        return outcome.staged

    # Beginning.

    def _apply(self, staged: Staged | None) -> None:
        if staged is None:
            return
        problem = None
        try:
            self._wanted.apply(staged)
        except CheckpointError as error:
            problem = str(error)
        agree(self._group, "applying what was restored", problem)

    def _enter(
        self,
        base: Told,
        generation: int,
        term: int,
        crew: Crew,
        ordered: tuple[HostAddress, ...],
        hosts: tuple[int, ...],
    ) -> Entered | None:
        """Enter the generation at this host's keeper."""
        keeper, entered, problem = self._keeper, None, None
        if keeper is not None:
            request = Enter(
                generation=generation,
                term=term,
                rank=self._rank,
                ranks=crew.ranks,
                hosts=hosts,
                addresses=ordered,
                committer=0,
                base=base.state,
                structure=self._structure,
                header=self._header,
                image_bytes_max=self._image_bytes_max,
            )
            try:
                entered = keeper.enter(request)
            except CheckpointError as error:
                problem = str(error)
        agree(self._group, f"entering generation {generation}", problem)
        return entered

    def _sum(self, read_bytes: Mapping[str, int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for data in all_gather_bytes(self._group, msgspec.json.encode(read_bytes)):
            for tier, size_bytes in msgspec.json.decode(data, type=dict[str, int]).items():
                total[tier] = total.get(tier, 0) + size_bytes
        return total


class _Pool:
    """This host's pool while states are staged from it; `store` is None if there is none."""

    def __init__(self, home: Home, tell: Callable[..., None]) -> None:
        self.store: PoolStore | None = None
        self._pool: Pool | None = None
        if home.host_dir is None:
            return
        try:
            self._pool = Pool.open(HostDir(home.host_dir).pool)
        except FileNotFoundError:
            return
        except (OSError, CheckpointError) as error:
            tell("pool_unreadable", str(error))
            return
        self.store = PoolStore(self._pool)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _hosts_of(members: Sequence[_Member]) -> tuple[tuple[int, ...], tuple[HostAddress, ...]]:
    """Of each rank, index into the hosts; and these, in the order of their first ranks."""
    index: dict[str, int] = {}
    ordered: list[HostAddress] = []
    for member in members:
        if member.host not in index:
            index[member.host] = len(ordered)
            ordered.append(HostAddress(member.host, member.rack, member.address))
    return tuple(index[member.host] for member in members), tuple(ordered)


def _explain_parent(error: StructureMismatch) -> str:
    names = (*error.missing, *error.unexpected, *error.changed)
    is_other_model = any(name.startswith("model/") for name in names)
    return str(error) if is_other_model else f"{error}; for the weights alone give --weights-only"


def _agree(group: dist.ProcessGroup | None, doing: str, problem: str | None) -> None:
    try:
        agree(group, doing, problem)
    except OtherRanksFailed as error:
        raise BeginRefused(str(error)) from error
