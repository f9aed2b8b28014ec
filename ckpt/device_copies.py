"""Copies from a device into an image on the host, on a stream of their own.

They are put in order after the optimizer's step by an event, run beside the next forward and
backward, and the optimizer's stream (not the host) waits for them before the next update. Small
tensors are joined on the device: a transfer costs more than their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.ckpt.copy_jobs import SMALL_BYTES

_TOGETHER_BYTES = 4 << 20  # of device memory that a join takes for a moment


@dataclass(frozen=True, slots=True)
class _Join:
    """Small sources whose places in the image follow each other: one target for all."""

    target: torch.Tensor
    sources: tuple[torch.Tensor, ...]


class DeviceCopies:
    """The copies of one plan into one slot, from one device.

    Args:
        targets: on the host, in the order of the image; in registered memory, else every copy
            makes the host wait.
        sources: of the same sizes.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._joins: list[_Join] = []
        run: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            is_plain = not (source.is_conj() or source.is_neg())
            if not (is_plain and source.nbytes <= SMALL_BYTES and source.is_contiguous()):
                self._pairs.append((target, source))
                continue
            if run and not _follows(run, target):
                self._join(run)
                run = []
            run.append((target, source))
        if run:
            self._join(run)

    def launch(self) -> None:
        """Put all copies on the current stream. Does not wait for them."""
        with torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
            for join in self._joins:
                join.target.copy_(torch.cat(join.sources), non_blocking=True)

    def _join(self, run: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        first = run[0][0]
        size_bytes = sum(target.nbytes for target, _ in run)
        flat = torch.empty(0, dtype=torch.uint8)
        flat.set_(first.untyped_storage(), _start_of(first), (size_bytes,), (1,))
        sources = tuple(source.detach().reshape(-1).view(torch.uint8) for _, source in run)
        self._joins.append(_Join(flat, sources))


class SideStream:
    """The order of copies on one device against its current stream.

    Args:
        device: of the copies.
        api: torch's module of the device's kind (`torch.get_device_module`).
    """

    def __init__(self, device: torch.device, api: Any) -> None:  # noqa: ANN401  a module
        self._device = device
        self._api = api
        self.stream = api.Stream(device)
        """The stream itself: for measurements."""
        self._ready = api.Event()
        self._copied = api.Event()
        self._is_launched = False

    def mark(self) -> None:
        """What is on the current stream by now comes before the copies that are launched next."""
        self._is_launched = False
        self._ready.record(self._api.current_stream(self._device))

    def launch(self, copies: DeviceCopies | None) -> None:
        """Launch copies behind the mark (None: none besides). From any thread; does not wait."""
        with self._api.stream(self.stream):
            self.stream.wait_event(self._ready)
            if copies is not None:
                copies.launch()
            self._copied.record(self.stream)
        self._is_launched = True

    def hold_current(self) -> None:
        """What comes on the current stream from now on waits for the copies launched last."""
        if self._is_launched:
            self._api.current_stream(self._device).wait_event(self._copied)

    def settle(self) -> None:
        """Block this thread until the copies launched last are in the host's memory."""
        if self._is_launched:
            self._copied.synchronize()


class Registered:
    """Host memory that a CUDA device may read and write directly: page-locked where it lies.

    Args:
        memory: whole pages, mapped and touched.

    Raises:
        RuntimeError: as CUDA gives it, if it cannot lock that much.
    """

    def __init__(self, memory: memoryview) -> None:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = view.data_ptr()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(self._address, view.nbytes, _PORTABLE))
        if code:
            raise RuntimeError(
                f"CUDA cannot lock {view.nbytes:,} bytes of the pool (error {code}): raise the "
                f"limit of locked memory (ulimit -l), or keep fewer slots"
            )

    def close(self) -> None:
        """Unlock the memory. No copy may be going on; a second call does nothing.

        Raises:
            RuntimeError: as CUDA says it.
        """
        if not self._address:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostUnregister(self._address))
        self._address = 0
        if code:
            raise RuntimeError(f"CUDA cannot unlock the pool (error {code})")


_PORTABLE = 1


def _start_of(target: torch.Tensor) -> int:
    return int(target.storage_offset()) * target.element_size()


def _follows(run: Sequence[tuple[torch.Tensor, torch.Tensor]], target: torch.Tensor) -> bool:
    """Whether `target` lies right behind the run, which is not too long yet."""
    last, first = run[-1][0], run[0][0]
    end = last.data_ptr() + last.nbytes
    return end == target.data_ptr() and end - first.data_ptr() < _TOGETHER_BYTES
