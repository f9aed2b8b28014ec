"""What a log means: which commits are live, and why the others are not. Pure.

The fold goes over the records once, in order of `seq`. Whatever it does not count is kept with a
reason, so that `show` can answer "where is my step 120?". The rules (numbers of docs/format.md):

- only entries of the current term count: those of a lower one came from somebody who had been
  superseded, those of a higher one from nobody (I5);
- generations ascend, and begin at a state on the lineage that no verdict calls bad (I6, I9);
- only the newest generation commits, at ascending steps, and not after a rewind: so whatever an
  older one still writes stays unreferenced, and a name never gets a second content (I7, I8);
- a verdict of bad stands, and holds for all that descends from the state (I9).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from keepstep.ckpt.entry import (
    Commit,
    End,
    Generation,
    Operator,
    Record,
    Retire,
    Rewind,
    Term,
    Verdict,
)
from keepstep.ckpt.manifest import State


class Status(Enum):
    """What became of a commit. Only a live one may be restored."""

    LIVE = "live"
    VOID = "void"
    BAD = "bad"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit that counted when it was made, and what became of it since."""

    state: State
    seq: int
    at: str
    manifest_digest: str
    size_bytes: int
    status: Status
    reason: str
    """Why it is not live; empty if it is."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """An entry that changed nothing, and why."""

    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of the lineage that one generation computed: steps above `floor`, up to `cut`."""

    generation: int
    floor: int
    cut: int | None = None

    def holds(self, state: State) -> bool:
        """Whether `state` lies on this part."""
        above = state.step > self.floor
        return state.generation == self.generation and above and not self._is_beyond(state.step)

    def _is_beyond(self, step: int) -> bool:
        return self.cut is not None and step > self.cut


@dataclass(frozen=True, slots=True)
class Lineage:
    """The meaning of a log up to, not including, entry `next_seq`."""

    job: str | None
    """None: the log is empty."""
    next_seq: int
    term: int
    """The current term; 0 before the first."""
    term_by: str
    term_seq: int
    """Where the current term was taken; -1 before the first."""
    generations: tuple[Generation, ...]
    """All that counted, ascending; the last is the newest."""
    chain: tuple[Segment, ...]
    """The lineage itself: its parts in order, each going on from the one before."""
    commits: tuple[Committed, ...]
    """All that counted, newest entry first, whatever became of them."""
    committed_to: int
    """The highest step that the newest generation ever committed; its base's step (-1 without a
    base) before that. No state of that generation at or below it will ever be committed again."""
    good: Mapping[State, str]
    bad: Mapping[State, str]
    retired: Mapping[State, str]
    """State -> reason, for the three."""
    operators: tuple[Operator, ...]
    end: End | None
    """How the run ended, if nothing began after it."""
    ignored: tuple[Ignored, ...]

    @property
    def generation(self) -> Generation | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    @property
    def live(self) -> tuple[Committed, ...]:
        """The live commits, newest (highest step) first. At most one per step (S1)."""
        return tuple(commit for commit in self.commits if commit.status is Status.LIVE)

    def admits(self, state: State) -> str:
        """Why a run may not go on from `state`, committed or not; "" if it may.

        It may if the state is on the lineage, is not bad, descends from no bad one, and was not
        retired. Whether its bytes are anywhere is another question.
        """
        for commit in self.commits:
            if commit.state == state:
                return commit.reason
        if state in self.retired:
            return self.retired[state]
        if all(one.number != state.generation for one in self.generations):
            return f"generation {state.generation} has not begun"
        if not any(segment.holds(state) for segment in self.chain):
            return f"it is not on the lineage: {self._extent_of(state.generation)}"
        onset: dict[int, int] = {}
        for each in self.bad:
            onset[each.generation] = min(each.step, onset.get(each.generation, each.step))
        cause = _bad_ancestor(state, onset, {one.number: one for one in self.generations})
        if cause is None:
            return ""
        if cause == state:
            return self.bad[cause]
        return f"it descends from {state_words(cause)}, which is bad: {self.bad[cause]}"

    def _extent_of(self, generation: int) -> str:
        for segment in self.chain:
            if segment.generation == generation:
                upto = "" if segment.cut is None else f" and up to step {segment.cut}"
                return f"of generation {generation} it has what is above step {segment.floor}{upto}"
        return f"of generation {generation} it has nothing any more"


def _bad_ancestor(
    state: State, onset: Mapping[int, int], generations: Mapping[int, Generation]
) -> State | None:
    """The bad state that `state` is or descends from, if any.

    `onset`: generation -> its first bad step.
    """
    at: State | None = state if onset else None
    while at is not None:
        step = onset.get(at.generation)
        if step is not None and at.step >= step:
            return State(at.generation, step)
        found = generations.get(at.generation)
        at = found.base if found is not None else None
    return None


def resume_points(lineage: Lineage) -> tuple[Committed, ...]:
    """The commits that a run may be restored from, best first."""
    return lineage.live


def state_words(state: State | None) -> str:
    """How a state is written for people: "step 120 of generation 3"."""
    if state is None:
        return "nothing"
    return f"step {state.step} of generation {state.generation}"


def fold(records: Iterable[Record]) -> Lineage:
    """What `records`, a log from entry 0 on in order of `seq`, mean. Never fails."""
    folding = Fold()
    for record in records:
        folding.add(record)
    return folding.lineage()


class Fold:
    """The lineage while it grows: `add` records in order of `seq`, ask for the `lineage`."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._next_seq = 0
        self._term = Term(number=0, by="nobody")
        self._term_seq = -1
        self._generations: dict[int, Generation] = {}
        self._newest = 0
        self._chain: list[Segment] = []
        self._rewound_at: int | None = None
        self._committed_to = -1
        self._commits: dict[State, Commit] = {}
        self._places: dict[State, tuple[int, str]] = {}
        self._dead: dict[State, tuple[Status, str]] = {}
        self._live: set[State] = set()
        self._good: dict[State, str] = {}
        self._bad: dict[State, str] = {}
        self._bad_at: dict[int, int] = {}
        self._retired: dict[State, str] = {}
        self._operators: list[Operator] = []
        self._end: End | None = None
        self._ignored: list[Ignored] = []

    @property
    def term(self) -> Term:
        """The current term's entry; number 0 before the first."""
        return self._term

    @property
    def term_seq(self) -> int:
        """Where the current term was taken; -1 before the first."""
        return self._term_seq

    def add(self, record: Record) -> None:
        """Count one more entry, or note why it does not count."""
        self._next_seq = record.seq + 1
        if self._job is None:
            self._job = record.job
        reason = self._refusal(record) or self._count(record)
        if reason is not None:
            self._ignored.append(Ignored(record.seq, reason))

    def _refusal(self, record: Record) -> str | None:
        """Why an entry does not count whatever it says, from its job and term alone."""
        if record.job != self._job:
            return f"it belongs to job {record.job!r}, this log to {self._job!r}"
        if isinstance(record.body, Term):
            return None
        if record.term < self._term.number:
            return (
                f"term {record.term} had ended: {self._term.by} took term {self._term.number} "
                f"at entry {self._term_seq}"
            )
        if record.term > self._term.number:
            return f"nobody has taken term {record.term}"
        return None

    def _count(self, record: Record) -> str | None:
        match record.body:
            case Term() as body:
                return self._take_term(body, record.seq)
            case Generation() as body:
                return self._begin(body, record.seq)
            case Commit() as body:
                return self._commit(body, record)
            case Verdict() as body:
                return self._judge(body, record.seq)
            case Rewind() as body:
                return self._rewind(body, record.seq)
            case Retire() as body:
                return self._retire(body, record.seq)
            case Operator() as body:
                self._operators.append(body)
            case End() as body:
                self._end = body
        return None

    def _take_term(self, body: Term, seq: int) -> str | None:
        if body.number <= self._term.number:
            return f"term {body.number} is not above term {self._term.number}"
        self._term, self._term_seq = body, seq
        return None

    def _begin(self, body: Generation, seq: int) -> str | None:
        if body.number <= self._newest:
            return f"generation {body.number} is not above generation {self._newest}"
        if body.base is not None:
            if not self._is_on_lineage(body.base):
                return f"its base, {state_words(body.base)}, is not on the lineage"
            cause = self._bad_ancestor(body.base)
            if cause is not None:
                return f"its base, {state_words(body.base)}, is bad: {self._bad[cause]}"
        floor = -1 if body.base is None else body.base.step
        self._cut(body.base)
        self._chain.append(Segment(body.number, floor))
        self._generations[body.number] = body
        self._newest = body.number
        self._rewound_at = None
        self._committed_to = floor
        self._end = None
        origin = "anew" if body.base is None else f"at {state_words(body.base)}"
        self._void(f"generation {body.number} began {origin} (entry {seq})")
        return None

    def _commit(self, body: Commit, record: Record) -> str | None:
        state = body.state
        newest = self._newest
        if state.generation > newest:
            return f"generation {state.generation} has not begun"
        if state.generation < newest:
            return f"generation {newest} had succeeded generation {state.generation}"
        if self._rewound_at is not None:
            return (
                f"the rewind of entry {self._rewound_at} ended generation {newest}: "
                "only a new generation may commit"
            )
        if state.step <= self._committed_to:
            return (
                f"step {state.step} is not above step {self._committed_to}, "
                f"where generation {newest} already stood"
            )
        self._committed_to = state.step
        self._commits[state] = body
        self._places[state] = (record.seq, record.at)
        cause = self._bad_ancestor(state)
        if state in self._retired:
            self._dead[state] = (Status.RETIRED, self._retired[state])
        elif cause is not None:
            self._dead[state] = (Status.BAD, self._blame(state, cause))
        else:
            self._live.add(state)
        return None

    def _judge(self, body: Verdict, seq: int) -> str | None:
        reason = f"{body.reason} (entry {seq})"
        if body.good:
            cause = self._bad_ancestor(body.state)
            if cause is not None:
                return f"a verdict of bad stands: {self._bad[cause]}"
            self._good[body.state] = reason
            return None
        self._bad.setdefault(body.state, reason)
        number, step = body.state.generation, body.state.step
        self._bad_at[number] = min(step, self._bad_at.get(number, step))
        for state in list(self._live):
            cause = self._bad_ancestor(state)
            if cause is not None:
                self._kill(state, Status.BAD, self._blame(state, cause))
        for state in [good for good in self._good if self._bad_ancestor(good) is not None]:
            del self._good[state]
        return None

    def _rewind(self, body: Rewind, seq: int) -> str | None:
        if body.to is not None and not self._is_on_lineage(body.to):
            return f"{state_words(body.to)} is not on the lineage"
        self._cut(body.to)
        self._rewound_at = seq
        self._void(f"rewound to {state_words(body.to)}: {body.reason} (entry {seq})")
        return None

    def _retire(self, body: Retire, seq: int) -> str | None:
        for state in body.states:
            reason = f"{body.reason} (entry {seq})"
            self._retired.setdefault(state, reason)
            if state in self._live:
                self._kill(state, Status.RETIRED, reason)
            elif state in self._dead:
                _, why = self._dead[state]
                self._dead[state] = (Status.RETIRED, why)
        return None

    def _is_on_lineage(self, state: State) -> bool:
        return any(segment.holds(state) for segment in self._chain)

    def _cut(self, last: State | None) -> None:
        """End the lineage at `last`, which is on it (None: before everything)."""
        while self._chain and (last is None or not self._chain[-1].holds(last)):
            self._chain.pop()
        if last is not None:
            self._chain[-1] = replace(self._chain[-1], cut=last.step)

    def _void(self, reason: str) -> None:
        for state in list(self._live):
            if not self._is_on_lineage(state):
                self._kill(state, Status.VOID, reason)

    def _kill(self, state: State, status: Status, reason: str) -> None:
        self._live.discard(state)
        self._dead[state] = (status, reason)

    def _bad_ancestor(self, state: State) -> State | None:
        """The bad state that `state` is or descends from, if any."""
        return _bad_ancestor(state, self._bad_at, self._generations)

    def _blame(self, state: State, cause: State) -> str:
        if state == cause:
            return self._bad[cause]
        return f"it descends from {state_words(cause)}, which is bad: {self._bad[cause]}"

    def lineage(self) -> Lineage:
        """The meaning so far."""
        commits = []
        for state, body in self._commits.items():
            seq, at = self._places[state]
            status, reason = self._dead.get(state, (Status.LIVE, ""))
            digest, size_bytes = body.manifest_digest, body.size_bytes
            commits.append(Committed(state, seq, at, digest, size_bytes, status, reason))
        return Lineage(
            job=self._job,
            next_seq=self._next_seq,
            term=self._term.number,
            term_by=self._term.by,
            term_seq=self._term_seq,
            generations=tuple(self._generations.values()),
            chain=tuple(self._chain),
            commits=tuple(reversed(commits)),
            committed_to=self._committed_to,
            good=dict(self._good),
            bad=dict(self._bad),
            retired=dict(self._retired),
            operators=tuple(self._operators),
            end=self._end,
            ignored=tuple(self._ignored),
        )
