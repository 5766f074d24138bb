"""The definition, in operations of torch; a CPU computes with it."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fused.step.spec import Best, Looks, Queries


def begin(row_B: Tensor, position_B: Tensor, last_R: Tensor, looks: Looks) -> Queries:
    real_B, at_B = position_B >= 0, position_B.clamp(min=0).long()
    index_B = torch.where(real_B, row_B, len(last_R) - 1).long()
    slots = [place.slots(row_B.long(), at_B).where(real_B, -1) for place in looks.places]
    budget_B = select_B = None
    if looks.budget_R is not None:
        budget_B = looks.budget_R[row_B.long()]
        select_B = position_B.where(budget_B > 0, -1)
    if looks.now_1 is not None:
        looks.now_1.add_(1)
    return Queries(row_B, position_B, position_B + 1, row_B.where(real_B, -1), index_B, last_R[index_B], at_B,
                   torch.stack(slots) if slots else at_B.new_empty(0, len(at_B)), budget_B, select_B)


def angles(positions_T: Tensor, freq_F: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    freqs_TF = positions_T[:, None] * freq_F
    cos_T2F, sin_T2F = freqs_TF.new_empty(2, len(freqs_TF), 2, freqs_TF.shape[1], dtype=dtype)
    torch.mul(freqs_TF.cos()[:, None].expand(cos_T2F.shape), factor, out=cos_T2F)
    sin_TF = freqs_TF.sin()
    torch.mul(sin_TF, -factor, out=sin_T2F[:, 0])
    torch.mul(sin_TF, factor, out=sin_T2F[:, 1])
    return cos_T2F.flatten(1)[:, None], sin_T2F.flatten(1)[:, None]


def best(head_BV: Tensor, logits_BV: Tensor) -> Best:
    peak_B, token_B = logits_BV.copy_(head_BV).max(-1)
    return Best(peak_B[:, None], token_B[:, None].int(), torch.full_like(token_B, -1))


def say(found: Best, row_B: Tensor, position_B: Tensor, last_R: Tensor, count_LRKE: Tensor | None) -> Tensor:
    token_B = torch.where(found.token_B < 0, found.at_BS[:, 0].long(), found.token_B)
    real_B = position_B >= 0
    last_R[torch.where(real_B, row_B, len(last_R) - 1).long()] = token_B
    answer_2B = torch.stack((token_B, found.peak_BS[:, 0].isfinite().long()))
    if count_LRKE is None:
        return answer_2B
    count_BE = count_LRKE[:, row_B.long()].sum((0, 2)).where(real_B[:, None], 0)
    return torch.cat((answer_2B, count_BE.T))
