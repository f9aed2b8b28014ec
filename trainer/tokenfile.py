"""Token files: a corpus as memory-mapped ids (`NAME.bin`) and where documents begin (`NAME.idx`).

    NAME.bin    token ids, little-endian, u16 if every id fits, else u32; nothing else
    NAME.idx    0   8  magic "KSTOKENS"
                8   4  u32 format version (1)
                12  4  u32 bytes a token: 2 or 4
                16  8  u64 tokens
                24  8  u64 documents
                32  16 xxh3_128 of NAME.bin
                48  4  u32 length of the JSON that follows
                52  n  JSON: TokenizerInfo
                .   .  i64 x (documents + 1): offset of each document, then the number of tokens
                .   16 xxh3_128 of all the bytes before

The index is written last and atomically: a token file without its index does not exist. Pointers
are 64 bits (a 32-bit one overflows at 2 GiB); the id width follows the vocabulary.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from keepstep.trainer.errors import DataError
from keepstep.trainer.tokenizer import Tokenizer, TokenizerInfo, Tokens

FORMAT_VERSION = 1
MAGIC = b"KSTOKENS"
JSON_BYTES_MAX = 1 << 16
INDEX_BYTES_MAX = 32 << 30
_HEAD = struct.Struct("<8sIIQQ16sI")
_DIGEST_BYTES = 16
_CHUNK_BYTES = 8 << 20


def index_path(path: Path) -> Path:
    """`NAME.idx` of `NAME`, `NAME.bin` or `NAME.idx`."""
    return _stem(path).with_name(_stem(path).name + ".idx")


def tokens_path(path: Path) -> Path:
    """`NAME.bin` of `NAME`, `NAME.bin` or `NAME.idx`."""
    return _stem(path).with_name(_stem(path).name + ".bin")


def _stem(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


@dataclass(frozen=True, slots=True)
class Built:
    """What `write_token_file` wrote."""

    path: Path
    tokens: int
    documents: int
    digest: str


class TokenFile:
    """An open token file. Reading is safe from several threads and after a fork."""

    def __init__(self, path: Path) -> None:
        """Open and check the index, and the size of the tokens (their content: `verify`).

        Raises:
            DataError: missing, truncated, foreign, newer or damaged; names file and field.
        """
        self.path = tokens_path(path)
        index = index_path(path)
        head, pointers = _read_index(index)
        self.info = head.info
        self.token_count = head.tokens
        self.document_count = head.documents
        self.digest = head.digest.hex()
        self.pointers = pointers
        self._dtype = np.dtype("<u2" if head.token_bytes == 2 else "<u4")
        expected_bytes = head.tokens * head.token_bytes
        found_bytes = _size_bytes(self.path)
        if found_bytes != expected_bytes:
            raise _damaged(self.path, "size", f"{expected_bytes} bytes", f"{found_bytes} bytes")
        self._tokens: npt.NDArray[np.unsignedinteger] = (
            np.memmap(self.path, dtype=self._dtype, mode="r")
            if head.tokens
            else np.empty(0, dtype=self._dtype)
        )

    def read(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [first, end) as int64, each below the vocabulary's size.

        Raises:
            DataError: an id that the vocabulary does not have.
        """
        tokens = self._tokens[first:end].astype(np.int64)
        if tokens.size and int(tokens.max()) >= self.info.vocab_size:
            at = first + int(tokens.argmax())
            raise _damaged(
                self.path, f"token {at}", f"an id below {self.info.vocab_size}", str(tokens.max())
            )
        return tokens

    def document(self, number: int) -> list[int]:
        """The ids of one document.

        Raises:
            DataError: there is no such document, or as `read`.
        """
        if not 0 <= number < self.document_count:
            raise DataError(
                f"{self.path}: document {number}: expected one of 0 to {self.document_count - 1}",
                file=str(self.path),
                field=f"document {number}",
                expected=f"0 to {self.document_count - 1}",
                found=str(number),
            )
        ids = self.read(int(self.pointers[number]), int(self.pointers[number + 1]))
        return [int(one) for one in ids]

    def verify(self) -> None:
        """Read all tokens once and compare their digest.

        Raises:
            DataError: the bytes are not those that were written.
        """
        found = _file_digest(self.path)
        if found.hex() != self.digest:
            raise _damaged(self.path, "content", f"xxh3_128 {self.digest}", found.hex())


@dataclass(frozen=True, slots=True)
class _Head:
    token_bytes: int
    tokens: int
    documents: int
    digest: bytes
    info: TokenizerInfo


def _damaged(file: Path, field: str, expected: str, found: str) -> DataError:
    return DataError(
        f"{file}: {field}: expected {expected}, found {found}; "
        "build the token file again with `keepstep data build`",
        file=str(file),
        field=field,
        expected=expected,
        found=found,
    )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; a token file is NAME.bin with NAME.idx beside it, "
            "as `keepstep data build` writes them",
            file=str(path),
        ) from error


def _read_index(path: Path) -> tuple[_Head, npt.NDArray[np.int64]]:
    """The checked head and pointers of an index."""
    size_bytes = _size_bytes(path)
    if not _HEAD.size + _DIGEST_BYTES <= size_bytes <= INDEX_BYTES_MAX:
        raise _damaged(
            path,
            "size",
            f"{_HEAD.size + _DIGEST_BYTES} to {INDEX_BYTES_MAX} bytes",
            f"{size_bytes}",
        )
    with path.open("rb") as file:
        data = file.read(size_bytes)
    magic, version, *_ = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _damaged(path, "magic", repr(MAGIC), repr(magic))
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: version: expected {FORMAT_VERSION}, found {version}; "
            "it was written by a newer keepstep: upgrade, or build it again",
            file=str(path),
            field="version",
            expected=str(FORMAT_VERSION),
            found=str(version),
        )
    found = xxhash.xxh3_128_digest(data[:-_DIGEST_BYTES])
    if found != data[-_DIGEST_BYTES:]:
        raise _damaged(path, "digest", data[-_DIGEST_BYTES:].hex(), found.hex())
    return _parse_index(path, data)


def _parse_index(path: Path, data: bytes) -> tuple[_Head, npt.NDArray[np.int64]]:
    """Head and pointers of an index whose digest is right; a hostile one may still lie."""
    _, _, token_bytes, tokens, documents, digest, json_bytes = _HEAD.unpack_from(data)
    if token_bytes not in (2, 4):
        raise _damaged(path, "bytes a token", "2 or 4", str(token_bytes))
    if json_bytes > JSON_BYTES_MAX:
        raise _damaged(path, "JSON length", f"at most {JSON_BYTES_MAX}", str(json_bytes))
    expected_bytes = _HEAD.size + json_bytes + 8 * (documents + 1) + _DIGEST_BYTES
    if len(data) != expected_bytes:
        raise _damaged(path, "size", f"{expected_bytes} bytes", f"{len(data)} bytes")
    raw = data[_HEAD.size : _HEAD.size + json_bytes]
    try:
        info = msgspec.json.decode(raw, type=TokenizerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, "tokenizer", "a JSON object", str(error)) from error
    if not 0 <= info.end_of_document < info.vocab_size <= 1 << 32:
        raise _damaged(
            path, "tokenizer", "0 <= end_of_document < vocab_size <= 2^32", raw.decode("utf-8")
        )
    pointers = np.frombuffer(
        data, dtype="<i8", count=documents + 1, offset=_HEAD.size + json_bytes
    ).astype(np.int64)
    ascending = bool((np.diff(pointers) > 0).all())
    if int(pointers[0]) != 0 or int(pointers[-1]) != tokens or not ascending:
        raise _damaged(
            path,
            "pointers",
            f"ascending from 0 to {tokens}",
            f"{pointers[0]} to {pointers[-1]}, {'' if ascending else 'not '}ascending",
        )
    return _Head(token_bytes, tokens, documents, digest, info), pointers


def _file_digest(path: Path) -> bytes:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.digest()


def write_token_file(
    path: Path, tokenizer: Tokenizer, documents: Iterable[tuple[str, bytes]]
) -> Built:
    """Encode documents into `path`.bin and `path`.idx. Durable, and all or nothing, on return.

    Args:
        path: NAME (a suffix .bin or .idx is dropped).
        tokenizer: text to ids.
        documents: (where it comes from, its bytes), one at a time in memory. Empty ones are
            passed over.

    Raises:
        DataError: no document, one that the tokenizer cannot read, or a file that cannot be
            written (disk full and the like); then nothing was changed.
    """
    target, index = tokens_path(path), index_path(path)
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temp_index = index.with_name(f".{index.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        head, pointers = _write_tokens(temp, tokenizer, documents)
        _write_index(temp_index, head, pointers)
        # A new .bin under an old .idx would be a damaged pair: take the index away first.
        index.unlink(missing_ok=True)
        _fsync_directory(target.parent)
        temp.replace(target)
        temp_index.replace(index)
        _fsync_directory(target.parent)
    except OSError as error:
        raise DataError(
            f"{target}: cannot write: {error.strerror} (errno {error.errno}); nothing was built",
            file=str(target),
        ) from error
    finally:
        temp.unlink(missing_ok=True)
        temp_index.unlink(missing_ok=True)
    return Built(target, head.tokens, head.documents, head.digest.hex())


def _write_tokens(
    temp: Path, tokenizer: Tokenizer, documents: Iterable[tuple[str, bytes]]
) -> tuple[_Head, npt.NDArray[np.int64]]:
    """Write the ids of all documents; the head and the pointers that describe them."""
    info = tokenizer.info
    dtype = np.dtype("<u2" if info.vocab_size <= 1 << 16 else "<u4")
    hasher = xxhash.xxh3_128()
    ends = [0]
    with temp.open("wb") as file:
        for source, document in documents:
            if not document:
                continue
            tokens = _checked(tokenizer.encode(document, source), info, source)
            data = tokens.astype(dtype).tobytes()
            hasher.update(data)
            file.write(data)
            ends.append(ends[-1] + tokens.size)
        file.flush()
        os.fsync(file.fileno())
    if len(ends) == 1:
        raise DataError(
            f"{temp.parent}: no text in what was given: 0 documents of 0 bytes; "
            "name text (.txt, .md, .rst, .py) or JSON-lines files, or a directory with some",
            file=str(temp.parent),
            expected="at least 1 document",
            found="0",
        )
    head = _Head(dtype.itemsize, ends[-1], len(ends) - 1, hasher.digest(), info)
    return head, np.asarray(ends, dtype=np.int64)


def _checked(tokens: Tokens, info: TokenizerInfo, source: str) -> Tokens:
    """`tokens`, all below the vocabulary's size."""
    if int(tokens.max()) >= info.vocab_size:
        raise DataError(
            f"{source}: {info.name} gave id {tokens.max()}, its vocabulary has {info.vocab_size}",
            file=source,
            expected=f"ids below {info.vocab_size}",
            found=str(tokens.max()),
        )
    return tokens


def _write_index(temp: Path, head: _Head, pointers: npt.NDArray[np.int64]) -> None:
    info = msgspec.json.encode(head.info)
    data = _HEAD.pack(
        MAGIC,
        FORMAT_VERSION,
        head.token_bytes,
        head.tokens,
        head.documents,
        head.digest,
        len(info),
    )
    data += info + pointers.astype("<i8").tobytes()
    with temp.open("wb") as file:
        file.write(data + xxhash.xxh3_128_digest(data))
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("token files are read in place: a little-endian machine is needed")
