"""What the config.json of every family has in common, read into a Spec."""
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from penstock.config.base.errors import ConfigError
from penstock.model.base import GlobalLayer
from penstock.model.latent import LatentSpec
from penstock.model.layers import GqaSpec
from penstock.model.moe import MoESpec
from penstock.model.mtp import MTPNames
from penstock.model.rope import read_rope
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields


def read_attention(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None = None,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool = False,
) -> GqaSpec:
    """Heads and biases. `kv_heads` and `head_dim` are transformers' defaults for absent fields."""
    hidden, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    # A null means "as many as query heads" everywhere; only absence means the class's default.
    if kv_heads is None or "num_key_value_heads" in fields.values:
        kv_heads = num_heads
    num_kv_heads = fields.size("num_key_value_heads", kv_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads = {num_heads} must be a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if head_dim is None and fields.values.get("head_dim") is None and hidden % num_heads:
        raise ConfigError(
            f"config.json: without head_dim, hidden_size = {hidden} must be a multiple of "
            f"num_attention_heads = {num_heads}"
        )
    head_dim = fields.size("head_dim", head_dim or hidden // num_heads)
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
    )


def read_spec(
    fields: Fields,
    attention: GqaSpec | LatentSpec,
    *,
    mlp_bias: bool = False,
    moe: MoESpec | None = None,
    slides: Callable[[int], bool] | None = None,
    window_default: int | None = None,
    skipped_layers: int = 0,
    mtp: MTPNames | None = None,
    reads: Collection[str] = (),
    gelu: bool = False,
    tied: bool = False,
    theta: float = 10000.0,
    partial: float | None = None,
    kinds: Collection[str] = (),
) -> Spec:
    """The whole Spec. `slides`, `window_default`: see `Fields.windows`; `reads`: fields of NEUTRAL that mean
    something to the family; `gelu`: its activation, else SiLU; `tied`, `theta`: where it says nothing;
    `partial`: see `read_rope`; `kinds`: of its layers, in words of layer_types, those without a window.
    Raises ConfigError on another activation, another RoPE."""
    fields.check_neutral(reads, stated_by(fields, attention))
    name, known = ("hidden_activation", ("gelu_pytorch_tanh",)) if gelu else ("hidden_act", ("silu", "swish"))
    if fields.values.get(name, known[0]) not in known:
        fields.refuse(name, f"supported: {known[0]!r}")
    rope = read_rope(fields, attention.rope_dim, theta=theta, partial=partial)
    indexed = isinstance(attention, LatentSpec) and attention.index is not None
    windows = fields.windows(rope.max_position, slides=slides, default=window_default,
                             full="indexed_attention" if indexed else "full_attention", kinds=kinds)
    return Spec(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        width=fields.size("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", tied),
        rope=rope,
        attention=attention,
        mlp_bias=mlp_bias,
        moe=moe,
        skipped_layers=skipped_layers,
        mtp=mtp,
        windows=windows,
        gelu=gelu,
    )


def stated_by(fields: Fields, attention: GqaSpec | LatentSpec) -> dict[str, tuple[Any, ...]]:
    """Return values of neutral fields that say what a model with this attention does anyway."""
    layers = fields.size("num_hidden_layers")
    states: dict[str, tuple[Any, ...]] = {
        "no_rope_layers": ([1] * layers,),                  # 1: the layer has RoPE
        "attention_multiplier": (attention.scale,),
    }
    if isinstance(attention, LatentSpec):
        return {**states, "rope_interleaved": (True,),
                "query_pre_attn_scalar": (attention.nope_dim + attention.rope_dim,)}
    states["query_pre_attn_scalar"] = (attention.head_dim,)
    states["use_qk_norm"] = (True,) if attention.qk_norm else ()
    return states


def read_growth(fields: Fields) -> tuple[float, int]:
    """Return `growth` and `growth_length` of `GqaSpec`: of Mistral's models whose queries grow. Raises ConfigError."""
    rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    growth, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if growth is None:
        return 0.0, 1
    if type(growth) not in (int, float) or not 0 <= growth < 1e6 or type(length) is not int or length < 1:
        fields.refuse("rope_parameters", "llama_4_scaling_beta, a number, with "
                                         "original_max_position_embeddings, a number of tokens")
    return float(growth), length


def layers_of(fields: Fields) -> list[GlobalLayer]:
    return [GlobalLayer(index) for index in range(fields.size("num_hidden_layers"))]


def num_chosen(fields: Fields, num_experts: int, default: int) -> int:
    """Experts that a token visits. Raises ConfigError where there are fewer."""
    chosen = fields.size("num_experts_per_tok", default)
    if chosen > num_experts:
        raise ConfigError(f"config.json: num_experts_per_tok = {chosen} is more than the {num_experts} "
                          "experts")
    return chosen


def from_layer(fields: Fields, first: int | None = None) -> tuple[Callable[[int], bool], int]:
    """`slides` and `window_default` of Qwen2 and its kin: a switch, and the first layer with a window, by
    default as the config says."""
    if not fields.flag("use_sliding_window"):
        if "sliding_attention" in (fields.values.get("layer_types") or ()):
            fields.refuse("use_sliding_window", "layer_types has 'sliding_attention'")
        return (lambda layer: False), 4096
    if first is None:
        first = fields.size("max_window_layers", 28, least=0)
    return (lambda layer: layer >= first), 4096
