"""What a tensor and a job may be called.

Names end up in JSON, in people's terminals, and (through export) in file names. So the rules are
those that make all three harmless, and they are the same for who writes and for who reads.
"""

from __future__ import annotations

import re

from keepstep.ckpt.errors import BadName

NAME_BYTES_MAX = 1_024
JOB_CHARS_MAX = 100

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# C0, DEL, C1, lone surrogates, line and paragraph separators, and the backslash.
_REFUSED = re.compile("[\x00-\x1f\\\\\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def name_fault(name: str) -> str | None:
    """Why `name` cannot be a tensor's name, as the end of a sentence; None if it can.

    A name has 1 to 1,024 bytes of UTF-8, no control character and no backslash; its parts between
    slashes are not empty, "." or ".."; and it is not ``__metadata__``.
    """
    if not name:
        return "is empty"
    if _REFUSED.search(name) is not None:
        return "has a control character, a backslash or a lone surrogate"
    if len(name) > NAME_BYTES_MAX or len(name.encode()) > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes"
    if name == "__metadata__":
        return "is reserved by safetensors"
    if "/" in name or name[0] == ".":
        for part in name.split("/"):
            if part in ("", ".", ".."):
                return f"has the path part {part!r}"
    return None


def check_name(name: str) -> None:
    """Raise BadName unless `name` can be a tensor's name (see `name_fault`)."""
    fault = name_fault(name)
    if fault is not None:
        raise BadName(f"tensor name {name[:200]!r} {fault}; rename it")


def job_fault(job: str) -> str | None:
    """Why `job` cannot be a job's name, as the end of a sentence; None if it can."""
    if len(job) > JOB_CHARS_MAX:
        return f"is longer than {JOB_CHARS_MAX} characters"
    if _JOB.fullmatch(job) is None:
        return (
            "may have only ASCII letters, digits, '.', '_', '-', and begins with a letter or digit"
        )
    return None


def check_job(job: str) -> None:
    """Raise BadName unless `job` can be a job's name: 1 to 100 of ``A-Za-z0-9._-``."""
    fault = job_fault(job)
    if fault is not None:
        raise BadName(f"job name {job[:200]!r} {fault}")
