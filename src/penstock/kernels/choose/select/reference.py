"""The definition of `select`: one query and one KV head at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.choose.select.spec import LEAST, MOST, SelectRule
from penstock.kernels.types import fp8


def least_and_most(q_gH: Tensor, bounds_U2H: Tensor) -> tuple[Tensor, Tensor]:
    """least_Ug, most_Ug, float32: q.k of no key of a unit is outside of them."""
    low_UgH, high_UgH = (q_gH.float() * bound_U1H.float() for bound_U1H in
                         (bounds_U2H[:, 0, None], bounds_U2H[:, 1, None]))
    return torch.minimum(low_UgH, high_UgH).sum(-1), torch.maximum(low_UgH, high_UgH).sum(-1)


def scores(q_gH: Tensor, bounds_U2H: Tensor) -> Tensor:
    """score_U of units for the query heads that share a KV head, float32."""
    least_Ug, most_Ug = least_and_most(q_gH, bounds_U2H)
    return (MOST * most_Ug + LEAST * least_Ug).amax(-1)


def select(q_BNH: Tensor, bounds_PK2SH: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor,
           budget_B: Tensor, *, rule: SelectRule, chosen: int) -> Tensor:
    heads, size = bounds_PK2SH.shape[1], bounds_PK2SH.shape[3]
    group = q_BNH.shape[1] // heads
    chosen_BKC = torch.full((len(row_B), heads, chosen), -1, dtype=torch.int32, device=q_BNH.device)
    for b, (row, position, budget) in enumerate(zip(row_B.tolist(), position_B.tolist(),
                                                    budget_B.tolist(), strict=True)):
        if position < 0:
            continue
        assert rule.least_units <= budget <= chosen, f"a budget of {budget} units"
        (first, end), last = rule.scored(position), position // rule.unit
        want = min(budget - first - (last + 1 - end), end - first)
        for k in range(heads):
            best: list[int] = []
            if want > 0:
                units = torch.arange(first, end, device=q_BNH.device)
                bounds_U2H = fp8.floats(
                    bounds_PK2SH[table_RP[row, units // size].long(), k, :, units % size], q_BNH.shape[2])
                score_U = scores(q_BNH[b, k * group:(k + 1) * group], bounds_U2H)
                order = torch.sort(score_U, descending=True, stable=True).indices
                best = sorted((units[order[:want]]).tolist())
            kept = [*range(first), *best, *range(end, last + 1)]
            chosen_BKC[b, k, :len(kept)] = chosen_BKC.new_tensor(kept)
    return chosen_BKC
