"""Where text comes from: files, directories, JSON lines, and the default corpus.

The default corpus is what every machine has: the sources and documentation texts of the running
Python's own standard library (`pydoc_data/topics.py` is the language reference). It differs
between Python versions, so a run records its digest.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from keepstep.trainer.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
LINES_SUFFIXES = (".jsonl", ".ndjson")
DOCUMENT_BYTES_MAX = 1 << 30
STANDARD_LIBRARY_BYTES = 4 << 20

_SKIPPED_DIRECTORIES = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "ensurepip")
)

Document = tuple[str, bytes]
"""(where it comes from, its bytes)."""


def documents(inputs: list[Path], text_field: str = "text") -> Iterator[Document]:
    """The documents of files and directories, in the order given; a directory's sorted by path.

    A text file is one document; each line of a JSON-lines file is an object whose `text_field`
    is one. In a directory, files of other kinds are passed over; a file named itself is read as
    text unless it is named as JSON lines.

    Raises:
        DataError: missing, unreadable or too large; a line that is not such an object.
    """
    for path in inputs:
        if path.is_dir():
            for file in _files_below(path):
                yield from _file_documents(file, text_field)
        else:
            yield from _file_documents(path, text_field)


def _files_below(root: Path) -> list[Path]:
    """Text and JSON-lines files below `root`, sorted by their path as text."""
    kinds = TEXT_SUFFIXES + LINES_SUFFIXES
    found = [path for path in root.rglob("*") if path.suffix in kinds and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _file_documents(path: Path, text_field: str) -> Iterator[Document]:
    try:
        if path.suffix in LINES_SUFFIXES:
            yield from _lines(path, text_field)
            return
        size_bytes = path.stat().st_size
        if size_bytes > DOCUMENT_BYTES_MAX:
            raise DataError(
                f"{path}: {size_bytes} bytes in one document, at most {DOCUMENT_BYTES_MAX}; "
                "split it, or give it as JSON lines",
                file=str(path),
                field="size",
                expected=f"at most {DOCUMENT_BYTES_MAX} bytes",
                found=str(size_bytes),
            )
        yield str(path), path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}", file=str(path)) from error


def _lines(path: Path, text_field: str) -> Iterator[Document]:
    """One document a line. Blank lines are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(DOCUMENT_BYTES_MAX), b""), 1):
            if line.strip():
                source = f"{path}:{number}"
                yield source, _text_of_line(line, source, text_field)


def _text_of_line(line: bytes, source: str, text_field: str) -> bytes:
    expected = f'a JSON object with a string "{text_field}"'
    try:
        value = json.loads(line)
        text = value[text_field] if isinstance(value, dict) else None
        if isinstance(text, str):
            return text.encode("utf-8")
        found = f'"{text_field}" is a {type(text).__name__}' if isinstance(value, dict) else "none"
    except KeyError:
        found = f"the fields {', '.join(sorted(value)) or 'none'}"
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, lone surrogates
        found = str(error)
    raise DataError(
        f"{source}: expected {expected}, found {found}; name the field with --text-field",
        file=source,
        field=text_field,
        expected=expected,
        found=found,
    )


def standard_library(bytes_max: int = STANDARD_LIBRARY_BYTES) -> Iterator[Document]:
    """Sources and documentation texts of the running Python, at most `bytes_max` bytes of them.

    The order is a fixed shuffle (by a hash of the path), so that any part of the corpus, the
    held-out end among them, is of the same kind. A file that no longer fits is passed over.

    Raises:
        DataError: the standard library has no sources here (a zipped or stripped installation).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_standard_names(root), key=lambda name: hashlib.sha256(name.encode()).digest())
    left_bytes = bytes_max
    any_given = False
    for name in names:
        data = (root / name).read_bytes()
        if len(data) <= left_bytes:
            left_bytes -= len(data)
            any_given = True
            yield name, data
    if not any_given:
        raise DataError(
            f"{root}: no Python sources of at most {bytes_max} bytes: this Python has no standard "
            "library to train on; give a corpus with data.path",
            file=str(root),
        )


def _standard_names(root: Path) -> Iterator[str]:
    """Paths below `root` of .py and .txt files that belong to Python itself."""
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if _SKIPPED_DIRECTORIES.intersection(relative.parts):
            continue
        if path.suffix in (".py", ".txt") and path.is_file():
            yield relative.as_posix()
