"""One query over chosen latent rows in Triton: rows cut into parts that run side by side, joined in order.

A part is a fixed number of rows in float32, whatever the batch: a query's result does not depend on who
runs beside it. In bfloat16, where the step's other products depend on that too, there are as many parts as
fill a device. A program has some heads and, where values are wide, one half of them: their sums must stay in
registers. It scores with the row's two halves and its rest one by one, and adds these in an order that
is the same in either half. Imported only where a CUDA device was asked for.

    B queries   N query heads   H row dim   R value dim   P pages   G page size   S chosen rows
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.latent_attention import gluon_latent
from penstock.kernels.attention.sparse_attention.triton_units import join
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.types import fp8

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _values(pool, scales, line, d, here, VALUE: tl.constexpr, CODED: tl.constexpr):
    """Value dims `d` of the rows that begin at `line`: elements of the pool, of codes words of four bytes."""
    inside = here[:, None] & (d < VALUE)[None, :]
    if CODED:
        byte = tl.load(pool + (line * 4)[:, None] + d[None, :], mask=inside, other=0)
        s = tl.load(scales + (line + VALUE // 4)[:, None] + (d // 128)[None, :], mask=inside, other=0.0)
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * s
    else:               # one of two, when it is compiled
        return tl.load(pool + line[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def attend_rows(q, pool, scales, rests, slot, part, peak, scale, pool_page, HEADS, CHOSEN, SIZE: tl.constexpr,
                DIM: tl.constexpr, ROW: tl.constexpr, VALUE: tl.constexpr, HALVES: tl.constexpr,
                HALF: tl.constexpr, REST_PAD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                BLOCKS: tl.constexpr, EXACT: tl.constexpr, CODED: tl.constexpr):
    """Part `s` of query `b`, GROUP heads, HALF value dims: the mean of its values into `part`, log2 of the
    weights' sum into `peak`, -inf for a part without rows. ROW: elements of a row, of codes words of four
    bytes; `scales` and `rests` are the pool seen as f32 and as bf16."""
    follow()
    s, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    half, group = tl.program_id(1) % HALVES, tl.program_id(1) // HALVES
    parts = tl.num_programs(0)
    n = group * GROUP + tl.arange(0, GROUP)
    own_n = (n < HEADS)[:, None]
    d = tl.arange(0, HALF)
    mine, other = half * HALF + d, (HALVES - 1 - half) * HALF + d
    rest = VALUE + tl.arange(0, REST_PAD)
    line = q + (b * HEADS + n)[:, None] * DIM
    q_mine = tl.load(line + mine[None, :], mask=own_n & (mine < VALUE)[None, :], other=0.0)
    q_rest = tl.load(line + rest[None, :], mask=own_n & (rest < DIM)[None, :], other=0.0)
    if HALVES == 2:
        q_other = tl.load(line + other[None, :], mask=own_n & (other < VALUE)[None, :], other=0.0)
    top_n = tl.full([GROUP], float("-inf"), tl.float32)
    sum_n = tl.zeros([GROUP], tl.float32)
    acc_nV = tl.zeros([GROUP, HALF], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for block in range(BLOCKS):
        i = (s * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(slot + b * CHOSEN + i, mask=i < CHOSEN, other=-1)
        here = at >= 0
        begin = (at // SIZE).to(tl.int64) * pool_page + at % SIZE * ROW
        v_iV = _values(pool, scales, begin, mine, here, VALUE, CODED).to(q.dtype.element_ty)
        if CODED:
            blocks: tl.constexpr = (VALUE + 127) // 128
            r_iH = tl.load(rests + (begin * 2 + VALUE // 2 + 2 * blocks - VALUE)[:, None] + rest[None, :],
                           mask=here[:, None] & (rest < DIM)[None, :], other=0.0)
        else:
            r_iH = tl.load(pool + begin[:, None] + rest[None, :], mask=here[:, None] & (rest < DIM)[None, :],
                           other=0.0)
        r_iH = r_iH.to(q.dtype.element_ty)
        score = tl.dot(q_mine, tl.trans(v_iV), input_precision=precision)
        if HALVES == 2:
            o_iV = _values(pool, scales, begin, other, here, VALUE, CODED).to(q.dtype.element_ty)
            score += tl.dot(q_other, tl.trans(o_iV), input_precision=precision)
        score += tl.dot(q_rest, tl.trans(r_iH), input_precision=precision)
        score = tl.where(here[None, :], score * (scale * _LOG2E), float("-inf"))
        new_n = tl.maximum(top_n, tl.max(score, 1))
        base_n = tl.where(new_n == float("-inf"), 0.0, new_n)
        weight = tl.exp2(score - base_n[:, None])
        keep_n = tl.exp2(top_n - base_n)
        sum_n = sum_n * keep_n + tl.sum(weight, 1)
        acc_nV = acc_nV * keep_n[:, None]
        acc_nV = tl.dot(weight.to(v_iV.dtype), v_iV, acc_nV, input_precision=precision)
        top_n = new_n
    at_n = (b * HEADS + n) * parts + s
    none = sum_n == 0
    total = tl.where(none, 1.0, sum_n)
    tl.store(part + at_n[:, None] * VALUE + mine[None, :], acc_nV / total[:, None],
             mask=own_n & (mine < VALUE)[None, :])
    tl.store(peak + at_n, tl.where(none, float("-inf"), top_n + tl.log2(total)),
             mask=tl.where(half == 0, n < HEADS, False))


BLOCK, BLOCKS, WARPS = 64, 4, 4     # rows of a block, blocks of a part
GROUP, WIDE = 64, 256           # heads and value dims that one program sums
SUMS = 1 << 24                  # of parts, in memory at once
PROGRAMS = 128                  # that fill a device


@cache
def _in_gluon() -> bool:
    """Whether this is the GPU that `gluon_latent` is for: there a program has 64 heads, and all values."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def latent_attention(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor, *, value_dim: int,
                     scale: float) -> tuple[Tensor, Tensor]:
    """As `penstock.kernels.attention.latent_attention`. Capturable."""
    queries, heads, dim = q_BNH.shape
    size, chosen = pool_PGH.shape[1], slot_BS.shape[1]
    assert q_BNH.is_contiguous() and slot_BS.is_contiguous(), "queries and slots must be dense"
    coded = pool_PGH.dtype == torch.uint8
    row = fp8.width(dim, value_dim) if coded else dim
    assert pool_PGH.stride(2) == 1 and pool_PGH.stride(1) == row, "rows of a page must be dense"
    words, rests = (pool_PGH.view(kind) if coded else pool_PGH for kind in (torch.float32, torch.bfloat16))
    block = BLOCK // 2 if coded and BLOCK > 32 else BLOCK       # codes become values in shared memory
    exact = q_BNH.dtype == torch.float32
    pad = max(16, triton.next_power_of_2(value_dim))
    assert pad <= 2 * WIDE, f"values of {value_dim}"
    group = min(16 if exact else GROUP, max(16, triton.next_power_of_2(heads)))
    groups = triton.cdiv(heads, group)
    whole = (group, value_dim, dim) == (GROUP, 2 * WIDE, 2 * WIDE + 64) and not coded and _in_gluon()
    halves = 1 if whole or pad <= WIDE else 2
    rows = BLOCK * BLOCKS
    if not exact:
        blocks = triton.cdiv(chosen, BLOCK)
        blocks = max(1, blocks * min(queries * groups * halves, PROGRAMS) // PROGRAMS)
        rows = BLOCK * (1 << blocks.bit_length() - 1)           # few numbers of them are compiled
    parts = triton.cdiv(chosen, rows)
    device = q_BNH.device
    out_BNR = torch.empty((queries, heads, value_dim), dtype=q_BNH.dtype, device=device)
    lse_BN = torch.empty((queries, heads), dtype=torch.float32, device=device)
    if whole and parts == 1:
        gluon_latent.attend(q_BNH, pool_PGH, slot_BS, out_BNR[:, :, None], lse_BN[:, :, None], scale, rows)
        return out_BNR, lse_BN
    most = max(1, min(queries, SUMS // (heads * parts * value_dim)))
    part = torch.empty((most, heads, parts, value_dim), dtype=torch.float32, device=device)
    peak = torch.empty((most, heads, parts), dtype=torch.float32, device=device)
    for first in range(0, queries, most):
        turn = slice(first, first + most)
        num = len(slot_BS[turn])
        if whole:
            gluon_latent.attend(q_BNH[turn], pool_PGH, slot_BS[turn], part, peak, scale, rows)
            join(part, peak, out_BNR[turn], lse_BN[turn])
            continue
        attend_rows[(parts, groups * halves, num)](
            q_BNH[turn], pool_PGH, words, rests, slot_BS[turn], part, peak, scale, words.stride(0), heads,
            chosen, SIZE=size, DIM=dim, ROW=words.stride(1), VALUE=value_dim, HALVES=halves,
            HALF=pad // halves, REST_PAD=max(16, triton.next_power_of_2(max(1, dim - value_dim))),
            GROUP=group, BLOCK=block, BLOCKS=rows // block, EXACT=exact, CODED=coded,
            num_warps=WARPS, num_stages=1 if exact else 2, **early())
        join(part, peak, out_BNR[turn], lse_BN[turn])
    return out_BNR, lse_BN
