"""Tokens by an indexer's scores on a GPU: scores of all, counted in bins, then the best of each query.

The bin in which the cut falls follows from the counts; what lies in bins above it is chosen, and the few in
it are listed and settled exactly. However many the bin has, the choice is exact; with more than the list
holds it is slow. On Hopper a cluster of blocks in CUDA C++ counts and chooses; else scoring counts, and every
block of tokens settles the list for itself, in Triton. Which tokens are scored depends on positions alone,
which are on the device: a captured graph serves any rows. Imported only where a CUDA device was asked for.

    B queries   I index heads   J index head dim   P pages of keys   G page size   R rows of the table
    U tokens a row may have   S tokens chosen   b queries of a turn   K blocks of U   N entries of a list
"""

from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.c.device import Launch, launcher
from penstock.kernels.choose.clusters import BINS, NEAR, clustered
from penstock.kernels.triton.depend import early, fetch, follow
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.topn import bin_of, cut_of, key_of
from penstock.kernels.types import fp8


@triton.jit(do_not_specialize=["BLOCKS", "NUM"], do_not_specialize_on_alignment=["row", "position"])
def score_keys(q, weight, key, scales, table, row, position, score, counted, q_row, weight_row, key_page,
               table_row, TOKENS, BLOCKS, NUM, SIZE: tl.constexpr, HEADS: tl.constexpr,
               HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
               EXACT: tl.constexpr, KEY: tl.constexpr, CODED: tl.constexpr, BINS: tl.constexpr,
               QUERIES: tl.constexpr):
    """BLOCKS blocks of BLOCK tokens of QUERIES of the NUM queries, each counted in its bin if there are BINS;
    nothing where all are behind their positions. Those of one row share what is read of its keys. KEY:
    elements of a key, of codes words of four bytes; `scales` are the keys seen as f32. Codes are multiplied
    as they are, and summed in what the device has for them: within 1e-4 of the largest score or so.
    """
    b = tl.program_id(1).to(tl.int64) * QUERIES
    n = tl.arange(0, QUERIES)
    first = tl.program_id(0) * BLOCKS * BLOCK
    row_n = tl.load(row + b + n, mask=b + n < NUM, other=-1)
    end_n = tl.load(position + b + n, mask=b + n < NUM, other=-1) + 1
    # Nothing of ours writes positions and tables, and of keys only the newest ones: the others may come now.
    if QUERIES == 1:
        ahead = first + tl.arange(0, BLOCK)
        seen = ahead < tl.max(end_n, 0)
        near = tl.load(table + tl.max(row_n, 0).to(tl.int64) * table_row + ahead // SIZE, mask=seen, other=0)
        begin = (near.to(tl.int64) * key_page + tl.where(seen, ahead, 0) % SIZE * KEY)[:, None]
        fetch(key + begin * (4 if CODED else 1) + tl.arange(0, 2)[None, :] * (DIM // 2))
    follow()
    if first < tl.max(end_n, 0):
        d = tl.arange(0, DIM_PAD)
        c = tl.arange(0, QUERIES * HEADS_PAD)
        i, query = c % HEADS_PAD, b + c // HEADS_PAD
        used = (i < HEADS) & (query < NUM)
        q_JC = tl.load(q + (query * q_row + i * DIM)[None, :] + d[:, None],
                       mask=used[None, :] & (d[:, None] < DIM), other=0.0)
        weight_C = tl.load(weight + query * weight_row + i, mask=used, other=0.0)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        for turn in range(QUERIES):         # each of their rows, at the first query that has it
            line = tl.max(tl.where(n == turn, row_n, -1), 0)
            mine = (row_n == line) & (row_n >= 0)
            end = tl.max(tl.where(mine, end_n, 0), 0)
            end = tl.where(tl.sum((mine & (n < turn)).to(tl.int32), 0) == 0, end, 0)
            pages = table + line.to(tl.int64) * table_row
            for start in range(first, tl.minimum(first + BLOCKS * BLOCK, end), BLOCK):
                t = start + tl.arange(0, BLOCK)
                own = t < end
                page = tl.load(pages + t // SIZE, mask=own, other=0).to(tl.int64)
                at = page * key_page + t % SIZE * KEY
                key_tJ = tl.load(key + (at * (4 if CODED else 1))[:, None] + d[None, :],
                                 mask=own[:, None] & (d[None, :] < DIM), other=0.0)
                if CODED:
                    s_tC = tl.dot(key_tJ, q_JC)
                else:
                    s_tC = tl.dot(key_tJ.to(q.dtype.element_ty), q_JC, input_precision=precision)
                s_tC = tl.maximum(s_tC, 0.0) * weight_C[None, :]
                s_tn = tl.sum(tl.reshape(s_tC, (BLOCK, QUERIES, HEADS_PAD)), 2)
                if CODED:
                    s_tn *= tl.load(scales + at + DIM // 4, mask=own, other=0.0)[:, None]
                visible = mine[None, :] & (t[:, None] < end_n[None, :])
                tl.store(score + ((b + n) * TOKENS)[None, :] + t[:, None], s_tn, mask=visible)
                if BINS:
                    tl.atomic_add(counted + ((b + n) * (BINS + 1))[None, :] + bin_of(s_tn, BINS), 1,
                                  mask=visible, sem="relaxed")


@triton.jit
def clear_bins(counted, BINS: tl.constexpr):
    """A kernel of ours, as a fill of torch's would end what begins early."""
    follow()
    bins = counted + tl.program_id(0).to(tl.int64) * (BINS + 1)
    tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
    tl.store(bins + BINS, 0)


@triton.jit(do_not_specialize_on_alignment=["position"])
def mark_keys(score, position, counted, above, near_score, near_at, TOKENS, TOPK, BINS: tl.constexpr,
              BLOCK: tl.constexpr, NEAR: tl.constexpr):
    """For one block of a query's tokens: count those in bins above the cut's, into `above`; write those of
    the cut's bin into the query's list, of which the first NEAR have room, in any order."""
    follow()
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(position + b) + 1
    t = block * BLOCK + tl.arange(0, BLOCK)
    if (end > TOPK) & (block * BLOCK < end):
        bins = counted + b * (BINS + 1)
        bin_t, s = _bins(score + b * TOKENS, t, end, BINS)
        cut = _cut(bins, TOPK, BINS)
        tl.store(above + b * tl.num_programs(0) + block, tl.sum((bin_t < cut).to(tl.int32), 0))
        near = bin_t == cut
        n = tl.atomic_add(bins + BINS + tl.zeros_like(t), 1, mask=near, sem="relaxed")
        tl.store(near_score + b * NEAR + n, s, mask=near & (n < NEAR))
        tl.store(near_at + b * NEAR + n, t, mask=near & (n < NEAR))


@triton.jit
def _cut(bins, TOPK, BINS: tl.constexpr):
    """The bin in which the TOPK-th largest score is; the first is that of the largest. Sums of 128 first: to
    scan all of them takes several times as long."""
    n, k = tl.arange(0, BINS // 128), tl.arange(0, 128)
    sum_n = tl.sum(tl.load(bins + n[:, None] * 128 + k[None, :]), 1)
    line = tl.sum((tl.cumsum(sum_n, 0) < TOPK).to(tl.int32), 0)
    before = tl.sum(tl.where(n < line, sum_n, 0), 0)
    least = before + tl.cumsum(tl.load(bins + line * 128 + k), 0)
    return line * 128 + tl.sum((least < TOPK).to(tl.int32), 0)


@triton.jit
def _bins(line, t, end, BINS: tl.constexpr):
    """The bin of each token, BINS behind the end, and its score."""
    own = t < end
    s = tl.load(line + t, mask=own, other=0.0)
    return tl.where(own, bin_of(s, BINS), BINS), s


@triton.jit
def _near(line, start, end, cut, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a block of tokens, 0 of those that are not in bin `cut`, and the tokens."""
    t = start + tl.arange(0, BLOCK)
    bin_t, s = _bins(line, t, end, BINS)
    return tl.where(bin_t == cut, key_of(s), 0), t


@triton.jit(do_not_specialize_on_alignment=["position"])
def take_keys(score, position, counted, above, near_score, near_at, chosen, TOKENS, TOPK, BINS: tl.constexpr,
              BLOCK: tl.constexpr, NEAR: tl.constexpr, BLOCKS_PAD: tl.constexpr, TOPK_PAD: tl.constexpr):
    """Write the chosen tokens of one block of a query, after those of the blocks before; the first writes
    the -1 behind all. What is larger than the cut is taken, and of what equals it the first `spare`."""
    follow()
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(position + b) + 1
    first = block * BLOCK
    line, out = score + b * TOKENS, chosen + b * TOPK
    if block == 0:
        n = tl.arange(0, TOPK_PAD)
        tl.store(out + n, -1, mask=(n >= end) & (n < TOPK))
    if first < end:
        t = first + tl.arange(0, BLOCK)
        own = t < end
        if end <= TOPK:
            tl.store(out + t, t, mask=own)
        else:
            blocks = tl.num_programs(0)
            key = tl.where(own, key_of(tl.load(line + t, mask=own, other=0.0)), 0)
            c = tl.arange(0, BLOCKS_PAD)
            used = (c < blocks) & (c * BLOCK < end)
            above_c = tl.load(above + b * blocks + c, mask=used, other=0)
            want = TOPK - tl.sum(above_c, 0)
            place = tl.sum(tl.where(c < block, above_c, 0), 0)
            bins = counted + b * (BINS + 1)
            num = tl.load(bins + BINS)
            if num <= NEAR:
                i = tl.arange(0, NEAR)
                k = key_of(tl.load(near_score + b * NEAR + i, mask=i < num, other=0.0))
                k = tl.where(i < num, k, 0)
                at = tl.load(near_at + b * NEAR + i, mask=i < num, other=0)
                cut = cut_of(k, want)
                larger = tl.sum((k > cut).to(tl.int32), 0)
                place += tl.sum(((k > cut) & (at < first)).to(tl.int32), 0)
                equals = tl.sum(((k == cut) & (at < first)).to(tl.int32), 0)
            else:           # ties, or a bin of a million tokens: by halves, over all tokens each time
                middle = _cut(bins, TOPK, BINS)
                low = tl.full((), 0xffffffff, tl.uint32)
                cut = tl.full((), 0, tl.uint32)
                for start in range(0, end, BLOCK):
                    k, at = _near(line, start, end, middle, BINS, BLOCK)
                    low = tl.minimum(low, tl.min(tl.where(k == 0, 0xffffffff, k), 0).to(tl.uint32))
                    cut = tl.maximum(cut, tl.max(k, 0).to(tl.uint32))
                while low < cut:
                    half = low + ((cut - low + 1) >> 1)
                    count = tl.full((), 0, tl.int32)
                    for start in range(0, end, BLOCK):
                        k, at = _near(line, start, end, middle, BINS, BLOCK)
                        count += tl.sum((k >= half).to(tl.int32), 0)
                    low = tl.where(count >= want, half, low)
                    cut = tl.where(count >= want, cut, half - 1)
                larger = tl.full((), 0, tl.int32)
                equals = tl.full((), 0, tl.int32)
                for start in range(0, end, BLOCK):
                    k, at = _near(line, start, end, middle, BINS, BLOCK)
                    larger += tl.sum((k > cut).to(tl.int32), 0)
                    place += tl.sum(((k > cut) & (at < first)).to(tl.int32), 0)
                    equals += tl.sum(((k == cut) & (at < first)).to(tl.int32), 0)
            spare = want - larger
            equal = (key == cut) & own
            more = (key > cut) & own
            # Both counts in one scan: a block has fewer than 1 << 15.
            both = tl.cumsum(more.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
            equals += both >> 16
            place += (both & 0xffff) + tl.minimum(equals, spare) - 1
            tl.store(out + place, t, mask=more | (equal & (equals <= spare)))


SHARED, MANY = 4, 16        # queries of a prompt that are scored together; how many are called many
PROGRAMS = 528              # that score at once: four on each processor of an H200
TAKEN, TAKEN_MANY = 1024, 2048      # tokens that are looked through together, of many queries
SOME, MOST = 8, 32          # queries: C++ scores bfloat16 keys of 8 to 32
_SCORE, _PROMPT = (Path(__file__).with_name(f"{name}.cu") for name in ("score_keys", "score_prompt"))
GROUPS, WAVES = 3, 8        # of a prompt in C++: warp groups, of two queries each; blocks a processor has
LEAST_PART, MOST_PART = 256, 16384      # tokens of a block of it
SCORES = 1 << 26            # in memory at once: a prompt's are thousands of queries


def _tile(queries: int, coded: bool, shared: int) -> tuple[int, int, int]:
    """Tokens that are scored together, warps, stages: what was fastest on an H200."""
    if coded:
        return 128, 4 if shared == 1 else 8, 2
    return (64, 4, 3) if queries >= MANY else (128, 4, 2)


def _in_cpp(q_BIJ: Tensor, key_PGJ: Tensor) -> bool:
    """Whether kernels in C++ are for such queries and keys."""
    _, heads, dim = q_BIJ.shape
    kinds = {(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.uint8)}
    aligned = key_PGJ.data_ptr() | key_PGJ.stride(0) * key_PGJ.itemsize | q_BIJ.data_ptr()
    return (q_BIJ.dtype, key_PGJ.dtype) in kinds and heads <= 64 and dim == fp8.BLOCK and not (
        key_PGJ.shape[1] % 16 or aligned % 16)


def _scores(q_BIJ: Tensor, key_PGJ: Tensor) -> Launch | None:
    """What scores one query of each row, where it can and is faster: Triton brings a key of 132 bytes word by
    word, and takes twice as long; of bfloat16 keys it is slower with some queries, by a seventh of 16."""
    queries, heads, dim = q_BIJ.shape
    coded = key_PGJ.dtype == torch.uint8
    if not (coded or SOME <= queries <= MOST) or not _in_cpp(q_BIJ, key_PGJ):
        return None
    room = 64 * dim * q_BIJ.itemsize + 12 * 16 * key_PGJ.stride(1) * key_PGJ.itemsize
    return launcher(_SCORE, "score_keys", shared=room, SIZE=key_PGJ.shape[1], HEADS=heads, CODED=int(coded))


def _score_prompt(q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                  position_B: Tensor, score_bU: Tensor) -> bool:
    """Scores of several queries of a row by the kernel in C++; False: they are not for it."""
    if not _in_cpp(q_BIJ, key_PGJ):
        return False
    num, heads, dim = q_BIJ.shape
    coded, size = key_PGJ.dtype == torch.uint8, key_PGJ.itemsize
    stages = 6 if coded else 5
    room = GROUPS * 128 * dim * q_BIJ.itemsize + stages * 64 * key_PGJ.stride(1) * size
    launch = launcher(_PROMPT, "score_prompt", shared=room, SIZE=key_PGJ.shape[1], HEADS=heads,
                      CODED=int(coded), GROUPS=GROUPS, STAGES=stages)
    if launch is None:
        return False
    tokens, blocks = score_bU.shape[1], triton.cdiv(num, 2 * GROUPS)
    part = 64 * triton.cdiv(tokens * blocks, 64 * PROGRAMS // 4 * WAVES)
    part = min(max(part, LEAST_PART), MOST_PART)
    launch((triton.cdiv(tokens, part), blocks), 128 * (GROUPS + 1), q_BIJ, weight_BI, key_PGJ, table_RP,
           row_B, position_B, score_bU, q_BIJ.stride(0) * q_BIJ.itemsize, weight_BI.stride(0),
           key_PGJ.stride(0) * size, table_RP.stride(0), tokens, num, part)
    return True


def _choose(score_bU: Tensor, position_b: Tensor, counted_bN: Tensor, chosen_bS: Tensor) -> None:
    """In Triton, of scores that are counted in bins."""
    num, tokens, topk = len(position_b), score_bU.shape[1], chosen_bS.shape[1]
    taken = TAKEN if num < MANY else TAKEN_MANY
    blocks = triton.cdiv(tokens, taken)
    near_bN = torch.empty((num, NEAR), dtype=torch.float32, device=score_bU.device)
    near_at_bN, above_bK = (torch.empty((num, of), dtype=torch.int32, device=score_bU.device)
                            for of in (NEAR, blocks))
    lists = score_bU, position_b, counted_bN, above_bK, near_bN, near_at_bN
    mark_keys[(blocks, num)](*lists, tokens, topk, BINS=BINS, BLOCK=taken, NEAR=NEAR, num_warps=8, **early())
    take_keys[(blocks, num)](*lists, chosen_bS, tokens, topk, BINS=BINS, BLOCK=taken, NEAR=NEAR,
                             BLOCKS_PAD=triton.next_power_of_2(blocks), TOPK_PAD=triton.next_power_of_2(topk),
                             num_warps=4 if taken == TAKEN else 8, **early())


def index_select(q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, *, topk: int) -> Tensor:
    """Implement `penstock.kernels.choose.index_select`. Capturable."""
    queries, heads, dim = q_BIJ.shape
    size = key_PGJ.shape[1]
    tokens = table_RP.shape[1] * size
    assert q_BIJ.is_contiguous() and weight_BI.stride(1) == table_RP.stride(1) == 1, "rows must be dense"
    coded = key_PGJ.dtype == torch.uint8
    assert not coded or dim <= fp8.BLOCK, f"keys of {dim}"
    row = fp8.width(dim, dim) if coded else dim
    assert key_PGJ.stride(2) == 1 and key_PGJ.stride(1) == row, "tokens of a page must be dense"
    codes, words = ((key_PGJ.view(kind) for kind in (torch.float8_e4m3fn, torch.float32)) if coded else
                    (key_PGJ, key_PGJ))
    assert coded == (q_BIJ.dtype == torch.float8_e4m3fn), f"queries in {q_BIJ.dtype} of {key_PGJ.dtype}"
    device, exact = q_BIJ.device, q_BIJ.dtype == torch.float32
    most = max(1, min(queries, SCORES // tokens))
    if queries > most > 2 * GROUPS:
        most -= most % (2 * GROUPS)
    choose = clustered(most, tokens)
    bins = BINS if choose is None else 0
    score_bU = torch.empty((most, tokens), dtype=torch.float32, device=device)
    counted_bN = torch.empty((most, bins + 1), dtype=torch.int32, device=device)
    chosen_BS = torch.empty((queries, topk), dtype=torch.int32, device=device)
    for first in range(0, queries, most):
        turn = slice(first, first + most)
        position_b = position_B[turn]
        num = len(position_b)
        if bins:
            clear_bins[(num,)](counted_bN, BINS=BINS, num_warps=8, **early())
        shared = 1 if exact or num <= len(table_RP) else SHARED
        scored = q_BIJ[turn], weight_BI[turn]
        places = table_RP, row_B[turn], position_b, score_bU
        if shared == 1 and choose is not None and (launch := _scores(q_BIJ, key_PGJ)) is not None:
            parts = max(1, min(triton.cdiv(tokens, 64), PROGRAMS // num))
            launch((parts, num), 128, *scored, key_PGJ, *places, q_BIJ.stride(0) * q_BIJ.itemsize,
                   weight_BI.stride(0), key_PGJ.stride(0) * key_PGJ.itemsize, table_RP.stride(0), tokens,
                   queries)
        elif shared == 1 or bins or not _score_prompt(*scored, key_PGJ, *places):
            block, warps, stages = _tile(num, coded, shared)
            programs, total = triton.cdiv(num, shared), triton.cdiv(tokens, block)
            at_once = max(1, min(1024 // block, total * programs // PROGRAMS))
            score_keys[(triton.cdiv(total, at_once), programs)](
                *scored, codes, words, *places, counted_bN, q_BIJ.stride(0), weight_BI.stride(0),
                words.stride(0), table_RP.stride(0), tokens, at_once, num, SIZE=size, HEADS=heads,
                HEADS_PAD=max(16, triton.next_power_of_2(heads)), DIM=dim,
                DIM_PAD=max(32, triton.next_power_of_2(dim)), BLOCK=block, EXACT=exact,
                KEY=words.stride(1), CODED=coded, BINS=bins, QUERIES=shared,
                num_warps=warps, num_stages=stages, **early())
        if choose is None:
            _choose(score_bU, position_b, counted_bN, chosen_BS[turn])
        else:
            choose(score_bU, position_b, None, chosen_BS[turn])
    return chosen_BS


index_select_in_triton = alone(index_select)
