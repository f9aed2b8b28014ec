"""The communication budget: bytes per axis against what the links can move while compute runs."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.planner.comm import step_bytes
from keepstep.planner.cost import CostModel, StepCost
from keepstep.planner.layout import Layout


@dataclass(frozen=True, slots=True)
class AxisBudget:
    """One axis, per step and GPU.

    bytes: sent per GPU, the mean. wire_s: seconds on the links of the fullest GPU. hide_s: seconds
    of compute under which they may run (0 if the software hides none). exposed_s: what adds to
    the step. `headroom` is what is left of the window, in parts of it; below 0 it is overspent.
    """

    bytes: float
    wire_s: float
    hide_s: float
    exposed_s: float

    @property
    def used(self) -> float:
        """Wire seconds over the window; infinity where nothing hides them, 0 for no traffic."""
        if self.wire_s == 0.0:
            return 0.0
        return self.wire_s / self.hide_s if self.hide_s > 0 else float("inf")

    @property
    def headroom(self) -> float:
        """1 - used."""
        return 1.0 - self.used


@dataclass(frozen=True, slots=True)
class Budget:
    """The three axes of one layout."""

    dp: AxisBudget
    tp: AxisBudget
    pp: AxisBudget


def budget(model: CostModel, layout: Layout, global_batch: int, cost: StepCost) -> Budget:
    """The budget of a layout whose step cost is `cost`."""
    sent = step_bytes(model.model, layout, global_batch)
    windows = cost.windows
    return Budget(
        dp=AxisBudget(sent.dp, windows.dp_wire_s, windows.dp_hide_s, cost.dp_s),
        tp=AxisBudget(sent.tp, windows.tp_wire_s, windows.tp_hide_s, cost.tp_s),
        pp=AxisBudget(sent.pp, windows.pp_wire_s, windows.pp_hide_s, cost.pp_s),
    )


def tokens_to_hide_dp(reduce_bytes: int, zero: int, peak_flops: float, bytes_per_s: float) -> float:
    """Tokens per data-parallel replica and step above which the data axis can hide, at peak rate.

    Backward does 4 FLOPs per parameter and token; the axis moves the gradient (twice its bytes if
    nothing is sharded) and the weight. Sizes of model, tp and pp cancel (scaling-book, training).
    """
    moved = 2.0 * reduce_bytes if zero == 0 else reduce_bytes + 2.0
    return moved / 4.0 * peak_flops / bytes_per_s
