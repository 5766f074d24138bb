"""A layer's small operations in Triton: one launch and one pass each.

Imported only where a CUDA device was asked for. Rounds where the reference rounds.

    T tokens   D model dim   M heads, of which N are queries   H head dim   I MLP width   J = 2 I
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm(h, delta, weight, out, eps, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * DIM
    d = tl.arange(0, DIM_PAD)
    own = d < DIM
    x = tl.load(h + at + d, mask=own, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + at + d, mask=own, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(h + at + d, x, mask=own)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    w = tl.load(weight + d, mask=own, other=0.0).to(tl.float32)
    tl.store(out + at + d, (x * w).to(out.dtype.element_ty), mask=own)


@triton.jit
def norm_rotate(x, cos, sin, q_weight, k_weight, eps, x_token, x_head, M, N, DIM: tl.constexpr,
                HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr):
    """Some heads of one token, in place: each half of a head is read once, and both are written."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    own = (head < M) & (d < HALF)
    at = t * x_token + head * x_head + d
    kind: tl.constexpr = x.dtype.element_ty
    low = tl.load(x + at, mask=own, other=0.0).to(tl.float32)
    high = tl.load(x + at + HALF, mask=own, other=0.0).to(tl.float32)
    angle = t * DIM + d
    turn = d < HALF
    cos_low = tl.load(cos + angle, mask=turn, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=turn, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=turn, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=turn, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        query = head < N
        w_low = tl.where(query, tl.load(q_weight + d, mask=turn, other=0.0),
                         tl.load(k_weight + d, mask=turn, other=0.0)).to(tl.float32)
        w_high = tl.where(query, tl.load(q_weight + HALF + d, mask=turn, other=0.0),
                          tl.load(k_weight + HALF + d, mask=turn, other=0.0)).to(tl.float32)
        # The reference rounds the normed head, and its product with the weight.
        low = ((low * scale).to(kind).to(tl.float32) * w_low).to(kind).to(tl.float32)
        high = ((high * scale).to(kind).to(tl.float32) * w_high).to(kind).to(tl.float32)
    new_low = (low * cos_low).to(kind).to(tl.float32) + high * sin_low
    new_high = (high * cos_high).to(kind).to(tl.float32) + low * sin_high
    tl.store(x + at, new_low.to(kind), mask=own)
    tl.store(x + at + HALF, new_high.to(kind), mask=own)


@triton.jit
def silu_gate(x, out, x_token, WIDTH, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = i < WIDTH
    kind: tl.constexpr = x.dtype.element_ty
    gate = tl.load(x + t * x_token + i, mask=own, other=0.0).to(tl.float32)
    up = tl.load(x + t * x_token + WIDTH + i, mask=own, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + t * WIDTH + i, (silu * up).to(kind), mask=own)


class TritonOps:
    """`LayerOps` on a CUDA device. Capturable."""

    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        tokens, dim = h_TD.shape
        out_TD = torch.empty_like(h_TD)
        pad = triton.next_power_of_2(dim)
        add_norm[(tokens,)](h_TD, h_TD if delta_TD is None else delta_TD, weight_D, out_TD, eps, DIM=dim,
                            DIM_PAD=pad, ADD=delta_TD is not None,
                            num_warps=max(1, min(8, pad // 512)))
        return out_TD

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        self._turn(x_TMH, cos_T1H, sin_T1H, None, None, x_TMH.shape[1], 0.0)

    def norm_rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor,
                    k_weight_H: Tensor, num_heads: int, eps: float) -> None:
        self._turn(x_TMH, cos_T1H, sin_T1H, q_weight_H, k_weight_H, num_heads, eps)

    def _turn(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor | None,
              k_weight_H: Tensor | None, num_heads: int, eps: float) -> None:
        tokens, heads, dim = x_TMH.shape
        assert x_TMH.stride(2) == 1, "head dim must be dense"
        at_once = 4
        norm_rotate[(tokens, triton.cdiv(heads, at_once))](
            x_TMH, cos_T1H, sin_T1H, cos_T1H if q_weight_H is None else q_weight_H,
            cos_T1H if k_weight_H is None else k_weight_H, eps, x_TMH.stride(0), x_TMH.stride(1), heads,
            num_heads, DIM=dim, HALF=dim // 2, HALF_PAD=triton.next_power_of_2(dim // 2), HEADS=at_once,
            NORM=q_weight_H is not None, num_warps=1)

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        tokens, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
        out_TI = torch.empty((tokens, width), dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
        block = min(1024, triton.next_power_of_2(width))
        silu_gate[(tokens, triton.cdiv(width, block))](
            gate_up_TJ, out_TI, gate_up_TJ.stride(0), width, BLOCK=block, num_warps=4)
        return out_TI


OPS = TritonOps()
