"""Tokens by an indexer's scores in Triton: scores of all, then the best of each query, in rounds.

A round keeps the best TOPK of each block of scores, in order, until one block is left: what it keeps of a
block is exact, so what is left at the end is too, however long a row is. Which tokens are scored depends on
positions alone, which are on the device: a captured graph serves any rows. Imported only where a CUDA
device was asked for.

    B queries   I index heads   J index head dim   P pages of keys   G page size   R rows of the table
    U tokens a row may have   S tokens chosen   b queries of a turn   C candidates of a round
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.topn import cut_of, key_of, taken_of
from penstock.kernels.types import fp8


@triton.jit
def score_keys(q, weight, key, scales, table, row, position, score, q_row, weight_row, key_page, table_row,
               TOKENS, BLOCKS, SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
               DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
               KEY: tl.constexpr, CODED: tl.constexpr):
    """BLOCKS blocks of BLOCK tokens of one query; nothing where all its tokens are behind its position. KEY:
    elements of a key, of codes words of four bytes; `scales` are the keys seen as f32."""
    b = tl.program_id(1)
    end = tl.load(position + b) + 1
    first = tl.program_id(0) * BLOCKS * BLOCK
    if first < end:
        d = tl.arange(0, DIM_PAD)
        i = tl.arange(0, HEADS_PAD)
        q_JI = tl.load(q + b.to(tl.int64) * q_row + i[None, :] * DIM + d[:, None],
                       mask=(i[None, :] < HEADS) & (d[:, None] < DIM), other=0.0)
        weight_I = tl.load(weight + b.to(tl.int64) * weight_row + i, mask=i < HEADS, other=0.0)
        pages = table + tl.load(row + b).to(tl.int64) * table_row
        line = score + b.to(tl.int64) * TOKENS
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        for start in range(first, tl.minimum(first + BLOCKS * BLOCK, end), BLOCK):
            t = start + tl.arange(0, BLOCK)
            own = t < end
            page = tl.load(pages + t // SIZE, mask=own, other=0).to(tl.int64)
            at = page * key_page + t % SIZE * KEY
            inside = own[:, None] & (d[None, :] < DIM)
            if CODED:                   # a code is exact in any type
                byte = tl.load(key + (at * 4)[:, None] + d[None, :], mask=inside, other=0)
                key_tJ = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                key_tJ = tl.load(key + at[:, None] + d[None, :], mask=inside, other=0.0)
            s_tI = tl.dot(key_tJ.to(q.dtype.element_ty), q_JI, input_precision=precision)
            s_t = tl.sum(tl.maximum(s_tI, 0.0) * weight_I[None, :], 1)
            if CODED:
                s_t *= tl.load(scales + at + DIM // 4, mask=own, other=0.0)
            tl.store(line + t, s_t, mask=own)


@triton.jit
def best_keys(score, at, position, out_score, out_at, CANDIDATES, OUT, TOPK, TOPK_PAD: tl.constexpr,
              BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """The TOPK best of one block of a query's candidates, in their order, then -1. FIRST: they are the
    scores of all its tokens, and `at` is not read. LAST: it is the only block, and what is kept needs no
    score."""
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = block * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        token = c
        real = (c < CANDIDATES) & (c <= tl.load(position + b))
    else:
        token = tl.load(at + b * CANDIDATES + c, mask=c < CANDIDATES, other=-1)
        real = token >= 0
    num = tl.sum(real.to(tl.int32), 0)
    s = tl.load(score + b * CANDIDATES + c, mask=real, other=0.0)
    key = tl.where(real, key_of(s), 0)
    taken = real
    if num > TOPK:
        cut = cut_of(key, TOPK)
        taken = taken_of(key, cut, TOPK - tl.sum((key > cut).to(tl.int32), 0))
    out = b * OUT + block * TOPK
    place = out + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(out_at + place, token, mask=taken)
    if not LAST:
        tl.store(out_score + place, s, mask=taken)
    n = tl.arange(0, TOPK_PAD)
    tl.store(out_at + out + n, -1, mask=(n >= num) & (n < TOPK))


BLOCK = 128                 # tokens that are scored together
PROGRAMS = 528              # that score at once: four on each processor of an H200
WHOLE = 8192                # candidates of a block: as many as 16 warps keep in registers
SCORES = 1 << 26            # in memory at once: a prompt's are thousands of queries


def index_select(q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, *, topk: int) -> Tensor:
    """As `penstock.kernels.choose.index_select`. Capturable."""
    queries, heads, dim = q_BIJ.shape
    size = key_PGJ.shape[1]
    tokens = table_RP.shape[1] * size
    assert q_BIJ.is_contiguous() and weight_BI.stride(1) == table_RP.stride(1) == 1, "rows must be dense"
    coded = key_PGJ.dtype == torch.uint8
    assert not coded or dim <= fp8.BLOCK, f"keys of {dim}"
    row = fp8.width(dim, dim) if coded else dim
    assert key_PGJ.stride(2) == 1 and key_PGJ.stride(1) == row, "tokens of a page must be dense"
    words = key_PGJ.view(torch.float32) if coded else key_PGJ
    device = q_BIJ.device
    most = max(1, min(queries, SCORES // tokens))
    score_bU = torch.empty((most, tokens), dtype=torch.float32, device=device)
    chosen_BS = torch.empty((queries, topk), dtype=torch.int32, device=device)
    for first in range(0, queries, most):
        turn = slice(first, first + most)
        num = len(position_B[turn])
        total = triton.cdiv(tokens, BLOCK)
        blocks = max(1, min(8, total * num // PROGRAMS))
        score_keys[(triton.cdiv(total, blocks), num)](
            q_BIJ[turn], weight_BI[turn], key_PGJ, words, table_RP, row_B[turn], position_B[turn], score_bU,
            q_BIJ.stride(0), weight_BI.stride(0), words.stride(0), table_RP.stride(0), tokens, blocks,
            SIZE=size, HEADS=heads, HEADS_PAD=max(16, triton.next_power_of_2(heads)), DIM=dim,
            DIM_PAD=max(16, triton.next_power_of_2(dim)), BLOCK=BLOCK, EXACT=q_BIJ.dtype == torch.float32,
            KEY=words.stride(1), CODED=coded, num_warps=4)
        _best(score_bU, position_B[turn], chosen_BS[turn])
    return chosen_BS


def _best(score_bU: Tensor, position_b: Tensor, chosen_bS: Tensor) -> None:
    """The tokens of the best scores of each query into `chosen_bS`, block by block until one is left."""
    num, topk = chosen_bS.shape
    score_bC, at_bC, candidates = score_bU, chosen_bS, score_bU.shape[1]
    last = False
    while not last:
        block = min(max(WHOLE, 2 * triton.next_power_of_2(topk)), max(32, triton.next_power_of_2(candidates)))
        groups = triton.cdiv(candidates, block)
        last = groups == 1
        out_at = chosen_bS if last else chosen_bS.new_empty(num, groups * topk)
        out_score = score_bU if last else score_bU.new_empty(num, groups * topk)
        best_keys[(groups, num)](score_bC, at_bC, position_b, out_score, out_at, candidates, groups * topk,
                                 topk, TOPK_PAD=triton.next_power_of_2(topk), BLOCK=block, FIRST=score_bC is
                                 score_bU, LAST=last, num_warps=max(1, min(32, block // 512)))
        score_bC, at_bC, candidates = out_score, out_at, groups * topk
