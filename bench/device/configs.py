"""Published shapes of models, some with fewer layers, what `shapes.py` measures of each, and their random weights."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from direct import QWEN3_8B
from torch import Tensor

from penstock.exec.load.backends import packer
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts
from penstock.kernels.registry import Choice
from penstock.kernels.state import scan
from penstock.kernels.types.packed import Kind, quantised
from penstock.model import registry as families
from penstock.model.weights.formats.reader import Format

EMBED, EXPERTS = "model.embed_tokens.weight", ".experts."
# Weights that stay packed, by what `--weights` says, and whether these are experts only.
PACKED: dict[str, tuple[Format, Kind, bool]] = {
    "mxfp4": (Format("e2m1", 1, 32, 4), "e2m1", True), "int4": (Format("u8", 1, 128, 4), "u4", False),
    "fp8": (Format("e4m3", 128, 128), "e4m3", False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """prompts: lengths that are timed; cells: all KV on the device or not, and rows at once, with `context` tokens.
    noise: a token's own part of its embedding: consecutive tokens select alike with less. norms: what norms weigh, 0
    where 1 is added. tiny: what a CPU computes instead."""

    config: dict[str, Any]
    context: int
    prompts: tuple[int, ...]
    cells: tuple[str, ...]
    tiny: dict[str, Any]
    noise: float = 1.0
    norms: float = 1.0


def alternating(one: str, other: str, every: int, layers: int) -> list[str]:
    return [other if (i + 1) % every == 0 else one for i in range(layers)]


COMMON = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "vocab_size": 320, "intermediate_size": 96}
SHAPES = {
    "minimax-m3": Shape(        # a dense layer and five of its 57 with experts, which select; 81 GB
        config={
            "architectures": ["MiniMaxM3ForCausalLM"], "model_type": "minimax_m3", "hidden_size": 6144,
            "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "rotary_dim": 64, "intermediate_size": 3072, "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072, "num_local_experts": 128, "num_experts_per_tok": 4,
            "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 5],
            "mlp_layer_types": ["dense", *["sparse"] * 5], "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6,
            "rope_theta": 5e6, "tie_word_embeddings": False, "vocab_size": 200064},
        context=65536, prompts=(32768,), cells=("hosted:1,8", "resident:1,8"), noise=0.3, norms=0.0,
        tiny={**COMMON, "rotary_dim": 8, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
              "num_local_experts": 8, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16,
              "index_block_size": 16, "index_topk_blocks": 3}),
    "gpt-oss-20b": Shape(
        config={
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
            "layer_types": alternating("sliding_attention", "full_attention", 2, 24), "attention_bias": True,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "swiglu_limit": 7.0,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 4096, "truncate": False},
            "tie_word_embeddings": False, "vocab_size": 201088},
        context=8192, prompts=(8192,) * 8, cells=("resident:1,32",),
        tiny={**COMMON, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32,
              "layer_types": alternating("sliding_attention", "full_attention", 2, 6)}),
    "qwen3-8b": Shape(
        config=QWEN3_8B, context=8192, prompts=(8192,) * 3, cells=("resident:1,8,32",), tiny=COMMON),
    "kimi-k2": Shape(           # six layers, all dense: decode over MLA entries; 4 GB
        config={
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 6, "first_k_dense_replace": 6,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 50000.0,
            "tie_word_embeddings": False, "vocab_size": 163840},
        context=32768, prompts=(8192,) * 2, cells=("resident:1,8,32",),
        tiny={**COMMON, "first_k_dense_replace": 6, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
              "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
              "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "qwen3.5-35b-a3b": Shape(
        config={
            "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
            "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "layer_types": alternating("linear_attention", "full_attention", 4, 40),
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "vocab_size": 248320},
        context=8192, prompts=(32768,) * 3, cells=("resident:1,32",), norms=0.0,
        tiny={**COMMON, "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
              "linear_num_value_heads": 4, "linear_value_head_dim": 16, "moe_intermediate_size": 32,
              "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
              "layer_types": alternating("linear_attention", "full_attention", 4, 4)}),
    "qwen3.5-27b": Shape(       # 54 GB
        config={
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
            "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 17408, "layer_types": alternating("linear_attention", "full_attention", 4, 64),
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 48, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 248320,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        context=8192, prompts=(32768,) * 3, cells=("resident:1,32",), norms=0.0,
        tiny={**COMMON, "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
              "linear_num_value_heads": 6, "linear_value_head_dim": 16,
              "layer_types": alternating("linear_attention", "full_attention", 4, 4)}),
    "gemma-4-31b": Shape(       # 24 of 60 layers, 26 GB
        config={
            "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 5376,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
            "intermediate_size": 21504, "layer_types": alternating("sliding_attention", "full_attention", 6, 24),
            "sliding_window": 1024, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "enable_moe_block": False,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "vocab_size": 262144,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
        context=8192, prompts=(8192,) * 3, cells=("resident:1,32",),
        tiny={**COMMON, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 32,
              "layer_types": alternating("sliding_attention", "full_attention", 6, 6)}),
}


def form_of(name: str, size: tuple[int, ...], weights: str) -> tuple[Format, Kind] | None:
    """How a weight is packed; None: in no way. size: its shape; weights: of `PACKED`, or bfloat16."""
    if weights not in PACKED or len(size) != 2 or not name.startswith("model.layers.") or ".gate.weight" in name:
        return None
    form, kind, experts_only = PACKED[weights]
    return (form, kind) if EXPERTS in name or not experts_only else None


def build_model(shape: Shape, config: dict[str, Any], chosen: dict[str, Choice], device: str, dtype: torch.dtype,
                weights: str) -> Any:
    """Weights of variance one over their inputs, what a half adds to the stream smaller. chosen: back-ends; weights:
    what stays packed, see `PACKED`."""
    model = families.build(
        config, dtype=dtype, linear=packer(chosen), ops=layer.OP.use(chosen["layer"].name),
        experts=experts.OP.use(chosen["experts"].name) if "experts" in chosen else None,
        scan=scan.OP.use(chosen["scan"].name if "scan" in chosen else "reference"))
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int, scale: float) -> Tensor:
        return torch.empty(size, device=device).normal_(0, scale, generator=generator)
    for name, size in families.tensor_shapes(config):
        if name.endswith(families.FACTORS):
            plain = name.endswith(("linear_attn.norm.weight", "layer_scalar"))
            tensor = torch.full(size, 1.0 if plain else shape.norms, device=device)
        elif name == EMBED:
            tensor = normal(1, size[1], scale=1 - shape.noise) + normal(*size, scale=shape.noise)
            tensor *= size[1] ** -0.5 if config["tie_word_embeddings"] else 1.0
        elif len(size) == 1:
            tensor = normal(*size, scale=0.02)
        else:
            gain = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) else 1.0
            tensor = normal(*size, scale=gain / math.prod(size[1:]) ** 0.5)
        packed = form_of(name, size, weights)
        model.load(name, tensor.to(dtype) if packed is None else
                   quantised(tensor, packed[0].rows, packed[0].cols, packed[1]).regular())
    model.finish()
    return model
