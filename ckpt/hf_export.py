"""A checkpoint as a Hugging Face directory: config.json and safetensors that transformers loads.

Streams tensor by tensor from any layout. Weights keep their bits unless a cast is asked for.
config.json is written last: a directory without it is an export that did not end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.hf_config import (
    CONFIG_FILE,
    HF_DTYPES,
    INDEX_FILE,
    WEIGHTS_FILE,
    Unconvertible,
    cast,
    cast_note,
    config_of,
)
from keepstep.ckpt.llama import MODEL_PREFIX, LlamaShape, hf_name, parameter_shapes, shape_in
from keepstep.ckpt.reader import CheckpointReader
from keepstep.ckpt.safetensors_file import build_header
from keepstep.ckpt.writer import OnBytes, TargetTaken, bits
from keepstep.storage.store import Store

_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: files in order, bytes of weights, dtype, and what to know of it."""

    files: tuple[str, ...]
    weight_bytes: int
    dtype: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor of the export: our name, Hugging Face's, dtype in the file, shape."""

    name: str
    hf: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def export_hf(
    source: CheckpointReader,
    target: Store,
    *,
    dtype: str | None = None,
    shard_bytes: int | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> Exported:
    """Write the model of `source` into `target`, an empty directory. Durable on return.

    Args:
        source: the checkpoint, in any layout.
        target: where to.
        dtype: cast to this element type (F64, F32, F16 or BF16); None keeps the stored one.
        shard_bytes: begin another file before one would grow beyond this; None: one file.
        on_bytes: called with numbers of bytes written.

    Raises:
        Unconvertible: the checkpoint holds no plain Llama; says what is missing or too much.
        TargetTaken: `target` is not empty.
        Corrupt, FormatError, StoreError: as `CheckpointReader.read` and `Store.put_stream`.
    """
    llama = _model_of(source)
    weights = _weights(source, llama, dtype)
    other = next(target.list(""), None)
    if other is not None:
        raise TargetTaken(
            f"{target.url} is not empty: it has {other.key}; choose an empty or new directory"
        )
    shards = _shards(weights, shard_bytes)
    names = _file_names(len(shards))
    for file, shard in zip(names, shards, strict=True):
        header = build_header(((each.hf, each.dtype, each.shape) for each in shard), _METADATA)
        size_bytes = len(header) + sum(each.size_bytes for each in shard)
        data = _stream(source, shard, on_bytes)
        target.put_stream(file, chain([memoryview(header)], data), size_bytes)
    files = list(names)
    if len(shards) > 1:
        target.put(INDEX_FILE, _index(names, shards))
        files.append(INDEX_FILE)
    target.put(CONFIG_FILE, _document(config_of(llama, _common_dtype(weights))))
    return Exported(
        files=(*files, CONFIG_FILE),
        weight_bytes=sum(each.size_bytes for each in weights),
        dtype=_common_dtype(weights),
        notes=tuple(_notes(source, weights)),
    )


def _model_of(source: CheckpointReader) -> LlamaShape:
    llama = shape_in(source.manifest.values)
    if llama is None:
        raise Unconvertible(
            f"the checkpoint of step {source.manifest.state.step} in {source.store.url} does not "
            "say which model it holds (values.config.model); only what keepstep train saved, or "
            "import made, can be exported"
        )
    return llama


def _weights(source: CheckpointReader, llama: LlamaShape, dtype: str | None) -> list[_Weight]:
    """All weights in model order. Raise unless the checkpoint has exactly those of a Llama."""
    manifest = source.manifest
    shapes = parameter_shapes(llama)
    wanted = {MODEL_PREFIX + fqn for fqn in shapes}
    found = {name for name in manifest.tensors if name.startswith(MODEL_PREFIX)}
    if wanted != found:
        missing, extra = sorted(wanted - found)[:3], sorted(found - wanted)[:3]
        raise Unconvertible(
            f"the checkpoint is not the Llama that its configuration says: missing {missing}, "
            f"not known {extra}"
        )
    weights = []
    for fqn, shape in shapes.items():
        name, hf = MODEL_PREFIX + fqn, hf_name(fqn)
        assert hf is not None
        spec = manifest.tensors[name]
        if spec.shape != shape:
            raise Unconvertible(
                f"{name} has shape {list(spec.shape)}, the configuration gives {list(shape)}"
            )
        if spec.dtype not in HF_DTYPES:
            raise Unconvertible(
                f"{name} is {spec.dtype}; a Llama's weights are {', '.join(HF_DTYPES)}"
            )
        weights.append(_Weight(name, hf, dtype or spec.dtype, shape))
    return weights


def _shards(weights: Sequence[_Weight], shard_bytes: int | None) -> list[list[_Weight]]:
    """The weights cut into files, in order. A weight larger than the bound has one to itself."""
    shards: list[list[_Weight]] = [[]]
    size_bytes = 0
    for weight in weights:
        if shard_bytes is not None and shards[-1] and size_bytes + weight.size_bytes > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(weight)
        size_bytes += weight.size_bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _stream(
    source: CheckpointReader, shard: Sequence[_Weight], on_bytes: OnBytes
) -> Iterator[memoryview]:
    for weight in shard:
        for _, piece in source.pieces(weight.name):
            data = bits(cast(piece, weight.dtype, weight.name))
            yield data
            on_bytes(data.nbytes)


def _index(names: Sequence[str], shards: Sequence[Sequence[_Weight]]) -> bytes:
    files = {each.hf: file for file, shard in zip(names, shards, strict=True) for each in shard}
    total = sum(each.size_bytes for shard in shards for each in shard)
    return _document({"metadata": {"total_size": total}, "weight_map": files})


def _document(content: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2) + b"\n"


def _common_dtype(weights: Sequence[_Weight]) -> str:
    """What config.json calls the dtype of the weights: the widest of them."""
    return min((each.dtype for each in weights), key=list(HF_DTYPES).index)


def _notes(source: CheckpointReader, weights: Sequence[_Weight]) -> Iterator[str]:
    tensors = source.manifest.tensors
    before = sorted({tensors[w.name].dtype for w in weights if tensors[w.name].dtype != w.dtype})
    if before:
        yield cast_note(before, weights[0].dtype)
    tokenizer = source.manifest.values.get("tokenizer")
    name = tokenizer.get("name") if isinstance(tokenizer, dict) else tokenizer
    if name == "bytes":
        yield (
            "the tokenizer is bytes: id 0 to 255 is the byte itself, 256 the end of a document; "
            "there is no tokenizer file to export"
        )
    elif isinstance(name, str) and name:
        yield f"the tokenizer is {name}: copy that file beside the model"
    else:
        yield "the checkpoint does not name its tokenizer"
