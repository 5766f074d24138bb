"""`chunk_attention` that keeps a key or value which is not finite from the queries that do not see it.

    T queries   S keys   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from penstock.kernels.attention import hidden

Attend = Callable[..., tuple[Tensor, Tensor]]


def sound(attend: Attend) -> Attend:
    """`attend`, which hides by a triangle: on a CPU computed again with zeros where its result is not finite,
    on a GPU, which nothing here waits for, with marked keys from the beginning (`attention.hidden`)."""
    @wraps(attend)
    def run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
            scale: float) -> tuple[Tensor, Tensor]:
        if causal and q_TNH.device.type != "cpu":
            k_SKH, v_SKH = hidden.marked(k_SKH, v_SKH)
        out_TNH, lse_TN = attend(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
        if not causal or q_TNH.device.type != "cpu" or hidden.is_finite(out_TNH):
            return out_TNH, lse_TN
        k_SKH, v_SKH, bad_SK = hidden.split(k_SKH, v_SKH)
        out_TNH, lse_TN = attend(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
        end_T = torch.arange(1, len(q_TNH) + 1)
        seen_TK = hidden.seen(bad_SK, torch.zeros_like(end_T), end_T)
        return hidden.spoil(out_TNH, seen_TK), hidden.spoil(lse_TN, seen_TK)
    return run
