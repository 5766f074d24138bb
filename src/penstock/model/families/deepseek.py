"""DeepSeek-V3 and Kimi-K2, and with a lightning indexer DeepSeek-V3.2 and GLM-5: latent attention,
sigmoid-gated experts. Mistral Small 4: latent attention whose queries grow with their position, experts by softmax."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from penstock.config.base.errors import ConfigError
from penstock.model.base import GlobalLayer
from penstock.model.families.common import layers_of, read_growth, read_spec
from penstock.model.latent import IndexSpec, LatentSpec
from penstock.model.moe import MoESpec
from penstock.model.mtp import deepseek_names
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields


def deepseek_v3(fields: Fields) -> Spec:
    return _spec(fields, None)


def deepseek_v32(fields: Fields) -> Spec:
    return _spec(fields, _index(fields, interleaved=False, indexed=layers_of(fields)))


def glm_moe_dsa(fields: Fields) -> Spec:
    return _spec(fields, _index(fields, interleaved=True, indexed=_indexed(fields)))


def mistral4(fields: Fields) -> Spec:
    name = "rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling"
    rope = fields.mapping(name)
    if not rope:
        fields.refuse("rope_parameters", "the scaling of the RoPE that the model has: without it positions are others")
    # transformers says of a whole head what is turned of it, which qk_rope_head_dim says too.
    turned, dim = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim") + fields.size("qk_rope_head_dim")
    if rope.get("partial_rotary_factor") not in (None, turned / dim):
        fields.refuse(name, f"partial_rotary_factor, if it is there, as qk_rope_head_dim says: {turned / dim}")
    plain = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    fields = Fields({**fields.values, name: plain}, fields.family)
    spec = _spec(fields, None, sigmoid=False, dense=0, scale=1.0)
    growth, length = read_growth(fields)
    assert isinstance(spec.attention, LatentSpec)
    return replace(spec, attention=replace(spec.attention, growth=growth, growth_length=length))


def _index(fields: Fields, *, interleaved: bool, indexed: list[GlobalLayer]) -> IndexSpec:
    head_dim, rope = fields.size("index_head_dim"), fields.size("qk_rope_head_dim")
    if head_dim < rope:
        fields.refuse("index_head_dim", f"at least qk_rope_head_dim = {rope}")
    return IndexSpec(
        num_heads=fields.size("index_n_heads"),
        head_dim=head_dim,
        topk=fields.size("index_topk"),
        interleaved=fields.flag("indexer_rope_interleave", interleaved),
        layers=frozenset(indexed),
    )


def _spec(fields: Fields, index: IndexSpec | None, *, sigmoid: bool = True, dense: int = 3, scale: float = 2.5) -> Spec:
    """sigmoid: of experts' scores, else softmax. dense: layers without experts, scale: of what experts say, where a
    file says none."""
    for name, only in (("scoring_func", "sigmoid" if sigmoid else "softmax"), ("topk_method", "noaux_tc"),
                       ("moe_layer_freq", 1), ("rope_interleave", True)):
        if fields.values.get(name) not in (None, only):
            fields.refuse(name, f"supported: {only!r}")
    if "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None:
        raise ConfigError("config.json: q_lora_rank is null: queries made by one q_proj, without a low rank "
                          "(as in DeepSeek-V2-Lite, Moonlight and Kanana), are not supported")
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    if rope % 2 or rope < 4:
        fields.refuse("qk_rope_head_dim", "it must be even and at least 4 for RoPE")
    attention = LatentSpec(
        num_heads=fields.size("num_attention_heads"),
        q_rank=fields.size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.size("v_head_dim"),
        scale=(nope + rope) ** -0.5 * _yarn_scale(fields),
        bias=fields.flag("attention_bias"),
        index=index,
    )
    shared = fields.size("moe_intermediate_size") * fields.size("n_shared_experts", 1)
    skipped = fields.size("num_nextn_predict_layers", 0, least=0)
    moe = grouped_experts(fields, frozenset(_sparse(fields, dense)), shared=shared, scale=scale, sigmoid=sigmoid)
    return read_spec(
        fields, attention, moe=moe,
        skipped_layers=skipped, mtp=deepseek_names(fields.size("num_hidden_layers")) if skipped else None,
        kinds=("deepseek_sparse_attention",) if index else (),        # as nvidia/GLM-5.2-NVFP4 has it
    )


def _yarn_scale(fields: Fields) -> float:
    """What YaRN multiplies scores by, beside the cos and sin that `read_rope` scales."""
    params = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    kind = params.get("rope_type", params.get("type", "default"))
    weight, factor = params.get("mscale_all_dim"), params.get("factor")
    if kind == "default" or not weight or not isinstance(factor, int | float) or factor <= 1:
        return 1.0
    if not isinstance(weight, int | float):
        raise ConfigError(f"config.json: its RoPE has mscale_all_dim {weight!r}: a number is needed")
    return float(0.1 * weight * math.log(factor) + 1.0) ** 2


def grouped_experts(fields: Fields, layers: frozenset[GlobalLayer], *, shared: int, scale: float,
                    sigmoid: bool = True) -> MoESpec:
    """Experts as DeepSeek-V3 has them, by sigmoid or by softmax. shared: width of what every token visits; scale:
    where a file says none. Raises ConfigError on groups that do not divide them."""
    num_experts = fields.size("n_routed_experts")
    groups, groups_chosen = fields.size("n_group", 1), fields.size("topk_group", 1)
    num_chosen = fields.size("num_experts_per_tok")
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups) or groups_chosen > groups:
        raise ConfigError(
            f"config.json: n_group = {groups} groups of at least two of {num_experts} experts, of which "
            f"topk_group = {groups_chosen} are chosen, do not go together"
        )
    if num_chosen > num_experts // groups * groups_chosen:
        raise ConfigError(
            f"config.json: num_experts_per_tok = {num_chosen} is more than the "
            f"{num_experts // groups * groups_chosen} experts that may be chosen"
        )
    return MoESpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=fields.size("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", True),
        layers=layers,
        sigmoid=sigmoid,
        groups=groups,
        groups_chosen=groups_chosen,
        shared_width=shared,
        scale=fields.number("routed_scaling_factor", scale),
    )


def _sparse(fields: Fields, dense: int) -> list[GlobalLayer]:
    types = fields.values.get("mlp_layer_types")
    if types is None:
        dense = fields.size("first_k_dense_replace", dense, least=0)
        return [index for index in layers_of(fields) if index >= dense]
    _check_types(fields, "mlp_layer_types", types, ("dense", "sparse"))
    return [index for index in layers_of(fields) if types[index] == "sparse"]


def _indexed(fields: Fields) -> list[GlobalLayer]:
    """Layers with an indexer of their own: by name, by pattern, or every `index_topk_freq`-th."""
    layers = layers_of(fields)
    name = "indexer_types" if fields.values.get("indexer_types") is not None else "index_topk_pattern"
    types = fields.values.get(name)
    if isinstance(types, str) and name == "index_topk_pattern":
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    elif types is None:
        name, frequency = "index_skip_topk_offset", fields.size("index_topk_freq", 1)
        offset = fields.size("index_skip_topk_offset", 2, least=0)
        types = ["shared" if max(index - offset + 1, 0) % frequency else "full" for index in layers]
    _check_types(fields, name, types, ("full", "shared"))
    if types[0] != "full":
        fields.refuse(name, "the first layer must be 'full': no layer before it shares its indexer")
    return [index for index in layers if types[index] == "full"]


def _check_types(fields: Fields, name: str, types: Any, allowed: tuple[str, str]) -> None:
    if not isinstance(types, list) or len(types) < fields.size("num_hidden_layers") or not all(
            kind in allowed for kind in types):
        fields.refuse(name, f"one of {allowed} for every layer")
