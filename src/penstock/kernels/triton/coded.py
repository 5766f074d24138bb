"""Keys and values in codes, as `penstock.kernels.types.fp8` has them, where kernels of several ops in Triton read them.

Imported only where a CUDA device was asked for.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def floats_of(codes, scales, at, d, inside, DIM: tl.constexpr):
    """f32 of vectors that begin at the bytes `at` [N, 1], 0 where not `inside` [N, D]."""
    byte = tl.load(codes + at + d, mask=inside, other=0)
    x = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    part: tl.constexpr = min(x.shape[1], 128)
    blocks: tl.constexpr = x.shape[1] // part
    b = tl.arange(0, blocks)[None, :]
    seen = tl.max(inside.to(tl.int32), 1)[:, None] > 0
    scale = tl.load(scales + (at + DIM) // 4 + b, mask=seen & (b * 128 < DIM), other=0.0)
    x = tl.reshape(x, (x.shape[0], blocks, part)) * scale[:, :, None]
    return tl.reshape(x, (x.shape[0], blocks * part))


@triton.jit
def kept_vectors(x, words, at, d, seen, inside, DTYPE: tl.constexpr, DIM: tl.constexpr, CODED: tl.constexpr):
    """Vectors of a pool that begin at the elements `at` [N], 0 where not `inside` [N, D], and what to multiply their
    products with, [N], 0 where not `seen`. Codes of one block are exact in DTYPE, and so have their scale left; those
    of several are multiplied by theirs here, and rounded."""
    if CODED:
        if DIM <= 128:
            byte = tl.load(x + at[:, None] + d[None, :], mask=inside, other=0)
            value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
            scale = tl.load(words + (at + DIM) // 4, mask=seen, other=0.0)
        else:
            value = floats_of(x, words, at[:, None], d[None, :], inside, DIM).to(DTYPE)
            scale = tl.where(seen, 1.0, 0.0)
    else:
        value = tl.load(x + at[:, None] + d[None, :], mask=inside, other=0.0)
        scale = tl.where(seen, 1.0, 0.0)
    return value, scale


def words_of(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as f32, where their scales are read; pools of floats as they are."""
    if k.dtype != torch.uint8:
        return k, v
    return k.view(torch.float32), v.view(torch.float32)
