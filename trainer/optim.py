"""AdamW over a rank's parameters, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from keepstep.trainer.model_config import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """The rate of step `step` (from 1): linear warm-up, cosine down to the least, then constant."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.schedule_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    least = config.lr * config.lr_min_ratio
    return least + (config.lr - least) * (1.0 + math.cos(math.pi * progress)) / 2.0


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: matrices yes, norm weights no."""
    return not name.endswith("norm.weight")


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig
) -> torch.optim.AdamW:
    """Fused AdamW with two groups: matrices, then norm weights. Parameters keep their order."""
    pairs = list(named)
    groups = [
        {"params": [p for n, p in pairs if decays(n)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in pairs if not decays(n)], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def apply_gated(optimizer: torch.optim.AdamW, lr: float, refused: torch.Tensor) -> None:
    """One step at rate `lr`, unless `refused` (0-d fp32 on the device) is 1: then no bit changes.

    The gate is the fused kernel's own found_inf, so the host need not wait for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = refused  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
