"""A tile of a matrix product whose weights are floats or packed codes, for kernels in Triton.

Imported only where a CUDA device was asked for.
"""
from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.types.packed import ZERO, Packed

Constants: TypeAlias = "dict[str, int | str]"
_ONE = 1 << 30                  # columns of a block that is as wide as its weight


@triton.jit
def codes_of(weight, row, own, start, INPUTS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr,
             LESS: tl.constexpr):
    """float32 [rows, COLS]: the codes of some columns, of integers less LESS. Those beyond are of byte 0."""
    at = row.to(tl.int64)[:, None]
    if KIND == "u4" or KIND == "e2m1":
        h = start // 2 + tl.arange(0, COLS // 2)
        byte = tl.load(weight + at * (INPUTS // 2) + h[None, :], mask=own[:, None] & (h < INPUTS // 2)[None, :],
                       other=0, eviction_policy="evict_first").to(tl.int32)
        low, high = byte & 15, byte >> 4
        if KIND == "u4":        # 2^23 + n has n in the lowest bits of a float32
            low = (low | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)
            high = (high | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)
        else:                   # sign, exponent and fraction where those of a half are: 2^-14 of what it means
            low = ((low & 8) << 12 | (low & 7) << 9).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
            high = ((high & 8) << 12 | (high & 7) << 9).to(tl.uint16).to(tl.float16, bitcast=True).to(
                tl.float32) * 16384.0
        return tl.join(low, high).reshape(row.shape[0], COLS)
    k = start + tl.arange(0, COLS)
    # Bytes, as what is masked is 0: an e4m3 from elsewhere might be NaN.
    byte = tl.load(weight + at * INPUTS + k[None, :], mask=own[:, None] & (k < INPUTS)[None, :], other=0,
                   eviction_policy="evict_first")
    if KIND == "u8":
        return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)
    # Through float32: what makes a bfloat16 out of a half takes eight times as long.
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def weights_of(weight, scale, offset, row, own, start, SCALES, INPUTS: tl.constexpr, COLS: tl.constexpr,
               BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
               ZERO_CODE: tl.constexpr):
    """float32 [rows, COLS]: what packed weights mean, finite beyond the columns there are."""
    ROWS: tl.constexpr = row.shape[0]
    NUM: tl.constexpr = (COLS + BLOCK_COLS - 1) // BLOCK_COLS         # blocks of columns in a tile
    LESS: tl.constexpr = ZERO_CODE if OFFSET == "" else 0
    w = codes_of(weight, row, own, start, INPUTS, COLS, KIND, LESS).reshape(ROWS, NUM, COLS // NUM)
    j = start // BLOCK_COLS + tl.arange(0, NUM)
    at = row.to(tl.int64)[:, None] // BLOCK_ROWS * SCALES + j[None, :]
    there = own[:, None] & (j < SCALES)[None, :]
    s = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    if OFFSET == "shift":
        w = w * s + tl.load(offset + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
    elif OFFSET == "code":
        w = (w - tl.load(offset + at, mask=there, other=0).to(tl.float32)[:, :, None]) * s
    else:
        w = w * s
    return w.reshape(ROWS, COLS)


@triton.jit
def add_product(acc, weight, scale, offset, row, own, x_JK, start, SCALES, INPUTS: tl.constexpr,
                COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, KIND: tl.constexpr,
                OFFSET: tl.constexpr, ZERO_CODE: tl.constexpr, EXACT: tl.constexpr):
    """acc + weight[row, start:start + COLS] x_JK^T, in float32, of which rows that are not `own` are 0.

    x_JK is 0 beyond INPUTS. KIND: "floats", or of a `Packed`. Codes of a tile that lies in one block of columns are
    exact in bfloat16 and scaled after the product; of smaller blocks weights are rounded to the type of x.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    if KIND == "floats":
        k = start + tl.arange(0, COLS)
        at = row.to(tl.int64)[:, None] * INPUTS + k[None, :]
        w = tl.load(weight + at, mask=own[:, None] & (k < INPUTS)[None, :], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(x_JK), acc, input_precision=precision)
    elif COLS <= BLOCK_COLS and OFFSET != "shift":
        LESS: tl.constexpr = ZERO_CODE if OFFSET == "" else 0
        w = codes_of(weight, row, own, start, INPUTS, COLS, KIND, LESS)
        at_scale = row.to(tl.int64) // BLOCK_ROWS * SCALES + start // BLOCK_COLS
        if OFFSET == "code":
            w -= tl.load(offset + at_scale, mask=own, other=0).to(tl.float32)[:, None]
        s = tl.load(scale + at_scale, mask=own, other=0.0).to(tl.float32)
        acc += tl.dot(w.to(x_JK.dtype), tl.trans(x_JK), input_precision=precision) * s[:, None]
    else:
        w = weights_of(weight, scale, offset, row, own, start, SCALES, INPUTS, COLS, BLOCK_ROWS, BLOCK_COLS, KIND,
                       OFFSET, ZERO_CODE)
        acc = tl.dot(w.to(x_JK.dtype), tl.trans(x_JK), acc, input_precision=precision)
    return acc


def tile_cols(weight: Tensor | Packed, most: int, *, exact: bool) -> int:
    """Columns of a tile, a power of two up to `most`: of a packed weight they are several blocks or divide one.
    exact: of float32, where a tile of several has been seen to go wrong (experts in e4m3 on an H200, Triton of torch
    2.11)."""
    if not isinstance(weight, Packed) or weight.scale_RJ.shape[1] == 1:
        return most
    return min(most, weight.cols) if exact else most


def parts_of(weight: Tensor | Packed) -> tuple[Tensor, Tensor, Tensor, int, Constants]:
    """For a kernel: elements, scales, offsets, scales of a row of blocks, and the constants of `add_product`."""
    assert isinstance(weight, Packed) or weight.is_contiguous(), "not dense"
    if not isinstance(weight, Packed):
        return weight, weight, weight, 0, dict(BLOCK_ROWS=1, BLOCK_COLS=1, KIND="floats", OFFSET="", ZERO_CODE=0)
    scale, offset = weight.scale_RJ, weight.offset_RJ
    assert weight.code_OI.is_contiguous() and scale.is_contiguous(), "not dense"
    assert offset is None or offset.is_contiguous(), "not dense"
    blocks = scale.shape[1]
    assert blocks == 1 or (weight.cols >= 16 and weight.cols & (weight.cols - 1) == 0), (
        f"blocks of {weight.cols} columns: see `Packed.regular`")
    return (weight.code_OI.view(torch.uint8), scale, scale if offset is None else offset, blocks, dict(
        BLOCK_ROWS=weight.rows, BLOCK_COLS=_ONE if blocks == 1 else weight.cols, KIND=weight.kind,
        OFFSET="" if offset is None else "shift" if offset.is_floating_point() else "code",
        ZERO_CODE=ZERO[weight.kind]))
