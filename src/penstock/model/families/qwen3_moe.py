"""Qwen3-MoE: Qwen3 whose MLP is sparse in every layer that the config does not exempt."""
from __future__ import annotations

from penstock.config.base.errors import ConfigError
from penstock.model.base import GlobalLayer
from penstock.model.families.common import from_layer, read_attention, read_spec
from penstock.model.moe import MoESpec
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def qwen3_moe(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(
        fields, kv_heads=4, qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    slides, window = from_layer(fields, 0)
    return read_spec(fields, attention, moe=_moe(fields), slides=slides, window_default=window)


def _moe(fields: Fields) -> MoESpec:
    # transformers 5 writes num_local_experts, older files have num_experts.
    num_experts = fields.size("num_experts", fields.size("num_local_experts", 128))
    if fields.size("num_local_experts", num_experts) != num_experts:
        fields.refuse("num_local_experts", f"num_experts says {num_experts}")
    num_chosen = fields.size("num_experts_per_tok", 8)
    if num_chosen > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok = {num_chosen} is more than "
            f"the {num_experts} experts"
        )
    step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    return MoESpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=fields.size("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob"),
        layers=frozenset(
            GlobalLayer(index)
            for index in range(fields.size("num_hidden_layers"))
            if index not in dense and (index + 1) % step == 0
        ),
    )
