"""A directory with a Hugging Face Llama: what it holds, checked whole before any weight is read.

File names are the fixed ones, or come from the index and are single names, so nothing outside the
directory is opened by a name from a file. Links are followed: the hub's cache is made of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from keepstep.ckpt.document import decode, shortened
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.foreign import SNIFF_BYTES
from keepstep.ckpt.hf_config import (
    CONFIG_BYTES_MAX,
    CONFIG_FILE,
    HF_DTYPES,
    INDEX_FILE,
    WEIGHTS_FILE,
    Unconvertible,
    shape_from,
)
from keepstep.ckpt.llama import OUTPUT, LlamaShape, hf_name, our_name, parameter_shapes
from keepstep.ckpt.safetensors_file import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from keepstep.storage.keys import is_segment

_FILES_MAX = 10_000
_INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class HfWeight:
    """One weight: the file that has it, and where in it."""

    path: Path
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model found to be a plain Llama with all its weights; `weights` by our names."""

    path: Path
    llama: LlamaShape
    weights: Mapping[str, HfWeight]
    notes: tuple[str, ...]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_hf(path: Path) -> HfModel:
    """Look at the directory `path`; reads headers only.

    Raises:
        Unconvertible: it is no plain Llama, or its weights are not in safetensors; says why.
        FormatError (Foreign): a file is damaged, missing or not what its name says.
        OSError: the system refuses to read it.
    """
    config = decode(
        _whole(path / CONFIG_FILE), dict[str, Any], bytes_max=CONFIG_BYTES_MAX, file=CONFIG_FILE
    )
    llama = shape_from(config, CONFIG_FILE)
    tensors = _tensors(path)
    notes = []
    ignored = [name for name in tensors if name.endswith(_INVERSE_FREQUENCIES)]
    if ignored:
        notes.append(f"{len(ignored)} tensors of RoPE frequencies were left out: they are computed")
    output = hf_name(OUTPUT)
    if llama.tied and output in tensors:
        ignored.append(output)
        notes.append(f"{output} was left out: the configuration ties it to the embeddings")
    weights = _matched({n: t for n, t in tensors.items() if n not in set(ignored)}, llama)
    return HfModel(path, llama, weights, tuple(notes))


def _tensors(path: Path) -> dict[str, HfWeight]:
    """All tensors of the directory's weight files, by Hugging Face's names."""
    if (path / WEIGHTS_FILE).exists():
        return _in_file(path / WEIGHTS_FILE)
    if not (path / INDEX_FILE).exists():
        pickled = sorted(each.name for each in path.glob("pytorch_model*"))
        if pickled:
            raise Unconvertible(
                f"{path} has its weights in {pickled[0]}, which is pickle and never loaded: "
                "convert it to safetensors first"
            )
        raise FormatError(str(path), "", f"{WEIGHTS_FILE} or {INDEX_FILE}", "neither")
    index = decode(
        _whole(path / INDEX_FILE), _Index, bytes_max=HEADER_BYTES_MAX, file=INDEX_FILE
    ).weight_map
    files = sorted(set(index.values()))
    if len(files) > _FILES_MAX:
        raise FormatError(INDEX_FILE, "weight_map", f"at most {_FILES_MAX} files", f"{len(files)}")
    tensors: dict[str, HfWeight] = {}
    for file in files:
        if not is_segment(file):
            raise FormatError(
                INDEX_FILE, "weight_map", "names of files in this directory", shortened(repr(file))
            )
        for name, weight in _in_file(path / file).items():
            if index.get(name) != file:
                where = index.get(name, "no file")
                raise FormatError(
                    file, shortened(name), f"a tensor that {INDEX_FILE} places here", where
                )
            tensors[name] = weight
    missing = sorted(set(index) - set(tensors))
    if missing:
        raise FormatError(index[missing[0]], "", f"the tensor {shortened(missing[0])}", "none")
    return tensors


def _in_file(path: Path) -> dict[str, HfWeight]:
    """The tensors that one safetensors file says it has."""
    with _opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = header_length(file.read(SNIFF_BYTES), size_bytes, path.name)
        file.seek(LENGTH_BYTES)
        header = file.read(length)
    stored = parse_header(header, size_bytes, path.name)
    return {name: HfWeight(path, each) for name, each in stored.items()}


def _matched(tensors: Mapping[str, HfWeight], llama: LlamaShape) -> dict[str, HfWeight]:
    """The weights by our names. Raise unless they are exactly those of this Llama."""
    wanted = parameter_shapes(llama)
    found = {our_name(name) or name: weight for name, weight in tensors.items()}
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise Unconvertible(
            f"the weights are not those of a plain Llama of {llama.layers} layers: "
            f"missing {[hf_name(each) for each in missing[:3]]}, not known {extra[:3]}"
        )
    for fqn, shape in wanted.items():
        stored = found[fqn].stored
        where = f"{found[fqn].path.name}: {hf_name(fqn)}"
        if stored.shape != shape:
            raise Unconvertible(
                f"{where} has shape {list(stored.shape)}, where {CONFIG_FILE} gives {list(shape)}"
            )
        if stored.dtype not in HF_DTYPES:
            raise Unconvertible(
                f"{where} is {stored.dtype}; weights of {', '.join(HF_DTYPES)} can be imported"
            )
    return {fqn: found[fqn] for fqn in wanted}


def _whole(path: Path) -> bytes:
    """A small file's bytes, bounded."""
    with _opened(path) as file:
        return file.read(HEADER_BYTES_MAX + 1)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise FormatError(str(path.parent), "", f"a file {path.name}", "none") from error
