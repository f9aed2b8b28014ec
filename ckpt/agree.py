"""Bytes from every rank to every rank, and one verdict for all. JSON only, never pickle."""

from __future__ import annotations

import msgspec
import torch
from torch import distributed as dist

from keepstep.ckpt.errors import CheckpointError, FormatError
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.structure import RankStructure, Structure, merge_structures


class OtherRanksFailed(CheckpointError):
    """Something failed on at least one rank, so that no rank goes on.

    Attributes:
        problems: rank -> what it said.
    """

    def __init__(self, doing: str, problems: dict[int, str]) -> None:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
        super().__init__(f"{doing} failed, and nothing was changed on any rank: {listed}")
        self.problems = problems


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's number in `group`; 0 where nobody has joined a group: it is alone."""
    return 0 if _is_alone(group) else dist.get_rank(group)


def all_gather_bytes(group: dist.ProcessGroup | None, data: bytes) -> list[bytes]:
    """`data` of every rank of `group`, in the group's order; blocking. A collective.

    `group` must move CPU tensors (gloo); None is the default group, or nobody but this process
    where there is none.
    """
    if _is_alone(group):
        return [data]
    world = dist.get_world_size(group)
    own_size = torch.tensor([len(data)], dtype=torch.int64)
    sizes = [torch.empty_like(own_size) for _ in range(world)]
    dist.all_gather(sizes, own_size, group=group)
    lengths = [int(size.item()) for size in sizes]
    longest = max(lengths)
    if longest == 0:
        return [b""] * world
    own = torch.zeros(longest, dtype=torch.uint8)
    if data:
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own, group=group)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def broadcast_bytes(group: dist.ProcessGroup | None, data: bytes) -> bytes:
    """The `data` of the group's first rank, on all of them; blocking. A collective.

    What the others give is not looked at. For what is too large to be gathered from everybody.
    """
    if _is_alone(group):
        return data
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    length = int(size.item())
    if length == 0:
        return b""
    block = torch.zeros(length, dtype=torch.uint8)
    if dist.get_rank(group) == 0:
        block.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(block, group=group, group_src=0)
    return block.numpy().tobytes()


def gather_structure(group: dist.ProcessGroup | None, registry: Registry) -> Structure:
    """The structure of all ranks of the mesh, on each of them. A collective, once a run.

    Raises:
        PlanMismatch: on all ranks alike, naming tensor and ranks, if they contradict each other.
    """
    parts = []
    for rank, data in enumerate(all_gather_bytes(group, msgspec.json.encode(registry.structure()))):
        try:
            parts.append(msgspec.json.decode(data, type=RankStructure))
        except msgspec.DecodeError as error:
            raise FormatError(
                f"message of rank {rank}", "", "a structure", str(error), "run one version on all"
            ) from error
    return merge_structures(parts)


def agree(group: dist.ProcessGroup | None, doing: str, problem: str | None) -> None:
    """Go on only if all ranks can: each gives its problem, or None. A collective.

    Raises:
        OtherRanksFailed: on all ranks alike, if any has a problem.
    """
    said = all_gather_bytes(group, (problem or "").encode("utf-8", "replace"))
    problems = {rank: text.decode("utf-8") for rank, text in enumerate(said) if text}
    if problems:
        raise OtherRanksFailed(doing, problems)


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return group is None and not dist.is_initialized()
