"""Gemma 2 and the text of Gemma 3 and 4: some layers have a window; each half is normed before and behind."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.kernels.gemm.experts import TanhGelu
from penstock.model.families.common import layers_of, read_attention, read_spec
from penstock.model.layers import GqaSpec
from penstock.model.moe import MoESpec
from penstock.model.rope import read_window_rope
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
         FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
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


def gemma4_text(fields: Fields) -> Spec:
    """Layers without a window have heads of another width, fewer KV heads, and may take values from the keys'
    projection. The last layers may read the KV of the last one of their kind before them; each may add of the
    token itself; experts, if any, are beside the dense MLP."""
    fields = Fields({**fields.values, "rope_parameters": fields.mapping("rope_parameters") or ROPES}, fields.family)
    if fields.values.get("use_bidirectional_attention") not in (None, False, "vision"):     # of images alone
        fields.refuse("use_bidirectional_attention", "'vision', or null")
    bias, one_kv = fields.flag("attention_bias"), fields.flag("attention_k_eq_v")
    near = replace(read_attention(fields, kv_heads=4, head_dim=256, qkv_bias=bias, out_bias=bias, qk_norm=True),
                   scale=1.0, value_norm=True)
    head_dim, kv_heads = _global(fields, near, one_kv)
    spec = read_spec(fields, replace(near, head_dim=head_dim, num_kv_heads=kv_heads, one_kv=one_kv),
                     slides=lambda layer: (layer + 1) % 6 > 0, window_default=512, gelu=True, tied=True,
                     reads=("use_bidirectional_attention", CAPS[1]), moe=_experts(fields))
    window, types = fields.size("sliding_window", 512), _types(fields)
    shared = fields.size("num_kv_shared_layers", 0, least=0)
    width = fields.size("hidden_size_per_layer_input", 256, least=0)
    own = len(types) - shared
    if own < 1 or set(types[own:]) - set(types[:own]):
        fields.refuse("num_kv_shared_layers", "layers of each kind are left before these, which read their KV")
    if width and fields.size("vocab_size_per_layer_input", 262144) != spec.vocab_size:
        fields.refuse("vocab_size_per_layer_input", f"vocab_size, {spec.vocab_size}")
    sources = [i if i < own else max(j for j in range(own) if types[j] == types[i]) for i in range(len(types))]
    return replace(
        spec, windows=tuple(window if kind == SLIDING else 0 for kind in types) if SLIDING in types else (),
        window_attention=near, window_rope=read_window_rope(fields, near.head_dim), norms_behind=True,
        embed_scale=spec.hidden ** 0.5, logit_cap=_cap(fields, CAPS[1], 0.0), scaled=True, token_width=width,
        sources=tuple(sources) if shared else (),
        reader_width=spec.width * (1 + fields.flag("use_double_wide_mlp")))


def _types(fields: Fields) -> list[str]:
    """Return the kind of each layer; the last one sees all, as in transformers, whatever the list says."""
    num, given = fields.size("num_hidden_layers"), fields.values.get("layer_types")
    return [*(given or [SLIDING if (i + 1) % 6 else FULL for i in range(num)])[:num - 1], FULL]


def _global(fields: Fields, near: GqaSpec, one_kv: bool) -> tuple[int, int]:
    """Width and number of KV heads of the layers without a window, as published configs say them or as transformers
    saves them: by layer."""
    by_layer = fields.mapping("per_layer_config")
    if not by_layer:
        heads = fields.size("num_global_key_value_heads", near.num_kv_heads) if one_kv else near.num_kv_heads
        found = fields.size("global_head_dim", 512), heads
    else:
        first, full = next(iter(by_layer.values())), {str(i) for i, kind in enumerate(_types(fields)) if kind == FULL}
        if {*map(str, by_layer)} != full or any(each != first for each in by_layer.values()) or (
                not isinstance(first, dict) or set(first) - {"head_dim", "num_key_value_heads"}):
            fields.refuse("per_layer_config", "head_dim and num_key_value_heads, the same of all layers without a "
                          "window")
        own = Fields(first, fields.family)
        found = own.size("head_dim", near.head_dim), own.size("num_key_value_heads", near.num_kv_heads)
    if near.num_heads % found[1]:
        fields.refuse("num_global_key_value_heads", f"a divisor of num_attention_heads = {near.num_heads}")
    return found


def _experts(fields: Fields) -> MoESpec | None:
    if not fields.flag("enable_moe_block"):
        return None
    experts = fields.size("num_experts")
    chosen = fields.size("top_k_experts")
    if chosen > experts:
        fields.refuse("top_k_experts", f"at most num_experts = {experts}")
    return MoESpec(num_experts=experts, num_chosen=chosen, width=fields.size("moe_intermediate_size"),
                   renormalize=True, layers=frozenset(layers_of(fields)), router="router.proj", parallel=True,
                   weighed=True, gate=TanhGelu())


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
