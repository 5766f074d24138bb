"""Qwen3, dense: every query and key head is normed before RoPE; head_dim is its own field."""
from __future__ import annotations

from penstock.model.families.common import from_layer, read_attention, read_spec
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def qwen3(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(
        fields, kv_heads=32, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    slides, window = from_layer(fields)
    return read_spec(fields, attention, slides=slides, window_default=window)
