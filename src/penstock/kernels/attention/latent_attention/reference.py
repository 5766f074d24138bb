"""The definition of `latent_attention`: one query at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention.latent_attention.context import PagedContext, slots_of
from penstock.kernels.types import fp8


def latent_attention(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor | PagedContext, *, value_dim: int,
                     scale: float) -> tuple[Tensor, Tensor]:
    size = pool_PGH.shape[1]
    slot_BS = slots_of(slot_BS, size)
    out_BNR = q_BNH.new_zeros(*q_BNH.shape[:2], value_dim)
    lse_BN = torch.full(q_BNH.shape[:2], -torch.inf, device=q_BNH.device)
    for b, slot_S in enumerate(slot_BS.long()):
        slot_S = slot_S[slot_S >= 0]
        if len(slot_S):
            row_SH = fp8.floats(pool_PGH[slot_S // size, slot_S % size], value_dim)
            score_NS = q_BNH[b].float() @ row_SH.T * scale
            out_BNR[b] = (score_NS.softmax(-1) @ row_SH[:, :value_dim]).to(q_BNH.dtype)
            lse_BN[b] = score_NS.logsumexp(-1)
    return out_BNR, lse_BN
