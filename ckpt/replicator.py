"""The sending side of replication: offers each newly sealed own image to this host's peers.

A peer pulls what it is offered, and answers when it has a verified copy; only then is it acked. One
thread for each peer sleeps until there is something to offer. Nothing here holds up a rank: an
image that its rank overwrites meanwhile, by the rule of slots, is passed over.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from keepstep.ckpt.ack_ledger import AckLedger
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.keeper_config import KeeperConfig
from keepstep.ckpt.keeper_errors import KeeperGone, Refusal, Stale
from keepstep.ckpt.peers import choose
from keepstep.ckpt.plane_client import PlaneClient
from keepstep.ckpt.plane_messages import Offer
from keepstep.ckpt.service import Reporter
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.storage.token import Token

PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 1.0


class Replicator:
    """A `Service`. One thread for each peer host.

    Args:
        config: patience is used.
        shelf: which holds what is being sent.
        reporter: `acked`, and the events `unprotected` and `protected`.
        token: the job's.
        address: "host:port" of this host's data plane, from which peers pull.
        agreed: rank -> the newest step that is sealed and acked on all ranks (its seat's word), -1:
            none yet.
        locate: host id -> where its keeper may be now ("host:port" or None), asked when it is not
            where the tenure says: a hint. Must not block.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        config: KeeperConfig,
        shelf: Shelf,
        reporter: Reporter,
        token: Token,
        address: str,
        agreed: Callable[[int], int],
        locate: Callable[[str], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.shelf = shelf
        self.token = token
        self.agreed = agreed
        self.locate = locate
        self.clock = clock
        self.patience_s = config.patience_s
        self.reporter = reporter
        self._lock = threading.Lock()
        self._course: _Course | None = None

    def enter(self, tenure: Tenure) -> None:
        """See `Service.enter`. What is owed to an older generation's peers is dropped."""
        hosts = [each.host for each in tenure.addresses]
        places = choose(tenure.addresses, tenure.tiers.peers)[hosts.index(tenure.host)]
        course = _Course(self, tenure, [tenure.addresses[place] for place in places])
        with self._lock:
            before, self._course = self._course, course
        if before is not None:
            before.end()
        wanted = tenure.tiers.peers
        if len(places) < wanted:
            self.reporter.event(
                "unprotected",
                f"{wanted} copies in the memory of other hosts were asked for, but there are only "
                f"{len(places)} others; add hosts, or set peers to {len(places)}",
                host=tenure.host,
                generation=tenure.generation,
                peers=[hosts[place] for place in places],
            )
        course.begin()

    def sealed(self, shelved: Shelved) -> None:
        """See `Service.sealed`."""
        course = self._course
        if course is not None:
            course.sealed(shelved)

    def close(self, timeout_s: float) -> None:
        """See `Service.close`."""
        with self._lock:
            course, self._course = self._course, None
        if course is not None:
            course.close(timeout_s)

    def status(self) -> dict[str, object]:
        """See `Service.status`."""
        course = self._course
        return {"peers": [] if course is None else course.status()}


class _Course:
    """The replication of one generation."""

    def __init__(self, replicator: Replicator, tenure: Tenure, peers: list[HostAddress]) -> None:
        self.replicator = replicator
        self.tenure = tenure
        self.ledger = AckLedger(tenure.ranks, [peer.host for peer in peers])
        self.changed = threading.Condition()
        self.is_ended = False
        self._is_stale = False
        self._images: dict[tuple[int, int], Shelved] = {}
        self._links = [_Link(self, peer) for peer in peers]

    def begin(self) -> None:
        for link in self._links:
            link.thread.start()

    def sealed(self, shelved: Shelved) -> None:
        state, rank = shelved.state, shelved.rank
        if state.generation != self.tenure.generation or rank not in self.tenure.ranks:
            return
        with self.changed:
            self.ledger.sealed(rank, state.step)
            self._images[rank, state.step] = shelved
            levels = self._settled((rank,))
        self._report(levels)

    def following(self, peer: str) -> Shelved | None:
        """What to offer next; waits for it. None: the course is over."""
        with self.changed:
            while True:
                wanted = None if self._is_stale else self.ledger.following(peer)
                if wanted is not None and not self.is_ended:
                    return self._images[wanted]
                if self.is_ended:
                    return None
                self.changed.wait()

    def acked(self, peer: str, shelved: Shelved) -> None:
        with self.changed:
            is_back = self.ledger.acked(peer, shelved.rank, shelved.state.step)
            levels = self._settled(self.tenure.ranks if is_back else (shelved.rank,))
        self._report(levels)
        if is_back:
            self._event("protected", f"host {peer} has copies of the newest images again", peer)

    def dropped(self, peer: str, shelved: Shelved) -> None:
        with self.changed:
            self.ledger.dropped(peer, shelved.rank, shelved.state.step)
            self._settled((shelved.rank,))

    def lost(self, peer: str, reason: str) -> None:
        with self.changed:
            if not self.ledger.lost(peer):
                return
            levels = self._settled(self.tenure.ranks)
        self._report(levels)
        self._event(
            "unprotected",
            f"host {peer} has taken no copy for {self.replicator.patience_s:g} s; until it is "
            f"back, images count as safe in this host's own memory alone: {reason}",
            peer,
        )
        for rank in self.tenure.ranks:
            self.replicator.reporter.failed(rank)

    def restarted(self, peer: str) -> None:
        with self.changed:
            self.ledger.restarted(peer)

    def stale(self, reason: str, peer: str) -> None:
        """A newer generation has taken over: there is nothing more to be sent by this one."""
        with self.changed:
            is_new, self._is_stale = not self._is_stale, True
        if is_new:
            self._event("superseded", reason, peer)

    def wait(self, seconds: float) -> None:
        """A pause after a failure, ended early by the end of the course."""
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_ended, timeout=seconds)

    def end(self) -> None:
        with self.changed:
            self.is_ended = True
            self.changed.notify_all()

    def close(self, timeout_s: float) -> None:
        deadline_s = self.replicator.clock() + timeout_s
        with self.changed:
            self.changed.wait_for(self._is_quiet, timeout=timeout_s)
        self.end()
        for link in self._links:
            if link.thread.ident is not None:
                link.thread.join(max(0.1, deadline_s - self.replicator.clock()))

    def status(self) -> list[dict[str, object]]:
        with self.changed:
            return [
                {
                    "host": link.peer.host,
                    "address": link.address,
                    "is_lost": self.ledger.is_lost(link.peer.host),
                    "owed_images": self.ledger.owed(link.peer.host),
                    "sent_images": link.sent_images,
                    "sent_bytes": link.sent_bytes,
                    "failures": link.failures,
                    "last_failure": link.last_failure,
                }
                for link in self._links
            ]

    def _is_quiet(self) -> bool:
        """Whether nothing is owed to anybody who takes it."""
        return self._is_stale or all(
            link.is_failing or not self.ledger.owed(link.peer.host) for link in self._links
        )

    def _settled(self, ranks: Collection[int]) -> dict[int, int]:
        """The levels to report. Forgets the images that nobody is owed any more."""
        for rank in ranks:
            owed = self.ledger.owed_steps(rank) | {self.ledger.newest(rank)}
            for key in [key for key in self._images if key[0] == rank and key[1] not in owed]:
                del self._images[key]
        self.changed.notify_all()
        return {rank: self.ledger.level(rank) for rank in ranks}

    def _report(self, levels: Mapping[int, int]) -> None:
        """Not under the lock: the core, which has its own, may be calling `sealed` just now."""
        for rank, level in levels.items():
            if level >= 0:
                self.replicator.reporter.acked(rank, level)

    def _event(self, kind: str, reason: str, peer: str) -> None:
        self.replicator.reporter.event(
            kind,
            reason,
            host=self.tenure.host,
            peer=peer,
            generation=self.tenure.generation,
        )


class _Link:
    """The thread that offers images to one peer."""

    def __init__(self, course: _Course, peer: HostAddress) -> None:
        self._course = course
        self.peer = peer
        self.address = peer.address
        self.thread = threading.Thread(
            target=self._work, name=f"keepstep-replicate-{peer.host}", daemon=True
        )
        self.sent_images = 0
        self.sent_bytes = 0
        self.failures = 0
        self.last_failure = ""
        self._client: PlaneClient | None = None
        self._keeper = ""
        self._failing_since_s: float | None = None
        self._random = random.SystemRandom()

    @property
    def is_failing(self) -> bool:
        """Whether the peer did not take what it was offered last."""
        return self._failing_since_s is not None

    def _work(self) -> None:
        try:
            self._send_all()
        finally:
            self._close()
            if not self._course.is_ended:  # a defect: it is told, and stops no rank
                self._course.lost(self.peer.host, "the thread that sends to it has died")

    def _send_all(self) -> None:
        course, replicator = self._course, self._course.replicator
        pause_s = PAUSE_FIRST_S
        while (shelved := course.following(self.peer.host)) is not None:
            if shelved.state.step < replicator.agreed(shelved.rank):
                course.dropped(self.peer.host, shelved)  # all have newer ones
                continue
            try:
                self._offer(shelved)
                pause_s = PAUSE_FIRST_S
                self._failing_since_s = None
            except Stale as error:
                course.stale(str(error), self.peer.host)
            except CheckpointError as error:
                self._failed(error)
                course.wait(pause_s * self._random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _offer(self, shelved: Shelved) -> None:
        course, replicator = self._course, self._course.replicator
        tenure = course.tenure
        with replicator.shelf.hold(shelved) as is_there:
            if not is_there:
                course.dropped(self.peer.host, shelved)
                return
            accepted = self._connected().offer(
                Offer(
                    job=tenure.job,
                    to_host=self.peer.host,
                    from_host=tenure.host,
                    address=replicator.address,
                    generation=tenure.generation,
                    term=tenure.term,
                    state=shelved.state,
                    record=shelved.record,
                    plan_digest=shelved.structure.digest,
                    values=msgspec.Raw(msgspec.json.encode(shelved.values)),
                    agreed_acked=replicator.agreed(shelved.rank),
                )
            )
        self.sent_images += 1
        self.sent_bytes += shelved.record.size_bytes
        if self._keeper not in ("", accepted.keeper):
            course.restarted(self.peer.host)
        self._keeper = accepted.keeper
        course.acked(self.peer.host, shelved)

    def _connected(self) -> PlaneClient:
        if self._client is None:
            replicator = self._course.replicator
            self._client = PlaneClient(self.address, replicator.token, replicator.patience_s)
        return self._client

    def _failed(self, error: CheckpointError) -> None:
        replicator = self._course.replicator
        self.failures += 1
        self.last_failure = str(error)
        now_s = replicator.clock()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= replicator.patience_s:
            self._course.lost(self.peer.host, self.last_failure)
        if isinstance(error, KeeperGone | Refusal):
            self._close()
            found = replicator.locate(self.peer.host)
            self.address = self.peer.address if found in (None, self.address) else found

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
