"""All 512 values of an MLA KV entry for 64 heads in one program, in Gluon: what Triton keeps in no registers.

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

from penstock.kernels.attention.latent_attention.context import PagedContext
from penstock.kernels.triton.depend import early

# Triton 3.9 has another name for it, and arguments that are the same.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
GROUP, BLOCK, VALUE, REST, WARPS = 64, 64, 512, 64, 8


@gluon.jit
def _bring_heads(q, values, first, HEADS, ROW: gl.constexpr, lines: gl.constexpr):
    """Begin to copy what heads from `first` on have, of ROW dims each."""
    n = first + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, lines))
    d = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, lines))
    _copy(values, q + (n * ROW)[:, None] + d[None, :], mask=(n < HEADS)[:, None])


@gluon.jit
def _bring(pool, at, pool_page, values, rests, scales, turn, SIZE: gl.constexpr, V: gl.constexpr,
           R: gl.constexpr, lines: gl.constexpr, short: gl.constexpr, CODED: gl.constexpr):
    """Begin to copy the rows of these slots into the buffers of `turn`, zeros where there are none. at: i32,
    by `lines`."""
    SCALES: gl.constexpr = V // 128 if CODED else 0
    ROW: gl.constexpr = V + 4 * SCALES + 2 * R if CODED else V + R
    d = gl.arange(0, V, layout=gl.SliceLayout(0, lines))
    begin = (at // SIZE).to(gl.int64) * pool_page + at % SIZE * ROW
    _copy(values.index(turn), pool + begin[:, None] + d[None, :], mask=(at >= 0)[:, None])
    at = gl.convert_layout(at, gl.SliceLayout(1, short))
    begin = (at // SIZE).to(gl.int64) * pool_page + at % SIZE * ROW + V
    row = pool + begin[:, None]
    if CODED:
        word = gl.arange(0, SCALES, layout=gl.SliceLayout(0, short))
        scale = row.to(gl.pointer_type(gl.float32), bitcast=True) + word[None, :]
        _copy(scales.index(turn), scale, mask=(at >= 0)[:, None])
        row = (row + 4 * SCALES).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    r = gl.arange(0, R, layout=gl.SliceLayout(0, short))
    _copy(rests.index(turn), row + r[None, :], mask=(at >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _slots(line, i, here, SIZE: gl.constexpr, PAGED: gl.constexpr):
    """Entries `i` of a line of slots, or those of positions `i` in a line of a block table; -1 but for `here`."""
    if PAGED:
        at = gl.where(here, gl.load(line + i // SIZE, mask=here, other=0) * SIZE + i % SIZE, -1)
    else:
        at = gl.load(line + i, mask=here, other=-1)
    return at


@gluon.jit
def _part(slot, of, context, b, s, parts, CHOSEN, BLOCKS: gl.constexpr, BLOCK: gl.constexpr, FIRST: gl.constexpr):
    """The line of a query, where that ends, and where in it part `s` begins, of how many blocks."""
    if of is None:
        line, end, first, blocks = slot + b * CHOSEN, CHOSEN, s * (BLOCKS * BLOCK), BLOCKS
    else:
        line, end = slot + gl.load(of + b).to(gl.int64) * CHOSEN, gl.load(context + b)
        first = gl.where(end > FIRST, FIRST, 0)
        blocks = ((end - first + BLOCK - 1) // BLOCK + parts - 1) // parts
        first += s * blocks * BLOCK
    return line, end, first, blocks


@gluon.jit
def _decode(codes, scales, values, V: gl.constexpr):
    """Codes times their scales, in f32, into `values`."""
    # Eight threads one below the other share no bank in what they read of `codes`, nor in what they write.
    down: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 1, 4], [8, 1, 1], [0, 2, 1])
    parts: gl.constexpr = [values.shape[0], V // 128, 128]
    code = codes.reshape(parts).load(down).to(gl.float8e4nv, bitcast=True)
    scale = scales.load(gl.SliceLayout(2, down))
    values.reshape(parts).store((code.to(gl.float32) * scale[:, :, None]).to(values.dtype))


@gluon.jit
def _weigh(score, top):
    """A block's weights, what earlier ones are worth now, and the largest score so far."""
    new = gl.maximum(top, gl.max(score, 1))
    base = gl.where(new == float("-inf"), 0.0, new)
    return gl.exp2(score - base[:, None]), gl.exp2(top - base), new


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
def attend_whole(q, pool, slot, of, context, part, peak, scale, pool_page, HEADS, CHOSEN, SIZE: gl.constexpr,
                 BLOCKS: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, V: gl.constexpr, R: gl.constexpr,
                 FIRST: gl.constexpr):
    """As `triton_latent.attend_rows` of one group of 64 heads. scale: with log2(e) in it. Of one part alone
    `peak` becomes the natural log of the weights' sum, and `part` the result, in its dtype. A pool of u8 has
    codes (`kernels/types/fp8.py`), which become values here."""
    gdc_launch_dependents()
    gdc_wait()
    s, group, parts, b = gl.program_id(0), gl.program_id(1), gl.num_programs(0), gl.program_id(2).to(gl.int64)
    CODED: gl.constexpr = pool.dtype.element_ty == gl.uint8
    PAGED: gl.constexpr = of is not None
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    brought: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]) if CODED else lines
    short: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    kind: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    held: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=8 if CODED else 16, rank=2)
    values = gl.allocate_shared_memory(pool.dtype.element_ty, [2, BLOCK, V], held)
    rests = gl.allocate_shared_memory(kind, [2, BLOCK, R], wide)
    scales = rests                  # there are none, and none is asked for
    if CODED:
        scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK, V // 128],
                                           gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        own = gl.allocate_shared_memory(kind, [BLOCK, V], wide)
    q_values = gl.allocate_shared_memory(kind, [G, V], wide)
    q_rests = gl.allocate_shared_memory(kind, [G, R], wide)
    weights = gl.allocate_shared_memory(kind, [G, BLOCK], wide)
    line, end, first, blocks = _part(slot, of, context, b, s, parts, CHOSEN, BLOCKS, BLOCK, FIRST)
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, brought))
    i_score = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores))
    at = _slots(line, first + i, (first + i < end) & (blocks > 0), SIZE, PAGED)
    next_at = _slots(line, first + BLOCK + i, (first + BLOCK + i < end) & (blocks > 1), SIZE, PAGED)
    _bring_heads(q + b * HEADS * (V + R), q_values, group * G, HEADS, V + R, lines)
    _bring_heads(q + b * HEADS * (V + R) + V, q_rests, group * G, HEADS, V + R, short)
    _bring(pool, at, pool_page, values, rests, scales, 0, SIZE, V, R, brought, short, CODED)
    _bring(pool, next_at, pool_page, values, rests, scales, 1, SIZE, V, R, brought, short, CODED)
    acc = gl.zeros([G, V], gl.float32, sums)
    top = gl.full([G], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([G, BLOCK], gl.float32, scores)        # of each of a block's places: summed at the end
    for block in range(blocks):
        turn = block % 2
        if CODED:                   # slots come behind: registers do not hold both
            async_copy.wait_group(1)
            _decode(values.index(turn), scales.index(turn), own, V)
        ahead = first + (block + 2) * BLOCK + i
        next_at = _slots(line, ahead, (ahead < end) & (block + 2 < blocks), SIZE, PAGED)
        here = first + block * BLOCK + i_score
        here = here < end if PAGED else gl.load(line + here, mask=here < end, other=-1) >= 0
        if not CODED:
            async_copy.wait_group(1)
            own = values.index(turn)
        fence_async_shared()
        score = gl.zeros([G, BLOCK], gl.float32, scores)
        score = warpgroup_mma(q_values, own.permute((1, 0)), score, use_acc=False)
        score = warpgroup_mma(q_rests, rests.index(turn).permute((1, 0)), score)
        weight, keep, top = _weigh(gl.where(here[None, :], score * scale, float("-inf")), top)
        total = total * keep[:, None] + weight
        weights.store(weight.to(kind))
        fence_async_shared()
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, sums))[:, None]
        acc = warpgroup_mma(weights, own, acc)
        _bring(pool, next_at, pool_page, values, rests, scales, turn, SIZE, V, R, brought, short, CODED)
    async_copy.wait_group(0)
    _leave(part, peak, acc, total, top, b, s, parts, group * G, HEADS, G, V, scores, sums)


def attend(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor, seen: PagedContext | None, part_BNSV: Tensor,
           peak_BNS: Tensor, scale: float, rows: int) -> None:
    """Parts S of `rows` chosen rows, a multiple of BLOCK, as `attend_whole` leaves them; or of what is seen, where
    `slot_BS` is its table. part_BNSV f32, or of S = 1 the dtype of q. pool_PGH: of that dtype, or codes under
    bf16 queries."""
    queries, heads, _ = q_BNH.shape
    attend_whole[(peak_BNS.shape[2], -(-heads // GROUP), queries)](
        q_BNH, pool_PGH, slot_BS, None if seen is None else seen.row_B, None if seen is None else seen.context_B,
        part_BNSV, peak_BNS, scale * 1.4426950408889634, pool_PGH.stride(0), heads,
        slot_BS.shape[1], SIZE=pool_PGH.shape[1], BLOCKS=rows // BLOCK, G=GROUP, BLOCK=BLOCK, V=VALUE,
        R=REST, FIRST=0 if seen is None else seen.first, num_warps=WARPS, **early())
