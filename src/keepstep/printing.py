"""How every command prints JSON: indented, valid (NaN and infinity are null), one document."""

from __future__ import annotations

import sys

import msgspec


def print_json(document: object) -> None:
    """Print `document` on standard output. numpy's numbers count as floats."""
    text = msgspec.json.format(msgspec.json.encode(document, enc_hook=float))
    sys.stdout.write(text.decode() + "\n")
