"""`merge` in Triton: each output is read once, by a query and head. Imported only where there is a device."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BYTES = 16 << 10       # of a part that a program reads


@triton.jit
def merge_parts(out, lse, more, more_lse, NUM, DIM: tl.constexpr, DIM_PAD: tl.constexpr, LINES: tl.constexpr):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    ok, d = line < NUM, tl.arange(0, DIM_PAD)
    at = line.to(tl.int64)[:, None] * DIM + d
    own = ok[:, None] & (d < DIM)
    a, b = tl.load(lse + line, mask=ok, other=0.0), tl.load(more_lse + line, mask=ok, other=0.0)
    top = tl.where(a > b, a, b)             # NaN stays: it makes `total` one
    top = tl.where(top > float("-inf"), top, 0.0)
    first, second = tl.exp(a - top), tl.exp(b - top)
    total = first + second
    x, y = tl.load(out + at, mask=own).to(tl.float32), tl.load(more + at, mask=own).to(tl.float32)
    x = (tl.where(first[:, None] > 0, x * first[:, None], 0.0)
         + tl.where(second[:, None] > 0, y * second[:, None], 0.0)) / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=own)
    tl.store(lse + line, top + tl.log(total), mask=ok)


def merge(out_TNH: Tensor, lse_TN: Tensor, more_TNH: Tensor, more_TN: Tensor) -> None:
    """The contract is that of `penstock.kernels.attention.merge`. Capturable."""
    dim, num = out_TNH.shape[-1], lse_TN.numel()
    padded = triton.next_power_of_2(dim)
    lines = max(1, _BYTES // (padded * out_TNH.element_size()))
    merge_parts[(triton.cdiv(num, lines),)](out_TNH, lse_TN, more_TNH, more_TN, num, DIM=dim, DIM_PAD=padded,
                                            LINES=lines, num_warps=8)
