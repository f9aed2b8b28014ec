"""What a run's state consists of: registered once, by name and kind, and read fresh at each save.

Tensors are registered with the way to read them, not with their memory, because users and torch
replace tensors. Everything that a checkpoint could not give back exactly is refused here, by name,
before the first step. A registry knows this rank's part; `structure.merge_structures` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from keepstep.ckpt.errors import NotRepresentable
from keepstep.ckpt.live import (
    Constant,
    KnownTensors,
    LocalPart,
    ModuleTensor,
    StateTensor,
    persistent,
)
from keepstep.ckpt.manifest import TensorSpec
from keepstep.ckpt.names import check_name
from keepstep.ckpt.optimizer import (
    create_state,
    materialize_state,
    read_groups,
    refuse_groups,
    write_groups,
)
from keepstep.ckpt.placement import Mesh, Pin, Placement, Split, coordinates
from keepstep.ckpt.region import Box
from keepstep.ckpt.restore import RANK_PREFIX
from keepstep.ckpt.sharding import checked_box, local_tensor, placement_of, sorted_pins
from keepstep.ckpt.structure import HeldTensor, RankStructure
from keepstep.ckpt.torch_dtypes import dtype_name, torch_dtype
from keepstep.ckpt.values import why_not_json


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of which this rank holds the part `box`.

    `read` gives the local part, of this moment, as a plain tensor of `box.sizes`. `write` takes a
    restored part; None: it is copied into what `read` gives.
    """

    name: str
    tensor: HeldTensor
    box: Box
    read: LocalPart
    write: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A JSON value, equal on all ranks. `refuse` says why a saved one cannot be taken, or None."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    refuse: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class _Optimizer:
    prefix: str
    optimizer: torch.optim.Optimizer
    names: tuple[tuple[str, torch.Tensor], ...]  # (name without prefix, parameter)
    held: tuple[Held, ...]  # of each parameter, for its placement
    state_names: set[str] = field(default_factory=set)


class Registry:
    """The state of one rank.

    Args:
        mesh: the run's mesh; the axes of DTensors are found in it by name.
        rank: this rank's place in it.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh = mesh
        self.rank = rank
        self.version = 0
        """Grows when the structure changes; a plan is made for one version."""
        self._tensors: dict[str, Held] = {}
        self._aliases: dict[str, str] = {}
        self._values: dict[str, Value] = {}
        self._known = KnownTensors()
        self._optimizers: list[_Optimizer] = []

    # Registration.

    def add_tensor(
        self,
        name: str,
        tensor: torch.Tensor | Callable[[], torch.Tensor],
        *,
        at: Sequence[Pin] = (),
        splits: Sequence[Split] = (),
        shape: Sequence[int] | None = None,
        write: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Register a tensor, or a function that gives it.

        A DTensor says itself how it lies over its mesh. A plain one is replicated over all axes
        that `at` does not pin, unless `splits` and the global `shape` say that it is a part.
        A tensor that is registered already becomes another name (an alias) of the first.

        Raises:
            NotRepresentable: by name, for what could not be given back.
            BadName: for a name that is malformed.
        """
        read = tensor if not isinstance(tensor, torch.Tensor) else Constant(tensor)
        now = read()
        self._refuse_taken(name)
        _refuse_kind(name, now)
        known = self._known.find(now) if write is None else None
        if known is not None:
            self._add_alias(name, known)
            return
        self._hold(name, now, read, at, splits, shape, write)
        if write is None:
            self._known.add(now, name)

    def add_module(
        self,
        prefix: str,
        module: nn.Module,
        *,
        at: Sequence[Pin] = (),
        at_of: Mapping[str, Sequence[Pin]] | None = None,
        same_as: Mapping[str, str] | None = None,
    ) -> None:
        """Register all parameters and persistent buffers of `module` as `prefix` + name.

        Args:
            at: pins of all of them (the module's pipeline stage).
            at_of: name (without prefix) -> pins of that one instead of `at`.
            same_as: name -> the name under which another rank registers the same tensor; here it
                is registered under that name too, and its own becomes an alias.
        """
        at_of, same_as = at_of or {}, same_as or {}
        for fqn, path, key in persistent(module):
            canonical = same_as.get(fqn, fqn)
            pins = at_of.get(fqn, at_of.get(canonical, at))
            self.add_tensor(prefix + canonical, ModuleTensor(module, path, key), at=pins)
            if canonical != fqn:
                self._add_alias(prefix + fqn, prefix + canonical)

    def add_optimizer(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        *,
        names: Mapping[torch.Tensor, str] | None = None,
        params_prefix: str = "model/",
        groups_name: str = "param_groups",
    ) -> None:
        """Register an optimizer's state as `prefix` + parameter + "/" + key, and its groups.

        The parameters must be registered already. `names` gives their names without
        `params_prefix`, where they cannot be found by identity (local views of DTensors).
        State is made to exist where that changes no value; else see `has_absent_state`.
        """
        found = []
        for group in optimizer.param_groups:
            for number, param in enumerate(group["params"]):
                found.append(self._parameter(prefix, number, param, names, params_prefix))
        held = tuple(self._tensors[params_prefix + name] for name, _ in found)
        materialize_state(optimizer)
        kept = _Optimizer(prefix, optimizer, tuple(found), held)
        self._optimizers.append(kept)
        self._scan(kept)
        self.add_value(
            groups_name,
            lambda: read_groups(groups_name, optimizer),
            lambda groups: write_groups(optimizer, groups),
            lambda groups: refuse_groups(optimizer, groups),
        )

    def add_value(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        refuse: Callable[[Any], str | None] = lambda value: None,
    ) -> None:
        """Register a JSON value that is equal on all ranks.

        `refuse` is asked before anything is changed by a load, so that `write` need not fail.

        Raises:
            NotRepresentable: if JSON would not give back what `read` gives now.
        """
        self._refuse_taken(name)
        reason = why_not_json(read())
        if reason is not None:
            raise NotRepresentable(name, f"{reason}; give lists, dicts, numbers, texts or None")
        self._values[name] = Value(name, read, write, refuse)
        self.version += 1

    def add_rank_tensor(
        self,
        name: str,
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        """Register what is this rank's own (RNG state): ``rank/<rank>/name``, pinned to it.

        Restored into the same mesh only; in another mesh it is left as it is there.
        """
        coords = coordinates(self.mesh, self.rank)
        pins = [
            Pin(axis=axis.name, coords=(coord,))
            for axis, coord in zip(self.mesh.axes, coords, strict=True)
        ]
        self.add_tensor(f"{RANK_PREFIX}{self.rank}/{name}", read, at=pins, write=write)

    # What is registered.

    @property
    def tensors(self) -> Mapping[str, Held]:
        """All tensors of which this rank holds a part, by name."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Value]:
        """All values, by name."""
        return self._values

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All registered optimizers."""
        return tuple(one.optimizer for one in self._optimizers)

    def updated_names(self) -> frozenset[str]:
        """The tensors that change only in a step of a registered optimizer.

        Its parameters and its state. All others (buffers, frozen parameters, RNG) may change at
        any time.
        """
        names: set[str] = set()
        for one in self._optimizers:
            names.update(held.name for held in one.held)
            names.update(one.state_names & self._tensors.keys())
        return frozenset(names)

    def state_count(self) -> int:
        """How many tensors all optimizers' states have: grows when state comes to exist."""
        return sum(
            value is not None
            for one in self._optimizers
            for state in one.optimizer.state.values()
            for value in state.values()
        )

    def structure(self) -> RankStructure:
        """This rank's view, for `merge_structures`."""
        return RankStructure(
            rank=self.rank,
            mesh=self.mesh,
            tensors={name: held.tensor for name, held in self._tensors.items()},
            aliases=dict(self._aliases),
        )

    def read_values(self) -> dict[str, Any]:
        """All values of this moment. Raises NotRepresentable if one is no JSON any more."""
        found = {}
        for name, value in self._values.items():
            found[name] = value.read()
            reason = why_not_json(found[name])
            if reason is not None:
                raise NotRepresentable(name, f"since registration it has changed: {reason}")
        return found

    def has_absent_state(self) -> bool:
        """Whether a parameter that is being trained has no optimizer state yet.

        Then the first step makes it: call `refresh` after it on all ranks, and plan again.
        """
        return any(
            param.requires_grad and not one.optimizer.state.get(param)
            for one in self._optimizers
            for _, param in one.names
        )

    def refresh(self) -> bool:
        """Look for optimizer state that has come to exist. Returns whether there was any."""
        before = self.version
        for one in self._optimizers:
            self._scan(one)
        return self.version != before

    def create_absent(self, wanted: Mapping[str, TensorSpec]) -> bool:
        """Make optimizer state exist that a checkpoint has (`Manifest.tensors`).

        For optimizers that make their state lazily, before a restore into them. Names that are no
        state of a registered parameter are passed over. Returns whether something was made.
        """
        made = False
        for one in self._optimizers:
            params = dict(one.names)
            for name, spec in wanted.items():
                if name in self._tensors or not name.startswith(one.prefix):
                    continue
                param_name, _, key = name.removeprefix(one.prefix).rpartition("/")
                if param_name in params:
                    param = params[param_name]
                    dtype = torch_dtype(spec.dtype)
                    create_state(one.optimizer, param, key, spec.shape, dtype)
                    made = True
        return self.refresh() or made

    # Inside.

    def _hold(
        self,
        name: str,
        now: torch.Tensor,
        read: Callable[[], torch.Tensor],
        at: Sequence[Pin],
        splits: Sequence[Split],
        shape: Sequence[int] | None,
        write: Callable[[torch.Tensor], None] | None,
    ) -> None:
        if isinstance(now, DTensor):
            if splits or shape is not None:
                raise NotRepresentable(name, "it is a DTensor, which says itself how it is split")
            placement = placement_of(name, now, self.mesh, self.rank, at)
            global_shape = tuple(now.shape)
        else:
            placement = Placement(splits=tuple(splits), at=sorted_pins(at))
            global_shape = tuple(now.shape if shape is None else shape)
        local = local_tensor(now)
        _refuse_layout(name, local, is_written=write is None)
        box = checked_box(name, global_shape, placement, self.mesh, self.rank, tuple(local.shape))
        tensor = HeldTensor(
            shape=global_shape, dtype=dtype_name(name, now.dtype), placement=placement
        )
        self._tensors[name] = Held(
            name, tensor, box, LocalPart(name, read, tuple(local.shape), now), write
        )
        self.version += 1

    def _add_alias(self, name: str, target: str) -> None:
        if self._aliases.get(name, target) != target:
            raise NotRepresentable(name, f"it is another name of {self._aliases[name]!r} already")
        self._aliases[name] = target
        self.version += 1

    def _refuse_taken(self, name: str) -> None:
        check_name(name)
        if name in self._tensors or name in self._aliases or name in self._values:
            raise NotRepresentable(name, "the name is registered already; names must differ")

    def _parameter(
        self,
        prefix: str,
        number: int,
        param: torch.Tensor,
        names: Mapping[torch.Tensor, str] | None,
        params_prefix: str,
    ) -> tuple[str, torch.Tensor]:
        given = None if names is None else names.get(param)
        found = None if given is None else params_prefix + given
        if found is None:
            found = self._known.find(param)
        if found is None or found not in self._tensors or not found.startswith(params_prefix):
            raise NotRepresentable(
                f"{prefix}parameter {number} of shape {tuple(param.shape)}",
                f"no registered tensor under {params_prefix!r} is this parameter; "
                f"register the module first, or give its name",
            )
        return found.removeprefix(params_prefix), param

    def _scan(self, one: _Optimizer) -> None:
        for (name, param), held in zip(one.names, one.held, strict=True):
            for key, value in one.optimizer.state.get(param, {}).items():
                full = f"{one.prefix}{name}/{key}"
                if value is None or full in self._tensors:
                    continue
                if not isinstance(value, torch.Tensor):
                    raise NotRepresentable(
                        full,
                        f"it is a {type(value).__qualname__}, and only tensors can be kept in "
                        f"an optimizer's state; make it a 0-d tensor",
                    )
                one.state_names.add(full)
                read = StateTensor(one.optimizer, param, key)
                at = held.tensor.placement.at
                like_param = (
                    not isinstance(value, DTensor)
                    and value.ndim > 0
                    and tuple(value.shape) == held.box.sizes
                )
                if like_param:
                    splits, shape = held.tensor.placement.splits, held.tensor.shape
                    self.add_tensor(full, read, at=at, splits=splits, shape=shape)
                else:
                    self.add_tensor(full, read, at=at)


def _refuse_kind(name: str, tensor: torch.Tensor) -> None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, DTensor)
    if not plain:
        raise NotRepresentable(
            name,
            f"it is a {type(tensor).__module__}.{type(tensor).__qualname__}, whose meaning the "
            f"format does not know; register the plain tensors that it consists of",
        )


def _refuse_layout(name: str, local: torch.Tensor, *, is_written: bool) -> None:
    if local.layout is not torch.strided or local.is_quantized:
        kind = "quantized" if local.is_quantized else str(local.layout)
        raise NotRepresentable(name, f"its layout is {kind}; only strided tensors can be kept")
    if local.device.type == "meta":
        raise NotRepresentable(name, "it is on the meta device and has no data; materialize it")
    repeated = any(
        stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)
    )
    if repeated and is_written:
        raise NotRepresentable(
            name,
            f"it is expanded (shape {tuple(local.shape)}, strides {local.stride()}), so that a "
            f"restored value could not be written into it; register its base",
        )
