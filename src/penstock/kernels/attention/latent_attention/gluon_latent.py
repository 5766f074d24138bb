"""All 512 values of a latent row for 64 heads in one program, in Gluon: what Triton keeps in no registers.

Two warp groups have half of the chosen rows' scores each, exchange them through shared memory, and then half
of the values each: a score is computed once, a row is read once, the next one's copies are on their way.
Imported only where a CUDA device was asked for.

    B queries   N query heads   S chosen rows   V value dim   R other dims of a row
"""
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.triton.depend import early

# Triton 3.9 has another name for it, and arguments that are the same.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
GROUP, BLOCK, VALUE, REST, WARPS = 64, 64, 512, 64, 8


@gluon.jit
def _bring(pool, at, pool_page, values, rests, SIZE: gl.constexpr, ROW: gl.constexpr, V: gl.constexpr,
           R: gl.constexpr, lines: gl.constexpr, short: gl.constexpr):
    """Begin to copy the rows of these slots, zeros where there are none. at: i32, by `lines`."""
    d = gl.arange(0, V, layout=gl.SliceLayout(0, lines))
    begin = (at // SIZE).to(gl.int64) * pool_page + at % SIZE * ROW
    _copy(values, pool + begin[:, None] + d[None, :], mask=(at >= 0)[:, None])
    r = gl.arange(0, R, layout=gl.SliceLayout(0, short))
    at = gl.convert_layout(at, gl.SliceLayout(1, short))
    begin = (at // SIZE).to(gl.int64) * pool_page + at % SIZE * ROW + V
    _copy(rests, pool + begin[:, None] + r[None, :], mask=(at >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _leave(part, peak, acc, total, top, b, s, parts, first, HEADS, G: gl.constexpr, V: gl.constexpr,
           scores: gl.constexpr, sums: gl.constexpr):
    """Heads from `first` on: what is in registers goes where `attend_whole` says."""
    total = gl.sum(total, 1)
    none = total == 0
    total = gl.where(none, 1.0, total)
    n = first + gl.arange(0, G, layout=gl.SliceLayout(1, scores))
    log = (top + gl.log2(total)) * gl.where(parts == 1, 0.6931471805599453, 1.0)
    gl.store(peak + (b * HEADS + n) * parts + s, gl.where(none, float("-inf"), log), mask=n < HEADS)
    total = gl.convert_layout(total, gl.SliceLayout(1, sums))
    n = first + gl.arange(0, G, layout=gl.SliceLayout(1, sums))
    d = gl.arange(0, V, layout=gl.SliceLayout(0, sums))
    gl.store(part + (((b * HEADS + n) * parts + s) * V)[:, None] + d[None, :],
             (acc / total[:, None]).to(part.dtype.element_ty), mask=(n < HEADS)[:, None])


@gluon.jit
def attend_whole(q, pool, slot, part, peak, scale, pool_page, HEADS, CHOSEN, SIZE: gl.constexpr,
                 BLOCKS: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, V: gl.constexpr,
                 R: gl.constexpr):
    """As `triton_latent.attend_rows` of one group of 64 heads. scale: with log2(e) in it. Of one part alone
    `peak` becomes the natural log of the weights' sum, and `part` the result, in its dtype."""
    gdc_launch_dependents()
    gdc_wait()
    s, group, parts = gl.program_id(0), gl.program_id(1), gl.num_programs(0)
    b = gl.program_id(2).to(gl.int64)
    ROW: gl.constexpr = V + R
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    short: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    kind: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    values = gl.allocate_shared_memory(kind, [2, BLOCK, V], wide)
    rests = gl.allocate_shared_memory(kind, [2, BLOCK, R], wide)
    q_values = gl.allocate_shared_memory(kind, [G, V], wide)
    q_rests = gl.allocate_shared_memory(kind, [G, R], wide)
    weights = gl.allocate_shared_memory(kind, [G, BLOCK], wide)
    line = slot + b * CHOSEN
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, lines))
    i_score = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores))
    first = s * (BLOCKS * BLOCK)
    at = gl.load(line + first + i, mask=first + i < CHOSEN, other=-1)
    next_at = gl.load(line + first + BLOCK + i, mask=(first + BLOCK + i < CHOSEN) & (BLOCKS > 1),
                      other=-1)
    n = group * G + gl.arange(0, G, layout=gl.SliceLayout(1, lines))
    d = gl.arange(0, V, layout=gl.SliceLayout(0, lines))
    _copy(q_values, q + ((b * HEADS + n) * ROW)[:, None] + d[None, :],
                                           mask=(n < HEADS)[:, None])
    n_short = group * G + gl.arange(0, G, layout=gl.SliceLayout(1, short))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, short))
    _copy(q_rests, q + ((b * HEADS + n_short) * ROW + V)[:, None] + r[None, :],
                                           mask=(n_short < HEADS)[:, None])
    _bring(pool, at, pool_page, values.index(0), rests.index(0), SIZE, ROW, V, R, lines, short)
    _bring(pool, next_at, pool_page, values.index(1), rests.index(1), SIZE, ROW, V, R, lines, short)
    acc = gl.zeros([G, V], gl.float32, sums)
    top = gl.full([G], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([G, BLOCK], gl.float32, scores)        # of each of a block's places: summed at the end
    for block in range(BLOCKS):
        turn = block % 2
        ahead = first + (block + 2) * BLOCK + i
        next_at = gl.load(line + ahead, mask=(ahead < CHOSEN) & (block + 2 < BLOCKS), other=-1)
        here = first + block * BLOCK + i_score
        here = gl.load(line + here, mask=here < CHOSEN, other=-1) >= 0
        async_copy.wait_group(1)
        fence_async_shared()
        own, rest = values.index(turn), rests.index(turn)
        score = gl.zeros([G, BLOCK], gl.float32, scores)
        score = warpgroup_mma(q_values, own.permute((1, 0)), score, use_acc=False)
        score = warpgroup_mma(q_rests, rest.permute((1, 0)), score)
        score = gl.where(here[None, :], score * scale, float("-inf"))
        new = gl.maximum(top, gl.max(score, 1))
        base = gl.where(new == float("-inf"), 0.0, new)
        weight = gl.exp2(score - base[:, None])
        keep = gl.exp2(top - base)
        total = total * keep[:, None] + weight
        top = new
        weights.store(weight.to(kind))
        fence_async_shared()
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, sums))[:, None]
        acc = warpgroup_mma(weights, own, acc)
        _bring(pool, next_at, pool_page, own, rest, SIZE, ROW, V, R, lines, short)
    async_copy.wait_group(0)
    _leave(part, peak, acc, total, top, b, s, parts, group * G, HEADS, G, V, scores, sums)


def attend(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor, part_BNSV: Tensor, peak_BNS: Tensor,
           scale: float, rows: int) -> None:
    """Parts S of `rows` chosen rows, a multiple of BLOCK, as `attend_whole` leaves them. part_BNSV f32, or of
    S = 1 the dtype of q."""
    queries, heads, _ = q_BNH.shape
    attend_whole[(peak_BNS.shape[2], -(-heads // GROUP), queries)](
        q_BNH, pool_PGH, slot_BS, part_BNSV, peak_BNS, scale * 1.4426950408889634, pool_PGH.stride(0), heads,
        slot_BS.shape[1], SIZE=pool_PGH.shape[1], BLOCKS=rows // BLOCK, G=GROUP, BLOCK=BLOCK, V=VALUE,
        R=REST, num_warps=WARPS, **early())
