"""Counter-based randomness for sampling: one uniform per (seed, choice, output index).

No state and no global generator: a token does not depend on the batch around it, on a pause, or
on how its prompt was chunked.
"""
from __future__ import annotations

_M64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = (x + _GOLDEN) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def stream(*parts: int) -> int:
    """A 64-bit key for a sequence of integers of any sign; order matters."""
    key = 0
    for part in parts:
        key = _mix(key ^ _mix(part & _M64))
    return key


def uniform(key: int, index: int) -> float:
    """The `index`-th uniform of stream `key`, in [0, 1), a multiple of 2^-52.

    52 bits and not 53: `uniform * total` is then strictly below `total` in float64.
    """
    return (_mix(key ^ _mix(index & _M64)) >> 12) * 2.0**-52
