"""Can this host talk to the keepers of others: reachable, ours, and closed to strangers."""

from __future__ import annotations

import http.client
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.ckpt.doctor import Figures, Finding, Verdict, failed
from keepstep.ckpt.host_hints import read_hints
from keepstep.storage.store import Store
from keepstep.storage.token import Token

STATUS_PATH = "/v1/status"
_ANSWER_BYTES_MAX = 1 << 20
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Peer:
    """A keeper to be asked.

    Attributes:
        name: of its host, or its address.
        address: "host:port".
        generation: of the hint that named it; None: a person did.
    """

    name: str
    address: str
    generation: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether it can only be on this host: nobody else reaches that address."""
        host = self.address.rpartition(":")[0].strip("[]")
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:  # a name
            return False


def hinted_peers(store: Store) -> list[Peer]:
    """The keepers that the store has a hint of, newest generation only. Raises StoreError.

    Older generations' hosts need not be there any more.
    """
    hints = sorted(read_hints(store).values(), key=lambda hint: hint.host)
    newest = max((hint.generation for hint in hints), default=0)
    return [Peer(h.host, h.address, h.generation) for h in hints if h.generation == newest]


def check_peers(peers: Sequence[Peer], token: Token, timeout_s: float) -> list[Finding]:
    """One finding for each peer. Blocking: at most three `timeout_s` each."""
    return [_check(peer, token, timeout_s) for peer in peers]


def _check(peer: Peer, token: Token, timeout_s: float) -> Finding:
    check = f"peer {peer.name}"
    host, _, port = peer.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
        return failed(check, f"{peer.address!r} is no HOST:PORT", "give it as --peer HOST:PORT")
    host = host.strip("[]")
    begun_s = time.perf_counter()
    try:
        status = _ask(host, int(port), token.header, timeout_s)
        ms = (time.perf_counter() - begun_s) * 1_000
        stranger = _ask(host, int(port), None, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return _unreachable(check, peer, error)
    what = f"{peer.address}: answered in {ms:.1f} ms with status {status}"
    figures: Figures = {"address": peer.address, "ms": round(ms, 3), "status": status}
    if status in (401, 403):
        fix = "its job's token is another one: give all hosts of a job the same (KEEPSTEP_TOKEN)"
        return failed(check, f"{what}: it refuses this token", fix, figures)
    if status != 200:
        fix = "something else listens there: check the address, or look at that keeper's log"
        return failed(check, f"{what}: expected 200", fix, figures)
    if stranger not in (401, 403):
        fix = "it is no keeper, or it has no token: stop it, and start it with the job's token"
        return failed(check, f"{what}, and without a token with {stranger}", fix, figures)
    return Finding(check, Verdict.GOOD, f"{what}; strangers are refused", "", figures)


def _ask(host: str, port: int, authorization: str | None, timeout_s: float) -> int:
    """The status of the answer to a request for the keeper's status. Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {} if authorization is None else {"Authorization": authorization}
        connection.request("GET", STATUS_PATH, headers=headers)
        answer = connection.getresponse()
        answer.read(_ANSWER_BYTES_MAX)
        return answer.status
    finally:
        connection.close()


def _unreachable(check: str, peer: Peer, error: Exception) -> Finding:
    reason = str(error) or type(error).__name__
    fix = (
        "start that host's keeper, and let its port through (firewall, network policy, security"
        " group); check from here: curl -s -o /dev/null -w '%{http_code}'"
        f" http://{peer.address}{STATUS_PATH}"
    )
    if peer.generation is not None:
        fix += "; if the run has ended, there is none to ask: --no-hints"
    return failed(check, f"{peer.address}: {reason}", fix, {"address": peer.address})
