"""What a small tensor costs: 5,000 of 1 KiB less one of the same bytes, over 5,000. One process."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench.measures.rank import BenchRank, Site, keeper_site
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from keepstep.ckpt.keys import state_prefix
from keepstep.ckpt.log import Log
from keepstep.ckpt.placement import Mesh, MeshAxis
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.tiers import Due
from keepstep.storage.locate import open_store

COUNT = 5_000
ITEMS = 256  # of float32: 1 KiB


def small_cost(directory: Path, repetitions: int) -> dict[str, Any]:
    """Milliseconds and bytes of overhead for each tensor, capture to commit; and DCP's."""
    states = {
        "small": {f"t{number:04}": torch.randn(ITEMS) for number in range(COUNT)},
        "one": {"one": torch.randn(COUNT * ITEMS)},
    }
    ours: list[float] = []
    theirs: list[float] = []
    with contextlib.ExitStack() as stack:
        ranks: dict[str, BenchRank] = {}
        for name, tensors in states.items():
            site, _ = stack.enter_context(keeper_site(_made(directory / name)))
            registry = Registry(Mesh((MeshAxis("dp", 1),)), 0)
            for tensor_name, tensor in tensors.items():
                registry.add_tensor(tensor_name, tensor)
            ranks[name] = BenchRank(registry, site, stack)
        for number in range(repetitions + 1):
            names = list(states) if number % 2 else list(states)[::-1]
            ours_s, theirs_s = {}, {}
            for name in names:
                ranks[name].renew()
                ours_s[name] = ranks[name].save(Due.STORE).captured_to_committed_s
                theirs_s[name] = _dcp_s(directory / "dcp", states[name])
            if number:  # the first one warms up
                ours.append((ours_s["small"] - ours_s["one"]) * 1e3 / COUNT)
                theirs.append((theirs_s["small"] - theirs_s["one"]) * 1e3 / COUNT)
        many, one = (_durable_bytes(ranks[name].site) for name in ("small", "one"))
    return {
        "ours_ms": statistics.median(ours),
        "ours_bytes": (many - one) / COUNT,
        "dcp_ms": statistics.median(theirs),
        "dcp_bytes": (
            _dcp_bytes(directory / "dcp", states["small"])
            - _dcp_bytes(directory / "dcp", states["one"])
        )
        / COUNT,
        "ours_ms_all": ours,
    }


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _dcp_s(path: Path, tensors: dict[str, torch.Tensor]) -> float:
    shutil.rmtree(path, ignore_errors=True)
    saved: dict[str, Any] = dict(tensors)
    began_s = time.perf_counter()
    dcp_save(saved, checkpoint_id=str(path), no_dist=True)
    return time.perf_counter() - began_s


def _dcp_bytes(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    _dcp_s(path, tensors)
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _durable_bytes(site: Site) -> int:
    """What the newest commit's state takes in the store: images and manifest."""
    store = open_store(site.store)
    commit = Log(store).read().live[0]
    return sum(info.size_bytes for info in store.list(state_prefix(commit.state)))
