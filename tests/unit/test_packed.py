"""Weights that stay in block-scaled fp8: what they mean, how they are joined, and models that hold them."""
from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from plain_attention import causal
from safetensors.torch import save_file

from penstock.kernels.gemm import experts, linear
from penstock.kernels.platform import KernelError
from penstock.kernels.types.packed import E4M3, KINDS, Kind, Packed, joined, quantised
from penstock.model import registry
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.formats.blocks import quantises
from penstock.model.weights.formats.reader import Format
from penstock.model.weights.locate import locate

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 48,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "mlp_only_layers": [0], "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]},
}
LATENT = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 61,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "max_position_embeddings": 512,
}
OSS = {
    "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "num_local_experts": 7, "num_experts_per_tok": 3, "swiglu_limit": 0.5,
}
NEMOTRON = {
    "model_type": "nemotron_h", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 24,
    "num_hidden_layers": 2, "hybrid_override_pattern": "*E", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "mamba_num_heads": 4,
    "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 16,
}
BLOCKS = Format("e4m3", 32, 16)


def meant(weight: Packed) -> torch.Tensor:
    """Element by element."""
    element, scale = weight.code_OI.float().tolist(), weight.scale_RJ.tolist()
    return torch.tensor([[x * scale[i // weight.rows][j // weight.cols] for j, x in enumerate(row)]
                         for i, row in enumerate(element)])


@pytest.mark.parametrize("shape", [(300, 20, 128, 128), (300, 20, 7, 3), (5, 9, 1, 16), (1, 1, 128, 128)])
def test_floats_are_elements_times_the_scale_of_their_block(shape: tuple[int, ...]) -> None:
    rows, cols, *block = shape
    weight = quantised(torch.randn(rows, cols) * torch.rand(rows, 1), *block)
    torch.testing.assert_close(weight.floats(), meant(weight), rtol=1e-6, atol=0)
    assert weight.finite() and weight.num_bytes == rows * cols + 4 * weight.scale_RJ.numel()
    order = torch.randperm(rows)
    assert weight[order].floats().equal(weight.floats()[order])


def test_the_nearest_elements_are_within_the_last_bit_of_their_block() -> None:
    weight = torch.randn(70, 50)
    gap = (quantised(weight, 32, 16).floats() - weight).abs()
    assert (gap <= weight.abs() / 16 + weight.abs().max() * 2 ** -16).all()
    assert quantised(torch.zeros(3, 4), 2, 2).floats().eq(0).all()


@pytest.mark.parametrize("heights", [(32, 64, 32), (24, 24, 24), (5, 9), (7,)])
def test_joined_parts_mean_what_each_does(heights: tuple[int, ...]) -> None:
    parts = [quantised(torch.randn(rows, 40), 32, 16) for rows in heights]
    whole = joined(parts)
    assert whole.floats().equal(torch.cat([part.floats() for part in parts]))
    assert whole.rows == {3: 32 if heights[0] == 32 else 8}.get(len(heights), 1 if len(heights) == 2 else 32)


U8 = {"four bits": (15, 8, 32), "four bits with zero points": (15, None, 32), "wide groups": (15, None, 128),
      "eight bits": (255, 128, 32), "eight bits with zero points": (255, None, 48), "up to sixteen": (15, 16, 16)}


@pytest.mark.parametrize("form", U8)
def test_integers_mean_the_same_as_a_gpu_keeps_them(form: str) -> None:
    """In half a byte each where they fit, without zero points that all are alike, in scales of fewer bits."""
    most, zero, cols = U8[form]
    generator = torch.Generator().manual_seed(cols)
    code = torch.randint(0, most + 1, (6, 384), generator=generator, dtype=torch.uint8)
    scale = torch.rand(6, 384 // cols, generator=generator).half().float()
    offset = torch.randint(0, most + 1, scale.shape, generator=generator) if zero is None else torch.full(
        scale.shape, zero)
    given = Packed(code, scale, 1, cols, offset.short())
    kept = given.compact()
    assert kept.floats().equal(given.floats())
    assert kept.kind == ("u4" if most == 15 else "u8") and (kept.offset_RJ is None) == (zero in (8, 128))
    assert kept.code_OI.nbytes == code.numel() // (2 if most == 15 else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_floats_and_shifts_mean_the_same_as_a_gpu_keeps_them(kind: Kind) -> None:
    weight = quantised(torch.randn(6, 384), 1, 32, kind)
    assert weight.compact().floats().equal(weight.floats()) and weight.wide().floats().equal(weight.floats())
    if kind == "u8":
        shifted = replace(weight, offset_RJ=torch.randn(weight.scale_RJ.shape))
        error = (shifted.compact().floats() - shifted.floats()).abs().max()
        assert error <= 1e-3 * shifted.floats().abs().max()


@pytest.mark.parametrize("kinds", [("u4", "u4"), ("u8", "u8"), ("u4", "u8"), ("e2m1", "e2m1")])
def test_rows_with_zero_points_are_joined_with_rows_that_have_none(kinds: tuple[Kind, Kind]) -> None:
    plain, other = (quantised(torch.randn(rows, 64), 1, 32, kind) for rows, kind in zip((3, 5), kinds, strict=True))
    if kinds[0] != "e2m1":
        other = replace(other, offset_RJ=torch.randint(0, 16, other.scale_RJ.shape).short())
    for parts in ((plain, other), (other, plain)):
        assert joined(parts).floats().equal(torch.cat([part.floats() for part in parts]))


def test_a_nan_among_the_elements_or_scales_is_seen() -> None:
    inf = float("inf")
    for byte, scale, fine in ((0x7F, 1.0, False), (0xFF, 1.0, False), (0x7E, 1.0, True), (0, inf, False)):
        element = torch.tensor([[0, byte]], dtype=torch.uint8).view(E4M3)
        assert Packed(element, torch.tensor([[scale]]), 1, 2).finite() == fine


def test_a_factor_that_f16_does_not_hold_is_seen() -> None:
    codes = torch.ones(2, 64, dtype=torch.uint8)
    for small, large, fine in ((1e-3, 1e-3, True), (2e-5, 2e-5, False), (2e-8, 2e-8, False), (2e-8, 1e-3, True),
                               (1.0, 7e4, False), (0.0, 0.0, True)):
        scale, offset = torch.tensor([[small, small], [large, large]]), torch.full((2, 2), 8)
        assert Packed(codes, scale, 1, 32, offset).finite() == fine
        assert Packed(codes, torch.full((2, 2), 0.5), 1, 32, scale).finite() == fine


def test_blocks_that_kernels_do_not_read_are_refused() -> None:
    with pytest.raises(KernelError, match="blocks of 16 columns or a multiple"):
        linear.pack(quantised(torch.randn(4, 48), 4, 24), backend="reference")


def build(config: dict[str, Any], dtype: torch.dtype, together: bool) -> Any:
    ops = experts.OP.use("reference") if together else None
    return registry.build(config, dtype=dtype, linear=partial(linear.pack, backend="reference"), experts=ops)


def logits(model: Any, attend: Any = causal) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.arange(23) * 7 % 61
        return model.logits(model.forward(ids, torch.arange(23), attend))


@pytest.mark.parametrize("config", [MOE, LATENT, OSS, NEMOTRON],
                         ids=["qwen3_moe", "deepseek_v32", "gpt_oss", "nemotron_h"])
def test_experts_at_once_equal_experts_one_by_one(config: dict[str, Any]) -> None:
    """Both ways from routing to the sum, over a whole model's second half layers."""
    one, all_ = build(config, torch.float32, False), build(config, torch.float32, True)
    for name, tensor in registry.dummy_tensors(config, 5):
        weight = tensor if "norm" in name else tensor * 10
        one.load(name, weight)
        all_.load(name, weight)
    x = torch.randn(23, config["hidden_size"])
    for model in (one, all_):
        model.finish()
    mlp = "feeds" if config is NEMOTRON else "mlp"
    a, b = (getattr(model._layers[1], mlp)(x) for model in (one, all_))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert a.abs().max() > 1e-3


def test_experts_that_come_in_one_tensor_are_stacked_too() -> None:
    one, all_ = build(MOE, torch.float32, True), build(MOE, torch.float32, True)
    parts = dict(registry.dummy_tensors(MOE, 5))
    for name, tensor in parts.items():
        one.load(name, tensor)
        if ".experts." not in name:
            all_.load(name, tensor)
    prefix = "model.layers.1.mlp.experts"
    all_.load(f"{prefix}.gate_up_proj", torch.stack([torch.cat([
        parts[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(7)]))
    all_.load(f"{prefix}.down_proj", torch.stack([parts[f"{prefix}.{e}.down_proj.weight"] for e in range(7)]))
    one.finish()
    all_.finish()
    assert logits(one).equal(logits(all_))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_model_in_fp8_equals_its_dequantised_twin(tmp_path, dtype, tolerance) -> None:
    """Of a checkpoint's files: projections and experts are joined whose rows are no multiple of a block's."""
    tensors = {}
    for name, tensor in registry.dummy_tensors(MOE, 3, formats=lambda n: BLOCKS if quantises(n) else None):
        if isinstance(tensor, Packed):
            tensors |= {name: tensor.code_OI, f"{name}_scale_inv": tensor.scale_RJ * 10}
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    kept, twin = (build(MOE, dtype, together=True) for _ in range(2))
    for model, scaled in ((kept, ["e4m3"]), (twin, [])):
        checkpoint = open_checkpoint(locate(str(tmp_path)), scaled)
        assert (checkpoint.format("model.layers.0.self_attn.q_proj.weight") == BLOCKS) == bool(scaled)
        assert checkpoint.format("lm_head.weight") is None
        for name, weight in checkpoint.tensors():
            assert isinstance(weight, Packed) == bool(scaled and quantises(name)), name
            model.load(name, weight)
        model.finish()
    mlp = kept._layers[1].mlp.visit
    assert isinstance(mlp.gate_up.value, Packed) and isinstance(mlp.down.value, Packed)
    a, b = logits(kept), logits(twin)
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_dummy_weights_of_such_a_config_are_in_fp8_where_its_checkpoints_are(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    files = locate(str(tmp_path), load_format="dummy")
    kept = open_checkpoint(files, ["e4m3"])
    weights = dict(registry.dummy_tensors(MOE, 1, formats=kept.format))
    plain = dict(registry.dummy_tensors(MOE, 1, formats=open_checkpoint(files).format))
    assert {name for name, w in weights.items() if isinstance(w, Packed)} == {
        name for name in weights if quantises(name)} != set()
    assert not any(isinstance(w, Packed) for w in plain.values())
    for name, weight in weights.items():
        floats = weight.floats() if isinstance(weight, Packed) else weight
        assert (floats - plain[name]).abs().max() <= 0.07 * plain[name].abs().max(), name
    router = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert router and not isinstance(weights[router[0]], Packed)


def _compressed(bits: int, groups: int = 1, **weights: object) -> dict[str, object]:
    one = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 16,
                                              **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "language_model.model.layers.0.mlp.up_proj"],
            "config_groups": {f"group_{i}": one for i in range(groups)}}


@pytest.mark.parametrize("given, bits", [
    (_compressed(4), 4), (_compressed(8), 8), (_compressed(4, strategy="channel", group_size=None), 0),
    (_compressed(4, groups=2), 0),
    ({"quant_method": "awq", "bits": 4, "group_size": 16}, 4),
    ({"quant_method": "gptq", "bits": 8, "group_size": 16}, 8),
    ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, 0),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0)])
def test_dummy_weights_of_a_config_of_integers_are_packed_as_it_says(tmp_path, given, bits) -> None:
    """All projections but those that `ignore` names; as floats where the config does not say groups of all."""
    config = MOE | {"quantization_config": given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = open_checkpoint(locate(str(tmp_path), load_format="dummy"), ["e4m3", "e2m1", "u4", "u8"])
    weights = dict(registry.dummy_tensors(config, 1, formats=kept.format))
    plain = dict(registry.dummy_tensors(config, 1))
    packed = {name for name, weight in weights.items() if isinstance(weight, Packed)}
    left = {name for name in weights if "self_attn" in name or "layers.0.mlp.up_proj" in name}
    assert packed == {name for name in weights if bits and quantises(name) and (
        "ignore" not in given or name not in left)}
    for name in packed:
        assert (weights[name].kind, weights[name].cols) == ("u4" if bits == 4 else "u8", 16)
        step = plain[name].abs().max() / (7 if bits == 4 else 127)
        assert (weights[name].floats() - plain[name]).abs().max() <= 0.51 * step, name
    model = build(config, torch.float32, together=True)         # takes them all, and joins some
    for name, weight in weights.items():
        model.load(name, weight)
    model.finish()
    assert logits(model).isfinite().all() and len(left) > 3
