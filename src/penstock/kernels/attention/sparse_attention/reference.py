"""The definition of `sparse_attention`: one query and KV head at a time, float32, plain softmax."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types import fp8


def sparse_attention(q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
                     position_B: Tensor, *, unit: int, scale: float) -> tuple[Tensor, Tensor]:
    queries, kv_heads, _ = chosen_BKC.shape
    group, of_page = q_BNH.shape[1] // kv_heads, pool_PK2GH.shape[3] // unit
    out_BNH = torch.zeros_like(q_BNH, memory_format=torch.contiguous_format)
    lse_BN = torch.full(q_BNH.shape[:2], float("-inf"), device=q_BNH.device)
    place = torch.arange(unit, device=q_BNH.device)
    for b in range(queries):
        for k in range(kv_heads):
            units = chosen_BKC[b, k][chosen_BKC[b, k] >= 0].long()
            position_S = (units[:, None] * unit + place).flatten()
            at = slot_BKC[b, k, :len(units)].long()
            token = (at[:, None] % of_page * unit + place).flatten()
            page = (at // of_page).repeat_interleave(unit)
            seen = position_S <= position_B[b]
            if not seen.any():
                continue
            k_SH, v_SH = (fp8.decode_heads(x) if x.dtype == torch.uint8 else x.float() for x in (
                pool_PK2GH[page[seen], k, c, token[seen]] for c in (0, 1)))
            heads = slice(k * group, (k + 1) * group)
            score_gS = (q_BNH[b, heads, None].float() * k_SH).sum(-1) * scale
            out_BNH[b, heads] = (torch.softmax(score_gS, -1)[..., None] * v_SH).sum(1).to(q_BNH.dtype)
            lse_BN[b, heads] = torch.logsumexp(score_gS, -1)
    return out_BNH, lse_BN
