"""Vectors of KV in fp8, as a page has them: how they lie, and the rounding, which this file defines.

A vector of H values, of which the first `coded` are in fp8 (e4m3), each BLOCK of them with its own scale:

    coded bytes: the codes | f32 of each block: its scale | bf16 of each of the other H - coded values

An MLA KV entry of 512 and 64 takes 656 bytes, an indexer key of 128 takes 132. The scale is the largest amount
of its block / 448, so that this one is kept up to the rounding of a float; a code is to nearest, ties to
even. Pages of these are uint8: copies, moves and a pair carry bytes.

A key or value of a KV head is coded whole, and followed by zeros up to a multiple of 16 bytes: 64 values take 80
bytes, 128 take 144, 256 take 272. See ADR 0099.

Bounds of keys lie alike, all of them coded. A bound is rounded outward, so that it still is one; its scale is
the least power of two that keeps the largest amount within 448: a code times it is exact in any type.

    H values of a vector   W bytes of one that is kept   J index head dim   T tokens   C planes   K KV heads
"""
from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
LARGEST = 448.0             # that e4m3 has
_ALIGN = 16                 # bytes, of vectors of KV heads


def blocks_of(coded: int) -> int:
    return -(-coded // BLOCK)


def width(dim: int, coded: int) -> int:
    """W of vectors of `dim` values."""
    return coded + 4 * blocks_of(coded) + 2 * (dim - coded)


def encode(x_H: Tensor, coded: int) -> Tensor:
    """x [.., H], f32|bf16 -> uint8 [.., W], dense. What is not finite stays that."""
    if x_H.is_cuda and len(x_H):
        from penstock.kernels.triton import triton_codes  # needs Triton
        return triton_codes.encode(x_H, coded, width(x_H.shape[-1], coded))
    amount, blocks = x_H[..., :coded].float(), blocks_of(coded)
    block_bB = F.pad(amount, (0, blocks * BLOCK - coded)).reshape(*amount.shape[:-1], blocks, BLOCK)
    most_b1 = block_bB.abs().amax(-1, keepdim=True)
    scale_b1 = most_b1 / torch.full_like(most_b1, LARGEST)      # by a number, CUDA multiplies by its inverse
    code_bB = (block_bB / scale_b1.where(scale_b1 != 0, 1.0)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    parts = (code_bB.flatten(-2)[..., :coded], scale_b1.squeeze(-1), x_H[..., coded:].to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def decode(kept_W: Tensor, coded: int) -> Tensor:
    """uint8 [.., W] -> f32 [.., H]: code times scale, in f32."""
    end = coded + 4 * blocks_of(coded)
    code, scale, rest = (kept_W[..., at].contiguous() for at in (
        slice(coded), slice(coded, end), slice(end, None)))
    scale_b = scale.view(torch.float32).repeat_interleave(BLOCK, -1)[..., :coded]
    coded_H = code.view(torch.float8_e4m3fn).float() * scale_b
    return torch.cat((coded_H, rest.view(torch.bfloat16).float()), -1)


def head_width(dim: int) -> int:
    """W of keys and values of `dim` values, a multiple of 16."""
    return -(-width(dim, dim) // _ALIGN) * _ALIGN


def head_dim_of(wide: int) -> int:
    """The inverse of `head_width`, for multiples of 16: each 512 values have 16 bytes of scales or fewer."""
    return wide - _ALIGN * -(-wide // (4 * BLOCK + _ALIGN))


def encode_heads(kv_TCKH: Tensor) -> Tensor:
    """Return keys and values, C = 2, f32|bf16, dense in H, as pages of codes have them: uint8 [T, C, K, W], dense.
    What is not finite stays that; on a CUDA device such a value is zeros, and its key NaN (`attention.hidden`)."""
    dim = kv_TCKH.shape[-1]
    assert dim % _ALIGN == 0, f"heads of {dim} values"
    if kv_TCKH.is_cuda:
        from penstock.kernels.triton import triton_codes  # needs Triton
        return triton_codes.encode_heads(kv_TCKH, head_width(dim))
    return F.pad(encode(kv_TCKH, dim), (0, head_width(dim) - width(dim, dim)))


def kept_heads(kv_TCKH: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values as pages of `dtype` have them: coded where that is uint8, else as they are."""
    return encode_heads(kv_TCKH) if dtype == torch.uint8 else kv_TCKH


def heads_of(kept_W: Tensor, dtype: torch.dtype) -> Tensor:
    """What `kept_heads` has made, in `dtype`."""
    return decode_heads(kept_W, dtype) if kept_W.dtype == torch.uint8 else kept_W


def decode_heads(kept_W: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uint8 [.., W] of `encode_heads` as floats [.., H], dense: code times scale in f32, rounded to `dtype`."""
    dim = head_dim_of(kept_W.shape[-1])
    if kept_W.is_cuda:
        from penstock.kernels.triton import triton_codes  # needs Triton
        return triton_codes.decode_heads(kept_W, dim, dtype)
    return decode(kept_W[..., :width(dim, dim)], dim).to(dtype)


def by_power(x_H: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., H], f32|bf16 -> e4m3 [.., H] and f32 [..]: to nearest, ties to even, and the power of two that
    scales them: the least that keeps the largest amount within 448, and so what is exact in three bits stays
    that."""
    x_H = x_H.float()
    power = ((x_H.abs().amax(-1).view(torch.int32) + 0x1fffff >> 23) - 8).clamp_min(1)
    scale, over = (bits.to(torch.int32).view(torch.float32) for bits in (power << 23, 254 - power << 23))
    return (x_H * over[..., None]).to(torch.float8_e4m3fn), scale


def kept(x_H: Tensor, dtype: torch.dtype, coded: int) -> Tensor:
    """x [.., H] as pages of `dtype` have it: itself, rounded to that type, or coded where that is uint8."""
    if dtype == torch.uint8:
        return encode(x_H, coded)
    return x_H if x_H.dtype == dtype else x_H.to(dtype)


def floats(kept_W: Tensor, coded: int) -> Tensor:
    """f32 [.., H] of what a page has, whichever its dtype."""
    return decode(kept_W, coded) if kept_W.dtype == torch.uint8 else kept_W.float()


def outward(x_H: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    """A bound x [.., H], f32|bf16, as pages of `dtype` have it: never less if `up`, else never more."""
    if dtype == x_H.dtype:
        return x_H
    if dtype == torch.bfloat16:
        near_H, far = x_H.to(dtype), torch.tensor(float("inf") if up else float("-inf"), dtype=dtype)
        short_H = near_H.float() < x_H if up else near_H.float() > x_H
        return torch.where(short_H, torch.nextafter(near_H, far.to(x_H.device)), near_H)
    x_H, dim = x_H.float(), x_H.shape[-1]
    blocks = blocks_of(dim)
    block_bB = F.pad(x_H, (0, blocks * BLOCK - dim)).reshape(*x_H.shape[:-1], blocks, BLOCK)
    power_b = ((block_bB.abs().amax(-1).view(torch.int32) + 0x1fffff >> 23) - 8).clamp_min(1)
    scale_b, over_b = (bits.to(torch.int32).view(torch.float32) for bits in
                       (power_b << 23, 254 - power_b << 23))
    amount_H = x_H.abs() * over_b.repeat_interleave(BLOCK, -1)[..., :dim]
    away_H = (x_H > 0) == up
    small_H = torch.where(away_H, (amount_H * 512).ceil(), (amount_H * 512).floor()).int()
    large_H = (amount_H.view(torch.int32) + away_H * 0xfffff >> 20) - (120 << 3)
    code_H = small_H.where(amount_H < 2.0 ** -6, large_H)
    code_H = code_H.where(amount_H <= LARGEST, 0x7f) + 0x80 * (x_H < 0)
    return torch.cat((code_H.to(torch.uint8), scale_b.contiguous().view(torch.uint8)), -1)


SAME, BF16, FP8 = range(3)      # as in c/fp8.h


def format_of(pool: Tensor, q: Tensor) -> int:
    """What a page has, seen by queries of their type."""
    return FP8 if pool.dtype == torch.uint8 else SAME if pool.dtype == q.dtype else BF16


def format_of_bounds(bounds: Tensor, pool: Tensor) -> int:
    """What bounds are, seen by the keys of a pool; keys in codes become f32."""
    return (format_of(bounds, pool) if pool.dtype != torch.uint8 or bounds.dtype == torch.uint8 else
            SAME if bounds.dtype == torch.float32 else BF16)


@functools.cache
def signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A Hadamard matrix [size, size], of 1 and -1. Source: Sylvester, 1867."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    assert len(matrix) == size, f"{size} is no power of two"
    return matrix.to(device, dtype)


def mixed(x_J: Tensor) -> Tensor:
    """x [.., J] through a Hadamard matrix, in its dtype: products of two that are mixed stay what they were,
    and values of one vector become alike. J is a power of two.
    Source: DeepSeek-V3.2-Exp, its indexer; QuaRot, arXiv:2404.00456."""
    size = x_J.shape[-1]
    mixed_J: Tensor = x_J.float() @ signs(size, torch.float32, x_J.device) * size ** -0.5
    return mixed_J.to(x_J.dtype)
