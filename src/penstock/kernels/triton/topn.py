"""The n largest of a block of keys, in Triton, for kernels of several ops: a cut found by quartering.

Imported only by kernels, where Triton is installed.
"""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """uint32 in the order of float32 `x`, 0 and -0 equal; larger than 0 but for a NaN of all ones."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7fffffff)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def bin_of(x, BINS: tl.constexpr):
    """int32 below BINS: of larger float32 `x` no larger a bin. A bin is a 256th of a power of two, of 16 of
    them about one and of either sign, if there are 8,192; what is beyond is in the outermost."""
    part: tl.constexpr = BINS // 2 // 16                    # of a power of two
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    size = (bits & 0x7fffffff) // (0x800000 // part) - (127 - 8) * part
    size = tl.minimum(tl.maximum(size, 0), BINS // 2 - 1)
    return tl.where(bits < 0, BINS // 2 + size, BINS // 2 - 1 - size)


@triton.jit
def cut_of(key, n):
    """uint32: a cut for the n largest of a block of uint32 keys: at least n are no smaller, and fewer are
    larger. Of keys larger than 0 there are n or more."""
    high = tl.max(key, 0)
    count = tl.sum((key == high).to(tl.int32), 0)
    low = tl.min(tl.where(key == 0, high, key), 0)
    low = tl.where(count >= n, high, low)
    # n of them at or above `low` is enough: equal ones need no telling apart then.
    # A sum over the block is what takes time: one counts at three cuts, 21 bits each.
    while (high - low > 1) & (count != n):
        part = tl.maximum((high - low) >> 2, 1).to(tl.uint32)
        a = low + part
        b = tl.minimum(a + part, high)
        c = tl.minimum(b + part, high)
        three = tl.sum((key >= a).to(tl.int64) + ((key >= b).to(tl.int64) << 21)
                       + ((key >= c).to(tl.int64) << 42), 0)
        at_a, at_b, at_c = three & 0x1fffff, (three >> 21) & 0x1fffff, three >> 42
        high = tl.where(at_c >= n, high, tl.where(at_b >= n, c, tl.where(at_a >= n, b, a)))
        low = tl.where(at_c >= n, c, tl.where(at_b >= n, b, tl.where(at_a >= n, a, low)))
        best = tl.where(at_c >= n, at_c, tl.where(at_b >= n, at_b, at_a))
        count = tl.where(best >= n, best.to(tl.int32), count)
    return low


@triton.jit
def taken_of(key, cut, spare):
    """Keys above the cut, and the first `spare` of those that are equal to it; a key of 0 never is."""
    equal = (key == cut) & (key != 0)
    return (key > cut) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
