"""Llama 1 to 3, SmolLM2, and Mistral checkpoints whose sliding window is off."""
from __future__ import annotations

from penstock.model.families.common import read_attention, read_spec
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def llama(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=None, qkv_bias=bias, out_bias=bias)
    return read_spec(
        fields, attention, mlp_bias=fields.flag("mlp_bias"), window_switched=False
    )


def mistral(fields: Fields) -> Spec:
    attention = read_attention(fields, kv_heads=8, qkv_bias=False, out_bias=False)
    return read_spec(fields, attention, window_switched=False, window_default=4096)
