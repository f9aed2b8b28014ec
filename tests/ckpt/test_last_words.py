"""A process ends when one of its threads dies of a defect, and says so."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import threading, time
from keepstep.ckpt.last_words import end_with_any_thread

end_with_any_thread(lambda kind, reason: print(kind, reason, flush=True))
threading.Thread(target=lambda: 1 / 0, name="keepstep-disk-0", daemon=True).start()
time.sleep(60)
"""


def test_a_thread_that_dies_is_told_and_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "keeper_failed keepstep-disk-0 died of ZeroDivisionError" in done.stdout
    assert "Traceback" in done.stderr
