"""GGUF files written by the `gguf` package: Hugging Face names, layouts, values and config come back."""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock.config.base.errors import ConfigError
from penstock.model.weights import checkpoint
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.gguf_file import BLOCKS, read_gguf_header
from penstock.model.weights.locate import locate

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, EXPERTS = 32, 4, 2, 64, 11, 3
HEAD_DIM = HIDDEN // HEADS


def writer(path: Path, architecture: str = "llama", **changes: Any) -> gguf.GGUFWriter:
    """With the metadata of a tiny model; `changes` by key after the architecture, None drops one."""
    made = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": 1, "context_length": 128, "embedding_length": HIDDEN,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5}
    if architecture == "qwen3moe":
        values |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": FFN}
    for key, value in (values | changes).items():
        if value is not None:
            add: Callable[..., None] = {str: made.add_string, float: made.add_float32, list: made.add_array,
                                        bool: made.add_bool, int: made.add_uint32}[type(value)]
            add(key[1:] if key.startswith("/") else f"{architecture}.{key}", value)
    return made


def finish(made: gguf.GGUFWriter) -> Path:
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return made.path


def minimal(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    made = writer(path, architecture, **changes)
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    return finish(made)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(open_checkpoint(locate(str(path))).tensors())
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a llama: halves of a head become pairs."""
    half = weight.shape[0] // heads // 2
    pairs = [weight[h * 2 * half + part * half + i]
             for h in range(heads) for i in range(half) for part in (0, 1)]
    return np.stack(pairs)


LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
    "attn_k.weight": ("self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v.weight": ("self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_q.bias": ("self_attn.q_proj.bias", (HIDDEN,)),
    "attn_k.bias": ("self_attn.k_proj.bias", (KV_HEADS * HEAD_DIM,)),
    "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
}
DENSE = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", (FFN, HIDDEN)),
    "ffn_up.weight": ("mlp.up_proj.weight", (FFN, HIDDEN)),
    "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, FFN)),
}
NORMS = {"attn_q_norm.weight": ("self_attn.q_norm.weight", (HEAD_DIM,)),
         "attn_k_norm.weight": ("self_attn.k_norm.weight", (HEAD_DIM,))}


GEMMA = {"ffn_norm.weight": ("pre_feedforward_layernorm.weight", (HIDDEN,)),
         "post_attention_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
         "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (HIDDEN,))}


@pytest.mark.parametrize(("architecture", "layer"), [
    ("llama", LAYER | DENSE), ("qwen2", LAYER | DENSE), ("qwen3", LAYER | DENSE | NORMS),
    ("gemma3", LAYER | DENSE | NORMS | GEMMA)])
def test_names_and_layouts(tmp_path: Path, architecture: str,
                           layer: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    rng = np.random.default_rng(3)
    top = {"token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN)),
           "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
           "output.weight": ("lm_head.weight", (VOCAB, HIDDEN))}
    window = {"attention.sliding_window": 16} if architecture == "gemma3" else {}
    made = writer(tmp_path / "m.gguf", architecture, **window)
    wanted = {}
    for ours, (theirs, shape) in (top | {f"blk.0.{k}": (f"model.layers.0.{n}", s)
                                         for k, (n, s) in layer.items()}).items():
        wanted[theirs] = rng.standard_normal(shape, dtype=np.float32)
        heads = {"attn_q.": HEADS, "attn_k.": KV_HEADS}.get(ours[6:13], 0)
        stored = (interleave(wanted[theirs], heads) if heads and architecture == "llama"
                  else wanted[theirs])
        if architecture == "gemma3" and theirs.endswith("norm.weight"):
            stored = stored + np.float32(1)         # and so does the model, to what it reads
            wanted[theirs] = stored - np.float32(1)
        made.add_tensor(ours, stored)
    found = dict(open_checkpoint(locate(str(finish(made)))).tensors())
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), wanted[name]), name


def test_merged_experts_become_one_tensor_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    made = writer(tmp_path / "m.gguf", "qwen3moe")
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    wanted = {}
    router = rng.standard_normal((EXPERTS, HIDDEN), dtype=np.float32)
    made.add_tensor("blk.0.ffn_gate_inp.weight", router)
    for part, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
        merged = rng.standard_normal((EXPERTS, *shape), dtype=np.float32)
        packed = gguf.quants.quantize(merged, Type.Q8_0)
        made.add_tensor(f"blk.0.ffn_{part}_exps.weight", packed, raw_dtype=Type.Q8_0)
        for e in range(EXPERTS):
            wanted[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] = (
                gguf.quants.dequantize(packed[e], Type.Q8_0))
    opened = open_checkpoint(locate(str(finish(made))))
    found = dict(opened.tensors())
    assert np.array_equal(found.pop("model.layers.0.mlp.gate.weight").numpy(), router)
    del found["model.embed_tokens.weight"]
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(tensor.numpy(), wanted[name]) for name, tensor in found.items())
    assert opened.config["num_experts"] == EXPERTS and opened.config["norm_topk_prob"] is True


def test_table_of_block_types_is_the_packages() -> None:
    dequantised = {t for t in gguf.quants._type_traits} | {Type.F32, Type.F16}
    assert {Type(kind) for kind in BLOCKS} >= dequantised
    for kind, (name, elements, size) in BLOCKS.items():
        assert Type(kind).name == name and gguf.GGML_QUANT_SIZES[Type(kind)] == (elements, size)


@pytest.mark.parametrize("name", [name for name, _, _ in BLOCKS.values()])
def test_every_block_type_by_chunks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK_ELEMENTS", 1024)       # 7 rows of 768: a remainder of 256
    kind = Type[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(5)
    # Without bit 6 no float16 scale is infinite.
    raw = rng.integers(0, 256, (7, 768 // elements * size), dtype=np.uint8) & 0xBF
    made = writer(tmp_path / "m.gguf")
    made.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    header = read_gguf_header(finish(made)).tensors["token_embd.weight"]
    assert header.block == name and header.shape == (7, 768)
    ((_, tensor),) = open_checkpoint(locate(str(tmp_path / "m.gguf"))).tensors()
    wanted = gguf.quants.dequantize(raw, kind)
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    assert tensor.dtype == kept and np.array_equal(tensor.float().numpy(), wanted)
    assert np.abs(wanted).max() > 0


def config_of(path: Path) -> dict[str, Any]:
    return open_checkpoint(locate(str(path))).config


def test_config_in_hugging_face_terms(tmp_path: Path) -> None:
    config = config_of(minimal(tmp_path / "m.gguf", **{
        "rope.freq_base": 5e5, "/tokenizer.ggml.eos_token_id": 7, "/tokenizer.ggml.bos_token_id": 1,
        "/tokenizer.ggml.eot_token_id": 9, "attention.head_count_kv": [2, 2]}))
    assert config | {"rms_norm_eps": 1e-5} == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "rope_theta": 5e5, "rope_scaling": None, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32", "bos_token_id": 1,
        "eos_token_id": [7, 9]}
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_end_of_turn_is_found_by_name_in_files_without_the_key(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf", **{
        "/tokenizer.ggml.eos_token_id": 1, "/tokenizer.ggml.tokens": ["a", "<end>", "<|eot_id|>"]})
    assert open_checkpoint(locate(str(path))).eos_ids == (1, 2)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = config_of(minimal(tmp_path / "a.gguf", **{"rope.scaling.type": "linear",
                                                       "rope.scaling.factor": 4.0}))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = config_of(minimal(tmp_path / "b.gguf", "qwen2", **{
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5,
        "rope.scaling.original_context_length": 32}))
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
        "attention_factor": pytest.approx(0.5 * (1 + 0.1 * math.log(4)))}


def llama3_factors(dim: int, theta: float, factor: float, low: float, high: float,
                   original: int) -> np.ndarray:
    """As Hugging Face's `_compute_llama3_parameters` divides the inverse frequencies."""
    inverse = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    wavelength = 2 * np.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    mixed = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0,
                    np.where(wavelength > original / low, factor, mixed)).astype(np.float32)


@pytest.mark.parametrize(("factor", "low", "high", "original"), [
    (8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 16.0, 4096)])
def test_llama3_rope_parameters_come_back(tmp_path: Path, factor: float, low: float, high: float,
                                          original: int) -> None:
    wanted = llama3_factors(128, 5e5, factor, low, high, original)
    made = writer(tmp_path / "m.gguf", **{"attention.key_length": 128, "attention.value_length": 128,
                                          "rope.freq_base": 5e5})
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    made.add_tensor("rope_freqs.weight", wanted)
    opened = open_checkpoint(locate(str(finish(made))))
    scaling = opened.config["rope_scaling"]
    assert scaling.pop("rope_type") == "llama3"
    # Only the ratios of low, high and original are determined by the factors.
    ratio = low / scaling["low_freq_factor"]
    assert scaling["high_freq_factor"] * ratio == pytest.approx(high, rel=1e-3)
    again = llama3_factors(128, 5e5, scaling["factor"], scaling["low_freq_factor"],
                           scaling["high_freq_factor"], scaling["original_max_position_embeddings"])
    np.testing.assert_allclose(again, wanted, rtol=2e-3)
    assert [name for name, _ in opened.tensors()] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(("factors", "words"), [
    (np.full(4, 0.5, np.float32), "expected 4 from 1"), (np.ones(3, np.float32), "expected 4 from 1"),
    (np.array([1, 9, 1, 9], np.float32), "not a llama3"), (np.ones(4, np.float16), "expected a few F32"),
    (np.full(4, np.nan, np.float32), "expected 4 from 1")])
def test_rope_factors_of_another_kind(tmp_path: Path, factors: np.ndarray, words: str) -> None:
    made = writer(tmp_path / "m.gguf")
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    made.add_tensor("rope_freqs.weight", factors)
    assert words in refusal(finish(made))


@pytest.mark.parametrize("layers, scalar", [(18, 16), (62, 8)])
def test_gemma_3_has_what_llama_cpp_has_in_its_code(tmp_path: Path, layers: int, scalar: int) -> None:
    config = locate(str(minimal(tmp_path / "m.gguf", "gemma3", **{
        "attention.sliding_window": 16, "block_count": layers, "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": 1e6}))).config
    assert config | {
        "model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "query_pre_attn_scalar": scalar, "final_logit_softcapping": None,
        "tie_word_embeddings": True} == config
    assert "sliding_window" in refusal(minimal(tmp_path / "n.gguf", "gemma3"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing key": ({"block_count": None}, "no 'llama.block_count'"),
    "a wrong type": ({"block_count": "1"}, "expected int"),
    "layers that differ": ({"attention.head_count_kv": [2, 4]}, "expected one int"),
    "no heads": ({"attention.head_count": 0}, "0 attention heads"),
    "huge": ({"context_length": 2**31}, "max_position_embeddings is 2147483648"),
    "epsilon zero": ({"attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps is 0.0"),
    "partial rope": ({"rope.dimension_count": 4}, "partial RoPE"),
    "experts in a llama": ({"expert_count": 8}, "has experts"),
    "window": ({"attention.sliding_window": 64}, "sliding window"),
    "scale": ({"attention.scale": 0.5}, "attention scale"),
    "scaling": ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    "scaling factor": ({"rope.scaling.type": "linear", "rope.scaling.factor": -1.0}, "factor -1.0"),
    "a part": ({"/split.count": 3}, "one part of a split GGUF"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_would_give_wrong_text_is_refused(tmp_path: Path, case: str) -> None:
    changes, words = REFUSED[case]
    assert words in refusal(minimal(tmp_path / "m.gguf", **changes))


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    assert "'gemma' is not supported; supported are llama, qwen2" in refusal(
        minimal(tmp_path / "a.gguf", "gemma"))
    for name in ("blk.0.attn_q_norm.extra", "blk.1.attn_q.weight", "cls.weight", "blk.0.ffn_up_exps.weight"):
        made = writer(tmp_path / "b.gguf")
        made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
        made.add_tensor(name, np.ones((2, 32), np.float32))
        assert f"tensor {name!r} is not part of" in refusal(finish(made))
    made = writer(tmp_path / "c.gguf")
    made.add_tensor("output.weight", np.ones((VOCAB, HIDDEN), np.float32))
    assert "no tensor 'token_embd.weight'" in refusal(finish(made))


def test_expert_count_that_does_not_fit(tmp_path: Path) -> None:
    made = writer(tmp_path / "m.gguf", "qwen3moe")
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    made.add_tensor("blk.0.ffn_up_exps.weight", np.ones((EXPERTS + 1, FFN, HIDDEN), np.float32))
    assert "does not fit the metadata" in refusal(finish(made))


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    path = minimal(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for size in (0, 3, 4, 23, 24, 100, len(whole) - 200, len(whole) - VOCAB * 4 * HIDDEN - 1):
        path.write_bytes(whole[:size])
        assert "truncated" in refusal(path)
    path.write_bytes(b"GGUF\0\0\0\3" + whole[8:])
    assert "(big-endian)" in refusal(path)
    path.write_bytes(b"GGUF\1\0\0\0" + whole[8:])
    assert "GGUF version 1" in refusal(path)


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    made = writer(tmp_path / "m.gguf", block_count=2, aa=1, ab=2)
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    made.add_tensor("blk.0.ffn_up.weight", np.ones((FFN, HIDDEN), np.float32))
    made.add_tensor("blk.1.ffn_up.weight", np.ones((FFN, HIDDEN), np.float32))
    path = finish(made)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"llama.ab", b"llama.aa"))
    assert "key 'llama.aa' is there twice" in refusal(path)
    path.write_bytes(whole.replace(b"blk.1.", b"blk.0."))
    assert "tensor 'blk.0.ffn_up.weight' is there twice" in refusal(path)
    made = writer(path)
    made.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    made.add_tensor("blk.0.ffn_up.weight", np.ones((FFN, HIDDEN), np.float32))
    made.add_tensor("blk.00.ffn_up.weight", np.ones((FFN, HIDDEN), np.float32))
    assert "two tensors are model.layers.0.mlp.up_proj.weight" in refusal(finish(made))


def test_a_nan_scale_is_noticed(tmp_path: Path) -> None:
    packed = gguf.quants.quantize(np.ones((VOCAB, HIDDEN), np.float32), Type.Q8_0)
    packed[5, :2] = 0xFF
    made = writer(tmp_path / "m.gguf")
    made.add_tensor("token_embd.weight", packed, raw_dtype=Type.Q8_0)
    assert "'model.embed_tokens.weight' holds NaN or infinity" in refusal(finish(made))
