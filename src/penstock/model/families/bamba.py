"""Bamba: most layers are mixers of Mamba-2, the others attention of which half of a head is turned."""
from __future__ import annotations

import math
from dataclasses import replace

from penstock.config.base.errors import ConfigError
from penstock.kernels.state.scan import ScanSpec
from penstock.model.base import GlobalLayer
from penstock.model.families.common import read_attention, read_spec
from penstock.model.scan import StateSpec, split_of
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

PARTIAL = 0.5               # of a head that is turned, whatever a file says
INFINITE = {"__float__": "Infinity"}        # as transformers 5 writes it


def bamba(fields: Fields) -> Spec:
    bias = fields.flag("attention_bias")
    rope = {**fields.mapping("rope_parameters"), "partial_rotary_factor": PARTIAL}
    values = {**fields.values, "partial_rotary_factor": PARTIAL}
    if fields.mapping("rope_parameters"):
        values["rope_parameters"] = rope
    fields = Fields(values, fields.family)
    attention = read_attention(fields, kv_heads=8, qkv_bias=bias, out_bias=bias)
    attention = replace(attention, rotated=int(PARTIAL * attention.head_dim))
    spec = read_spec(fields, attention, mlp_bias=fields.flag("mlp_bias"), partial=PARTIAL,
                     kinds=("linear_attention",), reads=("partial_rotary_factor",))
    attends = fields.indices("attn_layer_indices")
    if not set(attends) & {*range(spec.num_layers)}:
        fields.refuse("attn_layer_indices", "one layer with attention at least")
    layers = frozenset(GlobalLayer(i) for i in range(spec.num_layers) if i not in attends)
    states = read_states(fields, spec.hidden, layers) if layers else None
    return replace(spec, norm_eps=fields.number("rms_norm_eps", 1e-5), norm_name="model.final_layernorm",
                   mlp_norm_name="pre_ff_layernorm", mlp_name="feed_forward", states=states)


def read_states(fields: Fields, hidden: int, layers: frozenset[GlobalLayer]) -> StateSpec:
    heads, values = fields.size("mamba_n_heads", 128), fields.size("mamba_expand", 2) * hidden
    auto = fields.values.get("mamba_d_head") in (None, "auto")
    dim = values // heads if auto else fields.size("mamba_d_head")
    if heads * dim != values:
        raise ConfigError(f"config.json: mamba_n_heads = {heads} times mamba_d_head = {dim} must be "
                          f"mamba_expand * hidden_size = {values}")
    return mamba(layers, name="mamba", heads=heads, key_heads=fields.size("mamba_n_groups", 1),
                 key_dim=fields.size("mamba_d_state", 256), dim=dim,
                 taps=fields.size("mamba_d_conv", 4, least=2), limits=_limits(fields),
                 bias=fields.flag("mamba_proj_bias"), conv_bias=fields.flag("mamba_conv_bias", True))


def mamba(layers: frozenset[GlobalLayer], *, name: str, heads: int, key_heads: int, key_dim: int,
          dim: int, taps: int, limits: tuple[float, float], bias: bool, conv_bias: bool) -> StateSpec:
    """States of Mamba-2, whatever a family calls its numbers: heads of `dim` values, key heads of `key_dim`.
    Raises ConfigError."""
    if heads % key_heads:
        raise ConfigError(f"config.json: {heads} heads of Mamba must be a multiple of its {key_heads} groups")
    scan = ScanSpec(heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=dim, taps=taps, delta=False,
                    least=limits[0], most=limits[1], split=split_of(heads, key_heads))
    return StateSpec(layers=layers, name=name, scan=scan, projections=(("in_proj", "zvkqs"),), channels="vkq",
                     bias=bias, conv_bias=conv_bias)


def _limits(fields: Fields) -> tuple[float, float]:
    """The least step and the most."""
    given = fields.values.get("time_step_limit")
    pair = [0.0, INFINITE] if given is None else given
    if isinstance(pair, list | tuple) and len(pair) == 2:
        least, most = (math.inf if limit == INFINITE else limit for limit in pair)
        if type(least) in (int, float) and type(most) in (int, float) and 0 <= least <= most:
            return float(least), float(most)
    fields.refuse("time_step_limit", "two numbers, the least step and the most")
