"""One query over chosen MLA KV entries in Triton: rows cut into parts that run side by side, joined in order.

A part is a fixed number of rows in float32, whatever the batch: a query's result does not depend on who
runs beside it. In bfloat16, where the step's other products depend on that too, there are as many parts as
fill a device. A program has some heads and, where values are wide, one half of them: their sums must stay in
registers. It scores with the row's two halves and its rest one by one, and adds these in an order that
is the same in either half. Chosen rows of codes become floats of the queries' type first, by a kernel of their own,
but for those that `gluon_latent` decodes itself; those of a context are decoded as they are read. Imported only where
a CUDA device was asked for.

    B queries   N query heads   H row dim   R value dim   P pages   G page size   S chosen rows
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.latent_attention import gluon_latent, prompt_latent
from penstock.kernels.attention.latent_attention.context import PagedContext
from penstock.kernels.attention.sparse_attention.triton_units import join
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.triton.lazy import alone, is_alone
from penstock.kernels.types import fp8

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["NUM"])
def decode_rows(pool, scales, rests, slot, out, own, pool_page, NUM, SIZE: tl.constexpr, DIM: tl.constexpr,
                WORDS: tl.constexpr, VALUE: tl.constexpr, REST_PAD: tl.constexpr, LINES: tl.constexpr):
    """LINES of the rows that `slot` names as floats: the one that `slot[i]` names into line i, which `own[i]`
    says then, -1 if there is none. `slot` None: row i, and `own` stays. WORDS: of four bytes, that a row of
    codes has and `pool_page` counts; `scales` and `rests` are the pool seen as f32 and as bf16."""
    follow()
    i = tl.program_id(0) * LINES + tl.arange(0, LINES)
    if slot is None:
        at = tl.where(i < NUM, i, -1)
    else:
        at = tl.load(slot + i, mask=i < NUM, other=-1)
        tl.store(own + i, tl.where(at >= 0, i, -1), mask=i < NUM)
    here = at >= 0
    begin = (at // SIZE).to(tl.int64) * pool_page + at % SIZE * WORDS
    line = out + i.to(tl.int64)[:, None] * DIM
    blocks: tl.constexpr = (VALUE + 127) // 128
    for block in tl.static_range(blocks):
        d = block * 128 + tl.arange(0, 128)
        inside = here[:, None] & (d < VALUE)[None, :]
        code = tl.load(pool + (begin * 4)[:, None] + d[None, :], mask=inside, other=0)
        scale = tl.load(scales + begin + VALUE // 4 + block, mask=here, other=0.0)
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        tl.store(line + d[None, :], x.to(out.dtype.element_ty), mask=inside)
    if DIM > VALUE:
        r = tl.arange(0, REST_PAD)
        inside = here[:, None] & (r < DIM - VALUE)[None, :]
        x = tl.load(rests + (begin * 2 + VALUE // 2 + 2 * blocks)[:, None] + r[None, :], mask=inside,
                    other=0.0)
        tl.store(line + VALUE + r[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _values(pool, scales, begin, first, here, VALUE: tl.constexpr, HALF: tl.constexpr):
    """HALF value dims, 256 at most, from `first` on of the rows that begin at these elements of `pool`, zeros where
    there are none. scales: the pool seen as f32 where rows are codes, else None."""
    d = first + tl.arange(0, HALF)
    inside = here[:, None] & (d < VALUE)[None, :]
    if scales is None:
        x = tl.load(pool + begin[:, None] + d[None, :], mask=inside, other=0.0)
    else:
        code = tl.load(pool + begin[:, None] + d[None, :], mask=inside, other=0)
        line = scales + begin // 4 + VALUE // 4 + first // 128
        scale = tl.load(line, mask=here, other=0.0)[:, None]
        if HALF > 128:              # a tile of them would take as much memory as four of codes
            second = tl.load(line + 1, mask=tl.where(first + 128 < VALUE, here, False), other=0.0)[:, None]
            scale = tl.where((tl.arange(0, HALF) < 128)[None, :], scale, second)
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    return x


@triton.jit
def _rests(rests, scales, begin, rest, here, DIM: tl.constexpr, VALUE: tl.constexpr):
    """The dims `rest`, which are no values, of such rows. rests: the pool as it is, or seen as bf16 behind codes."""
    if scales is None:
        behind = begin + VALUE
    else:
        behind = begin // 2 + (VALUE // 2 + 2 * ((VALUE + 127) // 128))
    return tl.load(rests + behind[:, None] + (rest - VALUE)[None, :], mask=here[:, None] & (rest < DIM)[None, :],
                   other=0.0)


@triton.jit
def attend_rows(q, pool, scales, rests, slot, of, context, part, peak, scale, pool_page, HEADS, CHOSEN,
                SIZE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, HALVES: tl.constexpr,
                HALF: tl.constexpr, REST_PAD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                BLOCKS: tl.constexpr, EXACT: tl.constexpr, FIRST: tl.constexpr):
    """Part `s` of query `b`, GROUP heads, HALF value dims: the mean of its values into `part`, log2 of the
    weights' sum into `peak`, -inf for a part without rows. With rows and contexts `slot` is a block table,
    CHOSEN its width, and FIRST as `PagedContext` has it; a context is cut evenly. ROW: elements that a row has in the
    pool; `scales` and `rests` as `decode_rows` has them, or None and the pool itself."""
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
    if of is None:
        where, end, first = slot + b * CHOSEN, CHOSEN, s * BLOCKS * BLOCK
    else:
        where, end = slot + tl.load(of + b).to(tl.int64) * CHOSEN, tl.load(context + b)
        first = tl.where(end > FIRST, FIRST, 0)
        share = tl.cdiv(tl.cdiv(end - first, BLOCK), parts)
        first += s * share * BLOCK
    for block in range(BLOCKS if of is None else share):
        i = first + block * BLOCK + tl.arange(0, BLOCK)
        if of is None:
            at = tl.load(where + i, mask=i < end, other=-1)
        else:
            page = tl.load(where + i // SIZE, mask=i < end, other=0)
            at = tl.where(i < end, page * SIZE + i % SIZE, -1)
        here = at >= 0
        begin = (at // SIZE).to(tl.int64) * pool_page + at % SIZE * ROW
        v_iV = _values(pool, scales, begin, half * HALF, here, VALUE, HALF).to(q.dtype.element_ty)
        r_iH = _rests(rests, scales, begin, rest, here, DIM, VALUE).to(q.dtype.element_ty)
        score = tl.dot(q_mine, tl.trans(v_iV), input_precision=precision)
        if HALVES == 2:
            o_iV = _values(pool, scales, begin, (HALVES - 1 - half) * HALF, here, VALUE, HALF).to(q.dtype.element_ty)
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
CODES = 32                      # rows of a block of codes: of 64 heads less shared memory than 64 rows of bfloat16
GROUP, WIDE = 64, 256           # heads and value dims that one program sums
SUMS = 1 << 24                  # of parts, in memory at once
CUTS = 64                       # parts of a context, at most
PROGRAMS, FEW = 128, 8          # that fill a device; in Gluon half of them do for so few queries and groups
LINES = 16                      # codes that a program decodes: a load of each thread and 128 values
DECODED = 256 << 20             # bytes of rows that were codes, in memory at once


@cache
def _in_gluon() -> bool:
    """Whether this is the GPU that `gluon_latent` is for: there a program has 64 heads, and all values."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def decoded(pool_PGH: Tensor, slot_BS: Tensor, dim: int, value_dim: int, dtype: torch.dtype, *,
            every: bool) -> tuple[Tensor, Tensor]:
    """Rows of codes as floats, and their slots: those that are named one after the other, -1 stays that; with
    `every` all of the pool, in its order."""
    size, row = pool_PGH.shape[1:]
    num = len(pool_PGH) * size if every else slot_BS.numel()
    rows_PGH = torch.empty((triton.cdiv(num, size), size, dim), dtype=dtype, device=pool_PGH.device)
    own_BS = slot_BS if every else torch.empty_like(slot_BS)
    words = pool_PGH.view(torch.float32)
    decode_rows[(triton.cdiv(num, LINES),)](
        pool_PGH, words, pool_PGH.view(torch.bfloat16), None if every else slot_BS, rows_PGH, own_BS,
        words.stride(0), num, SIZE=size, DIM=dim, WORDS=row // 4, VALUE=value_dim,
        REST_PAD=triton.next_power_of_2(max(1, dim - value_dim)), LINES=LINES, num_warps=WARPS, **early())
    return rows_PGH, own_BS


def _over_codes(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor, value_dim: int, scale: float, most: int, *,
                every: bool) -> tuple[Tensor, Tensor]:
    """What is attended to becomes floats first, up to `most` rows at once: what queries name, of some of them
    after the other, or with `every` all of the pool."""
    at_once = max(1, len(q_BNH) if every else most // slot_BS.shape[1])
    outs = [latent_attention(q, *decoded(pool_PGH, slot, q.shape[2], value_dim, q.dtype, every=every),
                             value_dim=value_dim, scale=scale)
            for q, slot in zip(q_BNH.split(at_once), slot_BS.split(at_once), strict=True)]
    if len(outs) == 1:
        return outs[0]
    out_BNR, lse_BN = (torch.cat(part) for part in zip(*outs, strict=True))
    return out_BNR, lse_BN


def latent_attention(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor | PagedContext, *, value_dim: int,
                     scale: float) -> tuple[Tensor, Tensor]:
    """As `penstock.kernels.attention.latent_attention`. Capturable."""
    queries, heads, dim = q_BNH.shape
    size, seen = pool_PGH.shape[1], slot_BS if isinstance(slot_BS, PagedContext) else None
    places = slot_BS if isinstance(slot_BS, Tensor) else slot_BS.table_RM
    chosen = places.shape[1] if seen is None else places.shape[1] * size
    coded = pool_PGH.dtype == torch.uint8
    row = fp8.width(dim, value_dim) if coded else dim
    assert q_BNH.is_contiguous() and places.is_contiguous(), "queries and slots must be dense"
    assert pool_PGH.stride(2) == 1 and pool_PGH.stride(1) == row, "rows of a page must be dense"
    exact = q_BNH.dtype == torch.float32
    pad = max(16, triton.next_power_of_2(value_dim))
    assert pad <= 2 * WIDE, f"values of {value_dim}"
    group = min(16 if exact else GROUP, max(16, triton.next_power_of_2(heads)))
    groups = triton.cdiv(heads, group)
    whole = (group, value_dim, dim) == (GROUP, 2 * WIDE, 2 * WIDE + 64) and not is_alone() and (
        _in_gluon())
    if coded and seen is None:
        most = DECODED // (dim * q_BNH.dtype.itemsize)
        # A pool that lies together, as a prompt's does, is decoded once where queries name more than it has.
        # One page is contiguous to torch whatever its stride: what a start measures would not decode.
        every = pool_PGH.stride(0) == size * row and len(pool_PGH) * size <= min(most, places.numel())
        if every or not whole:
            return _over_codes(q_BNH, pool_PGH, places, value_dim, scale, most, every=every)
    halves = 1 if whole or pad <= WIDE else 2
    rows = BLOCK * BLOCKS
    if not exact:
        blocks = triton.cdiv(chosen, BLOCK)
        beside = queries * groups * halves
        fill = PROGRAMS // 2 if whole and beside <= FEW else PROGRAMS
        blocks = max(1, blocks * min(beside, PROGRAMS) // fill)
        rows = BLOCK * (1 << blocks.bit_length() - 1)           # few numbers of them are compiled
    parts = triton.cdiv(chosen, rows)
    if seen is not None:
        parts, rows = min(parts, CUTS), BLOCK
    device = q_BNH.device
    out_BNR = torch.empty((queries, heads, value_dim), dtype=q_BNH.dtype, device=device)
    lse_BN = torch.empty((queries, heads), dtype=torch.float32, device=device)
    if whole and parts == 1:
        if not coded and seen is None and prompt_latent.attend(q_BNH, pool_PGH, places, out_BNR, lse_BN, scale):
            return out_BNR, lse_BN
        gluon_latent.attend(q_BNH, pool_PGH, places, seen, out_BNR[:, :, None], lse_BN[:, :, None], scale, rows)
        return out_BNR, lse_BN
    most = max(1, min(queries, SUMS // (heads * parts * value_dim)))
    part = torch.empty((most, heads, parts, value_dim), dtype=torch.float32, device=device)
    peak = torch.empty((most, heads, parts), dtype=torch.float32, device=device)
    for first in range(0, queries, most):
        turn = slice(first, first + most)
        num, of = len(q_BNH[turn]), None if seen is None else seen.part(turn)
        at = places[turn] if of is None else places
        if whole:
            gluon_latent.attend(q_BNH[turn], pool_PGH, at, of, part, peak, scale, rows)
            join(part, peak, out_BNR[turn], lse_BN[turn])
            continue
        attend_rows[(parts, groups * halves, num)](
            q_BNH[turn], pool_PGH, pool_PGH.view(torch.float32) if coded else None,
            pool_PGH.view(torch.bfloat16) if coded else pool_PGH, at, None if of is None else of.row_B,
            None if of is None else of.context_B, part, peak, scale, pool_PGH.stride(0), heads, at.shape[1],
            FIRST=0 if of is None else of.first, SIZE=size, ROW=row, DIM=dim, VALUE=value_dim, HALVES=halves,
            HALF=pad // halves, REST_PAD=max(16, triton.next_power_of_2(max(1, dim - value_dim))), GROUP=group,
            BLOCK=CODES if coded else BLOCK, BLOCKS=rows // BLOCK, EXACT=exact, num_warps=WARPS,
            num_stages=1 if exact else 2, **early())
        join(part, peak, out_BNR[turn], lse_BN[turn])
    return out_BNR, lse_BN


latent_attention_in_triton = alone(latent_attention)
