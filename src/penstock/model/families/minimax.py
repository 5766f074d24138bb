"""MiniMax-M2: the query heads of a token are normed together, and so are its key heads; all layers have
sigmoid-gated experts. MiniMax-M3: heads are normed one by one, all MLPs gate clamped inputs, and most layers have index
heads that select blocks of KV."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.kernels.gemm.experts import Clamped
from penstock.model.base import GlobalLayer
from penstock.model.families.common import layers_of, num_chosen, read_attention, read_spec
from penstock.model.layers import BlockIndex
from penstock.model.moe import MoESpec
from penstock.model.rope import rotated_dim
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

# What makers' files say that this code does; with another value it is another model.
ONLY = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
        "shared_intermediate_size": 0}


ONLY_M3 = {"scoring_func": "sigmoid", "qk_norm_type": "per_head", "use_qk_norm": True, "use_routing_bias": True,
           "use_gemma_norm": True, "attention_output_gate": False, "n_shared_experts": 1}
SPARSE = "minimax_m3_sparse"        # of layer_types
# Fields of an indexer, as makers have them in sparse_attention_config and as transformers has them, and defaults.
INDEX = {"sparse_num_index_heads": ("index_n_heads", 4), "sparse_index_dim": ("index_head_dim", 128),
         "sparse_block_size": ("index_block_size", 128), "sparse_topk_blocks": ("index_topk_blocks", 16),
         "sparse_local_block": ("index_local_blocks", 1)}


def _check(fields: Fields, only: Mapping[str, Any]) -> None:
    for name, value in only.items():
        if fields.values.get(name) not in (None, value):
            fields.refuse(name, f"supported: {value!r}")


def minimax_m2(fields: Fields) -> Spec:
    _check(fields, ONLY)
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


def minimax_m3(fields: Fields) -> Spec:
    _check(fields, ONLY_M3)
    act = fields.values.get("hidden_act")
    if act not in (None, "silu", "swigluoai"):
        fields.refuse("hidden_act", "supported: 'swigluoai'")
    head_dim = fields.size("head_dim", 128)
    fields = Fields({"partial_rotary_factor": fields.size("rotary_dim", min(64, head_dim)) / head_dim, **fields.values,
                     "hidden_act": "silu"}, fields.family)
    attention = read_attention(fields, kv_heads=4, head_dim=head_dim, qkv_bias=False, out_bias=False, qk_norm=True)
    attention = replace(attention, norm_plus=1.0, rotated=rotated_dim(fields, head_dim, 1.0),
                        index=_index(fields, attention.num_kv_heads, head_dim))
    num = fields.size("num_local_experts", 128)
    clamped = Clamped(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0))
    moe = MoESpec(num_experts=num, num_chosen=num_chosen(fields, num, 4), sigmoid=True, renormalize=True,
                  width=fields.size("intermediate_size", 3072), scale=fields.number("routed_scaling_factor", 2.0),
                  gate=clamped, shared_width=fields.size("shared_intermediate_size", 3072), layers=_sparse(fields),
                  bias_name="e_score_correction_bias")
    spec = read_spec(fields, attention, moe=moe, theta=5e6, partial=1.0, reads=("partial_rotary_factor",),
                     kinds=(SPARSE,))
    return replace(spec, norm_plus=1.0, gate=clamped, width=fields.size("dense_intermediate_size", 12288))


def _sparse(fields: Fields) -> frozenset[GlobalLayer]:
    """Layers that have experts: by name, or by number, 1 for each; else all."""
    name = "mlp_layer_types" if fields.values.get("mlp_layer_types") is not None else "moe_layer_freq"
    return frozenset(_marked(fields, name, fields.values.get(name), "sparse", "dense", everywhere=True))


def _marked(fields: Fields, name: str, kinds: Any, marked: str, other: str, *, everywhere: bool) -> list[GlobalLayer]:
    """Layers of which a field says `marked`, or 1, where it says `other` or 0 of the rest. everywhere: all where there
    is no such field, else none. Raises ConfigError."""
    layers = layers_of(fields)
    if kinds is None:
        return layers if everywhere else []
    words = {marked: True, 1: True, other: False, 0: False}
    if not isinstance(kinds, list) or len(kinds) < len(layers) or not all(
            type(kind) in (str, int) and kind in words for kind in kinds):
        fields.refuse(name, f"{marked!r} or {other!r}, or 1 or 0, for every layer")
    return [index for index in layers if words[kinds[index]]]


def _index(fields: Fields, kv_heads: int, head_dim: int) -> BlockIndex | None:
    """What selects blocks, of the layers that do. Raises ConfigError on what this code would get wrong."""
    own = fields.mapping("sparse_attention_config")
    if own.get("use_sparse_attention") is False:
        return None
    types = fields.values.get("layer_types")
    name, types = ("layer_types", types) if types is not None else (
        "sparse_attention_config", own.get("sparse_attention_freq"))
    layers = _marked(fields, name, types, SPARSE, "full_attention", everywhere=False)
    if not layers:
        return None
    field = "sparse_attention_config" if own else "layer_types"
    given = Fields({theirs: own.get(maker, fields.values.get(theirs)) for maker, (theirs, _) in INDEX.items()},
                   fields.family)
    heads, dim, block, top_k, local = (given.size(theirs, default, least=0) for theirs, default in INDEX.values())
    values = own.get("sparse_disable_index_value")
    if values is not None and (not isinstance(values, list) or not all(
            index < len(values) and values[index] == 1 for index in layers)):
        fields.refuse(field, "supported: sparse_disable_index_value 1 for every layer that selects")
    for what, right in (("sparse_score_type 'max'", own.get("sparse_score_type", "max") == "max"),
                        ("sparse_init_block 0", own.get("sparse_init_block", 0) == 0),
                        (f"as many index heads as KV heads, {kv_heads}", heads == kv_heads),
                        (f"index heads of head_dim = {head_dim}", dim == head_dim),
                        ("sparse_local_block 1 or more", local >= 1),
                        ("blocks of 1 to 256 tokens, which a page can hold", 1 <= block <= 256),
                        ("no more local blocks than sparse_topk_blocks", local <= top_k)):
        if not right:
            fields.refuse(field, f"supported: {what}")
    return BlockIndex(num_heads=heads, head_dim=dim, block=block, top_k=top_k, last=local, layers=frozenset(layers))
