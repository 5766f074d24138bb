"""Blocks by the best of their indexer keys on a GPU: scores of all, then the largest of each query and index head, by
the kernels of `select`. Which blocks are scored depends on positions alone, which are on the device: a captured graph
serves any rows. Imported only where a CUDA device was asked for.

    B queries   I index heads   J index head dim   P pages of keys   G page size   R rows of the table
    U blocks a row may have   C blocks selected at most   b queries of a turn   n queries of a program
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.choose.block_select.reference import rule_of
from penstock.kernels.choose.select.triton_bounds import SCORES, best_units
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.triton.lazy import alone
from penstock.kernels.types import fp8


@triton.jit(do_not_specialize=["turns", "NUM"], do_not_specialize_on_alignment=["row", "position"])
def score_blocks(q, key, scales, table, row, position, score, q_row, key_page, table_row, UNITS, SINK_UNITS, WINDOW,
                 turns, NUM, UNIT: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
                 DIM_PAD: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
                 BLOCKS: tl.constexpr, EXACT: tl.constexpr, KEY: tl.constexpr, CODED: tl.constexpr,
                 QUERIES: tl.constexpr):
    """`turns` of BLOCKS blocks, for QUERIES of the NUM queries; those of one row share what is read of its keys. A
    block has PARTS of PART tokens. KEY: elements of a key, of codes words of four bytes; `scales` are the keys seen as
    f32."""
    b = tl.program_id(1).to(tl.int64) * QUERIES
    n = tl.arange(0, QUERIES)
    follow()
    row_n = tl.load(row + b + n, mask=b + n < NUM, other=-1)
    end_n = tl.maximum(tl.load(position + b + n, mask=b + n < NUM, other=-1) + 1 - WINDOW, 0) // UNIT
    begin = tl.program_id(0) * turns * BLOCKS
    if begin < tl.max(end_n, 0):
        d, c = tl.arange(0, DIM_PAD), tl.arange(0, QUERIES * HEADS_PAD)
        i, query = c % HEADS_PAD, b + c // HEADS_PAD
        used = (i < HEADS) & (query < NUM)
        q_JC = tl.load(q + (query * q_row + i * DIM)[None, :] + d[:, None],
                       mask=used[None, :] & (d[:, None] < DIM), other=0.0)
        row_C = tl.load(row + query, mask=used, other=-1)
        end_C = tl.maximum(tl.load(position + query, mask=used, other=-1) + 1 - WINDOW, 0) // UNIT
        u, t = tl.arange(0, BLOCKS), tl.arange(0, BLOCKS * PART)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        for turn in range(QUERIES):         # each of their rows, at the first query that has it
            line = tl.max(tl.where(n == turn, row_n, -1), 0)
            mine = (row_n == line) & (row_n >= 0)
            end = tl.max(tl.where(mine, end_n, 0), 0)
            end = tl.where(tl.sum((mine & (n < turn)).to(tl.int32), 0) == 0, end, 0)
            pages = table + line.to(tl.int64) * table_row
            for start in range(begin, tl.minimum(begin + turns * BLOCKS, end), BLOCKS):
                best_uC = tl.full([BLOCKS, QUERIES * HEADS_PAD], float("-inf"), tl.float32)
                for part in range(PARTS):
                    inner = part * PART + t % PART
                    token = (start + t // PART) * UNIT + inner
                    own = (start + t // PART < end) & (inner < UNIT)
                    page = tl.load(pages + token // SIZE, mask=own, other=0).to(tl.int64)
                    # Of `token % SIZE * KEY` Triton 3.6 copies 16 bytes at once, which KEY words are not a multiple of.
                    at = page * key_page + token * KEY - token // SIZE * (SIZE * KEY)
                    key_tJ = tl.load(key + (at * (4 if CODED else 1))[:, None] + d[None, :],
                                     mask=own[:, None] & (d[None, :] < DIM), other=0.0)
                    if CODED:
                        s_tC = tl.dot(key_tJ, q_JC) * tl.load(scales + at + DIM // 4, mask=own, other=0.0)[:, None]
                    else:
                        s_tC = tl.dot(key_tJ.to(q.dtype.element_ty), q_JC, input_precision=precision)
                    s_tC = tl.where(own[:, None], s_tC, float("-inf"))
                    best_uC = tl.maximum(best_uC, tl.max(tl.reshape(
                        s_tC, (BLOCKS, PART, QUERIES * HEADS_PAD)), 1))
                scored = (row_C == line) & (start + u[:, None] < end_C[None, :]) & (start + u[:, None] >= SINK_UNITS)
                tl.store(score + ((query * HEADS + i) * UNITS)[None, :] + start + u[:, None], best_uC,
                         mask=scored & used[None, :])


TOKENS, COLUMNS = 128, 64       # of a product: keys, and queries of a prompt times index heads
PROGRAMS = 528                  # that score at once: four on each processor of an H200


def block_select(q_BIJ: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor, *,
                 block: int, topk: int, first: int, last: int) -> Tensor:
    """Implement `penstock.kernels.choose.block_select`. Capturable."""
    queries, heads, dim = q_BIJ.shape
    rule, size = rule_of(block, topk, first, last), key_PGJ.shape[1]
    units = triton.cdiv(table_RP.shape[1] * size, block)
    assert q_BIJ.stride(2) == table_RP.stride(1) == 1 and q_BIJ.stride(1) == dim, "heads of a query must be dense"
    coded = key_PGJ.dtype == torch.uint8
    assert coded == (q_BIJ.dtype == torch.float8_e4m3fn), f"queries in {q_BIJ.dtype} of {key_PGJ.dtype}"
    assert not coded or (dim <= fp8.BLOCK and dim % 4 == 0), f"keys of {dim}"
    assert key_PGJ.stride(2) == 1 and key_PGJ.stride(1) == (fp8.width(dim, dim) if coded else dim), "keys must be dense"
    codes, words = ((key_PGJ.view(kind) for kind in (torch.float8_e4m3fn, torch.float32)) if coded else
                    (key_PGJ, key_PGJ))
    part = min(TOKENS, triton.next_power_of_2(block))
    at_once = max(1, 64 // part)
    wide, exact = triton.next_power_of_2(heads), q_BIJ.dtype == torch.float32
    most = max(1, min(queries, SCORES // (heads * units)))
    score_bIU = torch.empty((most, heads, units), dtype=torch.float32, device=q_BIJ.device)
    chosen_BIC = torch.empty((queries, heads, topk), dtype=torch.int32, device=q_BIJ.device)
    for start in range(0, queries, most):
        turn = slice(start, start + most)
        num = len(position_B[turn])
        shared = 1 if exact or num <= len(table_RP) else max(1, COLUMNS // wide)
        programs, total = triton.cdiv(num, shared), triton.cdiv(units, at_once)
        turns = max(1, min(16, total * programs // PROGRAMS))
        score_blocks[(triton.cdiv(total, turns), programs)](
            q_BIJ[turn], codes, words, table_RP, row_B[turn], position_B[turn], score_bIU, q_BIJ.stride(0),
            words.stride(0), table_RP.stride(0), units, rule.sink_units, rule.window, turns, num, UNIT=block,
            HEADS=heads, HEADS_PAD=max(wide, 16 // shared), DIM=dim, DIM_PAD=max(32, triton.next_power_of_2(dim)),
            SIZE=size, PART=part, PARTS=triton.cdiv(block, part), BLOCKS=at_once,
            EXACT=exact, KEY=words.stride(1), CODED=coded, QUERIES=shared, num_warps=8 if exact else 4, num_stages=2,
            **early())
        best_units(score_bIU[:num], position_B[turn], None, chosen_BIC[turn], rule)
    return chosen_BIC


block_select_in_triton = alone(block_select)
