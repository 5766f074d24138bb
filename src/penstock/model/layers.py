"""The blocks of a decoder layer: attention with one fused projection, the gated MLP.

They own weights and order of operations; which blocks a model has is the family's business.

    T tokens   D model dim   N query heads   K KV heads   M = N + K   H head dim   I MLP width
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.model.base import Attend, LocalLayer
from penstock.model.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """`scale`: of the scores. `qk_norm`: RMS norm of every query and key head, before RoPE, with
    learned weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


class Mixer(Protocol):
    """The second half of a layer: MLP or experts."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        ...


class Attention:
    def __init__(
        self, slots: Slots, prefix: str, layer: LocalLayer, hidden: int, spec: AttentionSpec,
        eps: float,
    ) -> None:
        self.layer = layer
        self.eps = eps
        self.ops = slots.ops
        self.spec = spec
        self.num_rotated = spec.num_heads + spec.num_kv_heads
        self.qkv_shape = (-1, self.num_rotated + spec.num_kv_heads, spec.head_dim)
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = slots.linear(
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            [q_rows, kv_rows, kv_rows],
            hidden,
            spec.qkv_bias,
        )
        self.out = slots.linear([f"{prefix}.o_proj"], [hidden], q_rows, spec.out_bias)
        if spec.qk_norm:
            self.q_norm = slots.vector(f"{prefix}.q_norm.weight", (spec.head_dim,))
            self.k_norm = slots.vector(f"{prefix}.k_norm.weight", (spec.head_dim,))

    def __call__(self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend) -> Tensor:
        """out_TD. q, k, v given to `attend` are views of one tensor, not dense in T."""
        num_heads = self.spec.num_heads
        qkv = self.qkv(x_TD).view(self.qkv_shape)
        qk_TMH = qkv[:, : self.num_rotated]
        v_TKH = qkv[:, self.num_rotated :]
        if self.spec.qk_norm:
            self.ops.norm_rotate(qk_TMH, cos_T1H, sin_T1H, self.q_norm.value, self.k_norm.value, num_heads,
                                 self.eps)
        else:
            self.ops.rotate(qk_TMH, cos_T1H, sin_T1H)
        out_TNH = attend(self.layer, qk_TMH[:, :num_heads], qk_TMH[:, num_heads:], v_TKH)
        return self.out(out_TNH.flatten(1))


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, width: int, bias: bool) -> None:
        self.ops = slots.ops
        self.gate_up = slots.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [width, width], hidden, bias
        )
        self.down = slots.linear([f"{prefix}.down_proj"], [hidden], width, bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(self.ops.gate(self.gate_up(x_TD)))
