"""Paged decode attention in Triton: one query a row, its context cut into parts that run side by side.

Nothing here depends on the rows but through tensors on the device, so a captured graph stays right
when rows, contexts and page tables change. Imported only where a CUDA device was asked for.

    B rows of the call   R rows of the table   P pages   G page size   N query heads   K KV heads
    g = N / K   H head dim   S parts of a context
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.paged_attention.spec import AttentionSpec
from penstock.kernels.triton.coded import kept_vectors, words_of
from penstock.kernels.triton.depend import early, follow

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(x, cap):
    """cap * tanh(x / cap)."""
    share = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E / cap))
    size = cap * (1.0 - share) / (1.0 + share)
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize_on_alignment=["row", "context"])
def attend_parts(q, k, v, k_words, v_words, table, row, context, sinks, out, part, peak, scale, cap,
                 q_row, q_head, kv_page, kv_head, kv_token, table_row,
                 GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                 PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr,
                 WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, FIRST: tl.constexpr,
                 CODED: tl.constexpr):
    """Part `s` of row `b`, all query heads of one KV head. One part: straight into `out`; several:
    the mean into `part` and log2 of the weights' sum into `peak`, -inf for an empty one. What is before a
    window is not looked at; a sink is in the sum of part 0. CODED: bytes, which `words` are as f32."""
    b, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    n = tl.load(context + b)
    blocks = tl.cdiv(n, BLOCK)
    begin = tl.maximum(n - WINDOW, 0) if WINDOW else (tl.where(n > 1, 1, 0) if FIRST else 0)
    share = tl.cdiv(blocks - begin // BLOCK, PARTS)
    first = begin // BLOCK + s * share
    last = tl.minimum(first + share, blocks)
    i = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    own = (i[:, None] < GROUP) & (d[None, :] < DIM)
    q_at = b * q_row + (head * GROUP + i[:, None]) * q_head + d[None, :]
    q_gH = tl.load(q + q_at, mask=own, other=0.0)
    pages = table + tl.load(row + b).to(tl.int64) * table_row
    top_g = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    sum_g = tl.zeros([GROUP_PAD], tl.float32)
    acc_gH = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for block in range(first, last):
        t = block * BLOCK + tl.arange(0, BLOCK)
        seen = (t < n) & (t >= begin)
        page = tl.load(pages + t // PAGE, mask=seen, other=0).to(tl.int64)
        at = page * kv_page + head * kv_head + (t % PAGE) * kv_token
        inside = seen[:, None] & (d[None, :] < DIM)
        k_tH, k_scale_t = kept_vectors(k, k_words, at, d, seen, inside, q_gH.dtype, DIM, CODED)
        scores = tl.dot(q_gH, tl.trans(k_tH), input_precision=precision)
        if CODED:
            scores *= k_scale_t[None, :]
        scores = _capped(scores * scale, cap) * _LOG2E if CAPPED else scores * (scale * _LOG2E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_g = tl.maximum(top_g, tl.max(scores, 1))
        weight = tl.exp2(scores - new_g[:, None])
        keep_g = tl.exp2(top_g - new_g)
        sum_g = sum_g * keep_g + tl.sum(weight, 1)
        # A slot that holds no token may hold a NaN, which times 0 is one.
        v_tH, v_scale_t = kept_vectors(v, v_words, at, d, seen, inside, q_gH.dtype, DIM, CODED)
        acc_gH = acc_gH * keep_g[:, None]
        if CODED:
            weight *= v_scale_t[None, :]
        acc_gH = tl.dot(weight.to(v_tH.dtype), v_tH, acc_gH, input_precision=precision)
        top_g = new_g
    if SINKS:
        sink_g = tl.load(sinks + head * GROUP + i, mask=i < GROUP, other=0.0).to(tl.float32) * _LOG2E
        new_g = tl.maximum(top_g, sink_g)
        new_g = tl.where(s == 0, new_g, top_g)
        keep_g = tl.where(top_g == new_g, 1.0, tl.exp2(top_g - new_g))
        sum_g = sum_g * keep_g + tl.where(s == 0, tl.exp2(sink_g - new_g), 0.0)
        acc_gH = acc_gH * keep_g[:, None]
        top_g = new_g
    if PARTS == 1:
        o_at = (b * heads + head) * GROUP * DIM + i[:, None] * DIM + d[None, :]
        whole = acc_gH / tl.where(sum_g > 0, sum_g, 1.0)[:, None]
        tl.store(out + o_at, whole.to(out.dtype.element_ty), mask=own)
    else:
        at_g = ((b * heads + head) * GROUP + i) * PARTS + s
        none = sum_g == 0
        whole = acc_gH / tl.where(none, 1.0, sum_g)[:, None]
        tl.store(part + at_g[:, None] * DIM + d[None, :], whole, mask=own)
        log_g = tl.where(none, float("-inf"), top_g + tl.log2(tl.where(none, 1.0, sum_g)))
        tl.store(peak + at_g, log_g, mask=i < GROUP)


@triton.jit
def join_parts(part, peak, out, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PARTS: tl.constexpr,
               PARTS_PAD: tl.constexpr):
    """The weighted mean of the parts of one row and query head; zeros for a row without context."""
    follow()
    at = tl.program_id(0)
    s = tl.arange(0, PARTS_PAD)
    d = tl.arange(0, DIM_PAD)
    log_S = tl.load(peak + at * PARTS + s, mask=s < PARTS, other=float("-inf"))
    top = tl.max(log_S, 0)
    weight_S = tl.exp2(log_S - tl.where(top == float("-inf"), 0.0, top))
    own = (s[:, None] < PARTS) & (d[None, :] < DIM)
    x_SH = tl.load(part + (at * PARTS + s[:, None]) * DIM + d[None, :], mask=own, other=0.0)
    total = tl.sum(weight_S, 0)
    mean_H = tl.sum(x_SH * weight_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * DIM + d, mean_H.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How `decode` cuts its work: tokens of a block, parts of a context, warps, stages of loads."""

    block: int
    parts: int
    warps: int = 4
    stages: int = 5


def tuning(rows: int, num_kv_heads: int, longest: int, processors: int, window: int = 0,
           head_bytes: int = 0) -> Tuning:
    """For `rows` rows of at most `longest` tokens, of which a query sees `window`, 0: all: two programs
    a processor, at most, as measured on an H200 (4.36 TB/s for 32 rows of 8k), and no part shorter than two
    blocks. head_bytes: of one key; of wide ones fewer are in a processor's memory at once."""
    wide, longest = head_bytes > 512, min(longest, window) if window else longest
    block = 32 if wide else 64
    parts = max(1, min(2 * processors // (rows * num_kv_heads), longest // (2 * block), 64))
    return Tuning(block=block, parts=1 << (parts.bit_length() - 1), warps=4, stages=2 if wide else 5)


def decode(q_BNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, table_RP: Tensor, row_B: Tensor,
           context_B: Tensor, *, spec: AttentionSpec, cut: Tuning, sinks_N: Tensor | None = None) -> Tensor:
    """out_BNH: each row's one query over the first `context` slots of the pages in its table row, of a window
    the last of them. Of the spec that `prepare` is given.

    q_BNH      f32|bf16, dense in H       k, v_PKGH   as there, dense, equal strides
    table_RP   int32, dense in P, page indices         row_B, context_B   int32, dense
    sinks_N    f32, dense, where the spec has them
    A context of 0 gives zeros. Reads only slots of the row's tokens that its query sees. Capturable.
    """
    rows, heads, dim = q_BNH.shape
    _, kv_heads, page_size, _ = k_PKGH.shape
    assert k_PKGH.stride() == v_PKGH.stride(), "k and v lie differently"
    assert q_BNH.stride(2) == 1 and k_PKGH.stride(3) == 1, "head dim must be dense"
    out_BNH = torch.empty((rows, heads, dim), dtype=q_BNH.dtype, device=q_BNH.device)
    part, peak = out_BNH, out_BNH
    if cut.parts > 1:
        part = torch.empty((rows, heads, cut.parts, dim), dtype=torch.float32, device=q_BNH.device)
        peak = torch.empty((rows, heads, cut.parts), dtype=torch.float32, device=q_BNH.device)
    group = heads // kv_heads
    dim_pad = max(16, triton.next_power_of_2(dim))
    # Not early: begun beside the kernels in front, its programs fill the processors unevenly.
    attend_parts[(rows, kv_heads, cut.parts)](
        q_BNH, k_PKGH, v_PKGH, *words_of(k_PKGH, v_PKGH), table_RP, row_B, context_B,
        out_BNH if sinks_N is None else sinks_N, out_BNH,
        part, peak, spec.scale, spec.softcap,
        q_BNH.stride(0), q_BNH.stride(1), k_PKGH.stride(0), k_PKGH.stride(1), k_PKGH.stride(2),
        table_RP.stride(0), GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim,
        DIM_PAD=dim_pad, PAGE=page_size, BLOCK=cut.block, PARTS=cut.parts,
        EXACT=q_BNH.dtype == torch.float32, WINDOW=spec.window, CAPPED=spec.softcap > 0, SINKS=spec.sinks,
        FIRST=spec.first, CODED=k_PKGH.dtype == torch.uint8, num_warps=cut.warps, num_stages=cut.stages)
    if cut.parts > 1:
        join_parts[(rows * heads,)](part, peak, out_BNH, DIM=dim, DIM_PAD=dim_pad, PARTS=cut.parts,
                                    PARTS_PAD=triton.next_power_of_2(cut.parts), num_warps=1, **early())
    return out_BNH


@triton.jit(do_not_specialize_on_alignment=["row_T", "position_T"])
def write_rows(k_new, v_new, k, v, table, row_T, position_T, new_token, new_head, kv_page, kv_head,
               kv_token, table_row, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
               DIM_PAD: tl.constexpr, PAGE: tl.constexpr):
    """One new token's k and v into its slot; none for a negative position. A value that is not finite is
    stored as zeros, and its key as NaN: see `attention.hidden`."""
    follow()
    t = tl.program_id(0)
    position = tl.load(position_T + t)
    if position >= 0:
        row = (t if row_T is None else tl.load(row_T + t)).to(tl.int64)
        page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
        head = tl.arange(0, HEADS_PAD)[:, None]
        d = tl.arange(0, DIM_PAD)[None, :]
        own = (head < HEADS) & (d < DIM)
        at = page * kv_page + head * kv_head + (position % PAGE) * kv_token + d
        src = t.to(tl.int64) * new_token + head * new_head + d
        x = tl.load(v_new + src, mask=own, other=0.0)
        faults = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1)
        bad = tl.max(faults, 1)[:, None] > 0
        key = tl.load(k_new + src, mask=own, other=0.0)
        tl.store(k + at, tl.where(bad, float("nan"), key.to(tl.float32)).to(k.dtype.element_ty), mask=own)
        tl.store(v + at, tl.where(bad, 0.0, x.to(tl.float32)).to(v.dtype.element_ty), mask=own)


def write_kv(k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, table_RP: Tensor,
             row_T: Tensor | None, position_T: Tensor) -> None:
    """Write each new token's k and v into the page that its row's table names for its position. A value
    that is not finite is stored as zeros and its key as NaN: a library's kernel multiplies hidden values by
    zero.

    k, v_TKH   dtype of the pools, dense in H, equal strides
    row_T      integers, per token; None: each has a row of its own    table_RP   integers, dense in P
    position_T   integers, negative for a token that is padding.       Capturable.
    """
    tokens, heads, dim = k_TKH.shape
    assert k_TKH.stride() == v_TKH.stride() and k_PKGH.stride() == v_PKGH.stride(), "k and v lie differently"
    assert k_TKH.stride(2) == 1 and k_PKGH.stride(3) == 1, "head dim must be dense"
    write_rows[(tokens,)](
        k_TKH, v_TKH, k_PKGH, v_PKGH, table_RP, row_T, position_T, k_TKH.stride(0), k_TKH.stride(1),
        k_PKGH.stride(0), k_PKGH.stride(1), k_PKGH.stride(2), table_RP.stride(0), HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        PAGE=k_PKGH.shape[2], num_warps=4, **early())
