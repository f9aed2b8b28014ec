"""The same state saved and loaded by others: torch's DCP, and torch_checkpointing if there."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any, cast

from bench.measures.rank import barrier, slowest, timed
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

TORCH_CHECKPOINTING = "torch_checkpointing"


class Dcp:
    """torch.distributed.checkpoint, in one directory.

    Args:
        path: of the checkpoint; written anew by each save.
        state: what is saved.
        rank: 0 removes the directory.
    """

    def __init__(self, path: Path, state: dict[str, Any], rank: int) -> None:
        self._path = path
        self._state = state
        self._rank = rank

    def save_s(self) -> float:
        """A save, until the last rank is done."""
        _forget(self._path, self._rank)
        return timed(lambda: dcp_save(self._state, checkpoint_id=str(self._path)))

    def load_s(self, into: dict[str, Any] | None = None) -> float:
        """A load of the newest save, which has been read once before."""
        state = self._state if into is None else into
        return timed(lambda: dcp_load(state, checkpoint_id=str(self._path)))

    def async_save_s(self) -> tuple[float, float]:
        """How long `async_save` blocks with its own stager, and until the save is done."""
        return self._async_save_s(None)

    def staged_save_s(self) -> tuple[float, float]:
        """The same with the stager that copies in a thread, into shared memory.

        Blocked: until the copy is done, for the optimizer may not step before.
        """
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        try:
            return self._async_save_s(stager)
        finally:
            stager.close()

    def _async_save_s(self, stager: DefaultStager | None) -> tuple[float, float]:
        _forget(self._path, self._rank)
        barrier()
        began_s = time.perf_counter()
        done = cast(
            "Any",
            dcp_async_save(self._state, checkpoint_id=str(self._path), async_stager=stager),
        )
        if stager is not None:
            done.staging_completion.result()
        blocked_s = time.perf_counter() - began_s
        (done if stager is None else done.upload_completion).result()
        return slowest(blocked_s), slowest(time.perf_counter() - began_s)


class TorchCheckpointing:
    """torch_checkpointing's asynchronous save. Only where it is installed: see `why_not`."""

    def __init__(self, path: Path, state: dict[str, Any], rank: int) -> None:
        package = importlib.import_module(TORCH_CHECKPOINTING)
        storage = importlib.import_module(f"{TORCH_CHECKPOINTING}.storage.filesystem")
        # Its default, O_DIRECT through an unaligned buffer, is refused (EINVAL) by ext4.
        plain = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = package.CheckpointManager(
            package.CheckpointManager.Config(storage_config=plain)
        )
        self._path = path
        self._state = state
        self._rank = rank

    @staticmethod
    def why_not() -> str:
        """Why it cannot be measured; "" if it can."""
        if importlib.util.find_spec(TORCH_CHECKPOINTING) is not None:
            return ""
        return (
            "torch_checkpointing is not installed: pip install torch-checkpointing==0.1.1, "
            "then measure again"
        )

    def save_s(self) -> tuple[float, float]:
        """Until the optimizer may step, and until the save is done."""
        _forget(self._path, self._rank)
        barrier()
        began_s = time.perf_counter()
        done = self._manager.save(str(self._path), self._state)
        with self._manager.lock():
            blocked_s = time.perf_counter() - began_s
        if done is not None:
            done.result()
        return slowest(blocked_s), slowest(time.perf_counter() - began_s)

    def close(self) -> None:
        """End its process."""
        self._manager.close()


def _forget(path: Path, rank: int) -> None:
    barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    barrier()
