"""A path or URL opens a store, or says in one sentence why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.storage.errors import NotFound, Permanent
from keepstep.storage.locate import check_location, directory_of, open_store


def test_a_path_and_its_url_open_the_same_store(tmp_path: Path) -> None:
    directory = tmp_path / "with space %41 ä"
    store = open_store(directory, create=True)
    store.put("k", b"x")
    for location in (str(directory), store.url, f"file://{tmp_path}/with space %2541 ä"):
        assert open_store(location).get("k", 1) == b"x"
    assert open_store(store.url).url == store.url
    assert open_store(store.url.replace("file://", "file://localhost")).url == store.url


def test_nothing_is_made_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store at"):
        open_store(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    open_store(tmp_path / "a" / "b", create=True)
    assert (tmp_path / "a" / "b").is_dir()
    open_store(tmp_path / "a" / "b", create=True)


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/s", create=True).url == (tmp_path / "s").as_uri()


@pytest.mark.parametrize(
    ("location", "what"),
    [
        ("memory://x", "inside one process"),
        ("ftp://host/run", "unknown kind of store 'ftp'; expected a path, file:///"),
        ("s3://", "'' is no name of a bucket; expected s3://bucket/prefix"),
        ("s3:///run", "'' is no name of a bucket"),
        ("s3://bucket/a//b", "segment ''"),
        ("s3://bucket/../other", "segment '..'"),
        ("s3://bucket/run?region=x", "unknown option 'region=x'"),
        ("FILE://host/path", "three slashes"),
        ("file://relative", "three slashes"),
        ("file:///a%00b", "three slashes"),
        ("", "empty"),
        ("a\0b", "zero byte"),
    ],
)
@pytest.mark.parametrize("create", [False, True])
def test_what_cannot_be_opened_is_refused(location: str, what: str, create: bool) -> None:
    for refuse in (lambda: check_location(location), lambda: open_store(location, create=create)):
        with pytest.raises(Permanent) as caught:
            refuse()
        assert what in str(caught.value)
        assert caught.value.where == location


@pytest.mark.parametrize(
    "location",
    ["s3://bucket/run", "s3://nobody-has-made-it", "fsspec+local:///x", "/none/here", "file:///x"],
)
def test_what_may_be_there_is_not_looked_for(location: str) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'keepstep[s3]'")
    check_location(location)


def test_a_location_says_whether_it_is_a_directory(tmp_path: Path) -> None:
    assert directory_of(tmp_path / "s") == str(tmp_path / "s")
    assert directory_of("file:///a%20b/c") == "/a b/c"
    assert directory_of("s3://bucket/run") is None
    assert directory_of("fsspec+local:///x") is None


@pytest.mark.parametrize("create", [False, True])
def test_a_file_is_no_store(tmp_path: Path, create: bool) -> None:
    (tmp_path / "f").write_bytes(b"")
    for location in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(Permanent):
            open_store(location, create=create)
    with pytest.raises(Permanent, match="is not a directory"):
        open_store(tmp_path / "f", create=create)


@pytest.mark.parametrize("create", [False, True])
def test_a_url_with_credentials_is_refused_and_not_repeated(create: bool) -> None:
    for location in ("s3://AKIAKEY:s3cret@bucket/run", "S3://AKIAKEY:s3cret@bucket"):
        with pytest.raises(Permanent, match="AWS_ACCESS_KEY_ID") as caught:
            open_store(location, create=create)
        assert "s3cret" not in str(caught.value) + caught.value.where
        assert "AKIAKEY" not in str(caught.value) + caught.value.where


def test_a_local_store_needs_none_of_the_packages_of_a_bucket(tmp_path: Path) -> None:
    """They take long to import, and a rank that has an event loop's thread cannot be forked."""
    code = (
        "import sys; from keepstep.storage.locate import open_store;"
        f"open_store({str(tmp_path / 's')!r}, create=True).put('k', b'x');"
        "wrong = {'s3fs', 'fsspec', 'botocore', 'aiohttp', 'tenacity', 'asyncio', 'torch'};"
        "print(sorted(wrong & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
