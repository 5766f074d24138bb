"""Units by bounds of their keys on a GPU: scores of all, then the largest of each query and KV head.

On Hopper clusters of blocks in CUDA C++ choose (`choose/clusters.py`), else a program in Triton. Which units
are scored depends on positions alone, which are on the device: a captured graph serves any rows. Imported
only where a CUDA device was asked for.

    B queries   N query heads   K KV heads   g = N / K   H head dim   P pages of summaries   S units a page
    R rows of the table   U units a row may have   C units chosen at most   b queries of a turn
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.choose.clusters import clustered
from penstock.kernels.choose.select.spec import LEAST, MOST, SelectRule
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.topn import cut_of, key_of, taken_of
from penstock.kernels.types import fp8


@triton.jit
def _query(q, q_head, head, part, GROUP: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr,
           PART: tl.constexpr, CODED: tl.constexpr):
    """PART dims of a KV head's query heads as columns, two a head: what is above zero, and what is below; and
    the exponent of what they are multiples of, 127 for 1. Codes become f16 at little cost, so queries are
    that too, which a power of two brings near the largest."""
    c = tl.arange(0, COLS)
    d = part * PART + tl.arange(0, PART)
    q_Hc = tl.load(q + (head * GROUP + c[None, :] // 2) * q_head + d[:, None],
                   mask=(c[None, :] < 2 * GROUP) & (d[:, None] < DIM), other=0.0)
    amount_Hc = q_Hc.to(tl.float32)
    counts = tl.where(c % 2 == 0, amount_Hc > 0, amount_Hc < 0)
    exponent = 127
    if CODED:
        exponent = tl.max(tl.max(tl.abs(amount_Hc), 1), 0).to(tl.int32, bitcast=True) >> 23
        exponent = tl.maximum(exponent, 20) - 14
        q_Hc = (amount_Hc * ((254 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)
    return tl.where(counts, q_Hc, tl.zeros_like(q_Hc)), exponent


@triton.jit(do_not_specialize=["turns"], do_not_specialize_on_alignment=["row", "position"])
def score_units(q, bounds, scales, table, row, position, score, q_row, q_head, b_page, b_head, b_plane,
                table_row, UNITS, SINK_UNITS, WINDOW, turns, UNIT: tl.constexpr, GROUP: tl.constexpr,
                COLS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
                OF_PAGE: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
                EXACT: tl.constexpr, VECTOR: tl.constexpr, CODED: tl.constexpr, STAGES: tl.constexpr):
    """`turns` of BLOCK units of one query and KV head. The sum of max(q low, q high) is q's positive part
    times high plus its negative part times low, that of min the other way round: two products, of PART dims
    at a time, which codes have one scale for. Pages of bounds are `b_page` elements apart, heads and planes
    vectors of VECTOR elements; `scales` are they as f32. A scale is a power of two: it is exact wherever it
    is multiplied."""
    follow()
    own_first, head, b = tl.program_id(0) * turns * BLOCK, tl.program_id(1), tl.program_id(2)
    end = tl.maximum(tl.load(position + b) + 1 - WINDOW, 0) // UNIT
    first = tl.minimum(SINK_UNITS, end)
    behind = tl.minimum(end, own_first + turns * BLOCK)
    if (own_first < behind) & (behind > first):
        pages = table + tl.load(row + b).to(tl.int64) * table_row
        line = score + (b * tl.num_programs(1) + head).to(tl.int64) * UNITS
        q += b.to(tl.int64) * q_row
        c, g = tl.arange(0, COLS), tl.arange(0, COLS // 2)
        of_high = tl.where(c % 2 == 0, MOST, LEAST)[None, :]
        of_low = tl.where(c % 2 == 0, LEAST, MOST)[None, :]
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        SCALED: tl.constexpr = CODED and not EXACT
        q_Hc, exponent = _query(q, q_head, head, 0, GROUP, COLS, DIM, PART, SCALED)
        for start in tl.range(own_first, behind, BLOCK, num_stages=STAGES):
            u = start + tl.arange(0, BLOCK)
            own = (u >= first) & (u < end)
            page = tl.load(pages + u // OF_PAGE, mask=own, other=0).to(tl.int64)
            low_u = page * b_page + (head * b_head + u % OF_PAGE) * VECTOR
            s_uc = tl.zeros([BLOCK, COLS], tl.float32)
            for part in tl.static_range(PARTS):
                if PARTS > 1:
                    q_Hc, exponent = _query(q, q_head, head, part, GROUP, COLS, DIM, PART, SCALED)
                d = part * PART + tl.arange(0, PART)
                inside = own[:, None] & (d[None, :] < DIM)
                at_uH = bounds + low_u[:, None] + d[None, :]
                low_uH = tl.load(at_uH, mask=inside, other=0)
                high_uH = tl.load(at_uH + b_plane * VECTOR, mask=inside, other=0)
                counts_high, counts_low = of_high, of_low
                if CODED:
                    at_u = scales + low_u // 4 + (DIM // 4 + part)
                    one = (exponent << 23).to(tl.float32, bitcast=True) if SCALED else 1.0
                    counts_low *= tl.load(at_u, mask=own, other=0.0)[:, None] * one
                    counts_high *= tl.load(at_u + b_plane * (VECTOR // 4), mask=own, other=0.0)[:, None] * one
                    low_uH = low_uH.to(tl.float8e4nv, bitcast=True)
                    high_uH = high_uH.to(tl.float8e4nv, bitcast=True)
                low_uH, high_uH = low_uH.to(q_Hc.dtype), high_uH.to(q_Hc.dtype)
                s_uc += counts_high * tl.dot(high_uH, q_Hc, input_precision=precision)
                s_uc += counts_low * tl.dot(low_uH, q_Hc, input_precision=precision)
            s_ug = tl.sum(tl.reshape(s_uc, [BLOCK, COLS // 2, 2]), 2)
            best_u = tl.max(tl.where(g[None, :] < GROUP, s_ug, float("-inf")), 1)
            tl.store(line + u, best_u, mask=own)


@triton.jit(do_not_specialize_on_alignment=["position", "budget"])
def choose_units(score, position, budget, chosen, UNITS, CHOSEN, SINK_UNITS, WINDOW, UNIT: tl.constexpr,
                 CHOSEN_PAD: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """What one query and KV head keeps: all that is not scored, and the best of what is, in the order of
    units; -1 behind them. `budget`: of each query, None: CHOSEN. WHOLE: one block holds all scores of a row."""
    follow()
    head, b = tl.program_id(0), tl.program_id(1)
    at = (b * tl.num_programs(0) + head).to(tl.int64)
    p = tl.load(position + b)
    end = tl.maximum(p + 1 - WINDOW, 0) // UNIT
    first = tl.minimum(SINK_UNITS, end)
    behind = tl.where(p < 0, 0, p // UNIT + 1 - end)
    most = CHOSEN if budget is None else tl.load(budget + b)
    want = tl.maximum(tl.minimum(most - first - behind, end - first), 0)
    out = chosen + at * CHOSEN
    c = tl.arange(0, CHOSEN_PAD)
    kept = tl.where(c < first, c, end + c - first - want)
    tl.store(out + c, tl.where(c < first + want + behind, kept, -1),
             mask=(c < CHOSEN) & ((c < first) | (c >= first + want)))
    line = score + at * UNITS
    if want > 0:
        i = tl.arange(0, BLOCK)
        if WHOLE:
            u = first + i
            key = tl.where(u < end, key_of(tl.load(line + u, mask=u < end, other=0.0)), 0)
            cut = cut_of(key, want)
            taken = taken_of(key, cut, want - tl.sum((key > cut).to(tl.int32), 0))
            tl.store(out + first + tl.cumsum(taken.to(tl.int32), 0) - 1, u, mask=taken)
        else:
            cut = (want * 0).to(tl.uint32)
            bit = cut + 0x80000000
            for _ in range(32):
                higher = cut | bit
                count = want * 0
                for start in range(first, end, BLOCK):
                    u = start + i
                    key = tl.where(u < end, key_of(tl.load(line + u, mask=u < end, other=0.0)), 0)
                    count += tl.sum((key >= higher).to(tl.int32), 0)
                cut = tl.where(count >= want, higher, cut)
                bit = bit >> 1
            spare = want
            for start in range(first, end, BLOCK):
                u = start + i
                key = tl.where(u < end, key_of(tl.load(line + u, mask=u < end, other=0.0)), 0)
                spare -= tl.sum((key > cut).to(tl.int32), 0)
            place = first
            for start in range(first, end, BLOCK):
                u = start + i
                key = tl.where(u < end, key_of(tl.load(line + u, mask=u < end, other=0.0)), 0)
                taken = taken_of(key, cut, spare)
                tl.store(out + place + tl.cumsum(taken.to(tl.int32), 0) - 1, u, mask=taken)
                place += tl.sum(taken.to(tl.int32), 0)
                spare -= tl.sum((taken & (key == cut)).to(tl.int32), 0)


WHOLE_UNITS = 16384         # of a row: as many scores as one program keeps in registers
BLOCK_UNITS = 64            # that are scored at once
MANY, TURNS = 4096, 4       # programs: of so many over codes, each takes that many turns
SCORES = 1 << 24            # in memory at once: a prompt's outputs computed anew are thousands of queries


def best_units(score_bKU: Tensor, position_b: Tensor, budget_b: Tensor | None, chosen_bKC: Tensor,
               rule: SelectRule) -> None:
    """Write what each query and KV head keeps. budget_b: as in `select`; None: as many as there is room for."""
    num, kv_heads, units = score_bKU.shape
    choose, chosen = clustered(num * kv_heads, units), chosen_bKC.shape[2]
    if choose is not None:
        choose(score_bKU, position_b, budget_b, chosen_bKC, heads=kv_heads, unit=rule.unit, sinks=rule.sink_units,
               window=rule.window)
        return
    block = min(WHOLE_UNITS, max(32, triton.next_power_of_2(units)))
    choose_units[(kv_heads, num)](
        score_bKU, position_b, budget_b, chosen_bKC, units, chosen, rule.sink_units, rule.window, UNIT=rule.unit,
        CHOSEN_PAD=triton.next_power_of_2(chosen), BLOCK=block, WHOLE=units <= block,
        num_warps=max(1, min(32, block // 512)), **early())


def select(q_BNH: Tensor, bounds_PK2SH: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor,
           budget_B: Tensor, *, rule: SelectRule, chosen: int) -> Tensor:
    """Implement `penstock.kernels.choose.select`. Capturable."""
    queries, heads, dim = q_BNH.shape
    _, kv_heads, _, of_page, _ = bounds_PK2SH.shape
    group, units = heads // kv_heads, table_RP.shape[1] * of_page
    assert q_BNH.stride(2) == bounds_PK2SH.stride(4) == table_RP.stride(1) == 1, "rows must be dense"
    coded = bounds_PK2SH.dtype == torch.uint8
    vector = fp8.width(dim, dim) if coded else dim
    assert bounds_PK2SH.stride(3) == vector, "units of a page must be dense"
    b_page, *within = bounds_PK2SH.stride()[:3]
    assert not any(stride % vector for stride in within), "a page of no whole vectors"
    assert not coded or vector % 4 == b_page % 4 == 0, f"scales behind {dim} codes"
    part = min(fp8.BLOCK, max(16, triton.next_power_of_2(dim)))
    most = max(1, min(queries, SCORES // (kv_heads * units)))
    score_bKU = torch.empty((most, kv_heads, units), dtype=torch.float32, device=q_BNH.device)
    chosen_BKC = torch.empty((queries, kv_heads, chosen), dtype=torch.int32, device=q_BNH.device)
    codes = coded and q_BNH.dtype == torch.bfloat16             # multiplied as f16
    for first in range(0, queries, most):
        at = slice(first, first + most)
        q_bNH, position_b = q_BNH[at], position_B[at]
        turns = TURNS if codes and triton.cdiv(units, BLOCK_UNITS) * kv_heads * len(q_bNH) >= MANY else 1
        score_units[(triton.cdiv(units, BLOCK_UNITS * turns), kv_heads, len(q_bNH))](
            q_bNH, bounds_PK2SH, bounds_PK2SH.view(torch.float32) if coded else bounds_PK2SH, table_RP,
            row_B[at], position_b, score_bKU, q_BNH.stride(0), q_BNH.stride(1),
            b_page, *(stride // vector for stride in within), table_RP.stride(0), units, rule.sink_units,
            rule.window, turns, UNIT=rule.unit, GROUP=group, COLS=max(16, triton.next_power_of_2(2 * group)),
            DIM=dim, PART=part, PARTS=triton.cdiv(dim, part), OF_PAGE=of_page, BLOCK=BLOCK_UNITS,
            MOST=MOST, LEAST=LEAST, EXACT=q_BNH.dtype == torch.float32, VECTOR=vector, CODED=coded,
            STAGES=1 if turns == 1 else 3, num_warps=2 if codes and group <= 16 else 4, **early())
        best_units(score_bKU[:len(q_bNH)], position_b, budget_B[at], chosen_BKC[at], rule)
    return chosen_BKC


select_in_triton = alone(select)
