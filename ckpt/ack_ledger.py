"""Which images are still to be sent to which peer, and what a rank may count on. Pure.

A rank's *level* is the newest step of which its host and all its peers have the image, as all of
its older ones: images are sent in order, so that this one number says it. A peer that does not
answer is `lost` after a while: the level then counts without it, and of each rank it is owed the
newest image only, since older ones are overwritten meanwhile. When it has taken an image of each
rank, it counts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class AckLedger:
    """Of one generation.

    Args:
        ranks: whose images are sent.
        peers: ids of the hosts that are to have them.
    """

    def __init__(self, ranks: Collection[int], peers: Collection[str]) -> None:
        self._levels = dict.fromkeys(ranks, -1)
        self._sealed = dict.fromkeys(ranks, -1)
        self._peers = {peer: _Peer(ranks) for peer in peers}

    def sealed(self, rank: int, step: int) -> None:
        """This host has sealed an image. Steps of a rank ascend; one that does not is ignored."""
        if step <= self._sealed[rank]:
            return
        self._sealed[rank] = step
        for peer in self._peers.values():
            if peer.is_lost:
                peer.owed[rank].clear()
            peer.owed[rank].append(step)
        self._raise_levels()

    def following(self, peer: str) -> tuple[int, int] | None:
        """(rank, step) of the image that `peer` is to get next: the oldest state first."""
        owed = ((steps[0], rank) for rank, steps in self._peers[peer].owed.items() if steps)
        step, rank = min(owed, default=(-1, -1))
        return None if rank < 0 else (rank, step)

    def acked(self, peer: str, rank: int, step: int) -> bool:
        """`peer` has the image. Returns whether the peer was lost and counts again from now on."""
        found = self._peers[peer]
        self.dropped(peer, rank, step)
        found.acked[rank] = max(found.acked[rank], step)
        is_back = found.is_lost and self._is_met(found, rank)
        if is_back:
            found.is_lost = False
        self._raise_levels()
        return is_back

    def _is_met(self, peer: _Peer, rank: int) -> bool:
        """Whether a lost peer has, with this image of `rank`, taken one of each rank."""
        peer.is_met.add(rank)
        return all(
            one in peer.is_met or peer.acked[one] >= sealed for one, sealed in self._sealed.items()
        )

    def dropped(self, peer: str, rank: int, step: int) -> None:
        """The image need not be sent, or is no more: its slot was used again by the rule."""
        owed = self._peers[peer].owed[rank]
        while owed and owed[0] <= step:
            owed.popleft()

    def lost(self, peer: str) -> bool:
        """`peer` does not answer. Returns whether that is new."""
        found = self._peers[peer]
        is_new, found.is_lost = not found.is_lost, True
        found.is_met.clear()
        for steps in found.owed.values():
            while len(steps) > 1:
                steps.popleft()
        self._raise_levels()
        return is_new

    def restarted(self, peer: str) -> None:
        """`peer` may have forgotten what it had: it is owed the newest image of each rank."""
        found = self._peers[peer]
        for rank, step in self._sealed.items():
            found.acked[rank] = -1
            found.owed[rank].clear()
            if step >= 0:
                found.owed[rank].append(step)

    def level(self, rank: int) -> int:
        """The newest step of `rank` that all who count have; -1: none. Never goes back."""
        return self._levels[rank]

    def _raise_levels(self) -> None:
        for rank, sealed in self._sealed.items():
            counted = (peer.acked[rank] for peer in self._peers.values() if not peer.is_lost)
            level = min(min(counted, default=sealed), sealed)
            self._levels[rank] = max(self._levels[rank], level)

    def is_lost(self, peer: str) -> bool:
        """Whether `peer` does not count at present."""
        return self._peers[peer].is_lost

    def newest(self, rank: int) -> int:
        """The newest step of `rank` that this host has sealed; -1: none."""
        return self._sealed[rank]

    def owed_steps(self, rank: int) -> set[int]:
        """The steps of `rank` that some peer is still to get."""
        return {step for peer in self._peers.values() for step in peer.owed[rank]}

    def owed(self, peer: str) -> int:
        """How many images `peer` is still to get."""
        return sum(map(len, self._peers[peer].owed.values()))


class _Peer:
    def __init__(self, ranks: Collection[int]) -> None:
        self.owed: dict[int, deque[int]] = {rank: deque() for rank in ranks}
        self.acked = dict.fromkeys(ranks, -1)
        self.is_lost = False
        self.is_met: set[int] = set()  # ranks of which it took an image since it was lost
