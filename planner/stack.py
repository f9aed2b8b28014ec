"""What the training software does, where that changes the time: conventions, not constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stack:
    """attention: "core" writes the scores to memory, "flash" does not and skips the masked half.

    overlap_dp: gradients and weights travel under the last backward and first forward;
    overlap_pp: an interleaved schedule's sends run under the other chunk's compute; overlap_tp:
    the backward's collective runs under the weight gradient's product; causal_flops: the
    utilisation counts half of the attention (Megatron since 2025); serial_launch: a pass is
    launched by the core that runs it, before it, not meanwhile; per_layer: each layer's weights and
    gradients travel by themselves and the ends' as one more, gradients after the last micro batch
    alone (FSDP2, as the built-in trainer uses it), else as `zero` says.
    """

    attention: Literal["core", "flash"] = "flash"
    overlap_dp: bool = True
    overlap_pp: bool = True
    overlap_tp: bool = True
    causal_flops: bool = False
    serial_launch: bool = False
    per_layer: bool = False


MODERN = Stack()
CLASSIC = Stack(attention="core", overlap_dp=False, overlap_pp=False, overlap_tp=False)
"""Megatron-LM and Megatron-DeepSpeed up to 2022."""
SHARED_CORES = Stack(
    overlap_dp=False,
    overlap_pp=False,
    overlap_tp=False,
    causal_flops=True,
    serial_launch=True,
    per_layer=True,
)
"""Ranks on the cores of one machine: what moves bytes takes the time of what computes."""


def usual_stack(cores_per_node: int) -> Stack:
    """What runs on a cluster unless something else is known of it."""
    return SHARED_CORES if cores_per_node else MODERN
