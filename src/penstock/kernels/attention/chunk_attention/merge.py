"""Attention over parts of a context, put together.

    A parts   T queries   N query heads   H head dim
"""
from __future__ import annotations

import torch
from torch import Tensor


def merge(out_ATNH: Tensor, lse_ATN: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over all parts from the attention over each: exact, up to rounding. Any device.

    out_ATNH   f32|bf16    lse_ATN   f32: log of the sum of e^score over the part's keys, natural,
                           -inf for a part without keys, whose `out` is not looked at
    Returns    out_TNH, dtype of `out`, and lse_TN f32 of all parts together, which may be merged
               on. A query without any key has 0 and -inf. Parts are added in their order.
    Source     online softmax, arXiv:1805.02867; merged states as in FlashInfer, arXiv:2501.01005.
    """
    top_TN = lse_ATN.amax(0)
    finite_TN = top_TN.where(top_TN > float("-inf"), 0.0)
    weight_ATN = torch.exp(lse_ATN - finite_TN)
    total_TN = weight_ATN.sum(0)
    out_TNH = torch.zeros(out_ATNH.shape[1:], dtype=torch.float32, device=out_ATNH.device)
    for part_TNH, weight_TN in zip(out_ATNH, weight_ATN, strict=True):
        w_TN1 = weight_TN[..., None]
        out_TNH += (part_TNH.float() * w_TN1).where(w_TN1 > 0, 0.0)
    out_TNH /= total_TN.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return out_TNH.to(out_ATNH.dtype), finite_TN + torch.log(total_TN)
