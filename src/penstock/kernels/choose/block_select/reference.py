"""The definition of `block_select`: one query at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.choose.select.spec import SelectRule
from penstock.kernels.types import fp8


def rule_of(block: int, topk: int, first: int, last: int) -> SelectRule:
    """Return what is always kept, in the words of `select`. What is scored are whole blocks."""
    assert last >= 1 and first >= 0 and first + last <= topk, f"{first} and {last} of {topk} blocks"
    return SelectRule(unit=block, sink=first * block, window=1 + (last - 1) * block)


def scores(q_IJ: Tensor, key_PJ: Tensor, block: int) -> Tensor:
    """score_IU of whole blocks, whose keys these are, float32."""
    score_IP = q_IJ.float() @ fp8.floats(key_PJ, q_IJ.shape[1]).T
    return score_IP.view(len(q_IJ), -1, block).amax(-1)


def block_select(q_BIJ: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor, *,
                 block: int, topk: int, first: int, last: int) -> Tensor:
    rule, size = rule_of(block, topk, first, last), key_PGJ.shape[1]
    chosen_BIC = torch.full((*q_BIJ.shape[:2], topk), -1, dtype=torch.int32, device=q_BIJ.device)
    for b, (row, position) in enumerate(zip(row_B.tolist(), position_B.tolist(), strict=True)):
        if position < 0:
            continue
        (begin, end), own = rule.scored(position), position // block
        num = min(topk - begin - (own + 1 - end), end - begin)
        kept_C = torch.arange(own + 1, device=q_BIJ.device)
        for i in range(q_BIJ.shape[1]):
            best = kept_C[begin:end]
            if num < end - begin:
                seen = torch.arange(begin * block, end * block, device=q_BIJ.device)
                key_PJ = key_PGJ[table_RP[row, seen // size].long(), seen % size]
                order = scores(q_BIJ[b, i:i + 1], key_PJ, block)[0].sort(descending=True, stable=True).indices
                best = best[order[:num].sort().values]
            blocks = torch.cat((kept_C[:begin], best, kept_C[end:]))
            chosen_BIC[b, i, :len(blocks)] = blocks
    return chosen_BIC
