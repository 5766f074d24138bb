"""Nemotron-H: a layer is one norm and one mixer, by the pattern of a file: Mamba-2, attention without RoPE,
an MLP without a gate, or experts of that kind, of 3 Super and Ultra in fewer dims."""
from __future__ import annotations

import math
from dataclasses import replace

from penstock.model.base import GlobalLayer
from penstock.model.families.bamba import mamba
from penstock.model.families.common import read_attention, read_spec
from penstock.model.families.deepseek import grouped_experts
from penstock.model.rope import without_turns
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

STATE, ATTENDS, MLP, EXPERTS = KINDS = "linear_attention", "full_attention", "mlp", "moe"
NAMES = {"M": STATE, "*": ATTENDS, "-": MLP, "E": EXPERTS, "mamba": STATE, "attention": ATTENDS}
OLDER = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
         "mamba_conv_bias": "use_conv_bias"}
FILES = (("backbone.", "model."), ("model.embeddings.", "model.embed_tokens."))


def nemotron_h(fields: Fields) -> Spec:
    types = _types(fields)
    fields = Fields({
        "intermediate_size": 21504, **fields.values, **{new: fields.values[old] for old, new in OLDER.items()
                                                        if old in fields.values},
        "layer_types": types, "num_hidden_layers": len(types)}, fields.family)
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"),
                       ("tie_word_embeddings", False)):
        if fields.values.get(name) not in (None, only):
            fields.refuse(name, f"supported: {only!r}")
    states, attends, feeds, experts = (
        frozenset(GlobalLayer(i) for i, kind in enumerate(types) if kind == wanted) for wanted in KINDS)
    if not attends:
        fields.refuse("layers_block_type", "one layer of full_attention at least")
    bias = fields.flag("mlp_bias")
    if bias and experts:
        fields.refuse("mlp_bias", "false where layers have experts")
    moe = None
    if experts:
        shared = fields.size("moe_shared_expert_intermediate_size", 7688)
        inner = 0 if fields.values.get("moe_latent_size") is None else fields.size("moe_latent_size")
        moe = replace(grouped_experts(fields, experts, shared=shared, scale=1.0), gated=False, inner=inner)
    attention = read_attention(fields, kv_heads=8, head_dim=128, qkv_bias=False, out_bias=False)
    spec = read_spec(fields, attention, moe=moe, mlp_bias=bias, kinds=(STATE, MLP, EXPERTS))
    return replace(
        spec, rope=without_turns(spec.rope), norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_name="model.norm_f", files=FILES, feeds=feeds | experts, states=mamba(
            states, name="mixer", heads=fields.size("mamba_num_heads", 128),
            key_heads=fields.size("n_groups", 8), key_dim=fields.size("ssm_state_size", 128),
            dim=fields.size("mamba_head_dim", 64), taps=fields.size("conv_kernel", 4, least=2),
            limits=(fields.number("time_step_min", 0.001), math.inf), bias=fields.flag("use_bias"),
            conv_bias=fields.flag("use_conv_bias", True)) if states else None)


def _types(fields: Fields) -> list[str]:
    """What each layer is, of a list or, as older files have it, of a string with a letter for each."""
    name = next((name for name in ("layers_block_type", "layer_types", "hybrid_override_pattern")
                 if fields.values.get(name) is not None), "layers_block_type")
    given = fields.values.get(name)
    if not isinstance(given, list | str) or not given:
        fields.refuse(name, f"one of {', '.join(KINDS)} for every layer")
    types = [NAMES.get(str(kind), str(kind)) for kind in given]
    if set(types) - set(KINDS):
        fields.refuse(name, f"one of {', '.join(KINDS)} for every layer")
    return types
