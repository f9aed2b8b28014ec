"""The one place that chooses the device, the backend and what depends on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

DeviceChoice = Literal["auto", "cpu", "cuda"]


class DeviceError(RuntimeError):
    """The device that was asked for is not here."""


@dataclass(frozen=True)
class Device:
    """The device of this rank and the process-group backend that goes with it."""

    device: torch.device
    backend: str

    @property
    def type(self) -> str:
        """cpu or cuda."""
        return self.device.type

    def synchronize(self) -> None:
        """Wait until the work queued on the device is done (nothing to wait for on a CPU)."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.device)

    def name(self) -> str:
        """The name of the hardware as its driver gives it, or cpu."""
        return torch.cuda.get_device_name(self.device) if self.type == "cuda" else "cpu"


def cores_per_rank() -> int:
    """This rank's share of the host's cores, at least one."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // local_world)


def choose(choice: DeviceChoice = "auto", local_rank: int | None = None) -> Device:
    """CUDA with NCCL, one GPU a rank, where there is a GPU for this rank; else CPU with gloo.

    `local_rank` (default: LOCAL_RANK, else 0) is the rank's number on its host.

    Raises:
        DeviceError: cuda was asked for, and this host has no GPU of that number.
    """
    here = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(here + 1)))
    gpus = torch.cuda.device_count() if choice != "cpu" and torch.cuda.is_available() else 0
    # All ranks of a host must choose alike, so auto asks for a GPU for each of them.
    if gpus >= max(local_world, here + 1):
        torch.cuda.set_device(here)
        return Device(torch.device("cuda", here), "nccl")
    if choice == "cuda":
        raise DeviceError(
            f"device = cuda needs {max(local_world, here + 1)} GPUs on this host and found {gpus};"
            " start fewer ranks per host or set device = cpu"
        )
    return Device(torch.device("cpu"), "gloo")
