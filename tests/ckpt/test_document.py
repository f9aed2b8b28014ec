"""JSON documents: one way to write them, and strict bounds on what is read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.ckpt.document import check_json, decode, encode, explained
from keepstep.ckpt.errors import FormatError, NewerVersion, NotRepresentable


class _Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    numbers: tuple[int, ...]


class _Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    zebra: _Inner
    apple: dict[str, Any]
    format: int = 1


_BOUNDS = {"bytes_max": 1_000, "file": "f.json"}
_GOOD = _Outer(_Inner((1, 2)), {"b": 0.1, "a": [None, True, "é"]})


def _decode(data: bytes, bytes_max: int = 1_000, version_known: int | None = None) -> _Outer:
    return decode(data, _Outer, bytes_max=bytes_max, file="f.json", version_known=version_known)


def test_keys_are_sorted_at_every_depth_and_there_is_no_space() -> None:
    data = encode(_GOOD)
    assert (
        data
        == '{"apple":{"a":[null,true,"é"],"b":0.1},"format":1,"zebra":{"numbers":[1,2]}}'.encode()
    )
    assert _decode(data) == _GOOD


def test_the_bound_in_bytes_is_exact() -> None:
    data = encode(_GOOD)
    assert _decode(data, len(data)) == _GOOD
    with pytest.raises(FormatError, match=f"at most {len(data) - 1} bytes, found {len(data)}"):
        _decode(data, len(data) - 1)


@pytest.mark.parametrize(
    ("old", "new", "field", "reason"),
    [
        ("0.1", "NaN", "", "JSON"),
        ("0.1", "-Infinity", "", "JSON"),
        ("0.1", "1e999", "apple['b']", "out of range"),
        ('"b":0.1', '"a":0.1', "", "'a' twice"),
        ("[1,2]", '[1,2],"numbers":[1]', "", "'numbers' twice"),
        ('"format":1', '"format":1,"format":1', "", "'format' twice"),
        ("[1,2]", "[1,2.0]", "zebra.numbers[1]", "`float`"),
        ("[1,2]", "[1,true]", "zebra.numbers[1]", "`bool`"),
        ("[1,2]", '{"a":1}', "zebra.numbers", "`object`"),
        ("[1,2]", "[1,2],}", "", "JSON"),
        ("é", "\ud800", "", "JSON"),
        ("null", "[" * 100_000, "", "bounds"),
        ("0.1", "9" * 6_000, "apple['b']", "out of range"),
    ],
)
def test_what_strict_json_does_not_have_is_refused(
    old: str, new: str, field: str, reason: str
) -> None:
    text = encode(_GOOD).decode()
    assert old in text
    changed = text.replace(old, new, 1).encode(errors="surrogatepass")
    with pytest.raises(FormatError, match=reason) as caught:
        _decode(changed, 10**6)
    assert (caught.value.file, caught.value.field) == ("f.json", field)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"{}x", b'"', b"\xef\xbb\xbf{}"])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"f\.json"):
        _decode(data)


def test_a_version_is_read_first() -> None:
    assert _decode(encode(_GOOD), version_known=1) == _GOOD
    with pytest.raises(NewerVersion):
        _decode(b'{"format":2,"all":"else"}', version_known=1)
    for version in (b"0", b"-1", b'"1"', b"1.5", b"[]"):
        with pytest.raises(FormatError) as caught:
            _decode(b'{"format":' + version + b"}", version_known=1)
        assert caught.value.field == "format"


def test_free_values_nested_up_to_32_deep_can_be_kept() -> None:
    value: list[Any] = []
    for _ in range(31):
        value = [value]
    check_json(value, "values")
    with pytest.raises(NotRepresentable, match="values"):
        check_json([[value]], "values")


def test_decoder_messages_are_taken_apart() -> None:
    assert explained("Expected `int`, got `str` - at `$.a.b[3]`") == ("a.b[3]", "`int`", "`str`")
    assert explained("Expected `object`, got `array`") == ("", "`object`", "`array`")
    assert explained("Object missing required field `x` - at `$.a`") == (
        "a",
        "what the format says",
        "object missing required field `x`",
    )


def test_a_value_of_a_dict_is_named_by_its_key() -> None:
    with pytest.raises(FormatError) as caught:
        decode(b'{"good":{"numbers":[]},"bad":{"numbers":[1,"2"]}}', dict[str, _Inner], **_BOUNDS)
    assert caught.value.field == "['bad'].numbers[1]"
