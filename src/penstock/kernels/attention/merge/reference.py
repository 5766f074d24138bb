"""The definition of `merge`, on any device: a sum weighted by e^lse."""
from __future__ import annotations

import torch
from torch import Tensor


def merge(out_ATNH: Tensor, lse_ATN: Tensor) -> tuple[Tensor, Tensor]:
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
