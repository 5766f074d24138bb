"""The n largest of a block of keys, in Triton, for kernels of several ops: a cut found bit by bit.

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
    """uint32: the n-th largest of a block of uint32 keys; 0 if fewer than n are larger than 0."""
    cut = (n * 0).to(tl.uint32)
    bit = cut + 0x80000000
    for _ in range(32):
        higher = cut | bit
        enough = tl.sum((key >= higher).to(tl.int32), 0) >= n
        cut = tl.where(enough, higher, cut)
        bit = bit >> 1
    return cut


@triton.jit
def taken_of(key, cut, spare):
    """Keys above the cut, and the first `spare` of those that are equal to it; a key of 0 never is."""
    equal = (key == cut) & (key != 0)
    return (key > cut) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
