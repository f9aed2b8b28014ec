"""The structure of a state: names, shapes, dtypes and placements, as one rank and as all see it.

Each rank knows only what it holds a part of (a pipeline stage). `merge_structures` puts the ranks'
views together, and finds where they contradict each other. Structure is constant during a run, so
this is done once, and the plan of every save follows from it with no further word (DESIGN D3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keepstep.ckpt.errors import PlanMismatch
from keepstep.ckpt.manifest import TensorSpec
from keepstep.ckpt.placement import Mesh, Placement, coordinates, mesh_size
from keepstep.ckpt.plan import plan_digest


class HeldTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as one of its holders sees it: global shape, dtype name, placement."""

    shape: tuple[int, ...]
    dtype: str
    placement: Placement


class RankStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank registered: the tensors of which it holds a part, and other names of them."""

    rank: int
    mesh: Mesh
    tensors: dict[str, HeldTensor]
    aliases: dict[str, str]


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all ranks registered together, as the manifest has it. Equal bits on all ranks."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    digest: str
    """`plan_digest` of the three above: equal on all ranks, or their plans differ."""

    def placement(self, name: str) -> Placement:
        """The placement of the tensor called `name`. Raises KeyError."""
        return self.placements[self.tensors[name].placement]


def merge_structures(parts: Sequence[RankStructure]) -> Structure:
    """Put the views of all ranks of a mesh together; the same result from any order of `parts`.

    Raises:
        PlanMismatch: if ranks differ in the mesh, in a tensor's shape, dtype or placement, or in
            the target of an alias; or if a tensor is missing on a rank that its placement names,
            or present on another. The message names tensor and ranks.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    mesh = _common_mesh(ordered)
    seen: dict[str, HeldTensor] = {}
    holders: dict[str, list[int]] = {}
    aliases: dict[str, str] = {}
    alias_from: dict[str, int] = {}
    for part in ordered:
        for name, held in part.tensors.items():
            if name not in seen:
                seen[name] = held
                holders[name] = []
            elif held != seen[name]:
                raise _contradiction(name, holders[name][0], seen[name], part.rank, held)
            holders[name].append(part.rank)
        for alias, target in part.aliases.items():
            if aliases.setdefault(alias, target) != target:
                raise PlanMismatch(
                    f"{alias!r} is another name of {aliases[alias]!r} on rank {alias_from[alias]}, "
                    f"but of {target!r} on rank {part.rank}; register it alike on all ranks",
                    ranks=(part.rank,),
                )
            alias_from.setdefault(alias, part.rank)
    _check_holders(mesh, seen, holders)
    _check_aliases(seen, aliases)
    return structure_of(mesh, seen, aliases)


def structure_of(
    mesh: Mesh, held: Mapping[str, HeldTensor], aliases: Mapping[str, str]
) -> Structure:
    """The structure that ranks which hold these tensors would have agreed upon."""
    numbers: dict[Placement, int] = {}
    tensors: dict[str, TensorSpec] = {}
    for name in sorted(held):
        number = numbers.setdefault(held[name].placement, len(numbers))
        tensors[name] = TensorSpec(held[name].shape, held[name].dtype, number)
    placements = tuple(numbers)
    return Structure(
        mesh=mesh,
        placements=placements,
        tensors=tensors,
        aliases=dict(sorted(aliases.items())),
        digest=plan_digest(mesh, placements, tensors),
    )


def _common_mesh(ordered: Sequence[RankStructure]) -> Mesh:
    if not ordered:
        raise PlanMismatch("no rank described its structure; at least one must", ranks=())
    mesh = ordered[0].mesh
    different = tuple(part.rank for part in ordered if part.mesh != mesh)
    if different:
        raise PlanMismatch(
            f"ranks {list(different)} have another mesh than rank {ordered[0].rank}: "
            f"{_mesh_text(ordered[0].mesh)}; start all ranks with one layout",
            ranks=different,
        )
    ranks = [part.rank for part in ordered]
    if ranks != list(range(mesh_size(mesh))):
        raise PlanMismatch(
            f"the mesh {_mesh_text(mesh)} has ranks 0 to {mesh_size(mesh) - 1}, "
            f"but structures came from ranks {ranks}",
            ranks=tuple(ranks),
        )
    return mesh


def _mesh_text(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)


def _contradiction(
    name: str, first_rank: int, first: HeldTensor, rank: int, held: HeldTensor
) -> PlanMismatch:
    for field in ("shape", "dtype", "placement"):
        expected, found = getattr(first, field), getattr(held, field)
        if expected != found:
            return PlanMismatch(
                f"tensor {name!r} has {field} {expected} on rank {first_rank}, but {found} on "
                f"rank {rank}; ranks that hold parts of one tensor must register it alike, "
                f"and different tensors need different names",
                ranks=(rank,),
            )
    raise ValueError(f"{name!r} is the same on ranks {first_rank} and {rank}")


def _check_holders(mesh: Mesh, seen: dict[str, HeldTensor], holders: dict[str, list[int]]) -> None:
    expected_of: dict[Placement, list[int]] = {}
    for name, held in seen.items():
        if held.placement not in expected_of:
            expected_of[held.placement] = _pinned_ranks(mesh, held.placement)
        expected = expected_of[held.placement]
        if holders[name] != expected:
            missing = sorted(set(expected) - set(holders[name]))
            extra = sorted(set(holders[name]) - set(expected))
            said = f"ranks {missing} do not hold it" if missing else ""
            also = f"ranks {extra} hold it besides" if extra else ""
            raise PlanMismatch(
                f"by its placement tensor {name!r} lies on ranks {expected}, but "
                f"{' and '.join(filter(None, (said, also)))}; pin it to the coordinates that "
                f"hold it, or make it exist on all of them",
                ranks=tuple(missing + extra),
            )


def _pinned_ranks(mesh: Mesh, placement: Placement) -> list[int]:
    index = {axis.name: number for number, axis in enumerate(mesh.axes)}
    pins = [(index[pin.axis], frozenset(pin.coords)) for pin in placement.at]
    found = []
    for rank in range(mesh_size(mesh)):
        coords = coordinates(mesh, rank)
        if all(coords[number] in allowed for number, allowed in pins):
            found.append(rank)
    return found


def _check_aliases(seen: dict[str, HeldTensor], aliases: dict[str, str]) -> None:
    for alias, target in aliases.items():
        if alias in seen or target not in seen:
            why = "is itself a tensor" if alias in seen else f"names {target!r}, which no rank has"
            raise PlanMismatch(f"the alias {alias!r} {why}; register the pair alike", ranks=())
