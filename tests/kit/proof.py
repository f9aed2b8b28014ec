"""How a long proof says what it found: one JSON object, with what is needed to repeat it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git_commit() -> str:
    """The commit that is checked out, "+" behind it if files differ; "unknown" without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()


def print_report(name: str, seed: int, figures: Mapping[str, object]) -> None:
    """Print the figures of one proof as JSON."""
    print(json.dumps({"proof": name, "seed": seed, "git": git_commit(), **figures}, indent=2))
