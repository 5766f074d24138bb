"""Qwen3-Next and the text of Qwen3.5, dense or with experts: three of four layers are gated delta nets, the
others have gated attention."""
from __future__ import annotations

from dataclasses import replace

from penstock.config.base.errors import ConfigError
from penstock.kernels.state.scan import ScanSpec
from penstock.model.base import GlobalLayer
from penstock.model.families.common import layers_of, num_chosen, read_attention, read_spec
from penstock.model.moe import MoESpec
from penstock.model.mtp import QWEN
from penstock.model.rope import rotated_dim
from penstock.model.scan import StateSpec, split_of
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

PARTIAL = 0.25              # of a head that is turned
STATE, FULL = "linear_attention", "full_attention"


def qwen3_next(fields: Fields) -> Spec:
    """A layer without experts is dense."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    sparse = [i for i in layers_of(fields) if i not in dense and (i + 1) % step == 0]
    chosen = fields.values.get("num_experts") == 0 or not sparse
    return _spec(fields, None if chosen else _moe(fields, sparse, 10, 512), kv_heads=2, fused=True)


def qwen3_5_text(fields: Fields) -> Spec:
    return _spec(fields, None, kv_heads=4, fused=False)


def qwen3_5_moe_text(fields: Fields) -> Spec:
    return _spec(fields, _moe(fields, layers_of(fields), 8, 256), kv_heads=2, fused=False)


def _spec(fields: Fields, moe: MoESpec | None, *, kv_heads: int, fused: bool) -> Spec:
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, kv_heads=kv_heads, head_dim=256, qkv_bias=bias, out_bias=bias,
                               qk_norm=True)
    attention = replace(attention, norm_plus=1.0, gated=True,
                        rotated=rotated_dim(fields, attention.head_dim, PARTIAL))
    every_layer = moe is not None and len(moe.layers) == fields.size("num_hidden_layers")
    if every_layer and fields.values.get("intermediate_size") is None:
        fields = Fields({**fields.values, "intermediate_size": moe.width if moe else 0}, fields.family)
    spec = read_spec(fields, attention, moe=moe, partial=PARTIAL, kinds=(STATE,),
                     reads=("partial_rotary_factor",))
    drafts = (fields.size("mtp_num_hidden_layers", 1, least=0)
              and not fields.flag("mtp_use_dedicated_embeddings"))
    return replace(spec, norm_plus=1.0, states=_states(fields, fused), mtp=QWEN if drafts else None)


def _states(fields: Fields, fused: bool) -> StateSpec | None:
    """None where every layer attends."""
    num, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    types = fields.values.get("layer_types") or [FULL if (i + 1) % every == 0 else STATE for i in range(num)]
    layers = frozenset(GlobalLayer(i) for i in range(num) if types[i] == STATE)
    if len(layers) == num:
        fields.refuse("layer_types", f"one layer of {FULL} at least")
    heads, key_heads = fields.size("linear_num_value_heads", 32), fields.size("linear_num_key_heads", 16)
    if heads % key_heads:
        raise ConfigError(f"config.json: linear_num_value_heads = {heads} must be a multiple of "
                          f"linear_num_key_heads = {key_heads}")
    scan = ScanSpec(
        heads=heads, key_heads=key_heads, key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128), taps=fields.size("linear_conv_kernel_dim", 4, least=2),
        delta=True, split=split_of(heads, key_heads))
    if not layers:
        return None
    return StateSpec(
        layers=layers, name="linear_attn", scan=scan, together=fused,
        projections=(("in_proj_qkvz", "qkvz"), ("in_proj_ba", "bs")) if fused else
        (("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_b", "b"), ("in_proj_a", "s")))


def _moe(fields: Fields, layers: list[GlobalLayer], chosen: int, experts: int) -> MoESpec:
    num_experts = fields.size("num_experts", experts)
    return MoESpec(
        num_experts=num_experts, num_chosen=num_chosen(fields, num_experts, chosen),
        width=fields.size("moe_intermediate_size", 512),
        renormalize=fields.flag("norm_topk_prob", True), layers=frozenset(layers),
        shared_width=fields.size("shared_expert_intermediate_size", 512), shared_gated=True)
