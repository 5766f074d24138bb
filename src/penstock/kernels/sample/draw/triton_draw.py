"""draw in Triton: one program a row; thresholds are found by halving the range of the weights' bits.

A weight is in [0, 1], and the bits of such floats are ordered as they are, so that 30 bits are found with
two at a time: 15 passes over the row, which stays in the cache.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, follow

BLOCK = 4096
_ONE = 0x3F800000               # bits of 1.0


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, in signed words: see `kernels.sample.uniform`."""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _weigh(logits, w, V, scale, min_p, BLOCK: tl.constexpr):
    """Weights with temperature and min-p: the largest is 1."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits + at, mask=at < V, other=float("-inf")))
    peak = tl.max(best)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < V, other=float("-inf"))
        x = tl.exp((x - peak) / scale)
        tl.store(w + at, tl.where(x < min_p, 0.0, x), mask=at < V)


@triton.jit
def _above(w, V, bits, BLOCK: tl.constexpr):
    """Number and mass of the weights that are larger than the float of `bits`."""
    edge = bits.to(tl.float32, bitcast=True)
    number = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(w + at, mask=at < V, other=0.0)
        number += (x > edge).to(tl.int32)
        mass += tl.where(x > edge, x, 0.0).to(tl.float64)
    return tl.sum(number).to(tl.int64), tl.sum(mass)


@triton.jit
def _within(w, V, b1, b2, b3, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return for three thresholds, by bits: whether number, or mass, of the weights above is below `limit`."""
    e1 = b1.to(tl.float32, bitcast=True)
    e2 = b2.to(tl.float32, bitcast=True)
    e3 = b3.to(tl.float32, bitcast=True)
    s1 = tl.zeros((BLOCK,), tl.float64 if MASS else tl.int32)
    s2 = tl.zeros((BLOCK,), tl.float64 if MASS else tl.int32)
    s3 = tl.zeros((BLOCK,), tl.float64 if MASS else tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(w + at, mask=at < V, other=0.0)
        if MASS:
            s1 += tl.where(x > e1, x, 0.0).to(tl.float64)
            s2 += tl.where(x > e2, x, 0.0).to(tl.float64)
            s3 += tl.where(x > e3, x, 0.0).to(tl.float64)
        else:
            s1 += (x > e1).to(tl.int32)
            s2 += (x > e2).to(tl.int32)
            s3 += (x > e3).to(tl.int32)
    return tl.sum(s1) < limit, tl.sum(s2) < limit, tl.sum(s3) < limit


@triton.jit
def _threshold(w, V, low, limit, MASS: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Bits of the smallest weight, from `low` on, above which there are fewer weights, or is less mass, than
    `limit`."""
    high = tl.full((), ONE, tl.int32)
    while low < high:
        quarter = (high - low) // 4
        b1, b2, b3 = low + quarter, low + 2 * quarter, low + 3 * quarter
        ok1, ok2, ok3 = _within(w, V, b1, b2, b3, limit, MASS, BLOCK)
        high = tl.where(ok1, b1, tl.where(ok2, b2, tl.where(ok3, b3, high)))
        low = tl.where(ok1, low, tl.where(ok2, b1 + 1, tl.where(ok3, b2 + 1, b3 + 1)))
    return high


@triton.jit(do_not_specialize_on_alignment=["row_B", "position_B"])
def draw_rows(logits, w, token, row_B, position_B, knobs, stream, V, BLOCK: tl.constexpr, ONE: tl.constexpr):
    follow()
    b = tl.program_id(0)
    row = tl.load(row_B + b)
    position = tl.load(position_B + b)
    temperature = tl.load(knobs + row * 4)
    if (position >= 0) & (temperature > 0):
        logits += b.to(tl.int64) * V
        w += b.to(tl.int64) * V
        top_k = tl.load(knobs + row * 4 + 1)
        top_p = tl.load(knobs + row * 4 + 2)
        min_p = tl.load(knobs + row * 4 + 3).to(tl.float32)
        scale = tl.maximum(temperature.to(tl.float32), 1e-30)
        _weigh(logits, w, V, scale, min_p, BLOCK)
        tl.debug_barrier()

        edge = tl.full((), -1, tl.int32)            # every weight is above it
        ties = tl.full((), 0, tl.int64)             # of those at the edge, how many stay
        if top_k < V:
            edge = _threshold(w, V, tl.full((), 0, tl.int32), top_k.to(tl.int32), False, BLOCK, ONE)
            number, mass = _above(w, V, edge, BLOCK)
            ties = top_k.to(tl.int64) - number
        if top_p < 1:
            number, mass = _above(w, V, tl.where(edge < 0, 0, edge), BLOCK)
            kept = tl.where(edge < 0, 0, edge).to(tl.float32, bitcast=True)
            limit = top_p * (mass + ties.to(tl.float64) * kept.to(tl.float64))
            finer = _threshold(w, V, tl.where(edge < 0, 0, edge), limit, True, BLOCK, ONE)
            number, mass = _above(w, V, finer, BLOCK)
            value = finer.to(tl.float32, bitcast=True).to(tl.float64)
            wanted = tl.where(value > 0, tl.ceil((limit - mass) / tl.maximum(value, 1e-45)), 1.0)
            wanted = tl.maximum(wanted, 1.0).to(tl.int64)
            ties = tl.where(finer == edge, tl.minimum(wanted, ties), wanted)
            edge = finer

        # Ties beyond those that there are do no harm: they are counted as they come.
        bound = tl.where(edge < 0, 0, edge).to(tl.float32, bitcast=True)
        all_stay = edge < 0
        total = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int64)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(w + at, mask=at < V, other=0.0)
            tie = ((x == bound) & (at < V)).to(tl.int64)
            stays = all_stay | (x > bound) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= ties))
            total += tl.sum(tl.where(stays, x, 0.0).to(tl.float64))
            seen += tl.sum(tie)

        key = tl.load(stream + row * 2)
        index = tl.load(stream + row * 2 + 1)
        uniform = ((_mix(key ^ _mix(index)) >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16
        tl.store(stream + row * 2 + 1, index + 1)
        target = uniform * total
        upto = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0, tl.int64)
        passed = tl.full((), 0, tl.int64)           # ids whose CDF does not exceed the target
        last = tl.full((), 0, tl.int64)             # the last id with a weight
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(w + at, mask=at < V, other=0.0)
            tie = ((x == bound) & (at < V)).to(tl.int64)
            stays = all_stay | (x > bound) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= ties))
            x = tl.where(stays, x, 0.0).to(tl.float64)
            cdf = upto + tl.cumsum(x, 0)
            passed += tl.sum(((cdf <= target) & (at < V)).to(tl.int64))
            last = tl.maximum(last, tl.max(tl.where(x > 0, at, 0)).to(tl.int64))
            upto += tl.sum(x)
            seen += tl.sum(tie)
        tl.store(token + b, tl.minimum(passed, last))


def draw(logits_BV: Tensor, token_B: Tensor, row_B: Tensor, position_B: Tensor, params_R4: Tensor,
         stream_R2: Tensor) -> None:
    """See the package."""
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32, "logits of another kind"
    assert token_B.dtype == stream_R2.dtype == torch.int64 and params_R4.dtype == torch.float64
    assert row_B.dtype == position_B.dtype == torch.int32
    rows, vocab = logits_BV.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    draw_rows[(rows,)](logits_BV, torch.empty_like(logits_BV), token_B, row_B, position_B, params_R4,
                       stream_R2, vocab, BLOCK=block, ONE=_ONE, num_warps=16, **early())
