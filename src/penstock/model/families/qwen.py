"""Qwen2 and Qwen2.5: q, k and v always have a bias, the output projection never. Qwen3: every query and key
head is normed before RoPE; its MLP is dense, or sparse in every layer that the config does not exempt."""
from __future__ import annotations

from dataclasses import replace

from penstock.model.families.common import from_layer, layers_of, num_chosen, read_attention, read_spec
from penstock.model.layers import GqaSpec
from penstock.model.moe import MoESpec
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields


def qwen2(fields: Fields) -> Spec:
    return _spec(fields, read_attention(fields, kv_heads=32, qkv_bias=True, out_bias=False))


def qwen3(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    return _spec(fields, read_attention(fields, kv_heads=32, head_dim=128, qkv_bias=bias, out_bias=bias,
                                        qk_norm=True))


def qwen3_moe(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=4, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return _spec(fields, attention, 0, _moe(fields))


def qwen2_5_vl_text(fields: Fields) -> Spec:
    return _spec(fields, read_attention(fields, kv_heads=32, qkv_bias=True, out_bias=False), text=True,
                 theta=1e6)


def qwen3_vl_text(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    return _spec(fields, read_attention(fields, kv_heads=32, head_dim=128, qkv_bias=bias, out_bias=bias,
                                        qk_norm=True), text=True, theta=5e5)


def qwen3_vl_moe_text(fields: Fields) -> Spec:
    """Files have a layer's experts in two tensors, inputs by outputs."""
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=16, qkv_bias=bias, out_bias=bias, qk_norm=True)
    moe = replace(_moe(fields), renormalize=True, transposed=True)
    return _spec(fields, attention, 0, moe, text=True, theta=5e5)


def _spec(fields: Fields, attention: GqaSpec, first: int | None = None, moe: MoESpec | None = None, *,
          text: bool = False, theta: float = 10000.0) -> Spec:
    """first: layer with a window, None: as the config says. text: of a model that also sees images, whose
    RoPE has three positions a token, all the same in text, and no windows."""
    slides, window = from_layer(fields, first)
    return read_spec(fields, attention, moe=moe, slides=slides, window_default=window,
                     partial=1.0 if text else None, theta=theta)


def _moe(fields: Fields) -> MoESpec:
    # transformers 5 writes num_local_experts, older files have num_experts.
    num_experts = fields.size("num_experts", fields.size("num_local_experts", 128))
    if fields.size("num_local_experts", num_experts) != num_experts:
        fields.refuse("num_local_experts", f"num_experts says {num_experts}")
    step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    return MoESpec(
        num_experts=num_experts, num_chosen=num_chosen(fields, num_experts, 8),
        width=fields.size("moe_intermediate_size", 768), renormalize=fields.flag("norm_topk_prob"),
        layers=frozenset(i for i in layers_of(fields) if i not in dense and (i + 1) % step == 0))
