"""Text to token ids: bytes as they are, or a Hugging Face `tokenizer.json`.

A document is encoded and closed by the end-of-document id, so that a window which spans two
documents shows the model where one ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from keepstep.trainer.errors import ConfigError, DataError

Tokens = npt.NDArray[np.uint32]

BYTES = "bytes"
"""The name of the byte tokenizer in configurations and token files."""
END_OF_DOCUMENT = 256
BYTES_VOCAB_SIZE = 257
TOKENIZER_BYTES_MAX = 256 << 20


class TokenizerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer made a token file: enough to tell two apart.

    Attributes:
        name: "bytes", or the file name of the tokenizer.
        digest: xxh3_128 of the tokenizer's file, "" for bytes.
        vocab_size: ids are below this.
        end_of_document: the id that closes each document.
    """

    name: str
    digest: str
    vocab_size: int
    end_of_document: int


class Tokenizer(Protocol):
    """Text to ids."""

    @property
    def info(self) -> TokenizerInfo:
        """Which tokenizer this is."""

    def encode(self, document: bytes, source: str) -> Tokens:
        """The ids of one UTF-8 document, closed by the end-of-document id.

        Raises DataError, naming `source`, if the bytes are not what this tokenizer can read.
        """

    def decode(self, tokens: list[int]) -> str:
        """The text of ids, for people."""


class ByteTokenizer:
    """Each byte is its own id. Reads anything, UTF-8 or not."""

    info = TokenizerInfo(BYTES, "", BYTES_VOCAB_SIZE, END_OF_DOCUMENT)

    def encode(self, document: bytes, source: str) -> Tokens:
        """The bytes, then the end-of-document id."""
        tokens = np.empty(len(document) + 1, dtype=np.uint32)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """UTF-8 with replacement characters; the end of a document shows as "<end>"."""
        parts: list[bytes] = [b"<end>" if t >= END_OF_DOCUMENT else bytes([t]) for t in tokens]
        return b"".join(parts).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizer.json` (needs the optional package `tokenizers`)."""

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        """Load the file.

        Args:
            path: the `tokenizer.json`.
            end_of_document: the special token that closes a document; by default the first of
                the usual names that the vocabulary has.

        Raises:
            ConfigError: the package is not installed, or no end-of-document token is known.
            DataError: the file is missing, too large or not a tokenizer.
        """
        data = _read_tokenizer_file(path)
        self._tokenizer = _load(path, data)
        vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        names = (end_of_document,) if end_of_document else _USUAL_END_NAMES
        ids = [self._tokenizer.token_to_id(name) for name in names]
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise ConfigError(
                f"{path}: no end-of-document token: the vocabulary has none of "
                f"{', '.join(names)}; name one with --end-of-document"
            )
        self.info = TokenizerInfo(path.name, xxhash.xxh3_128_hexdigest(data), vocab_size, found)

    def encode(self, document: bytes, source: str) -> Tokens:
        """The ids of the text without added special tokens, then the end-of-document id."""
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}: byte {error.start} is not UTF-8, which {self.info.name} needs; "
                "convert the file, or use the byte tokenizer",
                file=source,
                expected="UTF-8",
                found=f"byte {document[error.start]:#04x} at {error.start}",
            ) from error
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        tokens = np.empty(len(ids) + 1, dtype=np.uint32)
        tokens[:-1] = ids
        tokens[-1] = self.info.end_of_document
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text, special tokens included."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


_USUAL_END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[SEP]",
)


def _read_tokenizer_file(path: Path) -> bytes:
    """The file's bytes, bounded."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > TOKENIZER_BYTES_MAX:
            raise DataError(
                f"{path}: {size_bytes} bytes; a tokenizer.json of at most {TOKENIZER_BYTES_MAX} "
                "is expected",
                file=str(path),
                expected=f"at most {TOKENIZER_BYTES_MAX} bytes",
                found=str(size_bytes),
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the tokenizer: {error.strerror}; "
            'give "bytes" or the path of a tokenizer.json',
            file=str(path),
        ) from error


def _load(path: Path, data: bytes) -> Any:  # noqa: ANN401 - an optional package's type
    """The `tokenizers` object of the file's bytes."""
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading a tokenizer.json needs the package `tokenizers`: "
            "pip install 'keepstep[hf]'"
        ) from error
    try:
        msgspec.json.decode(data)  # a better message for what is no JSON at all
        return HfTokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # tokenizers raises bare Exception for all it refuses
        raise DataError(
            f"{path}: not a Hugging Face tokenizer.json: {error}",
            file=str(path),
            expected="a tokenizer.json",
            found=str(error),
        ) from error


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `name` means: "bytes", or the path of a `tokenizer.json`.

    Raises:
        ConfigError, DataError: as `JsonTokenizer`.
    """
    if name == BYTES:
        return ByteTokenizer()
    return JsonTokenizer(Path(name), end_of_document)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """`vocab_size` rounded up to a multiple; the same for every layout, so that runs agree."""
    return -(-vocab_size // multiple) * multiple
