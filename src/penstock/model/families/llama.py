"""Llama 1 to 3, SmolLM2, Seed-OSS, and Mistral, all of whose layers may have a window; Ministral 3, whose
queries grow with their position."""
from __future__ import annotations

from dataclasses import replace

from penstock.model.families.common import read_attention, read_growth, read_spec
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields


def llama(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=None, qkv_bias=bias, out_bias=bias)
    return read_spec(fields, attention, mlp_bias=fields.flag("mlp_bias"))


def mistral(fields: Fields) -> Spec:
    attention = read_attention(fields, kv_heads=8, qkv_bias=False, out_bias=False)
    spec = read_spec(fields, attention, slides=lambda layer: True, window_default=4096)
    if fields.values.get("layer_types") is not None and 0 < sum(map(bool, spec.windows)) < spec.num_layers:
        fields.refuse("layer_types", "all layers are of one type")
    return spec


def seed_oss(fields: Fields) -> Spec:
    """Llama with biases of queries, keys and values."""
    attention = read_attention(fields, kv_heads=8, head_dim=128, qkv_bias=fields.flag("attention_bias", True),
                               out_bias=fields.flag("attention_out_bias"))
    return read_spec(fields, attention, mlp_bias=fields.flag("mlp_bias"))


def ministral3(fields: Fields) -> Spec:
    attention = read_attention(fields, kv_heads=8, head_dim=128, qkv_bias=False, out_bias=False)
    growth, length = read_growth(fields)
    attention = replace(attention, growth=growth, growth_length=length)
    return read_spec(fields, attention, slides=lambda layer: True)
