"""y = x W^T of many rows with W in e4m3, and x quantised to e4m3: the tensor cores of Hopper multiply both.

A row of x has a scale for each 128 columns, as its weight has blocks of 128 x 128, or one. Of fewer rows, and of other
weights, as `triton_packed`. Imported only where a CUDA device was asked for.

    T rows of x   O outputs   I inputs   J blocks of columns
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gemm.linear import triton_packed
from penstock.kernels.op import Unusable
from penstock.kernels.platform import Platform
from penstock.kernels.types.fp8 import LARGEST
from penstock.kernels.types.packed import E4M3, Packed

BLOCK, GROUP = 128, 8           # columns of a block, blocks of a program: each of its 128 threads has 16 bytes
LEAST_ROWS = triton_packed.TILE_MAX + 1         # fewer stay in the type of x: decoding, and checks of drafts


@triton.jit
def quantise_blocks(x, codes, scales, T, x_row, INPUTS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """GROUP blocks of COLS columns of a row: their codes, and their scales, [J, T]."""
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = g[:, None] * COLS + tl.arange(0, COLS)[None, :]
    values = tl.load(x + t * x_row + at, mask=at < INPUTS, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / 448.0
    code = tl.minimum(tl.maximum(values / scale[:, None], -448.0), 448.0)
    tl.store(codes + t * INPUTS + at, code.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=at < INPUTS)
    tl.store(scales + g.to(tl.int64) * T + t, scale, mask=g < tl.cdiv(INPUTS, COLS))


@triton.jit
def quantise_rows(x, codes, scales, T, x_row, INPUTS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    """A row's codes of COLS columns, and their scale, [J, T]: where COLS is all of them."""
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLS
    c = tl.arange(0, TILE)
    most = tl.zeros([TILE], tl.float32)
    for start in tl.static_range(0, COLS, TILE):
        at = first + start + c
        most = tl.maximum(most, tl.abs(tl.load(x + t * x_row + at, mask=at < INPUTS, other=0.0).to(tl.float32)))
    scale = tl.maximum(tl.max(most, 0), 1e-12) / 448.0
    for start in tl.static_range(0, COLS, TILE):
        at = first + start + c
        code = tl.load(x + t * x_row + at, mask=at < INPUTS, other=0.0).to(tl.float32) / scale
        code = tl.minimum(tl.maximum(code, -448.0), 448.0)
        tl.store(codes + t * INPUTS + at, code.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=at < INPUTS)
    tl.store(scales + tl.program_id(1).to(tl.int64) * T + t, scale)


def quantise(x_TI: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [T, I], scales f32 [T, J] of which T lies together) of x, dense in I; cols: of a scale, I or 128.
    T is rounded up to a multiple of 4, as cuBLAS needs it; rows beyond are of no use. Capturable."""
    tokens, inputs = x_TI.shape
    padded = triton.cdiv(tokens, 4) * 4
    code_TI = torch.empty((padded, inputs), dtype=torch.uint8, device=x_TI.device)
    scale_JT = torch.empty((triton.cdiv(inputs, cols), padded), dtype=torch.float32, device=x_TI.device)
    if cols == BLOCK:
        quantise_blocks[(tokens, triton.cdiv(len(scale_JT), GROUP))](
            x_TI, code_TI, scale_JT, padded, x_TI.stride(0), INPUTS=inputs, COLS=cols, GROUP=GROUP, num_warps=4)
    else:
        quantise_rows[(tokens, len(scale_JT))](
            x_TI, code_TI, scale_JT, padded, x_TI.stride(0), INPUTS=inputs, COLS=cols,
            TILE=min(1024, triton.next_power_of_2(cols)), num_warps=4)
    return code_TI.view(E4M3), scale_JT.T


def quantised(x_TI: Tensor, cols: int) -> Tensor:
    """float32 [T, I]: what the codes of `quantise` mean, in torch's own operations: its definition."""
    tokens, inputs = x_TI.shape
    block_TJC = F.pad(x_TI.float(), (0, -inputs % cols)).view(tokens, -1, cols)
    scale_TJ1 = block_TJC.abs().amax(2, keepdim=True).clamp_min(1e-12) / LARGEST
    code_TJC = (block_TJC / scale_TJ1).clamp(-LARGEST, LARGEST).to(E4M3).float()
    return (code_TJC * scale_TJ1).view(tokens, -1)[:, :inputs]


def form_of(weight: Packed) -> int:
    """Columns of x that share a scale beside this weight; 0: it is not multiplied so."""
    outputs, inputs = weight.shape
    if weight.kind != "e4m3" or outputs % 16 or inputs % 16:
        return 0
    if (weight.rows, weight.cols) == (BLOCK, BLOCK):
        return BLOCK if outputs % BLOCK == inputs % BLOCK == 0 else 0
    return inputs if weight.scale_RJ.shape[1] == 1 else 0


def reference(weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The definition: activations are quantised alike, products are those of torch in float32."""
    cols = form_of(weight)
    assert cols, f"{weight.kind} in {weight.rows} x {weight.cols}"

    def linear(x_TI: Tensor) -> Tensor:
        bias = None if bias_O is None else bias_O.float()
        return F.linear(quantised(x_TI, cols), weight.floats(), bias).to(x_TI.dtype)
    return linear


def probe(platform: Platform) -> str:
    if "sm_90" not in platform.features:
        raise Unusable("multiplies fp8 on Hopper only (sm_90)")
    if not hasattr(F, "scaled_mm"):
        raise Unusable(f"torch {platform.torch} has no scaled_mm")
    return f"scaled_mm of torch {platform.torch} from {LEAST_ROWS} rows of e4m3, see `cuda` for others"


def pack(weight: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Implement `linear.Pack`."""
    few = triton_packed.pack(weight, bias_O)
    cols = form_of(weight) if isinstance(weight, Packed) else 0
    if not isinstance(weight, Packed) or not cols:
        return few
    product = _product(weight, cols)

    def linear(x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] < LEAST_ROWS or x_TI.dtype != torch.bfloat16:
            return few(x_TI)
        out_TO = product(*quantise(x_TI, cols))[:len(x_TI)]
        return out_TO if bias_O is None else out_TO + bias_O
    return linear


def _product(weight: Packed, cols: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies codes and scales of x. It sums in float32: the tensor cores' own sums have fewer bits."""
    ways: Any = F.ScalingType
    if cols == BLOCK:
        # [J, O / 128], of which J lies together, in whole fours.
        scale = F.pad(weight.scale_RJ.float(), (0, -weight.scale_RJ.shape[1] % 4)).contiguous().T
        recipes = ways.BlockWise1x128, ways.BlockWise128x128
    else:
        # [1, O]. Joined weights with a scale each, as q, k and v, have blocks of as many rows as divide them all.
        outputs = weight.shape[0]
        scale = weight.scale_RJ.float().repeat_interleave(min(weight.rows, outputs), 0)[:outputs].contiguous().T
        recipes = ways.RowWise, ways.RowWise

    def product(code_TI: Tensor, scale_TJ: Tensor) -> Tensor:
        found: Tensor = F.scaled_mm(
            code_TI, weight.code_OI.T, scale_TJ, recipes[0], scale, recipes[1], output_dtype=torch.bfloat16,
            use_fast_accum=False)
        return found
    return product
