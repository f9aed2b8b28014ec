"""A tenure: what a keeper serves after ranks have entered a generation. Pure."""

from __future__ import annotations

import msgspec

from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.manifest import State
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Tiers


class Tenure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation as this host knows it, from its ranks' `Enter` (equal from all of them).

    Attributes:
        job: the job's name.
        host: this host's id.
        generation: its number.
        term: under which commits are appended.
        ranks: all ranks that this host has in it.
        hosts: of all ranks, by rank: index into `addresses`.
        addresses: the generation's hosts.
        committer: index into `addresses` of the host whose keeper commits.
        base: the state that it begins from.
        structure: of all ranks.
        tiers: the policy.
    """

    job: str
    host: str
    generation: int
    term: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    addresses: tuple[HostAddress, ...]
    committer: int
    base: State | None
    structure: Structure
    tiers: Tiers

    @property
    def is_committer(self) -> bool:
        """Whether this host's keeper is the one that commits."""
        return self.addresses[self.committer].host == self.host
