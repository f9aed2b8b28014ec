"""One attempt at reading a checkpoint, and what its failure means.

Only damage may send a run to an older commit: what the store does give is wrong, or is not there.
A store that cannot be read just now says nothing about the commit, nor does a commit of a newer
format: to pass over it would void it, and retention would later delete it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from keepstep.ckpt.errors import CheckpointError, FormatError, NewerVersion, StructureMismatch
from keepstep.storage.errors import NotFound, StoreError, TooLarge, Transient, Truncated

PAUSES_S = (0.1, 0.3, 1.0, 3.0)
"""Between the tries, while the store says that a later one may succeed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """What came of it: `found`, or one of the two in words.

    Attributes:
        found: what was read, if all of it is right.
        damage: what is wrong with the checkpoint itself.
        trouble: why nothing is known of it.
    """

    found: T | None = None
    damage: str = ""
    trouble: str = ""


def is_damage(error: Exception) -> bool:
    """Whether an error says that a checkpoint's files are wrong or gone."""
    if isinstance(error, NewerVersion):
        return False
    return isinstance(error, FormatError | NotFound | Truncated | TooLarge)


def attempt(read: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> Attempt[T]:
    """Call `read`, again after a pause while the store fails in a way that may pass.

    Raises:
        StructureMismatch: the checkpoint is whole, and of another run.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            return Attempt(found=read())
        except StructureMismatch:
            raise
        except Transient as error:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                return Attempt(trouble=str(error))
            sleep(pause_s)
        except (CheckpointError, StoreError) as error:
            text = str(error)
            return Attempt(damage=text) if is_damage(error) else Attempt(trouble=text)
