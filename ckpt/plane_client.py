"""Asking another host's keeper, over its data plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from keepstep.ckpt import plane_messages as messages
from keepstep.ckpt.document import encode
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_errors import KeeperGone, Refusal
from keepstep.ckpt.manifest import State
from keepstep.ckpt.plan import check_structure, plan_digest
from keepstep.ckpt.structure import Structure
from keepstep.storage.connections import Answer, ConnectionFailed, Connections, NotConnected
from keepstep.storage.token import Token

T = TypeVar("T")


class PlaneClient:
    """The keeper whose data plane is at `address`. For several threads.

    All methods block, and raise KeeperGone if it is not there, or silent for `timeout_s`; and what
    it answers: Stale, NoRoom, Refusal, NoSuchState, PullFailed.
    """

    def __init__(self, address: str, token: Token, timeout_s: float) -> None:
        """Connects to nobody yet. Raises Refusal for what is no address."""
        self.address = address
        try:
            self._connections = Connections(address, {"Authorization": token.header}, timeout_s)
        except ValueError as error:
            raise Refusal(f"no keeper can be asked: {error}") from error

    def close(self) -> None:
        """Close the connections that lie idle."""
        self._connections.close()

    def inventory(self) -> Inventory:
        """What the host has. No promise."""
        return self._get("/v1/inventory", Inventory)

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """The same as a promise. Raises Stale for an older generation or term."""
        body = encode(messages.Ask(generation, term))
        with self._answer("POST", "/v1/inventory", body) as answer:
            return self._decoded(answer.read(messages.JSON_BYTES_MAX), Inventory)

    def describe(self, state: State) -> bytes:
        """The description of a state in the inventory, encoded. Raises NoSuchState."""
        path = f"/v1/describe/{state.generation}/{state.step}"
        with self._answer("GET", path) as answer:
            return answer.read(messages.JSON_BYTES_MAX)

    def structure(self, digest: str) -> Structure:
        """The structure with this plan digest, checked. Raises Refusal, also if it is unknown."""
        found = self._get(f"/v1/structure/{digest}", Structure)
        try:
            check_structure(found.mesh, found.placements, found.tensors)
            computed = plan_digest(found.mesh, found.placements, found.tensors)
        except CheckpointError as error:
            raise Refusal(f"{self.address} sent a structure that cannot be: {error}") from error
        if not digest == found.digest == computed:
            raise Refusal(
                f"{self.address} sent a structure with digest {computed}, expected {digest}"
            )
        return found

    def status(self) -> dict[str, Any]:
        """For people."""
        return self._get("/v1/status", dict[str, Any])

    def offer(self, offer: messages.Offer) -> messages.Accepted:
        """Have the keeper copy an image. Returns when it has it, verified and sealed.

        It may be repeated. Raises Stale, NoRoom and PullFailed besides.
        """
        body = msgspec.json.encode(offer)
        with self._answer("POST", "/v1/offer", body) as answer:
            return self._decoded(answer.read(messages.OFFER_BYTES_MAX), messages.Accepted)

    def _get(self, path: str, type_: type[T]) -> T:
        with self._answer("GET", path) as answer:
            return self._decoded(answer.read(messages.JSON_BYTES_MAX), type_)

    @contextmanager
    def _answer(self, method: str, path: str, body: bytes = b"") -> Iterator[Answer]:
        """The answer, if it is a success. All requests here may be repeated."""
        try:
            with self._connections.request(method, path, body=body, may_repeat=True) as answer:
                if answer.status != 200:
                    raise self._refusal(answer)
                yield answer
        except (NotConnected, ConnectionFailed) as error:
            raise KeeperGone(f"the keeper at {self.address} does not answer: {error}") from error

    def _refusal(self, answer: Answer) -> CheckpointError:
        data = answer.read(messages.OFFER_BYTES_MAX)
        if answer.status == 401:
            return Refusal(f"{self.address} refuses the job token; use that of this job")
        try:
            return messages.error_of(
                msgspec.json.decode(data, type=messages.PlaneRefused), self.address
            )
        except (msgspec.MsgspecError, UnicodeError):
            return Refusal(f"{self.address} answered with status {answer.status} and no reason")

    def _decoded(self, data: bytes, type_: type[T]) -> T:
        """The answer; or the error, if it was refused after the status had been sent."""
        try:
            return msgspec.json.decode(data, type=type_)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
            fault = str(error)
        try:
            told = msgspec.json.decode(data, type=messages.PlaneRefused)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
            reason = f"{self.address} gave no answer of ours: {fault[:200]}"
            raise Refusal(reason) from error
        raise messages.error_of(told, self.address)
