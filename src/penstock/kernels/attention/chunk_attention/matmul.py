"""`chunk_attention` as two products and a softmax, all heads at once: torch's own operations.

    T queries   S keys   N query heads   K KV heads   g query heads of a KV head   H head dim
"""
from __future__ import annotations

import torch
from torch import Tensor

# Scores of so many queries at once: 512 x 600 keys x 9 heads of f32 are 11 MB, which caches keep.
_QUERIES = 512


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    parts = [_some(q_TNH[t:t + _QUERIES], k_SKH, v_SKH, t if causal else None, scale)
             for t in range(0, q_TNH.shape[0], _QUERIES)]
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _some(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, first: int | None,
          scale: float) -> tuple[Tensor, Tensor]:
    """Queries `first` and on, which see no later key; None: all see all."""
    (num, heads, dim), kv_heads = q_TNH.shape, k_SKH.shape[1]
    if first is not None:
        k_SKH, v_SKH = k_SKH[:first + num], v_SKH[:first + num]
    q_KgTH = q_TNH.view(num, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    score_KgTS = torch.matmul(q_KgTH, k_SKH.permute(1, 2, 0)[:, None]).float() * scale
    if first is not None:
        later_TS = torch.ones(num, first + num, dtype=torch.bool, device=q_TNH.device).triu(first + 1)
        score_KgTS.masked_fill_(later_TS, float("-inf"))
    lse_KgT = torch.logsumexp(score_KgTS, -1)
    weight_KgTS = torch.exp_(score_KgTS.sub_(lse_KgT[..., None])).to(q_TNH.dtype)
    out_KgTH = torch.matmul(weight_KgTS, v_SKH.transpose(0, 1)[:, None])
    return (out_KgTH.permute(2, 0, 1, 3).reshape(num, heads, dim),
            lse_KgT.permute(2, 0, 1).reshape(num, heads))
