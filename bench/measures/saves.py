"""Rounds on all ranks: to the disk, to a commit, the call, the guard, and restores."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from bench.measures.limits import RawDisk, WarmCopy
from bench.measures.model import Trained
from bench.measures.others import Dcp, TorchCheckpointing
from bench.measures.rank import BenchRank, Site, restore, slowest, timed

from keepstep.ckpt.agree import gather_structure
from keepstep.ckpt.tiers import Due, Tier

Round = dict[str, float]
DURABLE, COMMIT, CALL, RESTORE = "durable", "commit", "call", "restore"
PARTS = (DURABLE, COMMIT, CALL, RESTORE)


class Saves:
    """All that four ranks in one layout are measured at.

    Args:
        trained: the state.
        rank, world: this process's place.
        site: the keeper's.
        directory: for everything on the disk.
        stack: ends what was opened.
    """

    def __init__(
        self,
        trained: Trained,
        rank: int,
        world: int,
        site: Site,
        directory: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._trained = trained
        self._rank = rank
        self._site = site
        self._turn = False
        self._directory = directory
        self._stack = stack
        size_bytes = trained.bytes_per_rank
        self.ours = BenchRank(trained.registry(rank), site, stack)
        self._copy = WarmCopy(size_bytes)
        self._raw = RawDisk(directory / "raw", size_bytes * world, size_bytes) if not rank else None
        self._dcp = Dcp(directory / "dcp", trained.state, rank)
        self._other: TorchCheckpointing | None = None

    def rounds(self, parts: tuple[str, ...], repetitions: int) -> list[Round]:
        """Every part once in each round, in turning order; the first round warms up."""
        measures: dict[str, list[Callable[[], Round]]] = {
            DURABLE: [self.raw, self.durable],
            COMMIT: [self.raw, self.commit, self.dcp_save],
            CALL: [self.memcpy, self.call, self.dcp_async, self.dcp_staged, self.other],
            RESTORE: [self.restores],
        }
        wanted = list(
            dict.fromkeys(one for part in PARTS if part in parts for one in measures[part])
        )
        if RESTORE in parts:
            self.dcp_save()
        if CALL in parts and not TorchCheckpointing.why_not():
            path = self._directory / "torch_checkpointing"
            self._other = TorchCheckpointing(path, self._trained.state, self._rank)
            self._stack.callback(self._other.close)
        found: list[Round] = []
        for number in range(repetitions + 1):
            one: Round = {}
            for measure in wanted if number % 2 else wanted[::-1]:
                one |= measure()
            if number:
                found.append(one)
        return found

    def raw(self) -> Round:
        """The disk alone."""
        best: Round = {}

        def write() -> None:
            if self._raw is not None:
                best.update(self._raw.best_s())

        timed(write)
        return best

    def memcpy(self) -> Round:
        """A warm copy on all ranks at once."""
        return {"memcpy": timed(self._copy.run)}

    def durable(self) -> Round:
        """Until all images are on the local disk."""
        self.ours.renew()
        made = self.ours.save(Due.DISK)
        return {
            "captured_to_disk": made.captured_to_drained_s,
            "sealed_to_disk": made.sealed_to_drained_s,
            "last_sealed_to_disk": made.last_sealed_to_drained_s,
        }

    def commit(self) -> Round:
        """Until all ranks know of the commit; the disk tier has no part in it."""
        self.ours.renew()
        return {"captured_to_commit": self.ours.save(Due.STORE).captured_to_committed_s}

    def call(self) -> Round:
        """The call, and the guard waited for at once after it: a step without gradients."""
        self.ours.renew()
        made = self.ours.capture()
        began_s = time.perf_counter()
        self._trained.optimizer.step()
        guard_s = time.perf_counter() - began_s
        self.ours.wait_safe()
        return {"call": slowest(made.call_ms / 1e3), "guard": slowest(guard_s)}

    def dcp_save(self) -> Round:
        """DCP's save."""
        return {"dcp_save": self._dcp.save_s()}

    def dcp_async(self) -> Round:
        """DCP's async_save with its own stager."""
        blocked_s, took_s = self._dcp.async_save_s()
        return {"dcp_async_blocked": blocked_s, "dcp_async": took_s}

    def dcp_staged(self) -> Round:
        """DCP's async_save with the other one."""
        blocked_s, took_s = self._dcp.staged_save_s()
        return {"dcp_staged_blocked": blocked_s, "dcp_staged": took_s}

    def other(self) -> Round:
        """torch_checkpointing."""
        if self._other is None:
            return {}
        blocked_s, took_s = self._other.save_s()
        return {"torch_checkpointing_blocked": blocked_s, "torch_checkpointing": took_s}

    def restores(self) -> Round:
        """From this host's memory; from its disk, and DCP's load: files that were read before."""
        self.ours.save(Due.DISK | Due.STORE)
        self._restore_s(Tier.DISK)
        self._dcp.load_s()
        measures = [self._own_arena, self.memcpy_restored, self._disk, self._dcp_load]
        self._turn = not self._turn
        found: Round = {}
        for measure in measures if self._turn else measures[::-1]:
            found |= measure()
        return found

    def memcpy_restored(self) -> Round:
        """A warm copy, beside the restores."""
        return {"memcpy_restored": timed(self._copy.run)}

    def _own_arena(self) -> Round:
        return {"restore_memory": self._restore_s(Tier.MEMORY)}

    def _disk(self) -> Round:
        return {"restore_disk": self._restore_s(Tier.DISK)}

    def _dcp_load(self) -> Round:
        return {"dcp_load": self._dcp.load_s()}

    def _restore_s(self, tier: Tier) -> float:
        ours, expected = self.ours, self._trained.sum()
        manifest = ours.manifest()
        self._trained.spoil()
        took_s = timed(lambda: restore(ours.registry, ours.structure, manifest, self._site, tier))
        if self._trained.sum() != expected:
            raise SystemExit(f"the restore from {tier.value} gave other weights")
        return took_s


class Reshards:
    """Loads of a state of one layout in another.

    Args:
        source: saved in its layout.
        others: by words, the layouts to load it in.
    """

    def __init__(
        self,
        source: Trained,
        others: dict[str, Trained],
        rank: int,
        site: Site,
        directory: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._others = others
        self._site = site
        self._dcp = Dcp(directory / "dcp", source.state, rank)
        self._dcp.save_s()
        ours = BenchRank(source.registry(rank), site, stack)
        ours.save(Due.DISK | Due.STORE)
        self._manifest = ours.manifest()
        self._targets = {}
        for name, target in others.items():
            registry = target.registry(rank)
            self._targets[name] = (registry, gather_structure(None, registry))

    def rounds(self, repetitions: int) -> list[Round]:
        """Ours and theirs once in each round, in turning order; the first round warms up."""
        found: list[Round] = []
        for number in range(repetitions + 1):
            one: Round = {}
            for name, target in self._others.items():
                pair = [self._ours_s, self._theirs_s]
                for measure in pair if number % 2 else pair[::-1]:
                    one |= measure(name, target)
            if number:
                found.append(one)
        return found

    def _ours_s(self, name: str, target: Trained) -> Round:
        registry, structure = self._targets[name]
        manifest, site = self._manifest, self._site
        took_s = timed(lambda: restore(registry, structure, manifest, site, Tier.DISK))
        return {f"reshard_{name}": took_s}

    def _theirs_s(self, name: str, target: Trained) -> Round:
        return {f"dcp_reshard_{name}": self._dcp.load_s(target.state)}
