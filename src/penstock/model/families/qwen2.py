"""Qwen2 and Qwen2.5: q, k and v always have a bias, the output projection never."""
from __future__ import annotations

from penstock.model.families.common import from_layer, read_attention, read_spec
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def qwen2(fields: Fields) -> Spec:
    attention = read_attention(fields, kv_heads=32, qkv_bias=True, out_bias=False)
    slides, window = from_layer(fields)
    return read_spec(fields, attention, slides=slides, window_default=window)
