"""What keepers say to each other over their data planes: pure messages, as JSON.

    GET  /v1/inventory                   `Inventory`; no promise
    POST /v1/inventory      Ask          `Inventory`, as a promise
    GET  /v1/describe/GENERATION/STEP    `encode_description` of that state
    GET  /v1/structure/DIGEST            `Structure`
    POST /v1/offer          Offer        Accepted, when the image is there, verified and sealed
    GET  /v1/status                      for people
    GET, HEAD /v1/memory/KEY, /v1/disk/KEY    see `storage.peer_wire`

What is refused is answered with a `PlaneRefused`. An answer that takes long begins with spaces, one
now and then, so that whoever asks sees that somebody is there; its status says nothing then.
"""

from __future__ import annotations

import msgspec

from keepstep.ckpt.errors import CheckpointError, NoSuchState
from keepstep.ckpt.keeper_errors import KINDS, KeeperError, Refusal, Stale
from keepstep.ckpt.manifest import ImageRecord, State

JSON_BYTES_MAX = 1 << 26
"""Of an inventory, a description or a structure."""
OFFER_BYTES_MAX = 1 << 20
"""Of an offer: a state's values have at most a quarter of that."""
ASK_BYTES_MAX = 1 << 12


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for an inventory that is promised to this generation and term."""

    generation: int
    term: int


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sealed image that the receiver is to keep a copy of, and may pull from the sender.

    Attributes:
        job: the job's name.
        to_host: whom it is meant for.
        from_host: who sends it.
        address: "host:port" of the sender's data plane.
        generation: the sender's.
        term: the sender's.
        state: of the image.
        record: of the image; its digest covers the header, whose checksums cover the data.
        plan_digest: of the structure that the image is part of.
        values: the state's JSON values.
        agreed_acked: the newest step of this generation that all ranks have, sealed and acked; -1:
            none. Older images of the rank may go.
    """

    job: str
    to_host: str
    from_host: str
    address: str
    generation: int
    term: int
    state: State
    record: ImageRecord
    plan_digest: str
    values: msgspec.Raw
    agreed_acked: int


class Accepted(msgspec.Struct, frozen=True, tag="accepted", forbid_unknown_fields=True):
    """The image is there. `keeper` is another one after each start of the receiver."""

    keeper: str


class PlaneRefused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Nothing was done. `kind`: a class of `keeper_errors`, NoSuchState or PullFailed."""

    kind: str
    message: str
    generation: int = -1
    term: int = -1


class PullFailed(KeeperError):
    """The receiver could not read the whole, right image from the sender."""


_ERRORS: dict[str, type[CheckpointError]] = {
    **KINDS,
    "NoSuchState": NoSuchState,
    "PullFailed": PullFailed,
}
_STATUS = {"Stale": 409, "NoRoom": 503, "PullFailed": 502, "NoSuchState": 404}
_MESSAGE_CHARS_MAX = 2_000


def refused(error: CheckpointError) -> tuple[int, PlaneRefused]:
    """Status and answer that tell of an error."""
    kind = type(error).__name__
    if kind not in _ERRORS:
        kind = Refusal.__name__
    message = str(error)[:_MESSAGE_CHARS_MAX]
    if isinstance(error, Stale):
        return 409, PlaneRefused(kind, message, error.generation, error.term)
    return _STATUS.get(kind, 422), PlaneRefused(kind, message)


def error_of(answer: PlaneRefused, who: str) -> CheckpointError:
    """The error that `refused` told of; `who` answered."""
    message = f"{who}: {answer.message}"
    if answer.kind == Stale.__name__:
        return Stale(message, generation=answer.generation, term=answer.term)
    return _ERRORS.get(answer.kind, Refusal)(message)
