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
    utilisation counts half of the attention (Megatron since 2025).
    """

    attention: Literal["core", "flash"] = "flash"
    overlap_dp: bool = True
    overlap_pp: bool = True
    overlap_tp: bool = True
    causal_flops: bool = False


MODERN = Stack()
CLASSIC = Stack(attention="core", overlap_dp=False, overlap_pp=False, overlap_tp=False)
"""Megatron-LM and Megatron-DeepSpeed up to 2022."""
