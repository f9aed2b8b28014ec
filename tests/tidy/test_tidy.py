"""The house rules that a machine can hold: sizes, annotations, imports, symlinks, pure files."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [
    room
    for room in ("storage", "health", "planner", "ckpt", "recovery", "trainer", "chaos")
    if (ROOT / room).is_dir()
]
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
IMPURE = {
    "time",
    "random",
    "socket",
    "os",
    "threading",
    "subprocess",
    "asyncio",
    "secrets",
    "tempfile",
    "mmap",
    "fcntl",
    "torch",
}
PURE = [
    *(
        f"ckpt/{name}.py"
        for name in (
            "errors",
            "keys",
            "region",
            "placement",
            "dtypes",
            "plan",
            "checksum",
            "document",
            "encoding",
            "image",
            "manifest",
            "entry",
            "lineage",
            "retention",
            "restore",
            "candidates",
            "mosaic",
            "explain",
            "address",
            "drain_queue",
            "overlap",
            "pool_errors",
            "pool_table",
            "slots",
            "peers",
            "ack_ledger",
            "plane_messages",
            "control",
            "inventory",
            "keeper_core",
            "keeper_errors",
            "tenure",
            "tiers",
        )
    ),
    "storage/peer_wire.py",
    "storage/errors.py",
    "storage/store.py",
    "storage/keys.py",
    "trainer/order.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "planner").glob("*.py"))),
]


def product_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    tops = {*ROOMS, "bench", "tests"}
    return [
        ROOT / name
        for name in listed
        if (name.split("/")[0] in tops or name.startswith("src/keepstep/"))
        and (ROOT / name).is_file()
    ]


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level) + (node.module or ""), node.lineno


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in product_files()}


def test_there_is_something_to_check(trees: dict[Path, ast.Module]) -> None:
    assert len(trees) > 20


def test_no_file_is_longer_than_600_lines(trees: dict[Path, ast.Module]) -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in trees}
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES_MAX} == {}


def test_no_function_is_longer_than_70_lines(trees: dict[Path, ast.Module]) -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {node.end_lineno - node.lineno + 1}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_pickle_no_global_no_relative_import(trees: dict[Path, ast.Module]) -> None:
    found = []
    for path, tree in trees.items():
        where = path.relative_to(ROOT)
        for name, line in imported(tree):
            if name.split(".")[0] in FORBIDDEN or name.startswith("."):
                found.append(f"{where}:{line} imports {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.append(f"{where}:{node.lineno} global {node.names}")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                found.append(f"{where}:{node.lineno} torch.load unpickles")
    assert found == []


@pytest.mark.parametrize("name", PURE)
def test_pure_files_know_no_clock_no_socket_no_randomness(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    assert [
        (module, line) for module, line in imported(tree) if module.split(".")[0] in IMPURE
    ] == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_a_relative_symlink_of_the_package(room: str) -> None:
    link = ROOT / "src" / "keepstep" / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{room}"
    assert (link / "__init__.py").is_file()


def test_no_module_is_named_for_nothing(trees: dict[Path, ast.Module]) -> None:
    vague = {"utils", "common", "helper", "helpers", "manager", "misc"}
    assert [str(path.relative_to(ROOT)) for path in trees if path.stem in vague] == []


def test_every_module_says_what_it_owns(trees: dict[Path, ast.Module]) -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path, tree in trees.items()
        if "tests" not in path.parts and not ast.get_docstring(tree)
    ]
    assert silent == []
