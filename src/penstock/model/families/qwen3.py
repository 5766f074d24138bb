"""Qwen3, dense: every query and key head is normed before RoPE; head_dim is its own field."""
from __future__ import annotations

from penstock.model.families.common import read_attention, read_spec
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def qwen3(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(
        fields, kv_heads=32, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    return read_spec(fields, attention)
