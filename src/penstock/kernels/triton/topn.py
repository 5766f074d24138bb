"""The n largest of a block of keys, in Triton, for kernels of several ops: a cut found by halving.

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
def cut_of(key, n):
    """uint32: a cut for the n largest of a block of uint32 keys: at least n are no smaller, and fewer are
    larger. Of keys larger than 0 there are n or more."""
    high = tl.max(key, 0)
    count = tl.sum((key == high).to(tl.int32), 0)
    low = tl.min(tl.where(key == 0, high, key), 0)
    low = tl.where(count >= n, high, low)
    # n of them at or above `low` is enough: equal ones need no telling apart then.
    while (high - low > 1) & (count != n):
        middle = low + ((high - low) >> 1)
        found = tl.sum((key >= middle).to(tl.int32), 0)
        enough = found >= n
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        count = tl.where(enough, found, count)
    return low


@triton.jit
def taken_of(key, cut, spare):
    """Keys above the cut, and the first `spare` of those that are equal to it; a key of 0 never is."""
    equal = (key == cut) & (key != 0)
    return (key > cut) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
