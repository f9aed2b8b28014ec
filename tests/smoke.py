"""The installed package, as a stranger would use it: from another directory, with nothing else.

``python smoke.py DIST BIN``: DIST holds the built wheel and sdist, BIN the environment's programs.
Run by `.ci/run` after sdist -> wheel -> fresh environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path


def run(*command: str, expect: int = 0) -> str:
    """Run a command in the current directory and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != expect:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_wheel(dist: Path) -> None:
    """The wheel holds `keepstep` and its metadata, and every room as real files."""
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"keepstep"}, tops
    for room in ("ckpt", "planner", "storage", "trainer"):
        assert f"keepstep/{room}/__init__.py" in names, f"the wheel lacks {room}"
    assert "keepstep/py.typed" in names
    assert "keepstep/trainer/default.toml" in names


def main() -> None:
    dist, programs = Path(sys.argv[1]), Path(sys.argv[2])
    check_wheel(dist)
    keepstep = str(programs / "keepstep")
    Path("storage.py").write_text(
        "raise SystemExit('a file of the user shadowed a room of ours')\n"
    )
    train = (keepstep, "train", "--run-dir", "run", "--checkpoint-every", "2")
    run(*train, "--steps", "4", "--layout", "dp=2,tp=2,pp=1")
    run(*train, "--steps", "6", "--layout", "dp=1,tp=1,pp=2")
    steps = [
        json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6], steps
    run(keepstep, "verify", "run/store")
    run(keepstep, "reshard", "run/store@6", "other", "--layout", "dp=2,tp=1,pp=1")
    run(keepstep, "diff", "run/store@6", "other@6")
    run(keepstep, "diff", "run/store@4", "run/store@6", expect=1)
    run(keepstep, "export", "run/store", "model", "--format", "hf")
    assert (Path("model") / "config.json").is_file()
    print("smoke test: good")


if __name__ == "__main__":
    main()
