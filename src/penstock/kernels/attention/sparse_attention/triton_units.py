"""One query over chosen units in Triton: tokens cut into parts that run side by side, then joined in order.

A part is a fixed number of tokens, whatever the batch: a query's result does not depend on who runs
beside it. Imported only where a CUDA device was asked for.

    B queries   N query heads   K KV heads   g = N / K   H head dim   P pages   G page size   C chosen units
    S parts
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.coded import kept_vectors, words_of
from penstock.kernels.triton.depend import early, follow

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["position"])
def attend_units(q, k, v, k_words, v_words, chosen, slot, position, part, peak, scale, q_row, q_head, kv_page,
                 kv_head, CHOSEN, UNIT: tl.constexpr, OF_PAGE: tl.constexpr, GROUP: tl.constexpr,
                 GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
                 BLOCKS: tl.constexpr, EXACT: tl.constexpr, TOKEN: tl.constexpr, CODED: tl.constexpr):
    """Part `s` of query `b`, all query heads of one KV head: the mean of its values into `part`, log2 of
    the weights' sum into `peak`, -inf for a part that sees nothing. A slot has TOKEN elements. CODED: k and v are bytes
    of codes, the words they as f32."""
    follow()
    s, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts, heads = tl.num_programs(0), tl.num_programs(1)
    p = tl.load(position + b)
    i = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    own = (i[:, None] < GROUP) & (d[None, :] < DIM)
    q_gH = tl.load(q + b.to(tl.int64) * q_row + (head * GROUP + i[:, None]) * q_head + d[None, :], mask=own,
                   other=0.0)
    units = (b * heads + head) * CHOSEN
    top_g = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    sum_g = tl.zeros([GROUP_PAD], tl.float32)
    acc_gH = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for block in range(BLOCKS):
        n = (s * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        listed = n // UNIT < CHOSEN
        unit = tl.load(chosen + units + n // UNIT, mask=listed, other=-1)
        at = tl.load(slot + units + n // UNIT, mask=listed, other=-1)
        seen = (unit >= 0) & (unit * UNIT + n % UNIT <= p)
        here = seen & (at >= 0)
        token = at % OF_PAGE * UNIT + n % UNIT
        token = (at // OF_PAGE).to(tl.int64) * kv_page + head * kv_head + token * TOKEN
        inside = here[:, None] & (d[None, :] < DIM)
        k_nH, k_scale_n = kept_vectors(k, k_words, token, d, here, inside, q_gH.dtype, DIM, CODED)
        scores = tl.dot(q_gH, tl.trans(k_nH), input_precision=precision) * (scale * _LOG2E)
        if CODED:
            scores *= k_scale_n[None, :]
        # A unit that is nowhere must show.
        scores = tl.where(here[None, :], scores, tl.where(seen[None, :], float("nan"), float("-inf")))
        new_g = tl.maximum(top_g, tl.max(scores, 1))
        base_g = tl.where(new_g == float("-inf"), 0.0, new_g)
        weight = tl.exp2(scores - base_g[:, None])
        keep_g = tl.exp2(top_g - base_g)
        sum_g = sum_g * keep_g + tl.sum(weight, 1)
        v_nH, v_scale_n = kept_vectors(v, v_words, token, d, here, inside, q_gH.dtype, DIM, CODED)
        acc_gH = acc_gH * keep_g[:, None]
        if CODED:
            weight *= v_scale_n[None, :]
        acc_gH = tl.dot(weight.to(v_nH.dtype), v_nH, acc_gH, input_precision=precision)
        top_g = new_g
    at_g = ((b * heads + head) * GROUP + i) * parts + s
    none = sum_g == 0
    total = tl.where(none, 1.0, sum_g)
    tl.store(part + at_g[:, None] * DIM + d[None, :], acc_gH / total[:, None], mask=own)
    tl.store(peak + at_g, tl.where(none, float("-inf"), top_g + tl.log2(total)), mask=i < GROUP)


@triton.jit
def join_units(part, peak, out, lse, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, DIM: tl.constexpr,
               BLOCK: tl.constexpr):
    """The parts of one query and head, BLOCK dims, side by side; 0 and -inf where none sees anything."""
    follow()
    at, s = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PAD)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = d < DIM
    log_s = tl.load(peak + at * PARTS + s, mask=s < PARTS, other=float("-inf"))
    x_sH = tl.load(part + (at * PARTS + s)[:, None] * DIM + d[None, :],
                   mask=(s < PARTS)[:, None] & own[None, :], other=0.0)
    top = tl.max(log_s, 0)
    none = top == float("-inf")
    top = tl.where(none, 0.0, top)
    weight_s = tl.exp2(log_s - top)
    total = tl.where(none, 1.0, tl.sum(weight_s, 0))
    acc = tl.sum(x_sH * weight_s[:, None], 0)
    tl.store(out + at * DIM + d, (acc / total).to(out.dtype.element_ty), mask=own)
    if tl.program_id(1) == 0:
        tl.store(lse + at, tl.where(none, float("-inf"), (top + tl.log2(total)) / _LOG2E))


def join(part_BNSH: Tensor, peak_BNS: Tensor, out_BNH: Tensor, lse_BN: Tensor) -> None:
    """The parts S of each query and head into one: their means, and log2 of their weights' sums. Those there
    are no queries for stay as they are."""
    queries, heads, dim = out_BNH.shape
    parts = peak_BNS.shape[2]
    pad = triton.next_power_of_2(parts)
    block = max(16, min(triton.next_power_of_2(dim), (1 << 13) // pad))
    join_units[(queries * heads, triton.cdiv(dim, block))](
        part_BNSH, peak_BNS, out_BNH, lse_BN, PARTS=parts, PARTS_PAD=pad, DIM=dim, BLOCK=block, num_warps=4,
        **early())


BLOCK, BLOCKS = 64, 8           # tokens of a block, of wide heads half as many; blocks of a part
SUMS = 1 << 24                  # of parts, in memory at once


def sparse_attention(q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
                     position_B: Tensor, *, unit: int, scale: float) -> tuple[Tensor, Tensor]:
    """Implement `penstock.kernels.attention.sparse_attention`. Capturable."""
    queries, heads, dim = q_BNH.shape
    _, kv_heads, _, size, _ = pool_PK2GH.shape
    group, chosen = heads // kv_heads, chosen_BKC.shape[2]
    k_PKGH, v_PKGH, wide = pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1], pool_PK2GH.shape[4]
    assert q_BNH.stride(2) == pool_PK2GH.stride(4) == 1 and pool_PK2GH.stride(3) == wide, "not dense"
    assert chosen_BKC.is_contiguous() and slot_BKC.is_contiguous(), "choices must be dense"
    dim_pad = max(16, triton.next_power_of_2(dim))
    block = BLOCK if dim_pad * q_BNH.element_size() <= 512 else BLOCK // 2
    parts = triton.cdiv(chosen * unit, block * BLOCKS)
    most = max(1, min(queries, SUMS // (heads * parts * dim)))
    device = q_BNH.device
    part = torch.empty((most, heads, parts, dim), dtype=torch.float32, device=device)
    peak = torch.empty((most, heads, parts), dtype=torch.float32, device=device)
    out_BNH = torch.empty((queries, heads, dim), dtype=q_BNH.dtype, device=device)
    lse_BN = torch.empty((queries, heads), dtype=torch.float32, device=device)
    for first in range(0, queries, most):
        at = slice(first, first + most)
        num = len(position_B[at])
        attend_units[(parts, kv_heads, num)](
            q_BNH[at], k_PKGH, v_PKGH, *words_of(k_PKGH, v_PKGH), chosen_BKC[at], slot_BKC[at], position_B[at],
            part, peak, scale, q_BNH.stride(0), q_BNH.stride(1), pool_PK2GH.stride(0), pool_PK2GH.stride(1),
            chosen, UNIT=unit, OF_PAGE=size // unit, GROUP=group,
            GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_PAD=dim_pad, BLOCK=block,
            BLOCKS=BLOCKS, EXACT=q_BNH.dtype == torch.float32, TOKEN=wide, CODED=pool_PK2GH.dtype == torch.uint8,
            num_warps=4, num_stages=3, **early())
        join(part, peak, out_BNH[at], lse_BN[at])
    return out_BNH, lse_BN
