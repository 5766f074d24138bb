"""Rotary position embedding: frequencies of each scaling, angles of a step.

Numerically equal to transformers' modeling_rope_utils. Knows positions, not rows: every angle is a
function of its own position only, so KV does not depend on chunks, batches or cached prefixes.

    T tokens of the step   M heads, query and key together   H head dim   F = H / 2 frequencies
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.kernels.fused.step import angles
from penstock.model.weights.fields import NUMBER_MAX, Fields

FACTOR_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class NTK:
    """Dynamic NTK scaling: past `original` tokens the base grows with the length."""

    base: float
    factor: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """inv_freq_F f32. `attention_factor` multiplies cos and sin. `max_position` in tokens."""

    inv_freq_F: Tensor
    attention_factor: float
    max_position: int
    ntk: NTK | None = None

    def on(self, device: torch.device) -> Rope:
        """The same with its frequencies on `device`: a captured step must not bring them there."""
        return replace(self, inv_freq_F=self.inv_freq_F.to(device))

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos_T1H, sin_T1H) for `LayerOps.rotate`, computed in f32, returned in `dtype`. The
        frequencies are on the device of the positions.

        The first half of sin is negated: with it, the rotation needs a roll instead of a
        negation and a concatenation in every layer.

        Dynamic NTK: the token at position p uses the frequencies of a sequence of p + 1 tokens.
        That is transformers decoding token by token. Its whole prefill of a longer prompt uses the
        prompt's length for all tokens, which would make cached KV depend on the request.
        """
        inv_freq = self.inv_freq_F
        if self.ntk is not None:
            position_T1 = positions_T[:, None].float()
            longer = _ntk_freq(self.ntk, position_T1, inv_freq)
            inv_freq = torch.where(position_T1 < self.ntk.original, inv_freq, longer)
        return angles(positions_T, inv_freq, self.attention_factor, dtype)


def _ntk_freq(ntk: NTK, position_T1: Tensor, inv_freq_F: Tensor) -> Tensor:
    dim = 2 * inv_freq_F.shape[-1]
    length_T1 = (position_T1 + 1).clamp(min=ntk.original)
    growth_T1 = ntk.factor * length_T1 / ntk.original - (ntk.factor - 1)
    base_T1 = ntk.base * growth_T1 ** (dim / (dim - 2))
    return 1.0 / base_T1 ** _exponents(dim, inv_freq_F.device)


def _exponents(dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim


_ORIGINAL = "original_max_position_embeddings"


class _Scaling:
    """What a scaling function reads: the rope fields, the plain frequencies, the context length."""

    def __init__(self, params: dict[str, Any], fields: Fields, head_dim: int, theta: float) -> None:
        self.params = params
        self.max_position = fields.size("max_position_embeddings")
        self.dim = head_dim
        self.theta = self.number("rope_theta", theta)
        self.pos_freq_F = self.theta ** _exponents(head_dim)
        # transformers lets the top-level field win over the one inside the rope fields.
        original: float = fields.size(_ORIGINAL, 0)
        if not original and params.get(_ORIGINAL) is not None:
            original = self.number(_ORIGINAL)
        self.names_original = original > 0
        self.original = original or self.max_position

    def number(self, name: str, default: float | None = None) -> float:
        value = self.params.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"config.json: its RoPE needs {name}, a number > 0; got {value!r}")
        most = FACTOR_MAX if name == "factor" else NUMBER_MAX
        if value > most:
            raise ConfigError(f"config.json: its RoPE has {name} {value!r}: at most {most:g}")
        return float(value)


def _default(scaling: _Scaling) -> Rope:
    return Rope(
        inv_freq_F=1.0 / scaling.pos_freq_F, attention_factor=1.0, max_position=scaling.max_position
    )


def _linear(scaling: _Scaling) -> Rope:
    return Rope(
        inv_freq_F=1.0 / scaling.pos_freq_F / scaling.number("factor"),
        attention_factor=1.0,
        max_position=scaling.max_position,
    )


def _dynamic(scaling: _Scaling) -> Rope:
    """max_position_embeddings is the length before scaling; `factor` times that may be served."""
    factor = scaling.number("factor")
    return Rope(
        inv_freq_F=1.0 / scaling.pos_freq_F,
        attention_factor=1.0,
        max_position=int(scaling.max_position * factor),
        ntk=NTK(base=scaling.theta, factor=factor, original=scaling.max_position),
    )


def _llama3(scaling: _Scaling) -> Rope:
    """Source: Llama 3.1. Long wavelengths are divided by `factor`, short ones kept, rest mixed."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    factor, original = scaling.number("factor"), scaling.original
    if high <= low:
        raise ConfigError(f"config.json: high_freq_factor {high} must exceed low_freq_factor {low}")
    inv_freq_F = 1.0 / scaling.pos_freq_F
    wavelen_F = 2 * math.pi / inv_freq_F
    smooth_F = (original / wavelen_F - low) / (high - low)
    mixed_F = (1 - smooth_F) * inv_freq_F / factor + smooth_F * inv_freq_F
    scaled_F = torch.where(wavelen_F > original / low, inv_freq_F / factor, mixed_F)
    return Rope(
        inv_freq_F=torch.where(wavelen_F < original / high, inv_freq_F, scaled_F),
        attention_factor=1.0,
        max_position=scaling.max_position,
    )


def _yarn(scaling: _Scaling) -> Rope:
    """Source: YaRN, arXiv:2309.00071.

    A config that names the original length and a factor may be served up to their product, even
    where max_position_embeddings still holds the original length (as in Qwen's model cards).
    """
    params, dim, original = scaling.params, scaling.dim, scaling.original
    factor = scaling.number("factor", scaling.max_position / original)
    slow, fast = scaling.number("beta_slow", 1.0), scaling.number("beta_fast", 32.0)
    low, high = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(scaling.theta))
        for turns in (fast, slow)
    )
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep_F = 1 - ramp_F
    inv_freq_F = (1.0 / (factor * scaling.pos_freq_F)) * (1 - keep_F)
    inv_freq_F += (1.0 / scaling.pos_freq_F) * keep_F
    longest = int(original * factor) if scaling.names_original else 0
    return Rope(
        inv_freq_F=inv_freq_F,
        attention_factor=_yarn_attention(scaling, factor),
        max_position=max(scaling.max_position, longest),
    )


def _yarn_attention(scaling: _Scaling, factor: float) -> float:
    params = scaling.params
    if params.get("attention_factor") is not None:
        return scaling.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(scaling.number("mscale")) / mscale(scaling.number("mscale_all_dim"))
    return mscale(1.0)


def _proportional(scaling: _Scaling) -> Rope:
    """Gemma 4: the first pairs of a head turn, as fast as if all of them did; the others stand still."""
    part = scaling.number("partial_rotary_factor", 1.0)
    turned = int(part * scaling.dim // 2)
    if not 0 < turned <= scaling.dim // 2:
        raise ConfigError(f"config.json: partial_rotary_factor {part:g} of a head of {scaling.dim}: a number up to 1")
    inv_freq_F = 1.0 / scaling.pos_freq_F / scaling.number("factor", 1.0)
    inv_freq_F[turned:] = 0.0
    return Rope(inv_freq_F=inv_freq_F, attention_factor=1.0, max_position=scaling.max_position)


SCALINGS: dict[str, Callable[[_Scaling], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}


def read_rope(fields: Fields, head_dim: int, *, theta: float = 10000.0, partial: float | None = None) -> Rope:
    """The rope of a config, of the layers that see all: `rope_parameters` (transformers 5), or `rope_scaling`
    and `rope_theta`, which is `theta` where the config says nothing. partial: of a family that turns a part
    of a head, or whose positions are grids that are a line in text: that part, where the config says nothing.

    Raises ConfigError on an unknown type, a partial or multimodal rotation of another family, or a missing
    number.
    """
    params = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    if isinstance(params.get("full_attention"), dict):       # one entry per layer type
        params = params["full_attention"]
    theta = fields.number("rope_theta", theta)
    if partial is None:
        return _read(params, fields, head_dim, theta)
    turned = rotated_dim(fields, head_dim, partial)
    plain = {k: v for k, v in params.items() if k not in ("partial_rotary_factor", "mrope_section")
             and v != "mrope"}
    rope = _read(plain, fields, turned, theta)
    if turned < head_dim and (rope.attention_factor != 1.0 or rope.ntk is not None):
        raise ConfigError("config.json: of RoPE types that scale what they turn (yarn) or depend on the "
                          "length (dynamic), a part of a head is not supported")
    still_F = torch.zeros((head_dim - turned) // 2)          # an angle of 0 turns nothing
    return replace(rope, inv_freq_F=torch.cat((rope.inv_freq_F, still_F)))


def without_turns(rope: Rope) -> Rope:
    """Return angles for layers without RoPE: an angle of 0 changes no bit."""
    return replace(rope, inv_freq_F=rope.inv_freq_F * 0, attention_factor=1.0, ntk=None)


def rotated_dim(fields: Fields, head_dim: int, partial: float) -> int:
    """Dims of a head that are turned. Raises ConfigError."""
    params = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    part = params.get("partial_rotary_factor", fields.values.get("partial_rotary_factor", partial))
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1 or head_dim % 2:
        raise ConfigError(f"config.json: partial_rotary_factor {part!r} of a head of {head_dim}: a number "
                          "up to 1, of an even head")
    return int(head_dim * part)


def read_window_rope(fields: Fields, head_dim: int, *, theta: float = 10000.0) -> Rope:
    """Read RoPE of layers with a window, see `read_rope`; where they have their own, their entry of
    `rope_parameters`, or
    `rope_local_base_freq`."""
    params = fields.mapping("rope_parameters").get("sliding_attention")
    if not isinstance(params, dict):
        params = {}
    return _read(params, fields, head_dim, fields.number("rope_local_base_freq", theta))


def _read(params: dict[str, Any], fields: Fields, head_dim: int, theta: float) -> Rope:
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in SCALINGS:
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported; one of {', '.join(SCALINGS)}"
        )
    whole = kind == "proportional" or params.get("partial_rotary_factor") in (None, 1, 1.0)
    if not whole or params.get("mrope_section"):
        raise ConfigError(
            "config.json: partial and multimodal rotary embeddings (partial_rotary_factor, "
            "mrope_section) are not supported"
        )
    if head_dim % 2 or head_dim < 4:
        raise ConfigError(f"config.json: head_dim {head_dim} must be even and at least 4 for RoPE")
    return SCALINGS[kind](_Scaling(params, fields, head_dim, theta))
