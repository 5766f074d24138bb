"""y = x W^T with packed W, in Triton, and of a few rows of bfloat16 in C++: codes are read once, and become floats in
registers.

Imported only where a CUDA device was asked for.

    T rows of x   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.gemm.linear import triton_rows
from penstock.kernels.gemm.linear.triton_rows import TileShape
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.tiles import add_product, parts_of, tile_cols, weights_of
from penstock.kernels.types.packed import Packed


@triton.jit(do_not_specialize=["T"])
def packed_rows(x, weight, scale, offset, bias, out, T, OUTPUTS, x_row, SCALES, INPUTS: tl.constexpr,
                T_PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                BLOCK_COLS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ZERO_CODE: tl.constexpr,
                BIAS: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr):
    """ROWS outputs of T_PAD rows; with SPLIT a share of their inputs, and `out` has float32 of each."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    t = tl.program_id(1) * T_PAD + tl.arange(0, T_PAD)
    own = o < OUTPUTS
    acc = tl.zeros([ROWS, T_PAD], tl.float32)
    SHARE: tl.constexpr = (INPUTS + COLS * SPLIT - 1) // (COLS * SPLIT) * COLS
    part = tl.program_id(2)
    for start in range(part * SHARE, tl.minimum(part * SHARE + SHARE, INPUTS), COLS):
        x_TK = tl.load(x + t.to(tl.int64)[:, None] * x_row + start + c[None, :],
                       mask=(t < T)[:, None] & (start + c < INPUTS)[None, :], other=0.0)
        acc = add_product(acc, weight, scale, offset, o, own, x_TK, start, SCALES, INPUTS, COLS, BLOCK_ROWS,
                          BLOCK_COLS, KIND, OFFSET, ZERO_CODE, EXACT)
    if BIAS and SPLIT == 1:
        acc += tl.load(bias + o, mask=own, other=0.0).to(tl.float32)[:, None]
    tl.store(out + (part * T + t)[None, :].to(tl.int64) * OUTPUTS + o[:, None], acc.to(out.dtype.element_ty),
             mask=own[:, None] & (t < T)[None, :])


@triton.jit
def add_shares(part, bias, out, NUM, OUTPUTS, SPLIT: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """BLOCK of NUM results: what all shares have, in their order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLIT):
        acc += tl.load(part + s * NUM + i, mask=i < NUM, other=0.0)
    if BIAS:
        acc += tl.load(bias + i % OUTPUTS, mask=i < NUM, other=0.0).to(tl.float32)
    tl.store(out + i, acc.to(out.dtype.element_ty), mask=i < NUM)


@triton.jit
def dequantise(weight, scale, offset, out, FIRST, END, SCALES, INPUTS: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, KIND: tl.constexpr,
               OFFSET: tl.constexpr, ZERO_CODE: tl.constexpr):
    """ROWS x COLS elements of what rows FIRST to END mean."""
    o = FIRST + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLS
    c = start + tl.arange(0, COLS)
    w = weights_of(weight, scale, offset, o, o < END, start, SCALES, INPUTS, COLS, BLOCK_ROWS, BLOCK_COLS, KIND,
                   OFFSET, ZERO_CODE)
    tl.store(out + (o - FIRST).to(tl.int64)[:, None] * INPUTS + c[None, :], w.to(out.dtype.element_ty),
             mask=(o < END)[:, None] & (c < INPUTS)[None, :])


# Measured on an H200, int4 of 8192 x 8192 (bench/device/packed.py): 64 rows 47 us, 256 89; dequantised 92 and 115.
FEW_MAX = 64                    # rows of one tile
TILE_MAX = 256                  # rows of several, before cuBLAS is faster
PROGRAMS = 384                  # fewer leave processors of an H200 without work
PIECE = 1 << 25                 # elements of what is dequantised at once
CPP_MAX = 16                    # rows of the kernel in C++
# As packed_rows.cu numbers them.
_KINDS, _SCALES = ("e4m3", "u4", "e2m1", "u8"), (torch.float32, torch.float16, torch.bfloat16)
# Of seven ways the best in a step of Qwen3-30B-A3B on an H100, blocks: two for each of its processors.
_AHEAD, _BLOCKS = 4, 264


def cut_of(tokens: int, weight: Packed, *, exact: bool) -> TileShape:
    """The tile of a program, for so many rows."""
    if exact:
        return TileShape(32, 64, 4, 4 if tokens <= FEW_MAX else 2)
    if tokens > FEW_MAX:
        return TileShape(64, 128, 4, 3)
    return TileShape(32 if weight.kind == "e4m3" and tokens <= CPP_MAX else 64, 128, 4, 4)


class InCpp(NamedTuple):
    """packed_rows.cu for a weight: how it is launched, its threads, blocks that all of a GPU holds at once, and its
    last arguments."""

    launch: device.Launch
    threads: int
    blocks: int
    of_weight: tuple[int, int, int]


def in_cpp(x_TI: Tensor, weight: Tensor | Packed, tiles: int = 1, gate: int = 0) -> InCpp | None:
    """The kernel for 8 `tiles` rows at once. gate: of experts, as it numbers what becomes of sums. None: x or the
    weight's blocks are not what it takes, or NVRTC is missing."""
    if not isinstance(weight, Packed) or x_TI.dtype != torch.bfloat16 or weight.code_OI.data_ptr() % 16:
        return None
    scale, offset, inputs = weight.scale_RJ, weight.offset_RJ, weight.shape[1]
    chunk = 128 if weight.four else 64              # inputs that it multiplies at once
    several = 1 << 30 if scale.shape[1] == 1 else weight.cols // chunk
    small = 0 if several else weight.cols           # columns of a block, where a chunk has several
    if inputs % 64 or x_TI.stride(0) % 8 or x_TI.data_ptr() % 16 or scale.dtype not in _SCALES:
        return None
    if small and not (weight.four and small in (16, 32, 64)):
        return None
    if several & (several - 1) or (scale.shape[1] > 1 and not small and weight.cols % chunk):
        return None
    if offset is not None and (weight.kind != "u4" or offset.is_floating_point()):
        return None
    half = int(inputs % chunk > 0)
    warps = 8 if inputs // chunk + half > 16 else 4
    ahead = _AHEAD // 2 if tiles > 1 and weight.four else _AHEAD          # registers are few
    launch = device.launcher(
        Path(__file__).with_name("packed_rows.cu"), "packed_experts" if gate else "packed_rows", WARPS=warps,
        AHEAD=ahead, TILES=tiles, KIND=_KINDS.index(weight.kind), SCALE=_SCALES.index(scale.dtype),
        ZEROS=0 if offset is None else offset.element_size() * 8, SMALL=small, GATE=gate, HALF=half)
    if launch is None:
        return None
    return InCpp(launch, 32 * warps, _BLOCKS * 8 // warps,
                 (weight.rows, max(0, several.bit_length() - 1), scale.shape[1]))


def _few(x_TI: Tensor, weight: Packed, bias_O: Tensor | None, out_TO: Tensor) -> bool:
    """Whether out_TO has been written, in C++."""
    tokens, (outputs, inputs) = x_TI.shape[0], weight.shape
    most = CPP_MAX // 2 if weight.kind == "u4" else CPP_MAX         # where Triton is as fast
    if not 0 < tokens <= most or (found := in_cpp(x_TI, weight, triton.cdiv(tokens, 8))) is None:
        return False
    found.launch((min(triton.cdiv(outputs, 16), found.blocks), 1), found.threads, x_TI, weight.code_OI, weight.scale_RJ,
                 0 if weight.offset_RJ is None else weight.offset_RJ, 0 if bias_O is None else bias_O, out_TO, tokens,
                 outputs, inputs, x_TI.stride(0), *found.of_weight)
    return True


def split_of(tokens: int, weight: Packed, cut: TileShape) -> int:
    """In how many shares inputs are summed: where outputs alone give a GPU too few programs, and sums of all shares are
    few bytes beside the weight."""
    outputs, inputs = weight.shape
    programs, split = triton.cdiv(outputs, cut.rows), 1
    while (tokens <= FEW_MAX and programs * split < PROGRAMS and inputs >= 8 * split * cut.cols
           and 64 * split * tokens * outputs <= weight.code_OI.nbytes):
        split *= 2
    return split


def run(x_TI: Tensor, weight: Packed, bias_O: Tensor | None, cut: TileShape | None = None,
        split: int | None = None) -> Tensor:
    """y_TO, dtype of x, which is dense in I. Capturable."""
    tokens, (outputs, inputs) = x_TI.shape[0], weight.shape
    assert x_TI.stride(1) == 1 and x_TI.shape[1] == inputs, "rows must be dense and fit"
    out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    element, scale, offset, scales, constants = parts_of(weight)
    if cut is None and _few(x_TI, weight, bias_O, out_TO):
        return out_TO
    exact = x_TI.dtype == torch.float32
    cut = cut or cut_of(tokens, weight, exact=exact)
    few = tokens if tokens <= FEW_MAX else 128
    pad = max(16, triton.next_power_of_2(few))
    split = split_of(tokens, weight, cut) if split is None else split
    made = out_TO if split == 1 else torch.empty((split, *out_TO.shape), dtype=torch.float32, device=x_TI.device)
    packed_rows[(triton.cdiv(outputs, cut.rows), triton.cdiv(tokens, pad), split)](
        x_TI, element, scale, offset, scale if bias_O is None else bias_O, made, tokens, outputs, x_TI.stride(0),
        scales, INPUTS=inputs, T_PAD=pad, ROWS=cut.rows, COLS=tile_cols(weight, cut.cols, exact=exact),
        BIAS=bias_O is not None, EXACT=exact, SPLIT=split, num_warps=cut.warps, num_stages=cut.stages, **constants)
    if split > 1:
        add_shares[(triton.cdiv(out_TO.numel(), 1024),)](
            made, scale if bias_O is None else bias_O, out_TO, out_TO.numel(), outputs, SPLIT=split, BLOCK=1024,
            BIAS=bias_O is not None, num_warps=4)
    return out_TO


def floats(weight: Packed, dtype: torch.dtype, first: int = 0, end: int | None = None) -> Tensor:
    """[end - first, I]: what these rows of the weight mean, rounded to `dtype`. Capturable."""
    outputs, inputs = weight.shape
    end = outputs if end is None else end
    out_OI = torch.empty((end - first, inputs), dtype=dtype, device=weight.scale_RJ.device)
    element, scale, offset, scales, constants = parts_of(weight)
    rows, cols = 32, tile_cols(weight, 128, exact=False)
    dequantise[(triton.cdiv(end - first, rows), triton.cdiv(inputs, cols))](
        element, scale, offset, out_OI, first, end, scales, INPUTS=inputs, ROWS=rows, COLS=cols, num_warps=4,
        **constants)
    return out_OI


def many(x_TI: Tensor, weight: Packed, bias_O: Tensor | None) -> Tensor:
    """y_TO by cuBLAS, of pieces of the weight as floats. Capturable."""
    outputs, inputs = weight.shape
    step = max(1, PIECE // inputs // 128) * 128
    if outputs <= step:
        return F.linear(x_TI, floats(weight, x_TI.dtype), bias_O)
    out_TO = torch.empty((len(x_TI), outputs), dtype=x_TI.dtype, device=x_TI.device)
    for first in range(0, outputs, step):
        end = min(outputs, first + step)
        part_IO = floats(weight, x_TI.dtype, first, end).T
        if bias_O is None:
            torch.mm(x_TI, part_IO, out=out_TO[:, first:end])
        else:
            torch.addmm(bias_O[first:end], x_TI, part_IO, out=out_TO[:, first:end])
    return out_TO


def pack(weight: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Implement `linear.Pack`: for more than a few rows of a packed weight cuBLAS, after a copy as floats."""
    if not isinstance(weight, Packed):
        return triton_rows.pack(weight, bias_O)
    packed = weight.regular()

    def linear(x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] <= TILE_MAX:
            return run(x_TI, packed, bias_O)
        return many(x_TI, packed, bias_O)
    return linear


def pack_in_triton(weight: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Pack as `pack` does; for a few rows Triton's kernel, not that in C++."""
    return alone(pack(weight, bias_O))
