"""y = x W^T with W in block-scaled fp8, in Triton, and of a few rows of bfloat16 in C++: elements are read
once, and become floats in registers.

Imported only where a CUDA device was asked for.

    T rows of x   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.tiles import add_product, parts_of, tile_cols
from penstock.kernels.types.packed import Packed


@triton.jit(do_not_specialize=["T"])
def scaled_rows(x, weight, scale, bias, out, T, OUTPUTS, x_row, SCALES, INPUTS: tl.constexpr,
                T_PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                BLOCK_COLS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr):
    """ROWS outputs of all T rows."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    t = tl.arange(0, T_PAD)
    own = o < OUTPUTS
    acc = tl.zeros([ROWS, T_PAD], tl.float32)
    for start in range(0, INPUTS, COLS):
        x_TK = tl.load(x + t.to(tl.int64)[:, None] * x_row + start + c[None, :],
                       mask=(t < T)[:, None] & (start + c < INPUTS)[None, :], other=0.0)
        acc = add_product(acc, weight, scale, o, own, x_TK, start, SCALES, INPUTS, COLS, BLOCK_ROWS,
                          BLOCK_COLS, SCALED, EXACT)
    if BIAS:
        acc += tl.load(bias + o, mask=own, other=0.0).to(tl.float32)[:, None]
    tl.store(out + t[None, :].to(tl.int64) * OUTPUTS + o[:, None], acc.to(out.dtype.element_ty),
             mask=own[:, None] & (t < T)[None, :])


@triton.jit
def dequantise(weight, scale, out, OUTPUTS, INPUTS, SCALES, ROWS: tl.constexpr, COLS: tl.constexpr,
               BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """ROWS x COLS elements of what the weight means; COLS divides BLOCK_COLS."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLS
    c = first + tl.arange(0, COLS)
    inside = (o < OUTPUTS)[:, None] & (c < INPUTS)[None, :]
    at = o.to(tl.int64)[:, None] * INPUTS + c[None, :]
    byte = tl.load(weight + at, mask=inside, other=0)
    s = tl.load(scale + o // BLOCK_ROWS * SCALES + first // BLOCK_COLS, mask=o < OUTPUTS, other=0.0)
    w = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * s[:, None]
    tl.store(out + at, w.to(out.dtype.element_ty), mask=inside)


FEW_MAX = 64                    # rows; not measured on a device yet
CPP_MAX, CHUNK = 16, 64         # rows of the kernel in C++, and inputs that it multiplies at once
# Of seven ways the best in a step of Qwen3-30B-A3B on an H100, blocks: two for each of its processors.
_WARPS, _AHEAD, _BLOCKS = 8, 4, 264


def _in_cpp(x_TI: Tensor, weight: Packed, element: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> bool:
    """Whether out_TO has been written: not of many rows, of float32, of odd blocks, or without NVRTC."""
    tokens, (outputs, inputs) = x_TI.shape[0], weight.shape
    several = weight.cols // CHUNK
    if (not 0 < tokens <= CPP_MAX or x_TI.dtype != torch.bfloat16 or inputs % CHUNK
            or weight.cols != several * CHUNK or several & (several - 1) or x_TI.stride(0) % 8
            or x_TI.data_ptr() % 16 or element.data_ptr() % 16):
        return False
    launch = device.launcher(Path(__file__).with_name("scaled_rows.cu"), "scaled_rows", WARPS=_WARPS,
                             AHEAD=_AHEAD, TILES=triton.cdiv(tokens, 8))
    if launch is None:
        return False
    launch((min(triton.cdiv(outputs, 16), _BLOCKS), 1), 32 * _WARPS, x_TI, element, weight.scale_RJ,
           0 if bias_O is None else bias_O, out_TO, tokens, outputs, inputs, x_TI.stride(0), weight.rows,
           several.bit_length() - 1, weight.scale_RJ.shape[1])
    return True


def run(x_TI: Tensor, weight: Packed, bias_O: Tensor | None) -> Tensor:
    """y_TO, dtype of x, which is dense in I; T at most FEW_MAX. Capturable."""
    tokens, (outputs, inputs) = x_TI.shape[0], weight.shape
    assert x_TI.stride(1) == 1 and x_TI.shape[1] == inputs, "rows must be dense and fit"
    out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    element, scale, scales, constants = parts_of(weight)
    if _in_cpp(x_TI, weight, element, bias_O, out_TO):
        return out_TO
    rows, exact = 32, x_TI.dtype == torch.float32
    scaled_rows[(triton.cdiv(outputs, rows),)](
        x_TI, element, scale, scale if bias_O is None else bias_O, out_TO, tokens, outputs, x_TI.stride(0),
        scales, INPUTS=inputs, T_PAD=max(16, triton.next_power_of_2(tokens)), ROWS=rows,
        COLS=tile_cols(weight, 64 if exact else 128), BIAS=bias_O is not None, EXACT=exact, num_warps=4,
        num_stages=4, **constants)
    return out_TO


def floats(weight: Packed, dtype: torch.dtype) -> Tensor:
    """[O, I]: what the weight means, rounded to `dtype`. Capturable."""
    outputs, inputs = weight.shape
    out_OI = torch.empty(weight.shape, dtype=dtype, device=weight.scale_RJ.device)
    element, scale, scales, _ = parts_of(weight)
    rows, cols = 32, tile_cols(weight, 128)
    dequantise[(triton.cdiv(outputs, rows), triton.cdiv(inputs, cols))](
        element, scale, out_OI, outputs, inputs, scales, ROWS=rows, COLS=cols, BLOCK_ROWS=weight.rows,
        BLOCK_COLS=weight.cols, num_warps=4)
    return out_OI


def pack(weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Implement `Pack`: for more than a few rows cuBLAS, after a dequantised copy."""
    def linear(x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] <= FEW_MAX:
            return run(x_TI, weight, bias_O)
        return F.linear(x_TI, floats(weight, x_TI.dtype), bias_O)
    return linear


def pack_in_triton(weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Pack as `pack` does; for a few rows Triton's kernel, not that in C++."""
    return alone(pack(weight, bias_O))
