"""Which hosts keep copies of which: pure, alike on all hosts."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.ckpt.inventory import HostAddress


def choose(hosts: Sequence[HostAddress], copies: int) -> tuple[tuple[int, ...], ...]:
    """For each host, the indices of those that keep copies of its images: other hosts, other racks
    first, each chosen equally often. Fewer where there are not so many hosts."""
    raise NotImplementedError
