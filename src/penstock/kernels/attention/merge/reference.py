"""`merge` in torch's operations: any device."""
from __future__ import annotations

import torch
from torch import Tensor


def merge(out_TNH: Tensor, lse_TN: Tensor, more_TNH: Tensor, more_TN: Tensor) -> None:
    top_TN = torch.maximum(lse_TN, more_TN)
    finite_TN = top_TN.where(top_TN > float("-inf"), 0.0)
    total_TN, sum_TNH = torch.zeros_like(top_TN), torch.zeros_like(out_TNH, dtype=torch.float32)
    for part_TNH, part_TN in ((out_TNH, lse_TN), (more_TNH, more_TN)):
        weight_TN = torch.exp(part_TN - finite_TN)
        weight_TN1 = weight_TN[..., None]
        total_TN += weight_TN
        sum_TNH += (part_TNH.float() * weight_TN1).where(weight_TN1 > 0, 0.0)
    out_TNH.copy_(sum_TNH / total_TN.clamp_min(torch.finfo(torch.float32).tiny)[..., None])
    lse_TN.copy_(finite_TN + torch.log(total_TN))
