"""Corpora, tokenizers, token files and windows: what is built, and what is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.trainer.corpus import documents, standard_library
from keepstep.trainer.dataset import Windows, open_corpus
from keepstep.trainer.errors import ConfigError, DataError
from keepstep.trainer.model_config import IGNORED
from keepstep.trainer.tokenfile import TokenFile, index_path, write_token_file
from keepstep.trainer.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    Tokenizer,
    TokenizerInfo,
    Tokens,
    load_tokenizer,
    padded_vocab_size,
)


def build(path: Path, *texts: bytes) -> TokenFile:
    sources = ((f"text {number}", text) for number, text in enumerate(texts))
    write_token_file(path, ByteTokenizer(), sources)
    return TokenFile(path)


class WideTokenizer:
    """Ids beyond 16 bits."""

    info = TokenizerInfo("wide", "", 70_001, 70_000)

    def encode(self, document: bytes, source: str) -> Tokens:
        return np.array([*(69_000 + byte for byte in document), 70_000], dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token - 69_000 for token in tokens if token < 70_000).decode()


# ---- building


def test_a_token_file_holds_the_documents_and_where_they_begin(tmp_path: Path) -> None:
    tokens = build(tmp_path / "c", b"ab", b"", b"\xff\x00")
    ids = tokens.read(0, tokens.token_count)
    assert ids.tolist() == [97, 98, END_OF_DOCUMENT, 255, 0, END_OF_DOCUMENT]
    assert tokens.pointers.tolist() == [0, 3, 6]
    assert tokens.document_count == 2
    tokens.verify()


def test_the_width_of_ids_follows_the_vocabulary(tmp_path: Path) -> None:
    wide: Tokenizer = WideTokenizer()
    write_token_file(tmp_path / "w", wide, [("x", b"zz")])
    assert (tmp_path / "w.bin").stat().st_size == 3 * 4
    assert TokenFile(tmp_path / "w").read(0, 3).tolist() == [69_122, 69_122, 70_000]
    build(tmp_path / "n", b"zz")
    assert (tmp_path / "n.bin").stat().st_size == 3 * 2


def test_pointers_beyond_two_gibibytes_are_read(tmp_path: Path) -> None:
    """A sparse file: 3 x 2^30 tokens of one document, then a second one."""
    build(tmp_path / "big", b"x", b"y")
    count, first = 3 << 30, (3 << 30) - 2
    with (tmp_path / "big.bin").open("r+b") as file:
        file.truncate(count * 2)
        file.seek(first * 2)
        file.write(struct.pack("<HH", 121, END_OF_DOCUMENT))
    rewrite_index(tmp_path / "big", tokens=count, pointers=[0, first, count])
    tokens = TokenFile(tmp_path / "big")
    assert tokens.read(first - 1, count).tolist() == [0, 121, END_OF_DOCUMENT]
    assert int(tokens.pointers[1]) == first


def test_no_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 documents of 0 bytes"):
        build(tmp_path / "e", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    before = build(tmp_path / "c", b"old").digest

    def breaking() -> object:
        yield "good", b"new"
        raise DataError("a bad document")

    with pytest.raises(DataError, match="a bad document"):
        write_token_file(tmp_path / "c", ByteTokenizer(), breaking())  # type: ignore[arg-type]
    after = TokenFile(tmp_path / "c")
    after.verify()
    assert after.digest == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_text_files_json_lines_and_directories_are_documents(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_text("b")
    (tmp_path / "d" / "a.md").write_text("a")
    (tmp_path / "d" / "sub" / "x.jsonl").write_text('{"text": "1"}\n\n{"text": "2\\n", "k": 3}\n')
    (tmp_path / "d" / "image.png").write_bytes(b"not text")
    (tmp_path / "odd.xyz").write_text("named itself")
    found = [text for _, text in documents([tmp_path / "odd.xyz", tmp_path / "d"])]
    assert found == [b"named itself", b"a", b"b", b"1", b"2\n"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"[1]", "found none"),
        (b'{"txt": "a"}', "the fields txt"),
        (b'{"text": 3}', '"text" is a int'),
        (b'{"text": "\\ud800"}', "surrogates"),
        (b'{"text": "a"', "Expecting"),
        (b"\xff\xfe{}", "codec"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_bad_json_line_is_named_with_its_number(tmp_path: Path, line: bytes, word: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as refused:
        list(documents([file]))
    assert f"{file}:2" in str(refused.value)
    assert word in str(refused.value)


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.txt: cannot read: No such file"):
        list(documents([tmp_path / "no.txt"]))


def test_the_standard_library_is_a_fixed_corpus_below_its_cap() -> None:
    first = list(standard_library(300_000))
    assert first == list(standard_library(300_000))
    total = sum(len(text) for _, text in first)
    assert 200_000 < total <= 300_000
    assert not any("/test/" in name or "site-packages" in name for name, _ in first)


# ---- tokenizers


def hf_tokenizer(path: Path, end: str = "<|endoftext|>") -> Path:
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import models, pre_tokenizers

    vocab = {"hello": 0, "world": 1, "[UNK]": 2}
    tokenizer = HfTokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if end:
        tokenizer.add_special_tokens([end])
    tokenizer.save(str(path))
    return path


def test_a_hugging_face_tokenizer_encodes_and_closes_documents(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_tokenizer(tmp_path / "tokenizer.json")))
    assert tokenizer.info.vocab_size == 4
    assert tokenizer.encode(b"hello there world", "x").tolist() == [0, 2, 1, 3]
    with pytest.raises(DataError, match="byte 6 is not UTF-8"):
        tokenizer.encode(b"hello \xff", "x")


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    path = hf_tokenizer(tmp_path / "tokenizer.json", end="")
    with pytest.raises(ConfigError, match="no end-of-document token"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), "world").info.end_of_document == 1


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04", b'{"model": {"type": "Evil"}}'])
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        load_tokenizer(str(path))
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(str(tmp_path / "absent.json"))


def test_bytes_decode_for_people() -> None:
    assert ByteTokenizer().decode([104, 105, END_OF_DOCUMENT, 0xC3, 0xA9]) == "hi<end>é"


def test_a_vocabulary_is_padded_to_a_multiple_whatever_the_layout() -> None:
    assert [padded_vocab_size(257, 64), padded_vocab_size(320, 64)] == [320, 320]


# ---- damaged and hostile files


def rewrite_index(path: Path, **changes: object) -> None:
    """Write an index anew with some fields changed and a right digest."""
    index = index_path(path)
    data = index.read_bytes()
    head = struct.Struct("<8sIIQQ16sI")
    names = ("magic", "version", "token_bytes", "tokens", "documents", "digest", "json_bytes")
    fields = dict(zip(names, head.unpack_from(data), strict=True))
    raw = data[head.size : head.size + fields["json_bytes"]]
    pointers = data[head.size + len(raw) : -16]
    if "json" in changes:
        raw = bytes(changes["json"])  # type: ignore[call-overload]
        fields["json_bytes"] = len(raw)
    if "pointers" in changes:
        pointers = np.asarray(changes["pointers"], dtype="<i8").tobytes()
    fields.update({name: value for name, value in changes.items() if name in names})
    body = head.pack(*(fields[name] for name in names)) + raw + pointers
    index.write_bytes(body + xxhash.xxh3_128_digest(body))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"magic": b"\x80\x04pickle"}, "magic"),
        ({"version": 2}, "version"),
        ({"token_bytes": 3}, "bytes a token"),
        ({"tokens": 10**15}, "pointers"),
        ({"documents": 10**9}, "size"),
        ({"documents": (1 << 64) - 1}, "size"),
        ({"json_bytes": (1 << 32) - 1}, "JSON length"),
        ({"json": b"{"}, "tokenizer"),
        ({"json": b"\xff"}, "tokenizer"),
        ({"json": b'{"name":"a","digest":"","vocab_size":5,"end_of_document":9}'}, "tokenizer"),
        ({"json": b'{"name":"a","digest":"","vocab_size":5}'}, "tokenizer"),
        ({"pointers": [0, 9, 6]}, "pointers"),
        ({"pointers": [0, -3, 6]}, "pointers"),
        ({"pointers": [1, 3, 6]}, "pointers"),
        ({"pointers": [0, 0, 6]}, "pointers"),
    ],
)
def test_a_hostile_index_is_refused_with_file_and_field(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    build(tmp_path / "c", b"ab", b"cd")
    rewrite_index(tmp_path / "c", **changes)
    with pytest.raises(DataError) as refused:
        TokenFile(tmp_path / "c")
    assert refused.value.field == field
    assert refused.value.file == str(tmp_path / "c.idx")
    assert refused.value.expected
    assert refused.value.found


def test_every_flipped_byte_and_every_cut_of_an_index_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "c", b"ab", b"cd")
    index = tmp_path / "c.idx"
    good = index.read_bytes()
    for at in range(len(good)):
        index.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(DataError):
            TokenFile(tmp_path / "c")
        index.write_bytes(good[:at])
        with pytest.raises(DataError):
            TokenFile(tmp_path / "c")


def test_tokens_that_changed_are_found(tmp_path: Path) -> None:
    tokens = build(tmp_path / "c", b"abcdef")
    with (tmp_path / "c.bin").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="content: expected xxh3_128"):
        tokens.verify()
    os.truncate(tmp_path / "c.bin", 4)
    with pytest.raises(DataError, match="size: expected 14 bytes, found 4 bytes"):
        TokenFile(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(DataError, match=r"c\.bin: No such file"):
        TokenFile(tmp_path / "c")


def test_an_id_that_the_vocabulary_lacks_is_found_on_reading(tmp_path: Path) -> None:
    tokens = build(tmp_path / "c", b"abcdef")
    with (tmp_path / "c.bin").open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<H", 300))
    with pytest.raises(DataError, match="token 2: expected an id below 257, found 300"):
        tokens.read(0, 7)


# ---- windows


@settings(deadline=None, derandomize=True, max_examples=60)
@given(length=st.integers(0, 200), seq_len=st.integers(1, 33), first=st.integers(0, 20))
def test_every_token_but_the_first_is_a_label_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, length: int, seq_len: int, first: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "windows"
    text = bytes(range(221))
    tokens = TokenFile(path) if index_path(path).exists() else build(path, text)
    windows = Windows(tokens, first, first + length, seq_len)
    samples = windows.read(np.arange(len(windows)))
    labels = samples.labels[samples.labels != IGNORED]
    assert labels.tolist() == list(range(first + 1, first + length))
    assert samples.valid_tokens == max(0, length - 1)
    whole = samples.labels != IGNORED
    assert np.array_equal(samples.inputs[whole] + 1, samples.labels[whole])


def test_the_held_out_part_is_whole_documents_at_the_end(tmp_path: Path) -> None:
    build(tmp_path / "c", *(bytes([65 + n]) * 99 for n in range(10)))
    corpus = open_corpus(tmp_path / "c", seq_len=10, seed=0, heldout_fraction=0.15, batch=4)
    assert (corpus.training.end, corpus.heldout.first, corpus.heldout.end) == (800, 800, 1000)
    assert len(corpus.training) == 80
    assert corpus.order.epoch_size == 80


def test_a_single_document_is_parted_at_a_window(tmp_path: Path) -> None:
    build(tmp_path / "c", b"x" * 999)
    corpus = open_corpus(tmp_path / "c", seq_len=10, seed=0, heldout_fraction=0.1, batch=4)
    assert corpus.training.end == 900


def test_a_corpus_that_cannot_fill_a_step_is_refused_with_the_numbers(tmp_path: Path) -> None:
    build(tmp_path / "c", b"x" * 99)
    with pytest.raises(DataError, match=r"100 tokens give 10 training windows of 10.* the 16 of"):
        open_corpus(tmp_path / "c", seq_len=10, seed=0, heldout_fraction=0, batch=16)
    with pytest.raises(DataError, match="leave none to hold out"):
        open_corpus(tmp_path / "c", seq_len=99, seed=0, heldout_fraction=0.001, batch=1)


def test_jsonl_round_trip_of_text(tmp_path: Path) -> None:
    text = 'quotes " and \u20ac and \x00'
    (tmp_path / "x.jsonl").write_text(json.dumps({"body": text}) + "\n")
    assert [t for _, t in documents([tmp_path / "x.jsonl"], "body")] == [text.encode()]
