"""One rank's side of the captures: a state copied into a slot of the pool at (nearly) every step.

Nothing here waits for a keeper, a peer, a disk or a store. The keeper is reached through the pool's
table alone: a slot that is CAPTURED is the keeper's, and what became of it is read from the seat.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from keepstep.ckpt.bell import Ringer
from keepstep.ckpt.control import Entered
from keepstep.ckpt.copier import Copier, Copying
from keepstep.ckpt.device_copies import Registered
from keepstep.ckpt.errors import CheckpointError, NotRepresentable, WrongMoment
from keepstep.ckpt.guard import UpdateGuard
from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.image import ImageHeader, build, items_of
from keepstep.ckpt.keeper_errors import SlotsTaken
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import State
from keepstep.ckpt.overlap import OverlapChoice
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.pool import Pool, Slot
from keepstep.ckpt.pool_errors import PoolError
from keepstep.ckpt.pool_table import VALUES_BYTES, Seat, SlotStatus, Writer
from keepstep.ckpt.process import this_process
from keepstep.ckpt.registry import Registry
from keepstep.ckpt.slot_copy import ImageParts, SlotCopy, Streams
from keepstep.ckpt.slots import OWNS_NOTHING, STEP_NONE, Decision, Level, SlotRule
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tiers import Due

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Captured:
    """What one call of `capture` did.

    Attributes:
        call_ms: how long the call took.
        guard_ms: how long the update guard held the optimizers up since the call before.
        skipped: why nothing was captured on any rank; "" if it was.
        due: the tiers the captured state goes to.
        put_off: the tiers that it should go to, and a later state will.
        reason: why something was put off.
    """

    call_ms: float
    guard_ms: float
    skipped: str
    due: Due
    put_off: Due
    reason: str

    @property
    def blocked_ms(self) -> float:
        """What the training has lost to it since the call before."""
        return self.call_ms + self.guard_ms


@dataclass(slots=True)
class _Opened:
    """What there is between `open` and `close`."""

    generation: int
    pool: Pool
    seat: Seat
    slots: tuple[Slot, ...]
    copies: tuple[SlotCopy, ...]
    registered: tuple[Registered, ...]
    rule: SlotRule
    copier: Copier
    guard: UpdateGuard
    ringer: Ringer
    writer: Writer


class Snapshots:
    """The captures of one rank.

    Args:
        registry: the state; its structure must be part of `structure`.
        structure: what all ranks registered (`merge_structures`).
        job: the job's name.

    The plan is made at once, and nothing else: memory is the pool's, and comes with `open`.
    """

    def __init__(self, registry: Registry, structure: Structure, job: str) -> None:
        self._registry = registry
        self._version = registry.version
        self._state_count = registry.state_count()
        mesh = structure.mesh
        owned = Plan(mesh, structure.placements, structure.tensors).owned(registry.rank)
        items = items_of(structure.tensors, owned)
        start = State(generation=0, step=0)
        self._header: ImageHeader = build(job, start, registry.rank, mesh, structure.digest, items)
        self._parts = ImageParts(registry, self._header)
        self._opened: _Opened | None = None
        self._choice = OverlapChoice()
        self._began_s: float | None = None  # when the last capture did that copied something
        self._guard_ms = 0.0
        self._lost = STEP_NONE
        self._drained_by_loss = STEP_NONE
        self._problems: deque[tuple[State, str]] = deque()
        self._choice_told = False

    @property
    def owns_bytes(self) -> bool:
        """Whether this rank has an image at all."""
        return self._header.data_bytes > 0

    @property
    def header(self) -> bytes:
        """The unsealed header for step 0, for `Enter.header`; b"" if this rank owns nothing."""
        return self._header.encoded if self.owns_bytes else b""

    @property
    def size_bytes(self) -> int:
        """Size of this rank's image; 0 if it owns nothing. For `Enter.image_bytes_max`."""
        return self._header.size_bytes if self.owns_bytes else 0

    @property
    def inside_bytes(self) -> int:
        """How much of it each `capture` copies before it returns."""
        return self._parts.inside_bytes

    @property
    def has_new_state(self) -> bool:
        """Whether optimizer state has come to exist, or something was registered, since the plan.

        Then the plan must be made anew on all ranks: `Registry.refresh`, `gather_structure`, other
        snapshots, and another `Enter`. Until then nothing is captured on this rank.
        """
        is_as_planned = self._registry.version == self._version
        return not is_as_planned or self._registry.state_count() != self._state_count

    def confirm_plan(self) -> None:
        """The structure was looked at again on all ranks, and is still the one of the plan."""
        self._version = self._registry.version
        self._state_count = self._registry.state_count()

    def open(
        self,
        entered: Entered,
        generation: int,
        slot_count: int,
        *,
        is_from_nothing: bool = False,
        kept: State | None = None,
    ) -> None:
        """Take the slots that the keeper gave, and put the update guard on the optimizers.

        Blocking: this process's page tables are filled, and with CUDA the memory is locked.

        Args:
            entered: the keeper's answer.
            generation: under which states are named.
            slot_count: the least number of slots that any rank got which got any: the same on all
                ranks, for they skip alike. 2 or more.
            is_from_nothing: the generation has no base, so no slot holds anything that a later
                beginning may need: the same on all ranks.
            kept: of this generation, captured by an earlier plan: not to be the first to go.

        Raises:
            WrongMoment: if it is open.
            NotRepresentable: values that are too long for a slot.
            PoolError, OSError: the pool cannot be opened.
            RuntimeError: CUDA cannot lock the memory.
        """
        if self._opened is not None:
            raise WrongMoment("the snapshots are open already; close them first")
        self._values()
        rule = SlotRule(slot_count, first_alone=not is_from_nothing)
        pool = Pool.open(Path(entered.pool))
        given = [pool.slots[index] for index in entered.slots]
        if kept is not None:
            given.sort(key=lambda slot: slot.status is SlotStatus.SEALED and slot.state == kept)
        slots = tuple(given[:slot_count])
        streams = Streams()
        for slot in slots:
            slot.prefault()
        is_cuda = self._parts.is_on_cuda()
        registered = tuple(Registered(slot.image) for slot in slots) if is_cuda else ()
        copies = tuple(SlotCopy(self._parts, self._header, slot.image, streams) for slot in slots)
        self._opened = _Opened(
            generation=generation,
            pool=pool,
            seat=pool.seats[entered.seat],
            slots=slots,
            copies=copies,
            registered=registered,
            rule=rule,
            copier=Copier(),
            guard=UpdateGuard(self._registry.optimizers, self._hold_update),
            ringer=Ringer(HostDir(Path(entered.pool).parent).bell),
            writer=this_process(),
        )

    def level(self) -> Level:
        """How far this rank's images are, for `slots.agree` over all ranks.

        `lost` is the one entry of which the largest counts.
        """
        opened = self._open()
        if not self.owns_bytes:
            return OWNS_NOTHING
        # Read before `lost`: a loss must be told no later than a newer state that is safe.
        acked, drained = opened.seat.acked, opened.seat.drained
        lost = max(self._lost, opened.seat.lost)
        return Level(acked, max(drained, self._drained_by_loss), lost)

    def capture(self, state: State, due: Due, agreed: Level) -> Captured:
        """Capture the state of this moment. All ranks call it for the same steps, in order.

        Returns at once: what no optimizer updates has been copied then; the rest is copied while
        training goes on, and the next step of a registered optimizer waits until it is. A failure
        is told (`take_problems`), and ends nothing.

        Args:
            state: its name; of the generation of `open`, with a step above the last.
            due: the tiers that it goes to beyond memory and peers: the same on all ranks.
            agreed: `slots.agree` of the levels of all ranks at some earlier moment: likewise.

        Raises:
            WrongMoment: if it is not open, or for a state of another generation.
            Stale: a newer generation has begun. End this process.
        """
        opened = self._open()
        if state.generation != opened.generation:
            raise WrongMoment(
                f"{state_words(state)} is not of generation {opened.generation}, which is open"
            )
        began_s = time.perf_counter()
        guard_ms, self._guard_ms = self._guard_ms, 0.0
        if self._began_s is not None:
            self._choice.add((began_s - self._began_s) * 1e3)
        self._began_s = None
        opened.copier.wait()
        decision = opened.rule.decide(state.step, due, agreed)
        opened.seat.agreed_acked, opened.seat.agreed_drained = agreed.acked, agreed.drained
        if decision.position is None:
            opened.seat.skipped += 1
        elif self.owns_bytes and self._begin(opened, state, decision, decision.position):
            opened.seat.captured = state.step
            self._began_s = began_s
        return Captured(
            call_ms=(time.perf_counter() - began_s) * 1e3,
            guard_ms=guard_ms,
            skipped=decision.reason if decision.is_skipped else "",
            due=decision.due,
            put_off=decision.put_off,
            reason="" if decision.is_skipped else decision.reason,
        )

    def wait(self) -> None:
        """Block until the copy that is going on has ended, well or badly.

        For who changes captured tensors other than by a registered optimizer's `step`.
        """
        if self._opened is not None:
            self._opened.copier.wait()

    def wait_sealed(self, timeout_s: float) -> bool:
        """Block until the keeper has sealed all that was captured; whether it has, in time."""
        self.wait()
        until_s = time.monotonic() + timeout_s
        while any(slot.status is SlotStatus.CAPTURED for slot in self._open().slots):
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def take_problems(self) -> list[tuple[State, str]]:
        """What failed since the last call, and why: captures that do not exist on this rank."""
        taken = []
        while self._problems:
            taken.append(self._problems.popleft())
        return taken

    def take_choice(self) -> str:
        """Once: whether copies overlap with training or not, with the numbers; else ""."""
        if self._choice_told or not self._choice.is_settled:
            return ""
        self._choice_told = True
        return self._choice.words

    @property
    def committed(self) -> int:
        """The newest committed step that the keeper knows of; -1: none."""
        return self._open().seat.committed

    @property
    def failures(self) -> int:
        """How many times a tier has failed; the keeper's events have the reasons."""
        return self._open().seat.failures

    def close(self) -> None:
        """Wait for the copy that is going on, take off the guard, and let go of the pool.

        A second call does nothing. Captured slots stay as they are: they are the keeper's.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.guard.close()
        opened.copier.close()
        for memory in opened.registered:
            memory.close()
        opened.ringer.close()
        opened.pool.close()

    # Inside.

    def _open(self) -> _Opened:
        if self._opened is None:
            raise WrongMoment("the snapshots are not open: the rank has not entered a generation")
        return self._opened

    def _begin(self, opened: _Opened, state: State, decision: Decision, position: int) -> bool:
        """Begin to copy into a slot. False: it failed at once, and that is noted."""
        slot, copy = opened.slots[position], opened.copies[position]
        try:
            self._check_planned()
            values = self._values()
            self._parts.read()
            slot.claim(opened.writer, self._registry.rank, state, decision.due)
        except (NotRepresentable, WrongMoment, SlotsTaken, PoolError) as error:
            self._lose(state, decision.due, error)
            return False
        try:
            copy.copy_inside()
            jobs, streams = copy.jobs(state)
        except (CheckpointError, RuntimeError) as error:
            slot.free()
            self._lose(state, decision.due, error)
            return False
        except BaseException:
            slot.free()
            raise

        def ended(problem: Exception | None) -> None:
            try:
                if problem is None:
                    slot.captured(values, self._header.size_bytes)
            except (CheckpointError, ValueError) as error:
                problem = error
            if problem is not None:
                self._lose(state, decision.due, problem)
                slot.free()
            opened.ringer.ring()

        opened.copier.begin(Copying(jobs, streams, ended))
        if not self._choice.is_overlapped:
            opened.copier.hold_update()
        return True

    def _check_planned(self) -> None:
        if self.has_new_state:
            raise WrongMoment(
                "since the plan was made, tensors were registered or an optimizer has made state; "
                "the plan must be made anew on all ranks"
            )

    def _values(self) -> bytes:
        values = msgspec.json.encode(self._registry.read_values())
        if len(values) > VALUES_BYTES:
            raise NotRepresentable(
                "values",
                f"together they are {len(values):,} bytes of JSON, of at most {VALUES_BYTES:,}; "
                f"put what is large into a tensor",
            )
        return values

    def _hold_update(self) -> None:
        """The update guard."""
        opened = self._opened
        if opened is not None:
            began_s = time.perf_counter()
            opened.copier.hold_update()
            self._guard_ms += (time.perf_counter() - began_s) * 1e3

    def _lose(self, state: State, due: Due, error: Exception) -> None:
        """The state does not exist on this rank. Said before any newer one can be safe."""
        if due:
            self._drained_by_loss = state.step
        self._lost = state.step
        self._problems.append((state, f"{type(error).__name__}: {error}"))
