"""A tile of a matrix product whose weights are floats or block-scaled fp8, for kernels in Triton.

Imported only where a CUDA device was asked for.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.types.packed import Packed


@triton.jit
def add_product(acc, weight, scale, row, own, x_JK, start, SCALES, INPUTS: tl.constexpr,
                COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SCALED: tl.constexpr,
                EXACT: tl.constexpr):
    """acc + weight[row, start:start + COLS] x_JK^T, in float32, of which rows that are not `own` are 0.

    x_JK is 0 beyond INPUTS. SCALED: the weight is the bytes of e4m3; the tile lies in one block of columns.
    """
    k = start + tl.arange(0, COLS)
    at = row.to(tl.int64)[:, None] * INPUTS + k[None, :]
    inside = own[:, None] & (k < INPUTS)[None, :]
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    if SCALED:
        # Bytes, as what is masked is 0: an e4m3 from elsewhere might be NaN.
        byte = tl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
        # Through float32: what makes a bfloat16 out of a half takes eight times as long.
        w = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(x_JK.dtype)
        at_scale = row.to(tl.int64) // BLOCK_ROWS * SCALES + start // BLOCK_COLS
        s = tl.load(scale + at_scale, mask=own, other=0.0)
        acc += tl.dot(w, tl.trans(x_JK), input_precision=precision) * s[:, None]
    else:
        w = tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(x_JK), acc, input_precision=precision)
    return acc


def tile_cols(weight: Tensor | Packed, most: int) -> int:
    """Columns of a tile: a power of two up to `most`, and of a packed weight one that divides its blocks."""
    if not isinstance(weight, Packed):
        return most
    cols = min(most, weight.cols & -weight.cols)
    assert cols >= 16, f"blocks of {weight.cols} columns"
    return cols


def parts_of(weight: Tensor | Packed) -> tuple[Tensor, Tensor, int, dict[str, int | bool]]:
    """For a kernel: elements, scales, scales of a row of blocks, and the constants of `add_product`."""
    if isinstance(weight, Packed):
        assert weight.kind == "e4m3", "codes of integers are read on a CPU"
        assert weight.code_OI.is_contiguous() and weight.scale_RJ.is_contiguous(), "not dense"
        return (weight.code_OI.view(torch.uint8), weight.scale_RJ, weight.scale_RJ.shape[1],
                dict(BLOCK_ROWS=weight.rows, BLOCK_COLS=weight.cols, SCALED=True))
    assert weight.is_contiguous(), "not dense"
    return weight, weight, 0, dict(BLOCK_ROWS=1, BLOCK_COLS=1, SCALED=False)
