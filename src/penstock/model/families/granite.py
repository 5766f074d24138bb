"""Granite 4: most layers are mixers of Mamba-2 (of micro none), the others attention, as a rule without RoPE;
experts beside a dense MLP, or that alone. Embeddings, scores, what layers add and logits are scaled."""
from __future__ import annotations

from dataclasses import replace

from penstock.model.base import GlobalLayer
from penstock.model.families.bamba import read_states
from penstock.model.families.common import layers_of, num_chosen, read_attention, read_spec
from penstock.model.moe import MoESpec
from penstock.model.rope import without_turns
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
NAMES = {"mamba": "linear_attention", "attention": "full_attention"}        # of files of transformers 4


def granitemoehybrid(fields: Fields) -> Spec:
    given = fields.values.get("layer_types", fields.values.get("layers_block_type"))
    if isinstance(given, list):
        given = [NAMES.get(str(kind), kind) for kind in given]
        fields = Fields({**fields.values, "layer_types": given}, fields.family)
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=None, qkv_bias=bias, out_bias=bias)
    attention = replace(attention, scale=fields.number("attention_multiplier", 1.0))
    moe, shared = _moe(fields), fields.size("shared_intermediate_size", 1024)
    dense = Fields({**fields.values, "intermediate_size": shared}, fields.family)
    spec = read_spec(dense, attention, moe=moe, kinds=("linear_attention",), reads=SCALES)
    types = given or ["linear_attention"] * spec.num_layers
    layers = frozenset(GlobalLayer(i) for i in range(spec.num_layers) if types[i] == "linear_attention")
    if len(layers) == spec.num_layers:
        fields.refuse("layer_types", "one layer of full_attention at least")
    if fields.values.get("position_embedding_type") not in (None, "rope", "nope"):
        fields.refuse("position_embedding_type", "'rope', 'nope' or null")
    if fields.values.get("position_embedding_type") != "rope":
        spec = replace(spec, rope=without_turns(spec.rope))
    return replace(spec, mlp_name="block_sparse_moe" if moe else "shared_mlp", mlp_bundled=True,
                   embed_scale=fields.number("embedding_multiplier", 1.0),
                   residual_scale=fields.number("residual_multiplier", 1.0),
                   logit_divisor=fields.number("logits_scaling", 1.0),
                   states=read_states(fields, spec.hidden, layers) if layers else None)


def _moe(fields: Fields) -> MoESpec | None:
    experts = fields.size("num_local_experts", 8, least=0)
    if not experts:
        return None
    return MoESpec(
        num_experts=experts, num_chosen=num_chosen(fields, experts, 2), renormalize=True,
        width=fields.size("intermediate_size", 11008), layers=frozenset(layers_of(fields)),
        shared_width=fields.size("shared_intermediate_size", 1024), router="router", beside=True)
