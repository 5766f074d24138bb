"""y = x W^T for one to a few dozen rows of x, in Triton: the weight is read once, at the memory's speed.

For one row each program keeps a tile of partial products and sums it at the end; for more, weights
are the large operand of a matrix product. Imported only where a CUDA device was asked for.

    T rows of x   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, fetch, follow, wait


@triton.jit
def _begin(line, own, INPUTS: tl.constexpr):
    """The beginnings of a program's rows into the cache: weights do not hang on who is in front."""
    at = tl.arange(0, 16)[None, :] * 64                     # elements of a line of the cache
    fetch(line + tl.where(own[:, None] & (at < INPUTS), at, 0))


@triton.jit
def one_row(x, weight, bias, out, OUTPUTS, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
            STAGES: tl.constexpr, BIAS: tl.constexpr):
    """ROWS outputs of one row."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    own = o < OUTPUTS
    line = weight + o.to(tl.int64)[:, None] * INPUTS
    _begin(weight + tl.where(own, o, 0).to(tl.int64)[:, None] * INPUTS, own, INPUTS)
    wait()
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(0, INPUTS, COLS, num_stages=STAGES):
        inside = start + c < INPUTS
        w = tl.load(line + start + c[None, :], mask=own[:, None] & inside[None, :], other=0.0,
                    eviction_policy="evict_first")
        acc += w.to(tl.float32) * tl.load(x + start + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + o, mask=own, other=0.0).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["T"])
def few_rows(x, weight, bias, out, T, OUTPUTS, x_row, INPUTS: tl.constexpr, T_PAD: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr, BIAS: tl.constexpr):
    """ROWS outputs of all T rows."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    t = tl.arange(0, T_PAD)
    own = o < OUTPUTS
    line = weight + o.to(tl.int64)[:, None] * INPUTS
    _begin(weight + tl.where(own, o, 0).to(tl.int64)[:, None] * INPUTS, own, INPUTS)
    follow()
    acc = tl.zeros([ROWS, T_PAD], tl.float32)
    for start in range(0, INPUTS, COLS):
        inside = start + c < INPUTS
        w = tl.load(line + start + c[None, :], mask=own[:, None] & inside[None, :], other=0.0,
                    eviction_policy="evict_first")
        x_TI = tl.load(x + t[:, None] * x_row + start + c[None, :],
                       mask=(t < T)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x_TI), acc)
    if BIAS:
        acc += tl.load(bias + o, mask=own, other=0.0).to(tl.float32)[:, None]
    tl.store(out + t[None, :].to(tl.int64) * OUTPUTS + o[:, None], acc.to(out.dtype.element_ty),
             mask=own[:, None] & (t < T)[None, :])


@dataclass(frozen=True, slots=True)
class TileShape:
    """Outputs and inputs of a program's tile, warps, stages of loads."""

    rows: int
    cols: int
    warps: int
    stages: int


FEW_MAX = 32          # rows; from there on cuBLAS is as fast
# Measured on an H200 over weights of 8B models (bench/device), beside cuBLAS at 2.6 to 4.1 TB/s; few and
# middle in steps of Qwen3-30B-A3B and of W1 on an H100.
_FEW, _MIDDLE, _LARGE, _HEAD = 512, 4096, 16384, 65536        # outputs; few: a router's


def cut_of(rows: int, outputs: int) -> TileShape:
    if rows == 1:
        return TileShape(2, 2048, 4, 1) if outputs >= _LARGE or outputs <= _FEW else TileShape(8, 512, 4, 3)
    if outputs >= _HEAD:
        return TileShape(128, 128, 8, 4)
    if rows > 16:
        return TileShape(32, 256, 4, 4) if outputs < 6144 else TileShape(64, 128, 4, 5)
    return TileShape(16, 256, 4, 6) if _MIDDLE <= outputs < 2 * _MIDDLE else TileShape(64, 128, 4, 5)


def run(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, cut: TileShape | None = None) -> Tensor:
    """y_TO. x bf16, dense in I; the weight bf16 and dense; T at most FEW_MAX. Capturable."""
    tokens, (outputs, inputs) = x_TI.shape[0], weight_OI.shape
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous(), "rows must be dense"
    out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    bias = weight_OI if bias_O is None else bias_O
    cut = cut or cut_of(tokens, outputs)
    if tokens == 1:
        one_row[(triton.cdiv(outputs, cut.rows),)](
            x_TI, weight_OI, bias, out_TO, outputs, INPUTS=inputs, ROWS=cut.rows, COLS=cut.cols,
            STAGES=cut.stages, BIAS=bias_O is not None, num_warps=cut.warps, **early())
        return out_TO
    few_rows[(triton.cdiv(outputs, cut.rows),)](
        x_TI, weight_OI, bias, out_TO, tokens, outputs, x_TI.stride(0), INPUTS=inputs,
        T_PAD=max(16, triton.next_power_of_2(tokens)), ROWS=cut.rows, COLS=cut.cols,
        BIAS=bias_O is not None, num_warps=cut.warps, num_stages=cut.stages, **early())
    return out_TO


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Implement `Pack`: cuBLAS, and Triton for a few rows in bf16."""
    weight_OI = weight_OI.contiguous()
    few = FEW_MAX if weight_OI.dtype == torch.bfloat16 else 0

    def linear(x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] <= few:
            return run(x_TI, weight_OI, bias_O)
        return F.linear(x_TI, weight_OI, bias_O)
    return linear
