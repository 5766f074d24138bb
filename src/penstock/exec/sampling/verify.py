"""Which positions of a step with drafts count: one rule, for a device behind its layers and a host with its answers.

    B positions, those of a row one after the other
"""
from __future__ import annotations

import torch
from torch import Tensor


def counted(id_B: Tensor, draft_B: Tensor, finite_B: Tensor, first_B: Tensor) -> Tensor:
    """bool: a row's first position, and each behind it whose input is what the one before it says, up to one that is
    wrong or whose logits are not finite. No draft changes a token.

    id_B      what each says            draft_B   what each took as its input, -1: it is a first one, or padding
    first_B   bool: the rows' first
    """
    at_B = torch.arange(len(id_B), device=id_B.device)
    follows_B = first_B | ((draft_B == id_B.roll(1)) & finite_B)
    wrong_B = torch.where(follows_B, -1, at_B).cummax(0).values
    return wrong_B < torch.where(first_B, at_B, -1).cummax(0).values
