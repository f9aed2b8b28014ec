"""An optimizer's state and parameter groups, as things that a checkpoint can hold.

torch makes the state lazily, in the first step; a checkpoint wants to know its structure before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.sharding import local_tensor
from keepstep.ckpt.values import why_not_json

_GATED = (torch.optim.Adam, torch.optim.AdamW)
_BATCH_BYTES = 64 * 2**20  # of zero gradients that exist at one time


def materialize_state(optimizer: torch.optim.Optimizer) -> bool:
    """Make the state of all trainable parameters exist, changing no value.

    For Adam and AdamW of torch: a fused step whose `found_inf` is one allocates the state and
    rejects the update on the device. Their fresh state is zeros, which is what they would begin
    with later, so a parameter that never gets a gradient is not affected either. (SGD's momentum
    is: its first value is the gradient itself.) Hooks of `step` do not run, gradients and options
    are as before on return.

    Returns whether every trainable parameter now has state.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    absent = [param for param in params if param.requires_grad and not optimizer.state.get(param)]
    if not absent:
        return True
    differs = any(group.get("differentiable") for group in optimizer.param_groups)
    if type(optimizer) not in _GATED or differs or not all(map(_may_be_fused, absent)):
        return False
    before = [(param, param.grad) for param in params]
    gate_before = getattr(optimizer, "found_inf", None)
    step = cast("Callable[[torch.optim.Optimizer], None]", inner_step(type(optimizer)))
    options = [(group, group["fused"], group["foreach"]) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        for param in params:
            param.grad = None
        for batch in _batches(absent):
            gate = torch.ones((), device=local_tensor(batch[0]).device)
            vars(optimizer)["found_inf"] = gate
            for param in batch:
                param.grad = torch.zeros_like(param)
            step(optimizer)
            for param in batch:
                param.grad = None
    finally:
        for group, fused, foreach in options:
            group["fused"], group["foreach"] = fused, foreach
        for param, grad in before:
            param.grad = grad
        vars(optimizer).pop("found_inf", None)
        if gate_before is not None:
            vars(optimizer)["found_inf"] = gate_before
    _count_where_others_do(optimizer, absent)
    return True


def _may_be_fused(param: torch.Tensor) -> bool:
    """Whether the fused step takes such a parameter."""
    return param.is_floating_point() and local_tensor(param).device.type in ("cpu", "cuda")


def _count_where_others_do(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> None:
    """Put the count of steps where a step that is not fused keeps it: on the CPU."""
    is_double = torch.get_default_dtype() == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    made = {id(param) for param in params}
    for group in optimizer.param_groups:
        if group["fused"] or group.get("capturable"):
            continue
        for param in group["params"]:
            if id(param) in made:
                state = optimizer.state[param]
                state["step"] = state["step"].to("cpu", dtype)


def inner_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The class's own `step`, below the hooks and the schedulers' counting that wrap it."""
    step = kind.step
    return cast("Callable[..., Any]", getattr(step, "__wrapped__", step))


def _batches(params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """`params` in batches of one device, each of bounded size."""
    batch: list[torch.Tensor] = []
    size_bytes = 0
    for param in params:
        local = local_tensor(param)
        other_device = bool(batch) and local_tensor(batch[0]).device != local.device
        if batch and (other_device or size_bytes + local.nbytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(param)
        size_bytes += local.nbytes
    if batch:
        yield batch


def create_state(
    optimizer: torch.optim.Optimizer,
    param: torch.Tensor,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Make the one state tensor that a checkpoint has and this optimizer has not made yet.

    It lies like the parameter if it has the parameter's shape; else it is a plain tensor on the
    CPU, or on the parameter's device if the optimizer's groups are fused or capturable.
    """
    if shape == tuple(param.shape):
        made = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    else:
        group = next(
            group
            for group in optimizer.param_groups
            if any(param is one for one in group["params"])
        )
        on_device = group.get("fused") or group.get("capturable")
        device = local_tensor(param).device if on_device else torch.device("cpu")
        made = torch.zeros(shape, dtype=dtype, device=device)
    optimizer.state[param][key] = made


def read_groups(name: str, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of all parameter groups (lr, betas, and whatever a user added) as JSON values.

    Tuples become lists, 0-d tensors numbers; `write_groups` turns them back. Parameters are left
    out: they are known by name.

    Raises:
        NotRepresentable: naming group and option, for an option that JSON cannot hold.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        plain: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                continue
            plain[key] = _plain(value)
            reason = why_not_json(plain[key])
            if reason is not None:
                raise NotRepresentable(
                    f"{name}[{number}][{key!r}]", f"{reason}; keep it outside the optimizer"
                )
        groups.append(plain)
    return groups


def refuse_groups(optimizer: torch.optim.Optimizer, groups: object) -> str | None:
    """Why `write_groups` could not take these groups; None if it can."""
    count = len(optimizer.param_groups)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return f"it is no list of {count} parameter groups"
    if len(groups) != count:
        return f"it has {len(groups)} parameter groups, the optimizer {count}"
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, live in group.items():
            number_like = (int, float) if isinstance(live, torch.Tensor) else (list,)
            special = isinstance(live, torch.Tensor | tuple)
            if key in saved and special and not isinstance(saved[key], number_like):
                return f"group {number} has {key!r} = {saved[key]!r}, which does not fit {live!r}"
    return None


def write_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Set the options of the groups in place; those that the checkpoint lacks stay as they are.

    `refuse_groups` must have had no objection.
    """
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            live = group.get(key)
            if key == "params":
                continue
            if isinstance(live, torch.Tensor):
                live.fill_(value)
            elif isinstance(live, tuple):
                group[key] = tuple(value)
            else:
                group[key] = value


def _plain(value: Any) -> Any:  # noqa: ANN401  options of a group are anything
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not isinstance(value, DTensor):
        return value.item()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
