"""What can stop a run before or while it trains.

    TrainerError                base; never raised itself
    ├── ConfigError             the configuration cannot work or is not understood; a ValueError
    ├── DataError               a corpus, tokenizer or token file is missing, damaged or too small
    ├── RunDirError             the run directory cannot be used
    │   └── RunIsLive           another process trains in it: host and pid are named
    ├── ResumeRefused           the run in the store is not this one: every difference is named
    ├── NotSaved                the last state is not in the store, and waiting did not help
    └── RankFailed              a rank died or raised; the message is the first cause

The command line prints the message alone: each says what, where, expected, found, what to do.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the trainer's errors."""


class ConfigError(TrainerError, ValueError):
    """The configuration cannot work, or is not understood."""


class DataError(TrainerError):
    """A corpus, tokenizer or token file is missing, damaged or too small.

    Attributes:
        file: which file.
        field: which part of it, or "" for the whole.
        expected: what was expected there.
        found: what was found.
    """

    def __init__(
        self, message: str, *, file: str = "", field: str = "", expected: str = "", found: str = ""
    ) -> None:
        super().__init__(message)
        self.file = file
        self.field = field
        self.expected = expected
        self.found = found


class RunDirError(TrainerError):
    """The run directory cannot be used."""


class RunIsLive(RunDirError):
    """Another process trains in this run directory.

    Attributes:
        host: where it runs.
        pid: its process id there.
    """

    def __init__(self, message: str, *, host: str, pid: int) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid


class ResumeRefused(TrainerError):
    """What the store holds is not this run. `differences` has one line for each."""

    def __init__(self, message: str, *, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class NotSaved(TrainerError):
    """The run's last state could not be committed in time. `step` is its step."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class RankFailed(TrainerError):
    """A rank died or raised. `rank` is the first one; the message is its cause."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
