"""A process whose threads depend on each other ends when one of them dies of a defect.

A keeper without one of its threads would look alive and drain, commit or replicate nothing more.
Its successor, which is started at once, verifies what it finds and goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

EXIT_CODE = 1


def end_with_any_thread(tell: Callable[[str, str], None]) -> None:
    """From now on a thread that dies of an exception is told, and ends the process at once."""

    def ended(args: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(args)
        name = "a thread" if args.thread is None else args.thread.name
        kind = args.exc_type.__name__
        tell("keeper_failed", f"{name} died of {kind}: {args.exc_value}; the keeper ends with it")
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    threading.excepthook = ended
