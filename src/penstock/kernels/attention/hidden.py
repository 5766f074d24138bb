"""Keys and values that are not finite, where a kernel multiplies hidden values by zero or adds its masks.

NaN times zero and NaN plus minus infinity are NaN, so a token whose KV overflowed would spoil the tokens
before it that share its chunk. A chunk on a CPU is computed as it is; only if its result is not finite it is
computed again with zeros in such places, and a query that sees one of them gets NaN. A GPU would have to be
waited for: there `marked` values are zeros, and NaN is the key that marks them. See ADR 0067.

    S keys   K KV heads   H head dim   T queries   N query heads
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

# A score of a key below this is finite, whatever sound query meets it.
LARGEST = 2.0 ** 60


def is_finite(out: Tensor) -> bool:
    """Whether all of a result is: its sum tells. A sum that overflows by itself costs time only."""
    return math.isfinite(float(out.sum(dtype=torch.float32)))


def split(k_SKH: Tensor, v_SKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k and v, [.., K, H], with zeros where either is not finite, and bad [.., K] bool: where that is."""
    bad_SK = ~((k_SKH.abs() <= LARGEST) & v_SKH.isfinite()).all(-1)
    return k_SKH.masked_fill(bad_SK[..., None], 0), v_SKH.masked_fill(bad_SK[..., None], 0), bad_SK


def seen(bad_SK: Tensor, first_T: Tensor, end_T: Tensor) -> Tensor:
    """[T, K] bool: whether query t sees one that is bad among the keys [first[t], end[t])."""
    before_SK = torch.nn.functional.pad(bad_SK.cumsum(0), (0, 0, 1, 0))
    return before_SK[end_T] > before_SK[first_T]


def spoil(out_TNH: Tensor, seen_TK: Tensor) -> Tensor:
    """`out` with NaN for the query heads of a KV head of which the query sees a bad key; [T, N] too."""
    seen_TN = seen_TK.repeat_interleave(out_TNH.shape[1] // seen_TK.shape[1], 1)
    return out_TNH.masked_fill_(seen_TN if out_TNH.dim() == 2 else seen_TN[..., None], math.nan)


def marked(k_SKH: Tensor, v_SKH: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of which a value that is not finite is zeros and its key NaN: for kernels that hide scores by
    a choice, not by a sum. The device is not waited for."""
    bad_SK1 = ~v_SKH.isfinite().all(-1, keepdim=True)
    return k_SKH.masked_fill(bad_SK1, math.nan), v_SKH.masked_fill(bad_SK1, 0)
