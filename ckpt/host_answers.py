"""What a host has, as its keeper tells others: inventories and descriptions. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.errors import CheckpointError, FormatError, NoSuchState
from keepstep.ckpt.inventory import Copy, Inventory
from keepstep.ckpt.keeper_errors import Refusal
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keys import state_name
from keepstep.ckpt.manifest import State, encode_description
from keepstep.ckpt.sealer import Sealer
from keepstep.ckpt.tiers import Tier
from keepstep.storage.errors import NotFound, StoreError

ADOPTED_S = 600.0
"""How long an answer may wait for the images of an earlier keeper to be verified."""

DISK_PATIENCES = 3
"""For so many patiences may the disk be silent before an inventory goes without it."""


class HostAnswers:
    """An `Answers`. Inventories read the headers of all images on the disk: blocking.

    Args:
        memory: of this host.
        sealer: which is done with what was captured before an inventory is promised.
        disk: opens the disk tier, or raises StoreError; None for none.
        on_promise: told the generation of a promise, before the inventory is made.
        services: JSON of all services, for the status.
    """

    def __init__(
        self,
        memory: KeeperMemory,
        sealer: Sealer,
        disk: Callable[[], DiskTier] | None,
        on_promise: Callable[[int], None],
        services: Callable[[], dict[str, object]],
    ) -> None:
        self._memory = memory
        self._sealer = sealer
        self._disk = disk
        self._on_promise = on_promise
        self._services = services
        self._told: set[str] = set()
        self._is_free = threading.Semaphore()

    def inventory(self) -> Inventory:
        """See `Answers.inventory`."""
        wait_adopted(self._memory)
        memory = self._memory
        copies = [
            Copy(
                state=image.state,
                record=image.record,
                tier=Tier.MEMORY if image.is_own else Tier.PEER,
                plan_digest=image.structure.digest,
            )
            for image in memory.shelf.all()
        ]
        copies += self._disk_copies()
        promise = memory.promise
        return Inventory(
            host=memory.config.host,
            rack=memory.config.rack,
            address=memory.address,
            generation=promise.generation,
            term=promise.term,
            copies=tuple(copies),
        )

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """See `Answers.take_inventory`. What was captured by then is sealed first."""
        wait_adopted(self._memory)
        who = f"an inventory for generation {generation}, term {term},"
        self._memory.fence(generation, term, who)
        self._sealer.submit_captured()
        self._sealer.wait_idle(self._memory.config.patience_s)
        self._memory.give_promise(generation, term, who)
        self._on_promise(generation)
        return self.inventory()

    def describe(self, state: State) -> bytes:
        """See `Answers.describe`."""
        wait_adopted(self._memory)
        for image in self._memory.shelf.all():
            if image.state == state:
                return encode_description(image.description())
        if self._disk is not None:
            try:
                return encode_description(self._disk().describe(state))
            except NotFound:
                pass
            except (StoreError, FormatError) as error:
                self._tell_disk(str(error))
        known = sorted({image.state for image in self._memory.shelf.all()})
        raise NoSuchState(
            f"host {self._memory.config.host} has no image of state {state_name(state)}; in memory "
            f"it has {', '.join(map(state_name, known)) or 'none'}"
        )

    def check_fence(self, generation: int, term: int) -> None:
        """See `Answers.check_fence`."""
        self._memory.check_fence(generation, term)

    def status(self) -> dict[str, object]:
        """See `Answers.status`."""
        memory = self._memory
        tenure = memory.tenure
        with memory.lock:
            seats = {
                str(seat.rank): {
                    "sealed": seat.sealed,
                    "acked": seat.acked,
                    "drained": seat.drained,
                    "committed": seat.committed,
                    "captured": seat.captured,
                    "skipped": seat.skipped,
                    "failures": seat.failures,
                }
                for seat in memory.pool.seats
                if seat.is_taken
            }
        return {
            "job": memory.config.job,
            "host": memory.config.host,
            "address": memory.address,
            "pid": memory.me.pid,
            "promise": {"generation": memory.promise.generation, "term": memory.promise.term},
            "generation": None if tenure is None else tenure.generation,
            "images": [
                {
                    "state": state_name(image.state),
                    "rank": image.rank,
                    "own": image.is_own,
                    "bytes": image.record.size_bytes,
                }
                for image in memory.shelf.all()
            ],
            "ranks": seats,
            **self._services(),
        }

    def _disk_copies(self) -> list[Copy]:
        if self._disk is None:
            return []
        wait_s = DISK_PATIENCES * self._memory.config.patience_s
        try:
            copies, wrong = self._look(self._disk, wait_s)
        except TimeoutError:
            self._tell_disk(
                f"the disk does not answer within {wait_s:g} s; inventories go without its copies"
            )
            return []
        except StoreError as error:
            self._tell_disk(str(error))
            return []
        for sentence in wrong:
            self._tell_disk(sentence)
        return copies

    def _look(self, disk: Callable[[], DiskTier], wait_s: float) -> tuple[list[Copy], list[str]]:
        """`DiskTier.copies`, by a thread that may hang; one at a time. Raises TimeoutError."""
        if not self._is_free.acquire(timeout=wait_s):
            raise TimeoutError
        look: Future[tuple[list[Copy], list[str]]] = Future()

        def work() -> None:
            try:
                look.set_result(disk().copies())
            except (CheckpointError, StoreError, OSError) as error:
                look.set_exception(error)
            finally:
                self._is_free.release()

        threading.Thread(target=work, name="keepstep-disk-look", daemon=True).start()
        return look.result(wait_s)

    def _tell_disk(self, sentence: str) -> None:
        """Tell what is wrong with the disk, once."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._memory.tell("disk_copy_refused", sentence, tier=Tier.DISK.value)


def wait_adopted(memory: KeeperMemory) -> None:
    """Until the images of an earlier keeper are verified. Raises Refusal if that takes too long."""
    if not memory.is_adopted.wait(ADOPTED_S):
        raise Refusal(
            f"host {memory.config.host} still verifies the images of an earlier keeper after "
            f"{ADOPTED_S:.0f} s; ask again"
        )
