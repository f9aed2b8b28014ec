"""Runs one proof by name: ``python -m tests.prove NAME [options of the proof]``."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def proofs() -> dict[str, str]:
    """Name of each proof -> module that runs it."""
    here = [path.stem for path in (ROOT / "tests" / "prove").glob("[a-z]*.py")]
    benches = [path.stem for path in (ROOT / "bench").glob("[a-z]*.py")]
    return {name: f"tests.prove.{name}" for name in sorted(here)} | {
        f"bench-{name}": f"bench.{name}" for name in sorted(benches)
    }


def first_line(module: str) -> str:
    """The first line of a module's docstring."""
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").split("\n", 1)[0]


def main(arguments: list[str]) -> int:
    """Run the proof that the first argument names; list them all if there is none."""
    known = proofs()
    if not arguments or arguments[0] not in known:
        for name, module in known.items():
            print(f"{name:20} {first_line(module)}", file=sys.stderr)
        return 2
    sys.argv = [known[arguments[0]], *arguments[1:]]
    sys.path.insert(0, str(ROOT))
    runpy.run_module(known[arguments[0]], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
