"""Gemma 2 and the text of Gemma 3: some layers have a window; each half is normed before and behind."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.model.families.common import read_attention, read_spec
from penstock.model.layers import GqaSpec
from penstock.model.rope import read_window_rope
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma2(fields: Fields) -> Spec:
    """Every other layer has the window; scores and logits are capped."""
    capped = replace(_attention(fields, qk_norm=False), softcap=_cap(fields, CAPS[0], 50.0))
    return _spec(fields, capped, lambda layer: layer % 2 == 0, 10000.0, _cap(fields, CAPS[1], 30.0), CAPS)


def gemma3_text(fields: Fields) -> Spec:
    """All but each sixth layer have the window, and a RoPE of their own."""
    every = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
    attention = _attention(fields, qk_norm=True)
    spec = _spec(fields, attention, lambda layer: (layer + 1) % every > 0, 1e6, _cap(fields, CAPS[1], 0.0),
                 CAPS[1:])
    return replace(spec, window_rope=read_window_rope(fields, attention.head_dim))


def _attention(fields: Fields, *, qk_norm: bool) -> GqaSpec:
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=4, head_dim=256, qkv_bias=bias, out_bias=bias,
                               qk_norm=qk_norm)
    return replace(attention, scale=fields.number("query_pre_attn_scalar", 256) ** -0.5, norm_plus=1.0)


def _spec(fields: Fields, attention: GqaSpec, slides: Callable[[int], bool], theta: float,
          logit_cap: float, reads: tuple[str, ...]) -> Spec:
    spec = read_spec(fields, attention, slides=slides, window_default=4096, gelu=True, tied=True, theta=theta,
                     reads=(*reads, "query_pre_attn_scalar"))
    return replace(spec, norm_plus=1.0, norms_behind=True, embed_scale=spec.hidden ** 0.5,
                   logit_cap=logit_cap)


def _cap(fields: Fields, name: str, default: float) -> float:
    """Null and absent differ: a file of another kind than the class's default says null."""
    return fields.number(name, 0.0) if name in fields.values else default
