"""Vectors into codes, as `penstock.kernels.types.fp8` has them, in one launch where torch takes a dozen.

Imported only where a CUDA device was asked for.

    H values of a vector   W bytes of one that is kept
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, follow


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
        scale = tl.math.div_rn(tl.max(tl.abs(amount), 0), 448.0)
        code = tl.math.div_rn(amount, tl.where(scale != 0, scale, 1.0))
        code = tl.where(amount != amount, amount, tl.minimum(tl.maximum(code, -448.0), 448.0))
        tl.store(codes + t * WIDTH + d, code.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=d < CODED)
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
