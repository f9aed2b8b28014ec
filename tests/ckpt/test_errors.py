"""The drawn tree of errors is the real one."""

from __future__ import annotations

import re

from keepstep.ckpt import errors
from keepstep.ckpt.errors import CheckpointError, FormatError, NewerVersion, StructureMismatch


def _drawn() -> dict[str, str]:
    """Error -> its parent, from the tree in the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?([A-Z]\w+) {2,}", line)
        if match is None:
            continue
        depth = 0 if match[2] == "CheckpointError" else len(match[1]) // 4 + 1
        path[depth:] = [match[2]]
        if depth:
            parents[match[2]] = path[depth - 1]
    return parents


def _real() -> dict[str, str]:
    parents = {}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, CheckpointError):
            parents[name] = value.__bases__[0].__name__
    del parents["CheckpointError"]
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert _drawn() == _real()


def test_a_format_error_says_where_what_and_what_to_do() -> None:
    error = FormatError("states/x", "shape", "at most 64 dims", "65", "Do this.")
    assert str(error) == "states/x: shape: expected at most 64 dims, found 65. Do this."
    assert (error.file, error.field) == ("states/x", "shape")
    assert (error.expected, error.found) == ("at most 64 dims", "65")


def test_a_newer_version_says_which_and_that_nothing_is_wrong() -> None:
    message = str(NewerVersion("m.json", "format", 1, 7))
    assert message == (
        "m.json: format: expected a format up to 1, found format 7, written by a newer keepstep. "
        "Upgrade keepstep to read it; do not change or delete the file."
    )


def test_a_structure_mismatch_lists_names_and_keeps_all_of_them() -> None:
    names = [f"t{i}" for i in range(30)]
    error = StructureMismatch("refused", missing=["a"], changed=names)
    assert error.missing == ("a",)
    assert error.changed == tuple(names)
    assert "missing from the checkpoint (1): a" in str(error)
    assert "changed (30): t0, t1" in str(error)
    assert "and 10 more" in str(error)
    assert "only in" not in str(error)
