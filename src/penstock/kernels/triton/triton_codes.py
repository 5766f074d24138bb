"""Vectors into codes, as `penstock.kernels.types.fp8` has them, in one launch where torch takes a dozen.

Imported only where a CUDA device was asked for.

    H values of a vector   W bytes of one that is kept   T tokens   C planes   K KV heads   R vectors
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.coded import floats_of
from penstock.kernels.triton.depend import early, follow


@triton.jit
def _code_block(amount):
    """f32 [128] -> e4m3 as bytes, and their scale."""
    scale = tl.math.div_rn(tl.max(tl.abs(amount), 0), 448.0)
    code = tl.math.div_rn(amount, tl.where(scale != 0, scale, 1.0))
    code = tl.where(amount != amount, amount, tl.minimum(tl.maximum(code, -448.0), 448.0))
    return code.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def encode_rows(x, codes, scales, rests, x_row, DIM: tl.constexpr, CODED: tl.constexpr, WIDTH: tl.constexpr,
                REST_PAD: tl.constexpr):
    """One vector. `scales` and `rests` are the codes seen as f32 and as bf16."""
    follow()
    t = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (CODED + 127) // 128
    for block in tl.static_range(blocks):
        d = block * 128 + tl.arange(0, 128)
        amount = tl.load(x + t * x_row + d, mask=d < CODED, other=0.0).to(tl.float32)
        code, scale = _code_block(amount)
        tl.store(codes + t * WIDTH + d, code, mask=d < CODED)
        tl.store(scales + (t * WIDTH + CODED) // 4 + block, scale)
    if DIM > CODED:
        r = tl.arange(0, REST_PAD)
        own = r < DIM - CODED
        rest = tl.load(x + t * x_row + CODED + r, mask=own, other=0.0)
        tl.store(rests + (t * WIDTH + CODED) // 2 + 2 * blocks + r, rest.to(tl.bfloat16), mask=own)


def encode(x_H: Tensor, coded: int, wide: int) -> Tensor:
    """Implement `fp8.encode` for vectors that are dense in H, into W = `wide` bytes. Capturable."""
    dim = x_H.shape[-1]
    x_TH = x_H.reshape(-1, dim)
    assert x_TH.stride(1) == 1 and coded % 4 == wide % 4 == 0, f"vectors of {dim}, of which {coded} are coded"
    kept_TW = torch.empty(len(x_TH), wide, dtype=torch.uint8, device=x_H.device)
    encode_rows[(len(x_TH),)](
        x_TH, kept_TW, kept_TW.view(torch.float32), kept_TW.view(torch.bfloat16), x_TH.stride(0), DIM=dim,
        CODED=coded, WIDTH=wide, REST_PAD=triton.next_power_of_2(max(1, dim - coded)), num_warps=1, **early())
    return kept_TW.view(*x_H.shape[:-1], wide)


@triton.jit
def encode_pairs(x, codes, scales, x_token, x_plane, x_head, HEADS: tl.constexpr, DIM: tl.constexpr,
                 WIDTH: tl.constexpr):
    """Key and value of one token and KV head. `scales` are the codes seen as f32."""
    follow()
    t, k = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    blocks: tl.constexpr = (DIM + 127) // 128
    at = x + t * x_token + k * x_head
    faults = 0
    for block in tl.static_range(blocks):
        d = block * 128 + tl.arange(0, 128)
        value = tl.load(at + x_plane + d, mask=d < DIM, other=0.0).to(tl.float32)
        faults = tl.maximum(faults, tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), 0))
    for plane in tl.static_range(2):
        to = ((t * 2 + plane) * HEADS + k) * WIDTH
        for block in tl.static_range(blocks):
            d = block * 128 + tl.arange(0, 128)
            amount = tl.load(at + plane * x_plane + d, mask=d < DIM, other=0.0).to(tl.float32)
            amount = tl.where(faults > 0, float("nan") if plane == 0 else 0.0, amount)
            code, scale = _code_block(amount)
            tl.store(codes + to + d, code, mask=d < DIM)
            tl.store(scales + (to + DIM) // 4 + block, scale)
        rest = tl.arange(0, 4)
        tl.store(scales + (to + DIM) // 4 + blocks + rest, tl.zeros([4], tl.float32),
                 mask=rest < (WIDTH - DIM) // 4 - blocks)


def encode_heads(kv_TCKH: Tensor, wide: int) -> Tensor:
    """Implement `fp8.encode_heads`, into W = `wide` bytes. Capturable."""
    tokens, planes, heads, dim = kv_TCKH.shape
    assert planes == 2 and kv_TCKH.stride(3) == 1 and dim % 4 == 0, "keys and values that are dense"
    kept_TCKW = torch.empty(tokens, planes, heads, wide, dtype=torch.uint8, device=kv_TCKH.device)
    encode_pairs[(tokens * heads,)](
        kv_TCKH, kept_TCKW, kept_TCKW.view(torch.float32), *kv_TCKH.stride()[:3], HEADS=heads, DIM=dim, WIDTH=wide,
        num_warps=1, **early())
    return kept_TCKW


@triton.jit
def decode_vectors(codes, scales, out, NUM, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
                   LINES: tl.constexpr):
    """LINES vectors that lie together."""
    follow()
    r = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    inside = (r < NUM) & (d < DIM)
    x = floats_of(codes, scales, r * WIDTH, d, inside, DIM)
    tl.store(out + r * DIM + d, x.to(out.dtype.element_ty), mask=inside)


def decode_heads(kept_W: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Implement `fp8.decode_heads`. Capturable."""
    kept_RW = kept_W.contiguous().view(-1, kept_W.shape[-1])
    out = torch.empty(*kept_W.shape[:-1], dim, dtype=dtype, device=kept_W.device)
    num, pad = len(kept_RW), triton.next_power_of_2(dim)
    lines = max(1, 4096 // pad)
    if num:
        decode_vectors[(triton.cdiv(num, lines),)](
            kept_RW, kept_RW.view(torch.float32), out, num, DIM=dim, DIM_PAD=pad, WIDTH=kept_RW.shape[1], LINES=lines,
            num_warps=4, **early())
    return out
