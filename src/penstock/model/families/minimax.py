"""MiniMax-M2: the query heads of a token are normed together, and so are its key heads; all layers have
sigmoid-gated experts."""
from __future__ import annotations

from dataclasses import replace

from penstock.model.families.common import layers_of, num_chosen, read_attention, read_spec
from penstock.model.moe import MoESpec
from penstock.model.rope import rotated_dim
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

# What makers' files say that this code does; with another value it is another model.
ONLY = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
        "shared_intermediate_size": 0}


def minimax_m2(fields: Fields) -> Spec:
    for name, only in ONLY.items():
        if fields.values.get(name) not in (None, only):
            fields.refuse(name, f"supported: {only!r}")
    layers = fields.size("num_hidden_layers")
    if fields.values.get("attn_type_list") not in (None, [1] * layers):
        fields.refuse("attn_type_list", "supported: 1, full attention, for every layer")
    head_dim = fields.size("head_dim", 128)
    part = fields.size("rotary_dim", head_dim) / head_dim
    fields = Fields({"partial_rotary_factor": part, **fields.values}, fields.family)
    attention = read_attention(fields, kv_heads=8, head_dim=head_dim, qkv_bias=False, out_bias=False,
                               qk_norm=True)
    attention = replace(attention, norm_width=True, rotated=rotated_dim(fields, head_dim, 1.0))
    num = fields.size("num_local_experts", 256)
    moe = MoESpec(num_experts=num, num_chosen=num_chosen(fields, num, 8), sigmoid=True, renormalize=True,
                  width=fields.size("intermediate_size", 1536), layers=frozenset(layers_of(fields)),
                  bias_name="e_score_correction_bias")
    spec = read_spec(fields, attention, moe=moe, theta=5e6, partial=1.0, reads=("partial_rotary_factor",))
    # Its layers that draft lie after the last one, with another structure than the model's: they are skipped.
    skipped = fields.size("num_mtp_modules", 0, least=0) if fields.flag("use_mtp") else 0
    return replace(spec, skipped_layers=skipped)
