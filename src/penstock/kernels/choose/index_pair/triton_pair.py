"""Queries and key of an indexer mixed and coded, in Triton: one launch where torch takes twenty.

Imported only where a CUDA device was asked for.

    T tokens   I index heads   J index head dim   W bytes of a key that is kept
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, follow
from penstock.kernels.types import fp8


@triton.jit
def mix_pair(q, weight, key, matrix, mixed, counts, codes, scales, weight_token, key_token, HEADS, factor,
             DIM: tl.constexpr, LINES: tl.constexpr, EXACT: tl.constexpr):
    """LINES heads of one token through a Hadamard matrix, or, behind them, its key, rounded as the reference
    rounds. `mixed` has the bytes of e4m3; `scales` are the codes seen as f32."""
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * LINES
    d = tl.arange(0, DIM)
    sign = tl.load(matrix + d[:, None] * DIM + d[None, :])         # nothing writes it
    n = first + tl.arange(0, LINES)
    follow()
    if first < HEADS:
        at = (t * HEADS + n)[:, None] * DIM + d[None, :]
        own = (n < HEADS)[:, None]
        x = tl.load(q + at, mask=own, other=0.0)
    else:
        own = (n == first)[:, None]
        x = tl.load(key + t * key_token + tl.where(own, d[None, :], 0), mask=own, other=0.0)
    x = tl.dot(x, sign, input_precision="ieee" if EXACT else "tf32") * factor
    amount = x.to(q.dtype.element_ty).to(tl.float32)
    if first < HEADS:
        most = tl.max(tl.abs(amount), 1).to(tl.int32, bitcast=True)
        power = tl.maximum(((most + 0x1fffff) >> 23) - 8, 1)
        code = (amount * ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float8e4nv)
        at = (t * HEADS + n)[:, None] * DIM + d[None, :]
        tl.store(mixed + at, code.to(tl.uint8, bitcast=True), mask=(n < HEADS)[:, None])
        count = tl.load(weight + t * weight_token + n, mask=n < HEADS, other=0.0)
        tl.store(counts + t * HEADS + n, count * (power << 23).to(tl.float32, bitcast=True), mask=n < HEADS)
    else:
        WIDTH: tl.constexpr = DIM + 4
        scale = tl.math.div_rn(tl.max(tl.abs(amount), 1), 448.0)
        code = tl.math.div_rn(amount, tl.where(scale != 0, scale, 1.0)[:, None])
        code = tl.minimum(tl.maximum(code, -448.0), 448.0).to(tl.float8e4nv)
        mine = n == first
        tl.store(codes + t * WIDTH + tl.where(own, d[None, :], 0), code.to(tl.uint8, bitcast=True), mask=own)
        tl.store(scales + (t * WIDTH + DIM) // 4 + n - first, scale, mask=mine)


LINES = 16          # heads that a program mixes: the least that are multiplied


def index_pair(q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `penstock.kernels.choose.index_pair`. Capturable."""
    tokens, heads, dim = q_TIJ.shape
    assert q_TIJ.is_contiguous() and weight_TI.stride(1) == key_TJ.stride(1) == 1, "not dense"
    assert 16 <= dim <= fp8.BLOCK and dim & dim - 1 == 0, f"{dim} is no power of two from 16 to 128"
    mixed_TIJ = torch.empty_like(q_TIJ, dtype=torch.float8_e4m3fn)
    count_TI = torch.empty(tokens, heads, dtype=torch.float32, device=q_TIJ.device)
    kept_TW = torch.empty(tokens, fp8.width(dim, dim), dtype=torch.uint8, device=q_TIJ.device)
    mix_pair[(tokens, triton.cdiv(heads, LINES) + 1)](
        q_TIJ, weight_TI, key_TJ, fp8.signs(dim, q_TIJ.dtype, q_TIJ.device), mixed_TIJ.view(torch.uint8),
        count_TI, kept_TW, kept_TW.view(torch.float32), weight_TI.stride(0), key_TJ.stride(0), heads,
        dim ** -0.5, DIM=dim, LINES=LINES, EXACT=q_TIJ.dtype == torch.float32, num_warps=4, **early())
    return mixed_TIJ, count_TI, kept_TW
