"""What tensors and jobs may be called."""

from __future__ import annotations

import pytest

from keepstep.ckpt.errors import BadName
from keepstep.ckpt.names import check_job, check_name


@pytest.mark.parametrize(
    "name",
    [
        "w",
        "model/layers.0.attention.wq.weight",
        "a.b/c",
        "a/b.c",
        "..a",
        "a..b/c..",
        ".hidden",
        'quoted"name',
        "état/重み/🙂",
        "spaces are fine",
        "x" * 1024,
        "é" * 512,
    ],
)
def test_names_that_can_be(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "path part ''"),
        ("a//b", "path part ''"),
        ("a/", "path part ''"),
        ("..", r"path part '\.\.'"),
        (".", r"path part '\.'"),
        ("../../w", r"path part '\.\.'"),
        ("a/../w", r"path part '\.\.'"),
        ("a/./w", r"path part '\.'"),
        ("a\\..\\w", "backslash"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("\x1b[2J", "control character"),
        ("a\x85b", "control character"),
        ("a\u2028b", "control character"),
        ("a\udc80b", "lone surrogate"),
        ("x" * 1025, "longer than 1024"),
        ("é" * 513, "longer than 1024"),
        ("__metadata__", "reserved"),
    ],
)
def test_names_that_are_refused(name: str, reason: str) -> None:
    with pytest.raises(BadName, match=reason):
        check_name(name)


def test_job_names() -> None:
    for job in ("a", "llama-7b_run.2", "9", "x" * 100):
        check_job(job)
    for job in ("", "-a", ".a", "a/b", "a b", "a\n", "é", "x" * 101):
        with pytest.raises(BadName, match="job name"):
            check_job(job)
