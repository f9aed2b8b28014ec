"""Plain Python values in a checkpoint: what JSON gives back exactly, and nothing else."""

from __future__ import annotations

import math
from typing import Any

_DEPTH_MAX = 32
_INTEGER_BITS_MAX = 63


def why_not_json(value: Any, where: str = "", depth: int = 0) -> str | None:  # noqa: ANN401
    """Why `value` would not come back from JSON as the same value; None if it would.

    Kept: None, bool, str, integers below 2**63, finite floats, lists, and dicts with text keys.
    `where` is the path from the outermost value, for the answer.
    """
    kind = type(value)
    place = f"at {where}" if where else "it"
    if value is None or kind is bool:
        return None
    if kind is str:
        return None if _is_unicode(value) else f"{place} is text that is not valid Unicode"
    if kind is int:
        small = value.bit_length() <= _INTEGER_BITS_MAX
        return None if small else f"{place} is the integer {value}, beyond 63 bits"
    if kind is float:
        return None if math.isfinite(value) else f"{place} is {value}, not a finite number"
    if kind not in (list, dict):
        return f"{place} is a {kind.__module__}.{kind.__qualname__}"
    if depth >= _DEPTH_MAX:
        return f"{place} is nested more than {_DEPTH_MAX} deep"
    if kind is dict:
        wrong = [key for key in value if type(key) is not str or not _is_unicode(key)]
        if wrong:
            return f"{place} has the key {wrong[0]!r}, which is not text"
        items = value.items()
    else:
        items = enumerate(value)
    reasons = (why_not_json(item, f"{where}[{key!r}]", depth + 1) for key, item in items)
    return next((reason for reason in reasons if reason is not None), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
