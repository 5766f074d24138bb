"""The definition of `chunk_attention`: one query and one head at a time, float32."""
from __future__ import annotations

import torch
from torch import Tensor


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    group = q_TNH.shape[1] // k_SKH.shape[1]
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
    for t in range(q_TNH.shape[0]):
        end = t + 1 if causal else k_SKH.shape[0]
        for n in range(q_TNH.shape[1]):
            k_SH, v_SH = (x[:end, n // group].float() for x in (k_SKH, v_SKH))
            score_S = (k_SH * q_TNH[t, n].float()).sum(-1) * scale
            lse_TN[t, n] = torch.logsumexp(score_S, 0)
            out_TNH[t, n] = (torch.softmax(score_S, 0)[:, None] * v_SH).sum(0)
    return out_TNH, lse_TN
