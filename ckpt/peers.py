"""Which hosts keep copies of which: pure, alike on all hosts."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.ckpt.inventory import HostAddress


def choose(hosts: Sequence[HostAddress], copies: int) -> tuple[tuple[int, ...], ...]:
    """For each host, the indices of the hosts that keep copies of its images, best first.

    Never the host itself. Hosts of racks that have no copy yet come first, then those that were
    chosen least often: with racks of one size, or none, all are chosen equally often. A rack that
    is not known ("") is one of its own for each host. There are fewer copies where there are not
    so many other hosts.

    Args:
        hosts: of the generation, in its order; all hosts must give the same.
        copies: wanted of each image.
    """
    count = len(hosts)
    wanted = min(copies, count - 1)
    load = [0] * count
    chosen: list[list[int]] = [[] for _ in hosts]
    for _ in range(max(wanted, 0)):
        for index in range(count):
            best = min(
                (other for other in range(count) if other != index and other not in chosen[index]),
                key=lambda other: (
                    _shared([hosts[index], *(hosts[one] for one in chosen[index])], hosts[other]),
                    load[other],
                    (other - index) % count,
                ),
            )
            chosen[index].append(best)
            load[best] += 1
    return tuple(map(tuple, chosen))


def _shared(holders: Sequence[HostAddress], other: HostAddress) -> int:
    """How many of those that have the image would be lost together with `other`."""
    return sum(bool(other.rack) and holder.rack == other.rack for holder in holders)
