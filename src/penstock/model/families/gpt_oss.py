"""gpt-oss: every other layer has a window, heads have sinks; experts with biases gate clamped inputs."""
from __future__ import annotations

from dataclasses import replace

from penstock.kernels.gemm.experts import Clamped
from penstock.model.families.common import layers_of, num_chosen, read_attention, read_spec
from penstock.model.moe import MoESpec
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

# Where a config says nothing about RoPE.
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}


def gpt_oss(fields: Fields) -> Spec:
    if not fields.mapping("rope_scaling") and not fields.mapping("rope_parameters"):
        fields = Fields({**fields.values, "rope_parameters": YARN}, fields.family)
    bias = fields.flag("attention_bias", True)
    attention = replace(read_attention(fields, kv_heads=8, head_dim=64, qkv_bias=bias, out_bias=bias),
                        sinks=True)
    spec = read_spec(fields, attention, moe=_moe(fields), slides=lambda layer: layer % 2 == 0,
                     window_default=128, theta=150000.0)
    return replace(spec, norm_eps=fields.number("rms_norm_eps", 1e-5))


def _moe(fields: Fields) -> MoESpec:
    num_experts = fields.size("num_local_experts", fields.size("num_experts", 128))
    return MoESpec(
        num_experts=num_experts, width=fields.size("intermediate_size", 2880), renormalize=True,
        num_chosen=num_chosen(fields, num_experts, fields.size("experts_per_token", 4)),
        layers=frozenset(layers_of(fields)), router="router", biased=True,
        gate=Clamped(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)))
