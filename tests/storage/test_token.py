from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.storage.errors import Denied, NotFound
from keepstep.storage.token import (
    TOKEN_VARIABLE,
    Token,
    find_token,
    make_token_file,
    new_token,
    read_token,
)

SECRET = "not-to-be-seen-anywhere"


def private(path: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_admits_its_own_header_alone() -> None:
    token = Token(SECRET)
    assert token.admits(f"Bearer {SECRET}")
    for header in (None, "", SECRET, f"bearer {SECRET}", f"Bearer {SECRET} ", f"Bearer {SECRET}x"):
        assert not token.admits(header)
    assert not token.admits("Bearer \udcff")


def test_a_token_does_not_show_itself() -> None:
    assert SECRET not in repr(Token(SECRET))
    assert SECRET not in f"{[Token(SECRET)]}"


@pytest.mark.parametrize("text", ["", "short", "x" * 513, "with a space in the middle", "ü" * 20])
def test_what_is_no_token_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(Denied) as caught:
        Token(text)
    assert not text or text not in str(caught.value)


def test_new_tokens_differ() -> None:
    first, second = new_token(), new_token()
    assert not first.admits(second.header)


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    path = private(tmp_path / "token")
    assert find_token({TOKEN_VARIABLE: "another-token-than-that"}, path).admits(
        "Bearer another-token-than-that"
    )
    assert find_token({}, path).admits(f"Bearer {SECRET}")
    assert find_token({TOKEN_VARIABLE: ""}, path).admits(f"Bearer {SECRET}")


def test_no_token_is_said_with_what_to_do() -> None:
    with pytest.raises(Denied, match=TOKEN_VARIABLE):
        find_token({}, None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602, 0o700])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "token", mode=mode)
    with pytest.raises(Denied, match=f"{mode:04o}") as caught:
        read_token(path)
    assert SECRET not in str(caught.value)


def test_a_file_for_reading_only_will_do(tmp_path: Path) -> None:
    assert read_token(private(tmp_path / "token", f"{SECRET}\n", 0o400)).text == SECRET


def test_a_link_is_refused(tmp_path: Path) -> None:
    private(tmp_path / "token")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    with pytest.raises(Exception, match="ELOOP"):
        read_token(tmp_path / "link")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_token(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(Denied, match="regular"):
        read_token(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_owner_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "token")
    os.chown(path, 12_345, 12_345)
    with pytest.raises(Denied, match="12345"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "x" * 2_000, "a b" * 10, "\x00" * 20])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Denied, match=r"holds no token|bytes"):
        read_token(private(tmp_path / "token", text))


def test_a_token_file_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_token_file(path).text, range(8)))
    assert len(set(made)) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_a_token_file_that_is_there_stays(tmp_path: Path) -> None:
    path = private(tmp_path / "token")
    assert make_token_file(path).text == SECRET
    assert path.read_text() == SECRET
