"""Hugging Face models, out and in: transformers loads what we write and we read what it writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tests.kit.make_store import TINY, Content, llama_state, make_store
from transformers import LlamaConfig, LlamaForCausalLM

from keepstep.ckpt.address import find_live
from keepstep.ckpt.arrays import NUMPY_DTYPES, Array
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.hf_config import Unconvertible, shape_from
from keepstep.ckpt.hf_export import Exported, export_hf
from keepstep.ckpt.hf_import import Imported, import_hf
from keepstep.ckpt.hf_source import open_hf
from keepstep.ckpt.layout import Layout
from keepstep.ckpt.llama import LlamaShape, hf_name, our_name, parameter_shapes
from keepstep.ckpt.log import Log
from keepstep.ckpt.reader import CheckpointReader, open_checkpoint
from keepstep.ckpt.slabs import SLAB_BYTES
from keepstep.ckpt.writer import TargetTaken
from keepstep.storage.locate import open_store
from keepstep.storage.memory import MemoryStore
from keepstep.storage.store import Store
from keepstep.trainer.model import Llama
from keepstep.trainer.model_config import ModelConfig

TIED = msgspec.structs.replace(TINY, tied=True, kv_heads=4, rope_theta=500_000.0)


def opened(store: Store) -> CheckpointReader:
    return open_checkpoint(store, find_live(Log(store).read(), None, store.url))


def stored(content: Content) -> CheckpointReader:
    store = MemoryStore()
    make_store(store, content)
    return opened(store)


def exported(content: Content, path: Path, **options: int | str | None) -> Exported:
    return export_hf(stored(content), open_store(path, create=True), **options)


def imported(path: Path, dtype: str | None = None) -> tuple[CheckpointReader, Imported]:
    store = MemoryStore()
    done = import_hf(open_hf(path), store, job="hf", by="a test", dtype=dtype)
    return opened(store), done


def trainer_logits(
    weights: dict[str, Array], llama: LlamaShape, tokens: torch.Tensor
) -> torch.Tensor:
    """What the trainer's own model computes."""
    names = {field: getattr(llama, field) for field in LlamaShape.__struct_fields__}
    model = Llama(ModelConfig(**names))
    state = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    if llama.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    model.load_state_dict(state)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens)
    return logits


def hf_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, info = LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def some_tokens(llama: LlamaShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(llama.vocab_size, (2, llama.seq_len), generator=generator)


def model_weights(content: Content) -> dict[str, Array]:
    return {
        name.removeprefix("model/"): array
        for name, array in content.tensors.items()
        if name.startswith("model/")
    }


def scaled(content: Content) -> Content:
    """Weights of the size that a model has, so that logits are no noise."""
    for name in content.tensors:
        if name.startswith("model/"):
            content.tensors[name] = content.tensors[name] * np.float32(0.2)
    return content


def written_by_transformers(
    path: Path, llama: LlamaShape = TINY, dtype: torch.dtype = torch.float32, **options: str
) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=llama.vocab_size,
        hidden_size=llama.dim,
        intermediate_size=llama.ffn_dim,
        num_hidden_layers=llama.layers,
        num_attention_heads=llama.heads,
        num_key_value_heads=llama.kv_heads,
        max_position_embeddings=llama.seq_len,
        rms_norm_eps=llama.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": llama.rope_theta},
        tie_word_embeddings=llama.tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path, **options)
    return model


# Out.


@pytest.mark.parametrize("llama", [TINY, TIED], ids=["untied, grouped", "tied"])
@pytest.mark.parametrize("shard_bytes", [None, 8_000])
def test_transformers_computes_the_same_logits_from_an_export(
    tmp_path: Path, llama: LlamaShape, shard_bytes: int | None
) -> None:
    content = scaled(llama_state(Layout(2, 2, 2), llama))
    done = exported(content, tmp_path / "out", shard_bytes=shard_bytes)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(done.files)
    assert (len(done.files) > 3) == (shard_bytes is not None)
    tokens = some_tokens(llama)
    ours = trainer_logits(model_weights(content), llama, tokens)
    theirs = hf_logits(tmp_path / "out", tokens)
    assert ours.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-5


def test_an_export_has_the_stored_bits_and_says_which_tokenizer(tmp_path: Path) -> None:
    content = llama_state(Layout(1, 2, 2))
    done = exported(content, tmp_path / "out")
    there = load_file(tmp_path / "out" / "model.safetensors")
    weights = model_weights(content)
    assert set(there) == {hf_name(fqn) for fqn in weights}
    for fqn, array in weights.items():
        assert there[str(hf_name(fqn))].numpy().tobytes() == array.tobytes()
    assert done.dtype == "F32"
    assert any("the tokenizer is bytes" in note for note in done.notes)


def test_config_json_serves_old_and_new_transformers(tmp_path: Path) -> None:
    exported(llama_state(Layout(1, 1, 1), TIED), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 500_000.0, "rope_type": "default"}
    assert config["rope_theta"] == 500_000.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, None)
    assert config["tie_word_embeddings"] is True
    assert shape_from(config, "config.json") == TIED


def test_a_cast_is_made_on_request_and_said(tmp_path: Path) -> None:
    content = llama_state(Layout(1, 1, 1))
    done = exported(content, tmp_path / "out", dtype="BF16")
    assert "weights were cast from F32 to BF16, with rounding" in done.notes
    there = load_file(tmp_path / "out" / "model.safetensors")
    for fqn, array in model_weights(content).items():
        expected = torch.from_numpy(array).to(torch.bfloat16)
        assert torch.equal(there[str(hf_name(fqn))], expected)
    exact = exported(content, tmp_path / "wide", dtype="F64")
    assert "weights were cast from F32 to F64, exactly" in exact.notes


def test_a_cast_that_would_overflow_is_refused_and_leaves_no_config(tmp_path: Path) -> None:
    content = llama_state(Layout(1, 1, 1))
    content.tensors["model/norm.weight"][3] = 1e6
    with pytest.raises(
        Unconvertible, match=r"model/norm\.weight has values beyond the range of F16"
    ):
        exported(content, tmp_path / "out", dtype="F16")
    assert os.listdir(tmp_path / "out") == []


def test_only_a_whole_plain_llama_is_exported(tmp_path: Path) -> None:
    extra = llama_state(Layout(1, 1, 1))
    extra.tensors["model/layers.0.attention.wq.bias"] = np.zeros(16, np.float32)
    with pytest.raises(Unconvertible, match=r"not known \['model/layers.0.attention.wq.bias'\]"):
        exported(extra, tmp_path / "a")
    missing = llama_state(Layout(1, 1, 1))
    del missing.tensors["model/norm.weight"]
    with pytest.raises(Unconvertible, match=r"missing \['model/norm.weight'\]"):
        exported(missing, tmp_path / "b")
    unnamed = llama_state(Layout(1, 1, 1))
    del unnamed.values["config"]
    with pytest.raises(Unconvertible, match="does not say which model"):
        exported(unnamed, tmp_path / "c")
    other = llama_state(Layout(1, 1, 1))
    other.values["config"]["model"]["ffn_dim"] = 25
    with pytest.raises(Unconvertible, match=r"feed_forward.w1.weight has shape \[24, 16\]"):
        exported(other, tmp_path / "d")


def test_an_export_never_mixes_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(TargetTaken, match=r"it has model\.safetensors"):
        exported(llama_state(Layout(1, 1, 1)), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"somebody's"


# In.


@pytest.mark.parametrize("llama", [TINY, TIED], ids=["untied, grouped", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", ["10GB", "9KB"])
def test_the_trainer_computes_the_same_logits_from_an_import(
    tmp_path: Path, llama: LlamaShape, dtype: torch.dtype, max_shard_size: str
) -> None:
    written_by_transformers(tmp_path / "in", llama, dtype, max_shard_size=max_shard_size)
    there, done = imported(tmp_path / "in")
    assert done.llama == llama
    names = [name for name in there.manifest.tensors if name.startswith("model/")]
    weights = {name.removeprefix("model/"): there.read(name) for name in names}
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    tokens = some_tokens(llama)
    ours = trainer_logits(weights, llama, tokens)
    theirs = hf_logits(tmp_path / "in", tokens)
    assert ours.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-5
    assert bool(done.notes) == (dtype == torch.bfloat16)


def test_an_import_is_step_0_of_a_run_of_one_rank_that_says_its_origin(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in", TIED)
    store = MemoryStore()
    import_hf(open_hf(tmp_path / "in"), store, job="mine", by="me")
    lineage = Log(store).read()
    assert (lineage.job, lineage.live[0].state.step) == ("mine", 0)
    assert lineage.operators[0].why == f"the Hugging Face model in {tmp_path / 'in'}"
    manifest = opened(store).manifest
    assert manifest.aliases == {"model/output.weight": "model/tok_embeddings.weight"}
    values = manifest.values
    assert (values["step"], values["cursor"], values["skipped"]) == (0, 0, [])
    assert values["pipeline"] == {"stages": [[0, 1, 2, 3]], "virtual": 1}
    assert values["layout"] == {"dp": 1, "tp": 1, "pp": 1, "dp_replicate": 1}
    assert values["config"]["numerics"]["dtype"] == "fp32"
    assert msgspec.convert(values["config"]["model"], LlamaShape) == TIED


def test_out_and_in_again_gives_the_same_bits(tmp_path: Path) -> None:
    content = llama_state(Layout(2, 2, 1), TIED)
    exported(content, tmp_path / "out", shard_bytes=5_000)
    there, _ = imported(tmp_path / "out")
    for fqn, array in model_weights(content).items():
        assert there.read(f"model/{fqn}").tobytes() == array.tobytes()


def test_double_precision_stays_unless_told_otherwise(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in", dtype=torch.float64)
    _, kept = imported(tmp_path / "in")
    assert (kept.dtype, kept.notes) == ("F64", ())
    _, narrowed = imported(tmp_path / "in", "F32")
    assert narrowed.notes == ("weights were cast from F64 to F32, with rounding",)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    assert imported(tmp_path / "snapshot")[1].llama == TINY


def test_tensors_that_are_computed_or_tied_are_left_out_and_said(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in", TIED)
    file = tmp_path / "in" / "model.safetensors"
    tensors = {name: tensor.numpy() for name, tensor in load_file(file).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(tensors, file)
    there, done = imported(tmp_path / "in")
    assert len(done.notes) == 2
    assert set(there.manifest.tensors) == {f"model/{fqn}" for fqn in parameter_shapes(TIED)}


def test_names_go_both_ways() -> None:
    for fqn in parameter_shapes(TINY):
        assert our_name(str(hf_name(fqn))) == fqn
    assert hf_name("layers.0.attention.wq.bias") is None
    assert hf_name("layers.00.attention.wq.weight") is None
    assert our_name("model.layers.1.self_attn.q_proj.bias") is None


# What is refused.


def plain_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters is"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"num_attention_heads": 3}, "hidden_size 16 is no multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"num_attention_heads": 16}, "odd width 1"),
    ],
)
def test_another_model_than_a_plain_llama_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    assert shape_from(plain_config(), "config.json").kv_heads == 4
    with pytest.raises(Unconvertible, match=named):
        shape_from(plain_config() | change, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", None),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("num_hidden_layers", 10**9),
        ("hidden_size", -16),
        ("hidden_size", 16.0),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("rope_theta", [1]),
        ("rope_parameters", 7),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_setting_that_is_no_sensible_number_is_refused_by_field(
    field: str, value: object
) -> None:
    with pytest.raises(FormatError) as caught:
        shape_from(plain_config() | {field: value}, "config.json")
    assert (caught.value.file, caught.value.field) == ("config.json", field)


def test_pickled_weights_are_refused_by_file_name(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(Unconvertible, match=r"pytorch_model\.bin, which is pickle"):
        open_hf(tmp_path / "in")
    (tmp_path / "in" / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match="neither"):
        open_hf(tmp_path / "in")


def header_of(entries: dict[str, Any] | str, data_bytes: int) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(**change: object) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | change


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "at least 8 bytes, found 0"),
        (b"\x10\0\0", "at least 8 bytes, found 3"),
        ((10**12).to_bytes(8, "little") + b"{}", "header length: expected at most"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\x80\x04\x95" + bytes(60), "pickle"),
        (header_of('{"a":', 0), "JSON"),
        (header_of("[]", 0), "object"),
        (header_of({"a": entry(data_offsets=[0, 12])}, 12), "16 bytes for this shape"),
        (header_of({"a": entry(data_offsets=[-16, 0])}, 0), "data_offsets"),
        (header_of({"a": entry(data_offsets=[16, 32])}, 32), "to begin where the header ends"),
        (header_of({"a": entry(), "b": entry(data_offsets=[8, 24])}, 24), "to begin where a ends"),
        (header_of({"a": entry()}, 20), "bytes by its header"),
        (header_of({"a": entry()}, 12), "bytes by its header"),
        (header_of({"a": entry(dtype="F33")}, 16), "a known element type"),
        (header_of({"a": entry(shape=[-4])}, 16), "sizes from 0 on"),
        (header_of({"a": entry(shape=[1] * 1000)}, 16), "at most 64 sizes"),
        (
            header_of({"a": entry(shape=[2**61, 2**61, 0], data_offsets=[0, 0])}, 0),
            "the weights are",
        ),
        (header_of({"a": entry(more=1)}, 16), "more"),
        (
            header_of('{"a":' + json.dumps(entry()) + ',"a":' + json.dumps(entry()) + "}", 16),
            "twice",
        ),
        (header_of({"../../etc/passwd": entry()}, 16), "the weights are not those"),
    ],
)
def test_a_hostile_weight_file_is_refused(tmp_path: Path, raw: bytes, expected: str) -> None:
    written_by_transformers(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").write_bytes(raw)
    with pytest.raises((FormatError, Unconvertible), match=expected):
        open_hf(tmp_path / "in")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", ".hidden", "a/b", ""])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    written_by_transformers(tmp_path / "in", max_shard_size="9KB")
    file = tmp_path / "in" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    file.write_text(json.dumps(index))
    with pytest.raises(FormatError, match="names of files in this directory"):
        open_hf(tmp_path / "in")


def test_a_shard_that_is_missing_cut_or_not_as_indexed_is_named(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in", max_shard_size="9KB")
    shard = sorted((tmp_path / "in").glob("model-*"))[1]
    for number, spoil in enumerate(
        (
            lambda path: path.unlink(),
            lambda path: os.truncate(path, path.stat().st_size - 1),
            lambda path: save_file({"lm_head.weight": np.ones((64, 16), np.float32)}, path),
        )
    ):
        shutil.copytree(tmp_path / "in", tmp_path / str(number))
        spoil(tmp_path / str(number) / shard.name)
        with pytest.raises(FormatError, match=shard.name):
            open_hf(tmp_path / str(number))


def test_weights_of_another_shape_or_count_are_refused(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for change, named in (
        ({"intermediate_size": 32}, r"gate_proj.weight has shape \[24, 16\]"),
        ({"num_hidden_layers": 5}, r"missing \['model.layers.4"),
        ({"num_hidden_layers": 3}, r"not known \['layers.3"),
    ):
        (tmp_path / "in" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(Unconvertible, match=named):
            open_hf(tmp_path / "in")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    written_by_transformers(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = {name: tensor.numpy() for name, tensor in load_file(file).items()}
    tensors["model.norm.weight"] = np.ones(16, np.int32)
    save_file(tensors, file)
    with pytest.raises(Unconvertible, match=r"model\.norm\.weight is I32"):
        open_hf(tmp_path / "in")


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_each_float_type_goes_out_and_comes_in(tmp_path: Path, dtype: str) -> None:
    content = llama_state(Layout(1, 1, 1))
    for name, array in content.tensors.items():
        if name.startswith("model/"):
            content.tensors[name] = array.astype(NUMPY_DTYPES[dtype])
    done = exported(content, tmp_path / "out")
    assert done.dtype == dtype
    there, _ = imported(tmp_path / "out")
    for fqn, array in model_weights(content).items():
        wide = there.read(f"model/{fqn}")
        assert wide.astype(array.dtype).tobytes() == array.tobytes()


def test_a_weight_of_many_pieces_comes_in_and_goes_out_whole(tmp_path: Path) -> None:
    llama = msgspec.structs.replace(TINY, vocab_size=200_000, layers=1, tied=True)
    content = llama_state(Layout(2, 1, 1), llama)
    weights = model_weights(content)
    assert weights["tok_embeddings.weight"].nbytes > SLAB_BYTES
    exported(content, tmp_path / "out")
    there, _ = imported(tmp_path / "out")
    for fqn, array in weights.items():
        assert there.read(f"model/{fqn}").tobytes() == array.tobytes()
