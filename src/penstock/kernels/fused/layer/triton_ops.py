"""A layer's small operations in Triton: one launch and one pass each.

Imported only where a CUDA device was asked for. Rounds where the reference rounds.

    T tokens   D model dim   M heads, of which N are queries   H head dim   I MLP width   J = 2 I
    Of latent parts I and J are index heads and their dim.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fused.layer.latent import LatentNorms, Weighs, by_head
from penstock.kernels.triton.depend import early, fetch, follow


@triton.jit
def add_norm(h, delta, weight, out, eps, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * DIM
    d = tl.arange(0, DIM_PAD)
    own = d < DIM
    w = tl.load(weight + d, mask=own, other=0.0).to(tl.float32)
    follow()
    x = tl.load(h + at + d, mask=own, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + at + d, mask=own, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(h + at + d, x, mask=own)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    tl.store(out + at + d, (x * w).to(out.dtype.element_ty), mask=own)


@triton.jit
def norm_rotate(x, cos, sin, q_weight, k_weight, eps, x_token, x_head, M, N, DIM: tl.constexpr,
                HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr):
    """Some heads of one token, in place: each half of a head is read once, and both are written."""
    follow()
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
    follow()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = i < WIDTH
    kind: tl.constexpr = x.dtype.element_ty
    gate = tl.load(x + t * x_token + i, mask=own, other=0.0).to(tl.float32)
    up = tl.load(x + t * x_token + WIDTH + i, mask=own, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + t * WIDTH + i, (silu * up).to(kind), mask=own)


@triton.jit
def _turn(low, high, cos, sin, angle, turn, HALF: tl.constexpr, kind: tl.constexpr):
    """Both halves of what is rotated, f32, rounded where the reference rounds."""
    cos_low = tl.load(cos + angle, mask=turn, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=turn, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=turn, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=turn, other=0.0).to(tl.float32)
    return ((low * cos_low).to(kind).to(tl.float32) + high * sin_low,
            (high * cos_high).to(kind).to(tl.float32) + low * sin_high)


@triton.jit
def _weigh(h, head_weight, weight, t, head, tokens, heads, scale, DIM: tl.constexpr, COLS: tl.constexpr,
           TOKENS: tl.constexpr):
    """What a head of the indexer counts for TOKENS tokens, one or four: the weights are read once, and each
    token's sum is what it would be alone."""
    c = tl.arange(0, COLS)
    acc = tl.zeros([COLS], tl.float32)
    acc_1, acc_2, acc_3 = acc, acc, acc
    line_w = tl.arange(0, COLS) * 32                    # elements of a line of the cache
    fetch(head_weight + head * DIM + tl.where(line_w < DIM, line_w, 0))
    follow()
    for start in range(0, DIM, COLS):
        inside = start + c < DIM
        w = tl.load(head_weight + head * DIM + start + c, mask=inside, other=0.0)
        at = h + t * DIM + start + c
        acc += w * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if TOKENS == 4:
            acc_1 += w * tl.load(at + DIM, mask=tl.where(t + 1 < tokens, inside, False),
                                 other=0.0).to(tl.float32)
            acc_2 += w * tl.load(at + 2 * DIM, mask=tl.where(t + 2 < tokens, inside, False),
                                 other=0.0).to(tl.float32)
            acc_3 += w * tl.load(at + 3 * DIM, mask=tl.where(t + 3 < tokens, inside, False),
                                 other=0.0).to(tl.float32)
    out = weight + t * heads + head
    tl.store(out, tl.sum(acc, 0) * scale)
    if TOKENS == 4:
        tl.store(out + heads, tl.sum(acc_1, 0) * scale, mask=t + 1 < tokens)
        tl.store(out + 2 * heads, tl.sum(acc_2, 0) * scale, mask=t + 2 < tokens)
        tl.store(out + 3 * heads, tl.sum(acc_3, 0) * scale, mask=t + 3 < tokens)


@triton.jit
def latent_rows(x, cos, sin, q_weight, row_weight, key_weight, key_bias, residual, key, h, head_weight,
                weight, eps, scale, x_token, Q: tl.constexpr, Q_PAD: tl.constexpr, RANK: tl.constexpr,
                RANK_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, KEY: tl.constexpr,
                KEY_PAD: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr, TOKENS: tl.constexpr):
    """One part of a token: what queries are made of, the row, the key of the indexer, and behind these what
    each of its heads weighs, out of the layer's input `h` of DIM: of TOKENS tokens by the first of them, each
    by itself. Weights of norms come before all else."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = x.dtype.element_ty
    line = x + t * x_token
    i = tl.arange(0, HALF_PAD)
    turn = i < HALF
    angle = t * 2 * HALF + i
    if part == 0:
        d_q = tl.arange(0, Q_PAD)
        own_q = d_q < Q
        w_q = tl.load(q_weight + d_q, mask=own_q, other=0.0).to(tl.float32)
        follow()
        v_q = tl.load(line + d_q, mask=own_q, other=0.0).to(tl.float32)
        v_q = v_q * tl.rsqrt(tl.sum(v_q * v_q, 0) / Q + eps) * w_q
        tl.store(residual + t * Q + d_q, v_q.to(kind), mask=own_q)
    elif part == 1:
        d_r = tl.arange(0, RANK_PAD)
        own_r = d_r < RANK
        w_r = tl.load(row_weight + d_r, mask=own_r, other=0.0).to(tl.float32)
        follow()
        v_r = tl.load(line + Q + d_r, mask=own_r, other=0.0).to(tl.float32)
        v_r = v_r * tl.rsqrt(tl.sum(v_r * v_r, 0) / RANK + eps) * w_r
        tl.store(line + Q + d_r, v_r.to(kind), mask=own_r)
        at = line + Q + RANK + i
        low_r = tl.load(at, mask=turn, other=0.0).to(tl.float32)
        high_r = tl.load(at + HALF, mask=turn, other=0.0).to(tl.float32)
        low_r, high_r = _turn(low_r, high_r, cos, sin, angle, turn, HALF, kind)
        tl.store(at, low_r.to(kind), mask=turn)
        tl.store(at + HALF, high_r.to(kind), mask=turn)
    elif part == 2:
        d = tl.arange(0, KEY_PAD)
        own = d < KEY
        w = tl.load(key_weight + d, mask=own, other=0.0).to(tl.float32)
        b = tl.load(key_bias + d, mask=own, other=0.0).to(tl.float32)
        w_low = tl.load(key_weight + i, mask=turn, other=0.0).to(tl.float32)
        w_high = tl.load(key_weight + HALF + i, mask=turn, other=0.0).to(tl.float32)
        b_low = tl.load(key_bias + i, mask=turn, other=0.0).to(tl.float32)
        b_high = tl.load(key_bias + HALF + i, mask=turn, other=0.0).to(tl.float32)
        follow()
        begin = line + Q + RANK + 2 * HALF
        v = tl.load(begin + d, mask=own, other=0.0).to(tl.float32)
        mean = tl.sum(v, 0) / KEY
        off = tl.where(own, v - mean, 0.0)
        scale = tl.rsqrt(tl.sum(off * off, 0) / KEY + eps)
        tl.store(key + t * KEY + d, (off * scale * w + b).to(kind), mask=own & (d >= 2 * HALF))
        low = tl.load(begin + i, mask=turn, other=0.0).to(tl.float32) - mean
        high = tl.load(begin + HALF + i, mask=turn, other=0.0).to(tl.float32) - mean
        low = (low * scale * w_low + b_low).to(kind).to(tl.float32)
        high = (high * scale * w_high + b_high).to(kind).to(tl.float32)
        low, high = _turn(low, high, cos, sin, angle, turn, HALF, kind)
        tl.store(key + t * KEY + i, low.to(kind), mask=turn)
        tl.store(key + t * KEY + HALF + i, high.to(kind), mask=turn)
    elif t % TOKENS == 0:
        _weigh(h, head_weight, weight, t, part - 3, tl.num_programs(0), tl.num_programs(1) - 3, scale, DIM,
               COLS, TOKENS)


@triton.jit
def latent_queries(x, q, index, cos, sin, x_token, x_turned, q_head, N, INDEX, HALF: tl.constexpr,
                   HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, HEADS: tl.constexpr):
    """Some heads of one token, of the N of attention and the INDEX of the indexer behind them."""
    follow()
    t = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = x.dtype.element_ty
    m = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    h = tl.arange(0, HALF_PAD)[None, :]
    line = x + t * x_token + x_turned
    own = (m < N + INDEX) & (h < HALF)
    low = tl.load(line + m * 2 * HALF + h, mask=own, other=0.0).to(tl.float32)
    high = tl.load(line + m * 2 * HALF + HALF + h, mask=own, other=0.0).to(tl.float32)
    low, high = _turn(low, high, cos, sin, t * 2 * HALF + h, h < HALF, HALF, kind)
    at_q = q + (t * N + m + 1) * q_head - 2 * HALF + h
    tl.store(at_q, low.to(kind), mask=own & (m < N))
    tl.store(at_q + HALF, high.to(kind), mask=own & (m < N))
    at_index = index + (t * INDEX + m - N) * (2 * HALF + REST)
    tl.store(at_index + h, low.to(kind), mask=own & (m >= N))
    tl.store(at_index + HALF + h, high.to(kind), mask=own & (m >= N))
    r = tl.arange(0, REST_PAD)[None, :]
    other = (m >= N) & (m < N + INDEX) & (r < REST)
    rest = tl.load(line + (N + INDEX) * 2 * HALF + (m - N) * REST + r, mask=other, other=0.0)
    tl.store(at_index + 2 * HALF + r, rest, mask=other)


@triton.jit(do_not_specialize=["T"])
def head_rows(x, weight, out, T, OUTPUTS, x_token, x_head, w_head, w_out, w_in, out_token, out_head,
              INPUTS: tl.constexpr, INPUTS_PAD: tl.constexpr, T_PAD: tl.constexpr, ROWS: tl.constexpr):
    """ROWS outputs of all rows of a head. Its weights are there before what is multiplied with them."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1)
    i, t = tl.arange(0, INPUTS_PAD), tl.arange(0, T_PAD)
    own = o < OUTPUTS
    w = tl.load(weight + n * w_head + o[:, None] * w_out + i[None, :] * w_in,
                mask=own[:, None] & (i < INPUTS)[None, :], other=0.0)
    follow()
    x_iT = tl.load(x + n * x_head + t[None, :] * x_token + i[:, None],
                   mask=(i < INPUTS)[:, None] & (t < T)[None, :], other=0.0)
    y = tl.dot(w, x_iT)
    tl.store(out + n * out_head + t[None, :] * out_token + o[:, None], y.to(out.dtype.element_ty),
             mask=own[:, None] & (t < T)[None, :])


FEW = 64             # rows that are weighed here
FEW_HEADS = 32       # that are multiplied head by head here
TILE = 1 << 14       # elements of a head's weight, which registers hold


class TritonOps:
    """`LayerOps` on a CUDA device. Capturable."""

    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        tokens, dim = h_TD.shape
        out_TD = torch.empty_like(h_TD)
        pad = triton.next_power_of_2(dim)
        add_norm[(tokens,)](h_TD, h_TD if delta_TD is None else delta_TD, weight_D, out_TD, eps, DIM=dim,
                            DIM_PAD=pad, ADD=delta_TD is not None,
                            num_warps=max(1, min(8, pad // 512)), **early())
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
            NORM=q_weight_H is not None, num_warps=1, **early())

    def latent_rows(self, x_TX: Tensor, norms: LatentNorms, cos_T1H: Tensor, sin_T1H: Tensor,
                    weighs: Weighs | None) -> tuple[Tensor, Tensor, Tensor]:
        tokens, turned = len(x_TX), cos_T1H.shape[2]
        (q_rank,), (rank,) = norms.q_Q.shape, norms.row_R.shape
        key = 0 if norms.index_J is None else norms.index_J.shape[0]
        assert x_TX.stride(1) == 1 and x_TX.shape[1] >= q_rank + rank + turned + key, "parts of a token"
        residual_TQ, key_TJ = x_TX.new_empty(tokens, q_rank), x_TX.new_empty(tokens, key)
        some, dim, heads = norms.q_Q, 1, 0
        h_TD = head_ID = weight_TI = x_TX.new_empty(tokens, 0)
        if weighs is not None and tokens > FEW:
            weight_TI = weighs()
        elif weighs is not None:
            h_TD, head_ID = weighs.x_TD, weighs.weight_ID
            assert key and h_TD.is_contiguous() and head_ID.is_contiguous(), "rows must be dense"
            heads, dim = head_ID.shape
            weight_TI = head_ID.new_empty(tokens, heads)
        latent_rows[(tokens, (3 if key else 2) + heads)](
            x_TX, cos_T1H, sin_T1H, norms.q_Q, norms.row_R, some if norms.index_J is None else norms.index_J,
            some if norms.bias_J is None else norms.bias_J, residual_TQ, key_TJ, h_TD, head_ID, weight_TI,
            norms.eps, 0.0 if weighs is None else weighs.scale, x_TX.stride(0),
            Q=q_rank, Q_PAD=triton.next_power_of_2(q_rank), RANK=rank, RANK_PAD=triton.next_power_of_2(rank),
            HALF=turned // 2, HALF_PAD=triton.next_power_of_2(turned // 2), KEY=key,
            KEY_PAD=triton.next_power_of_2(max(1, key)), DIM=dim,
            COLS=min(1024, triton.next_power_of_2(dim)), TOKENS=4 if tokens > 8 else 1, num_warps=4,
            **early())
        return residual_TQ, key_TJ, weight_TI

    def latent_queries(self, x_TX: Tensor, q_TNH: Tensor, index_heads: int, index_dim: int, cos_T1H: Tensor,
                       sin_T1H: Tensor) -> Tensor:
        tokens, heads, dim = q_TNH.shape
        turned, rest = cos_T1H.shape[2], (index_dim - cos_T1H.shape[2] if index_heads else 0)
        assert x_TX.stride(1) == 1 and q_TNH.is_contiguous(), "not dense"
        index_TIJ = x_TX.new_empty(tokens, index_heads, index_dim)
        at_once = 4
        latent_queries[(tokens, triton.cdiv(heads + index_heads, at_once))](
            x_TX, q_TNH, index_TIJ, cos_T1H, sin_T1H, x_TX.stride(0),
            x_TX.shape[1] - index_heads * index_dim - heads * turned, dim, heads, index_heads,
            HALF=turned // 2, HALF_PAD=triton.next_power_of_2(turned // 2), REST=rest,
            REST_PAD=triton.next_power_of_2(max(1, rest)), HEADS=at_once, num_warps=1, **early())
        return index_TIJ

    def by_head(self, x_TNH: Tensor, weight_NOH: Tensor, out_TNO: Tensor) -> None:
        tokens, heads, inputs = x_TNH.shape
        pad, outputs = max(16, triton.next_power_of_2(inputs)), weight_NOH.shape[1]
        if tokens > FEW_HEADS or x_TNH.dtype == torch.float32 or pad > TILE // 16:
            return by_head(x_TNH, weight_NOH, out_TNO)
        assert x_TNH.stride(2) == out_TNO.stride(2) == 1, "rows must be dense"
        rows = min(TILE // pad, max(16, triton.next_power_of_2(outputs)))
        head_rows[(triton.cdiv(outputs, rows), heads)](
            x_TNH, weight_NOH, out_TNO, tokens, outputs, *x_TNH.stride()[:2], *weight_NOH.stride(),
            *out_TNO.stride()[:2], INPUTS=inputs, INPUTS_PAD=pad,
            T_PAD=max(16, triton.next_power_of_2(tokens)), ROWS=rows, num_warps=4, **early())

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        tokens, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
        out_TI = torch.empty((tokens, width), dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
        block = min(1024, triton.next_power_of_2(width))
        silu_gate[(tokens, triton.cdiv(width, block))](
            gate_up_TJ, out_TI, gate_up_TJ.stride(0), width, BLOCK=block, num_warps=4, **early())
        return out_TI


OPS = TritonOps()
