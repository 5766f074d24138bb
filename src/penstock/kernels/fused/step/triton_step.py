"""The ends of a captured step in Triton: a step's queries are few, so a launch takes longer than its work.

A row of logits is read by several programs, of which `say_tokens` joins what they found.
Imported only where a CUDA device was asked for.

    B queries of the step   R rows of the tables   V vocabulary   S vocabulary in parts   X lines of an answer
    T tokens of the step   F frequencies   H = 2 F
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fused.step.spec import Best, BlockTableRef, Looks, Queries
from penstock.kernels.triton.depend import early, follow

PART = 4096                     # logits of a program
PLACES = 3


@triton.jit
def _store_slot(table, table_row, out, b, own, row, position, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """SIZE: 0 where no row has a page."""
    if SIZE == 0:
        tl.store(out + b, (row * 0 - 1).to(tl.int64), mask=own)
    else:
        entry = position // UNIT
        page = tl.load(table + row.to(tl.int64) * table_row + entry // SIZE, mask=position >= 0,
                       other=-1).to(tl.int64)
        tl.store(out + b, tl.where(page >= 0, page * SIZE + entry % SIZE, -1), mask=own)


@triton.jit(do_not_specialize=["B", "LINE"], do_not_specialize_on_alignment=["row", "position"])
def begin_rows(row, position, last, budget, now, table0, table1, table2, wide, narrow, row0, row1, row2, B,
               LINE, LAST, PLACES: tl.constexpr, SIZE0: tl.constexpr, SIZE1: tl.constexpr,
               SIZE2: tl.constexpr, UNIT0: tl.constexpr, UNIT1: tl.constexpr, UNIT2: tl.constexpr,
               BUDGET: tl.constexpr, TICK: tl.constexpr, BLOCK: tl.constexpr):
    """Lines of LINE in `wide`: index, token, position, then a slot of each place; in `narrow`: context, own
    row, budget, position of those that have one."""
    follow()
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = b < B
    r, p = tl.load(row + b, mask=own, other=0), tl.load(position + b, mask=own, other=-1)
    index = tl.where(p >= 0, r, LAST).to(tl.int64)
    tl.store(wide + b, index, mask=own)
    tl.store(wide + LINE + b, tl.load(last + index, mask=own, other=0), mask=own)
    tl.store(wide + 2 * LINE + b, tl.maximum(p, 0).to(tl.int64), mask=own)
    tl.store(narrow + b, p + 1, mask=own)
    tl.store(narrow + LINE + b, tl.where(p >= 0, r, -1), mask=own)
    if BUDGET:
        most = tl.load(budget + r, mask=own, other=0)
        tl.store(narrow + 2 * LINE + b, most, mask=own)
        tl.store(narrow + 3 * LINE + b, tl.where(most > 0, p, -1), mask=own)
    if PLACES > 0:
        _store_slot(table0, row0, wide + 3 * LINE, b, own, r, p, SIZE0, UNIT0)
    if PLACES > 1:
        _store_slot(table1, row1, wide + 4 * LINE, b, own, r, p, SIZE1, UNIT1)
    if PLACES > 2:
        _store_slot(table2, row2, wide + 5 * LINE, b, own, r, p, SIZE2, UNIT2)
    if TICK:
        if tl.program_id(0) == 0:
            tl.store(now, tl.load(now) + 1)


@triton.jit(do_not_specialize_on_alignment=["position"])
def turn_angles(position, freq, cos, sin, factor, freq_row, F, F_PAD: tl.constexpr):
    """One token's."""
    follow()
    t = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, F_PAD)
    angle = tl.load(position + t).to(tl.float32) * tl.load(freq + t * freq_row + f, mask=f < F, other=0.0)
    x, y, at = tl.cos(angle) * factor, tl.sin(angle) * factor, 2 * t * F + f
    kind: tl.constexpr = cos.dtype.element_ty
    tl.store(cos + at, x.to(kind), mask=f < F)
    tl.store(cos + at + F, x.to(kind), mask=f < F)
    tl.store(sin + at, (-y).to(kind), mask=f < F)
    tl.store(sin + at + F, y.to(kind), mask=f < F)


@triton.jit
def best_parts(head, logits, peak, at, token, head_row, V, BLOCK: tl.constexpr):
    """A part of a row. What is not a number counts as the largest."""
    follow()
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(head + b * head_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
    tl.store(logits + b * V + v, x, mask=v < V)
    x = tl.where(x == x, x, float("inf"))
    most = tl.max(x, 0)
    to = b * tl.num_programs(0) + part
    tl.store(peak + to, most)
    tl.store(at + to, tl.min(tl.where(x == most, v, 0x7fffffff), 0))
    if part == 0:
        tl.store(token + b, -1)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["row", "position", "token"])
def say_tokens(peak, at, token, row, position, last, count, answer, B, LAST, ROWS, COUNTED, HEADS,
               PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, COUNTED_PAD: tl.constexpr):
    """One query. COUNTED: layers x HEADS of `count`; COUNTED_PAD: 0 where none are returned."""
    follow()
    b = tl.program_id(0)
    s = tl.arange(0, PARTS_PAD)
    x = tl.load(peak + b * PARTS + s, mask=s < PARTS, other=float("-inf"))
    i = tl.load(at + b * PARTS + s, mask=s < PARTS, other=0x7fffffff)
    most = tl.max(x, 0)
    found = tl.min(tl.where(x == most, i, 0x7fffffff), 0).to(tl.int64)
    drawn, r, p = tl.load(token + b), tl.load(row + b), tl.load(position + b)
    said = tl.where(drawn < 0, found, drawn)
    tl.store(answer + b, said)
    tl.store(answer + B + b, (tl.abs(most) < float("inf")).to(tl.int64))
    tl.store(last + tl.where(p >= 0, r, LAST), said)
    if COUNTED_PAD > 0:
        m = tl.arange(0, COUNTED_PAD)[:, None]
        e = tl.arange(0, 4)[None, :]
        of = (m // HEADS * ROWS + r).to(tl.int64) * HEADS + m % HEADS
        counts = tl.load(count + of * 4 + e, mask=m < tl.where(p >= 0, COUNTED, 0), other=0)
        tl.store(answer + (2 + e) * B + b, tl.sum(counts, 0)[None, :])


def begin(row_B: Tensor, position_B: Tensor, last_R: Tensor, looks: Looks) -> Queries:
    """Implement `penstock.kernels.fused.step.begin`."""
    num, places, budget_R = len(row_B), looks.places, looks.budget_R
    assert row_B.is_contiguous() and position_B.is_contiguous() and len(places) <= PLACES
    line = triton.cdiv(num, 4) * 4          # so that each is aligned: kernels are compiled for what is
    wide_XB = last_R.new_empty(3 + len(places), line)
    narrow_XB = row_B.new_empty(2 if budget_R is None else 4, line)
    three = (*places, *[BlockTableRef(None, 0)] * (PLACES - len(places)))
    tables = [row_B if place.table_RM is None else place.table_RM for place in three]
    block = 128
    # Nothing of a step is in front of it, which it might begin beside.
    begin_rows[(triton.cdiv(num, block),)](
        row_B, position_B, last_R, row_B if budget_R is None else budget_R,
        row_B if looks.now_1 is None else looks.now_1, *tables, wide_XB, narrow_XB,
        *[table.stride(0) for table in tables], num, line, len(last_R) - 1,
        PLACES=len(places),
        **{f"SIZE{i}": 0 if place.table_RM is None else place.size for i, place in enumerate(three)},
        **{f"UNIT{i}": place.unit for i, place in enumerate(three)}, BUDGET=budget_R is not None,
        TICK=looks.now_1 is not None, BLOCK=block, num_warps=4)
    (index_B, token_B, at_B), slot_LB = wide_XB[:3, :num], wide_XB[3:, :num]
    context_B, own_B, *budgets = narrow_XB[:, :num]
    return Queries(row_B, position_B, context_B, own_B, index_B, token_B, at_B, slot_LB, *budgets)


def angles(positions_T: Tensor, freq_F: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Implement `penstock.kernels.fused.step.angles`."""
    tokens, num = len(positions_T), freq_F.shape[-1]
    assert positions_T.is_contiguous() and freq_F.is_contiguous() and freq_F.dtype == torch.float32
    cos_T1H, sin_T1H = torch.empty(2, tokens, 1, 2 * num, dtype=dtype, device=positions_T.device)
    if tokens:
        turn_angles[(tokens,)](positions_T, freq_F, cos_T1H, sin_T1H, factor,
                               num if freq_F.dim() > 1 else 0, num, F_PAD=triton.next_power_of_2(num),
                               num_warps=1, **early())
    return cos_T1H, sin_T1H


def best(head_BV: Tensor, logits_BV: Tensor) -> Best:
    """Implement `penstock.kernels.fused.step.best`."""
    rows, vocab = head_BV.shape
    assert logits_BV.is_contiguous() and logits_BV.shape == head_BV.shape and head_BV.stride(1) == 1
    parts = triton.cdiv(vocab, PART)
    peak_BS = logits_BV.new_empty(rows, parts)
    at_BS, token_B = (torch.empty(shape, dtype=kind, device=peak_BS.device) for shape, kind in (
        (peak_BS.shape, torch.int32), (rows, torch.int64)))
    best_parts[(parts, rows)](head_BV, logits_BV, peak_BS, at_BS, token_B, head_BV.stride(0), vocab,
                              BLOCK=PART, num_warps=8, **early())
    return Best(peak_BS, at_BS, token_B)


def say(found: Best, row_B: Tensor, position_B: Tensor, last_R: Tensor, count_LRKE: Tensor | None) -> Tensor:
    """Implement `penstock.kernels.fused.step.say`."""
    (rows, parts), lines = found.peak_BS.shape, 2
    layers = table_rows = heads = 0
    if count_LRKE is not None:
        assert count_LRKE.is_contiguous() and count_LRKE.dtype == torch.int64
        layers, table_rows, heads, columns = count_LRKE.shape
        lines += columns
    answer_XB = last_R.new_empty(lines, rows)
    say_tokens[(rows,)](
        *found, row_B, position_B, last_R, last_R if count_LRKE is None else count_LRKE, answer_XB, rows,
        len(last_R) - 1, table_rows, layers * heads, max(1, heads), PARTS=parts,
        PARTS_PAD=triton.next_power_of_2(parts),
        COUNTED_PAD=0 if count_LRKE is None else triton.next_power_of_2(max(1, layers * heads)), num_warps=4,
        **early())
    return answer_XB
