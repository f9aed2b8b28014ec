"""All ranks bring one state to their hosts together: all of them have it verified, or none.

The ranks of a host share a staging file, and each brings a part of what any of them needs. In four
words that all ranks exchange: what each needs; what each brought, and what was wrong where it lay;
whether that could be mended; whether all is ready. Nothing live is changed by any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch.distributed as dist

from keepstep.ckpt.agree import all_gather_bytes
from keepstep.ckpt.copies import Fault, Lost
from keepstep.ckpt.errors import CheckpointError, Corrupt, StructureMismatch
from keepstep.ckpt.load import Loading, Staged
from keepstep.ckpt.mapping import StageMemory, StageTooLarge
from keepstep.storage.errors import StoreError

_TOLD_MAX = 16


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one host.

    Attributes:
        ranks: numbers in the group, ascending.
        index: which of them is this one.
        directory: of a tmpfs that they share; None: this rank works alone.
    """

    ranks: tuple[int, ...]
    index: int
    directory: Path | None


class _Word(msgspec.Struct, frozen=True):
    """What one rank says to all."""

    misfit: str = ""
    lost: str = ""
    trouble: str = ""
    needs: dict[int, tuple[tuple[int, int], ...]] = {}
    spoiled: dict[int, list[int]] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, on all ranks alike but for `staged`.

    Attributes:
        staged: this rank's part, verified; None if any rank has a problem.
        misfit: by rank, why the state does not fit what is registered.
        lost: by rank, why the state cannot be had.
        trouble: by rank, why nothing is known of it: the store could not be asked, or the host
            has no memory.
    """

    staged: Staged | None = None
    misfit: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    trouble: dict[int, str] = field(default_factory=dict)


def words(problems: dict[int, str]) -> str:
    """Problems by rank, in one line; one that several ranks have is said once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in problems.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )


class Together:
    """One state, brought by all ranks.

    Args:
        group: of all ranks; None: the default one.
        crew: this host's.
        name: of the staging file; of one try only.
        tell: an event of this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, crew: Crew, name: str, tell: Callable[..., None]
    ) -> None:
        self._group = group
        self._crew = crew
        self._path = None if crew.directory is None else crew.directory / name
        self._tell = tell
        self._loading: Loading | None = None
        self._staged: Staged | None = None
        self._told = 0

    def load(
        self,
        make: Callable[[], Loading],
        explain: Callable[[StructureMismatch], str] = str,
    ) -> Outcome:
        """Bring the state that `make` makes the loading of. Blocking; a collective.

        `explain` puts into words that the state does not fit.
        """
        try:
            outcome = self._load(make, explain)
        finally:
            self._tell_faults()
            if self._staged is None and self._loading is not None:
                self._loading.close()
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        return outcome

    def _load(
        self, make: Callable[[], Loading], explain: Callable[[StructureMismatch], str]
    ) -> Outcome:
        said = self._say(self._plan(make, explain))
        if _problem(said):
            return _outcome(said)
        said = self._say(self._try(lambda: self._bring(said)))
        if _problem(said):
            return _outcome(said)
        if any(word.spoiled for word in said):
            mended = self._say(self._try(lambda: self._mend(said)))
            if _problem(mended):
                return _outcome(mended)
        said = self._say(self._try(self._finish))
        if _problem(said):
            if self._staged is not None:
                self._staged.close()
            return _outcome(said)
        return Outcome(staged=self._staged)

    # The steps of one rank.

    def _plan(
        self, make: Callable[[], Loading], explain: Callable[[StructureMismatch], str]
    ) -> _Word:
        try:
            self._loading = make()
        except StructureMismatch as error:
            return _Word(misfit=explain(error))
        except (CheckpointError, StoreError) as error:
            return _Word(lost=str(error))
        return _Word(needs=dict(self._loading.needs))

    def _bring(self, said: list[_Word]) -> _Word:
        assert self._loading is not None
        needs = [said[rank].needs for rank in self._crew.ranks]
        self._loading.share(needs, self._crew.index, lambda size: StageMemory(size, self._path))
        return _Word(spoiled=self._loading.bring())

    def _mend(self, said: list[_Word]) -> _Word:
        assert self._loading is not None
        self._loading.mend(said[rank].spoiled for rank in self._crew.ranks)
        return _Word()

    def _finish(self) -> _Word:
        assert self._loading is not None
        self._staged = self._loading.finish()
        return _Word()

    def _try(self, step: Callable[[], _Word]) -> _Word:
        try:
            return step()
        except Lost as error:
            text = str(error)
            return _Word(trouble=text) if error.is_trouble else _Word(lost=text)
        except (StageTooLarge, OSError) as error:
            if isinstance(error, StoreError):
                return _Word(lost=str(error))
            return _Word(trouble=str(error))
        except (CheckpointError, StoreError) as error:
            return _Word(lost=str(error))

    # Words.

    def _say(self, word: _Word) -> list[_Word]:
        """Every rank's word, in the order of ranks."""
        said = all_gather_bytes(self._group, msgspec.json.encode(word))
        return [msgspec.json.decode(data, type=_Word) for data in said]

    def _tell_faults(self) -> None:
        """An event for each copy that did not serve; of very many, how many there were."""
        if self._loading is None:
            return
        faults = self._loading.course.faults
        for fault in faults[:_TOLD_MAX]:
            self._tell("copy_passed_over", f"{fault.place}: {fault.error}", **_details(fault))
        if len(faults) > _TOLD_MAX:
            more = len(faults) - _TOLD_MAX
            self._tell("copies_passed_over", f"{more} more of the same state", count=more)


def _details(fault: Fault) -> dict[str, object]:
    error = fault.error
    return {
        "tier": fault.place.tier.value,
        "of_host": fault.place.host,
        "image": fault.image,
        "tensor": error.tensor if isinstance(error, Corrupt) else None,
        "offset": error.offset if isinstance(error, Corrupt) else None,
    }


def _problem(said: list[_Word]) -> bool:
    return any(word.misfit or word.lost or word.trouble for word in said)


def _outcome(said: list[_Word]) -> Outcome:
    return Outcome(
        misfit={rank: word.misfit for rank, word in enumerate(said) if word.misfit},
        lost={rank: word.lost for rank, word in enumerate(said) if word.lost},
        trouble={rank: word.trouble for rank, word in enumerate(said) if word.trouble},
    )
