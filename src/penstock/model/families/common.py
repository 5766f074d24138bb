"""What the config.json of every family has in common, read into a Spec."""
from __future__ import annotations

from penstock.config.base.errors import ConfigError
from penstock.model.latent import LatentSpec
from penstock.model.layers import AttentionSpec
from penstock.model.moe import MoESpec
from penstock.model.rope import read_rope
from penstock.model.transformer import Spec
from penstock.model.weights.fields import Fields


def read_attention(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None = None,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool = False,
) -> AttentionSpec:
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
    return AttentionSpec(
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
    attention: AttentionSpec | LatentSpec,
    *,
    mlp_bias: bool = False,
    moe: MoESpec | None = None,
    window_switched: bool = True,
    window_default: int | None = None,
    skipped_layers: int = 0,
) -> Spec:
    """The whole Spec. Raises ConfigError on a sliding window, another activation, another RoPE."""
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "supported: 'silu'")
    latent = isinstance(attention, LatentSpec)
    rope = read_rope(fields, attention.rope_dim)
    fields.refuse_window(
        rope.max_position, switched=window_switched, default=window_default,
        layer_type="indexed_attention" if latent else "full_attention",
    )
    return Spec(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        width=fields.size("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings"),
        rope=rope,
        attention=attention,
        mlp_bias=mlp_bias,
        moe=moe,
        skipped_layers=skipped_layers,
    )
