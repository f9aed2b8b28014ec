"""Boxes and regions: the one abstraction that saving, restoring, resharding and comparing share.

A box is an axis-aligned part of a tensor. All arithmetic is on plain integers (DESIGN D1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` of a tensor.

    A 0-d tensor has the box ``Box((), ())``, of one element. A size of 0 makes the box empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box of the *global* tensor called `name`."""

    name: str
    box: Box
