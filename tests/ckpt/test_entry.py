"""Log entries: all kinds come back, and no byte of one can change unseen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.document import encode
from keepstep.ckpt.entry import (
    RECORD_BYTES_MAX,
    Body,
    Commit,
    End,
    Generation,
    Operator,
    Parent,
    Record,
    Retire,
    Rewind,
    Term,
    Verdict,
    decode_record,
    encode_record,
)
from keepstep.ckpt.errors import Corrupt, Foreign, FormatError, NewerVersion, NotRepresentable
from keepstep.ckpt.manifest import State
from keepstep.ckpt.placement import Mesh, MeshAxis

FILE = "log/000000/000000007"
_STATE = State(2, 40)
_MESH = Mesh((MeshAxis("pp", 1), MeshAxis("tp", 2)))
_GENERATION = Generation(2, ("a", "b"), _MESH, State(1, 30), None, {"model": {"dim": 64}})
BODIES: tuple[Body, ...] = (
    Term(4, "trainer on host a, pid 17"),
    _GENERATION,
    msgspec.structs.replace(
        _GENERATION, base=None, parent=Parent("file:///é", "other", _STATE, weights_only=True)
    ),
    Commit(_STATE, "d" * 32, 123_456),
    Verdict(_STATE, good=False, reason="loss 9.9 after 2.1"),
    Rewind(_STATE, "spike"),
    Rewind(None, "from the beginning"),
    Retire((State(1, 10), State(1, 20)), "keep_last = 5"),
    Operator("gc", "ada", 'said "so"\n'),
    End(_STATE, "reached step 40"),
    End(None, "nothing was done"),
)


def record(body: Body, **changes: Any) -> Record:  # noqa: ANN401
    fields: dict[str, Any] = {
        "seq": 7,
        "id": "0123456789abcdef" * 2,
        "job": "demo",
        "term": 4,
        "at": "2026-11-30T15:04:05.123Z",
        "body": body,
    }
    return Record(**{**fields, **changes})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_an_entry_comes_back_and_every_flipped_bit_is_found(body: Body) -> None:
    data = encode_record(record(body))
    assert decode_record(data, FILE) == record(body)
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(FormatError, match=FILE):
                decode_record(changed, FILE)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_an_entry_cut_short_or_with_more_behind_it_is_found(body: Body) -> None:
    data = encode_record(record(body))
    for length in range(len(data)):
        with pytest.raises(FormatError):
            decode_record(data[:length], FILE)
    for extra in (b"\n", b" ", b"\0", data):
        with pytest.raises(FormatError):
            decode_record(data + extra, FILE)


def test_the_bytes_of_format_1_do_not_change() -> None:
    """Such entries exist: a change here needs a new format version."""
    assert encode_record(record(Commit(_STATE, "d" * 32, 5))) == (
        b"52e7a9931a030eff4c96965c0d3330f2\n"
        b'{"at":"2026-11-30T15:04:05.123Z","body":{"kind":"commit",'
        b'"manifest_digest":"dddddddddddddddddddddddddddddddd","size_bytes":5,'
        b'"state":{"generation":2,"step":40}},"format":1,'
        b'"id":"0123456789abcdef0123456789abcdef","job":"demo","seq":7,"term":4}\n'
    )


def _raw(text: bytes) -> bytes:
    """An entry with a right checksum, whatever is in it."""
    return digest128(text).encode() + b"\n" + text + b"\n"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (record(Term(4, ""), seq=-1), "seq"),
        (record(Term(4, ""), seq=10**9), "seq"),
        (record(Term(4, ""), id="a"), "id"),
        (record(Term(4, ""), job=".."), "job"),
        (record(Term(4, ""), term=-1), "term"),
        (record(Term(4, ""), term=2**53), "term"),
        (record(Term(4, ""), at="yesterday"), "at"),
        (record(Term(4, ""), at="2026-11-30T15:04:05+01:00"), "at"),
        (record(Term(4, ""), format=0), "format"),
        (record(Term(-1, "")), "body.number"),
        (record(Commit(State(-1, 0), "d" * 32, 5)), "body.state.generation"),
        (record(Commit(_STATE, "D" * 32, 5)), "body.manifest_digest"),
        (record(Commit(_STATE, "d" * 32, -5)), "body.size_bytes"),
        (record(Verdict(State(0, -1), True, "")), "body.state.step"),
        (record(Rewind(State(0, 10**12), "")), "body.to.step"),
        (record(End(State(10**6, 1), "")), "body.state.generation"),
        (record(Retire((_STATE, State(0, -1)), "")), "body.states[1].step"),
        (record(msgspec.structs.replace(_GENERATION, number=10**6)), "body.number"),
        (record(msgspec.structs.replace(_GENERATION, mesh=Mesh((MeshAxis("", 1),)))), "body.mesh"),
        (
            record(msgspec.structs.replace(_GENERATION, base=State(-1, 0))),
            "body.base.generation",
        ),
        (
            record(msgspec.structs.replace(_GENERATION, parent=Parent("", "", State(0, -1), True))),
            "body.parent.state.step",
        ),
    ],
)
def test_an_entry_that_cannot_be_is_refused_when_written_and_when_read(
    changed: Record, field: str
) -> None:
    with pytest.raises(FormatError) as written:
        encode_record(changed)
    with pytest.raises(FormatError) as read:
        decode_record(_raw(encode(changed)), FILE)
    assert written.value.field == read.value.field == field
    assert read.value.file == FILE


def test_a_configuration_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(NotRepresentable, match=r"body\.config"):
        encode_record(record(msgspec.structs.replace(_GENERATION, config={"lr": float("nan")})))


def test_a_wrong_checksum_is_corruption_and_names_both() -> None:
    data = encode_record(record(Term(4, "")))
    with pytest.raises(Corrupt) as caught:
        decode_record(data.replace(b'"term":4', b'"term":5'), FILE)
    assert caught.value.expected == data[:32].decode()
    assert caught.value.tensor is None


def test_an_entry_of_a_newer_format_is_not_guessed_at() -> None:
    text = b'{"body":{"kind":"merge","into":3},"format":2,"seq":7}'
    with pytest.raises(NewerVersion, match="written by a newer keepstep"):
        decode_record(_raw(text), FILE)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'{"body":{"kind":"merge"}}',
        encode(record(Term(4, ""))).replace(b'"term":4}', b'"term":4,"term":4}'),
        encode(record(Term(4, ""))).replace(b'"seq":7', b'"seq":7.0'),
        encode(record(Term(4, ""))).replace(b'"seq":7', b'"seq":NaN'),
        encode(record(Term(4, ""))).replace(b'"seq":7', b'"seq":1' + b"0" * 5000),
        encode(record(_GENERATION)).replace(b"64", b"[" * 100_000 + b"]" * 100_000),
        encode(record(_GENERATION)).replace(b"64", b"[" * 500 + b"]" * 500),
        encode(record(_GENERATION)).replace(b"64", b"1" * 5000),
        encode(record(_GENERATION)).replace(b"64", b"1e999"),
        encode(record(_GENERATION)).replace(b"64", b'"\\ud800"'),
        encode(record(_GENERATION)).replace(b'"dim":64', b'"dim":64,"dim":65'),
    ],
)
def test_hostile_json_under_a_right_checksum_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError, match=FILE):
        decode_record(_raw(text), FILE)


def test_files_of_other_kinds_and_of_any_size_are_refused() -> None:
    with pytest.raises(Foreign, match="pickle"):
        decode_record(b"\x80\x04\x95" + b"x" * 60, FILE)
    with pytest.raises(FormatError, match=f"at most {RECORD_BYTES_MAX} bytes"):
        decode_record(bytes(RECORD_BYTES_MAX + 1), FILE)
