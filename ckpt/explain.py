"""Which copy each region of a state would come from, and how long that would take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep.ckpt.candidates import Place, Settled
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.manifest import State
from keepstep.ckpt.mosaic import Distance, nearest
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.region import Box
from keepstep.ckpt.tiers import Tier

SPEEDS: Mapping[str, tuple[float, str]] = {
    "own memory": (7.3e9, "verified in place at 22 GB/s, then copied at 10.9 GB/s"),
    "own disk": (2.7e9, "O_DIRECT, one host's disk, as it was read for DESIGN section 8"),
    "other host": (2.2e9, "one stream over loopback TCP; a real network may be faster or slower"),
    "store": (2.7e9, "a directory on a local disk; a bucket is as fast as its network"),
}
"""Bytes per second, and what they were measured with: 2 cores, torch 2.13, all ranks together."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor, the image that has it, and where that would be read."""

    tensor: str
    box: Box
    size_bytes: int
    image: int
    place: Place


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image and the places that have it, the one that would be asked first in front."""

    image: int
    size_bytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a state would come from.

    Attributes:
        state: the state; `is_committed`: whether the log has it.
        here: the host that would read it; "" for one that has nothing itself.
        images: all.
        regions: those that were asked for.
        bytes_by_speed: kind of source (a key of `SPEEDS`) -> bytes.
        seconds: for one host that reads all of it, one source after the other.
        odd: copies that contradict the others, in words.
    """

    state: State
    is_committed: bool
    here: str
    images: tuple[ImageSource, ...]
    regions: tuple[Region, ...]
    bytes_by_speed: Mapping[str, int]
    seconds: float
    odd: tuple[str, ...]


def explain(
    settled: Settled,
    *,
    is_committed: bool,
    distance: Distance,
    wants: Callable[[str], bool] = lambda tensor: False,
) -> Explanation:
    """Where the state would come from, read on host `distance.host`.

    `wants`: which tensors' regions to list.
    """
    manifest = settled.manifest
    images, by_speed = [], dict.fromkeys(SPEEDS, 0)
    for record in manifest.images:
        places = nearest(settled.places[record.rank], distance, record.rank)
        images.append(ImageSource(record.rank, record.size_bytes, places))
        if places:
            by_speed[_kind(places[0], distance.host)] += record.size_bytes
    regions = []
    if any(map(wants, manifest.tensors)):
        plan = Plan(manifest.mesh, manifest.placements, manifest.tensors)
        for one in images:
            for name, box in sorted(plan.owned(one.image).items()):
                if wants(name) and one.places:
                    itemsize = DTYPES[manifest.tensors[name].dtype].itemsize
                    size_bytes = box.volume * itemsize
                    regions.append(Region(name, box, size_bytes, one.image, one.places[0]))
    regions.sort(key=lambda region: (region.tensor, region.box.offsets, region.image))
    return Explanation(
        state=manifest.state,
        is_committed=is_committed,
        here=distance.host,
        images=tuple(images),
        regions=tuple(regions),
        bytes_by_speed={kind: size for kind, size in by_speed.items() if size},
        seconds=sum(size / SPEEDS[kind][0] for kind, size in by_speed.items()),
        odd=settled.odd,
    )


def _kind(place: Place, here: str) -> str:
    if place.tier is Tier.STORE:
        return "store"
    if place.host != here:
        return "other host"
    return "own disk" if place.tier is Tier.DISK else "own memory"
