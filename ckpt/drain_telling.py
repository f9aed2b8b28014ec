"""The events of the drains: what failed, since when, and what was done about it."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.ckpt.drain_queue import Ticket
from keepstep.ckpt.errors import Corrupt, FormatError
from keepstep.ckpt.lane import Failure, Late
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tiers import Tier


class DrainTelling:
    """Tells about one tier. A failure that goes on is told at the 1st, 2nd, 4th, 8th ... try."""

    def __init__(self, reporter: Reporter, tier: Tier) -> None:
        self._reporter = reporter
        self._tier = tier

    def failed(self, failure: Failure) -> None:
        """A try failed; it is made again."""
        self._reporter.failed(failure.ticket.rank)
        tries, failing_s, error = failure.tries, failure.failing_s, failure.error
        if tries & (tries - 1) == 0:
            self._tell(
                "drain_failed",
                failure.ticket,
                f"{error}; tried {tries} times in {failing_s:.0f} s, and trying again",
                tries=tries,
                failing_s=failing_s,
                errno=error.errno,
                waiting_steps=sorted({ticket.state.step for ticket in failure.waiting}),
            )

    def recovered(self, tries: int, failing_s: float) -> None:
        """The tier works again."""
        reason = f"the {self._tier.value} works again, after {tries} failures in {failing_s:.0f} s"
        self._reporter.event(
            "drain_recovered", reason, tier=self._tier.value, tries=tries, failing_s=failing_s
        )

    def gave_up(self, failure: Failure, tickets: Sequence[Ticket], then: str) -> None:
        """These images do not keep their slots for this tier any more."""
        names = ", ".join(_what(ticket) for ticket in tickets)
        self._reporter.event(
            "drain_gave_up",
            f"the {self._tier.value} has failed for {failure.failing_s:.0f} s; {then}: {names}; "
            f"the last failure: {failure.error}",
            tier=self._tier.value,
            failing_s=failure.failing_s,
            steps=sorted({ticket.state.step for ticket in tickets}),
            ranks=sorted({ticket.rank for ticket in tickets}),
        )

    def late(self, late: Late, then: str) -> None:
        """The tier neither has an image nor fails."""
        self._tell(
            "disk_slow",
            late.ticket,
            f"{_what(late.ticket)} has been on its way to the {self._tier.value} for "
            f"{late.under_way_s:.1f} s without an error: it is slow, or hangs; look at it with "
            f"`iostat` and `dmesg`; {then}",
            under_way_s=late.under_way_s,
            waiting_steps=sorted({ticket.state.step for ticket in late.waiting}),
        )

    def superseded(self, ticket: Ticket) -> None:
        """A newer state took its place before it had begun."""
        reason = (
            f"{_what(ticket)} does not go to the {self._tier.value}: newer states came before it "
            "had begun; the tier is slower than states are due there"
        )
        self._tell("drain_superseded", ticket, reason)

    def corrupt(self, shelved: Shelved, error: Corrupt, tier: Tier) -> None:
        """Wrong bytes were found in `tier`, and did not get further."""
        ticket = Ticket(shelved.state, shelved.rank)
        self._reporter.event(
            "corrupt",
            f"{_what(ticket)} is damaged in this host's {tier.value}: {error}",
            generation=ticket.state.generation,
            step=ticket.state.step,
            rank=ticket.rank,
            tier=tier.value,
            tensor=error.tensor,
            offset=error.offset,
        )

    def lost(self, shelved: Shelved) -> None:
        """The image left memory before it was written."""
        self.missing(Ticket(shelved.state, shelved.rank))

    def missing(self, ticket: Ticket) -> None:
        """No right copy of the image is left on this host."""
        reason = f"{_what(ticket)} is not on this host any more: it cannot go to the "
        self._tell("drain_lost", ticket, reason + self._tier.value)

    def refused(self, ticket: Ticket, error: FormatError) -> None:
        """The tier holds something else under the image's name."""
        reason = f"{_what(ticket)} does not go to the {self._tier.value}: {error}"
        self._tell("drain_lost", ticket, reason)

    def _tell(self, kind: str, ticket: Ticket, reason: str, **details: object) -> None:
        self._reporter.event(
            kind,
            reason,
            generation=ticket.state.generation,
            step=ticket.state.step,
            rank=ticket.rank,
            tier=self._tier.value,
            **details,
        )


def _what(ticket: Ticket) -> str:
    return f"the image of rank {ticket.rank} of {state_words(ticket.state)}"
