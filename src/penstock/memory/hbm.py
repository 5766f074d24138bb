"""The device pool. Nothing is cleared: a page holds whatever was there until a step or a copy writes
it. On a CPU an unused page costs no resident memory."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.plan import Tier
from penstock.memory.pool import BlockPool


def allocate(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [nbytes] on the device, not cleared."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class HbmPool(BlockPool):
    """Pages that attention reads: for layer l of the group, k is `pages[:, l, :, 0]` [P, K, U, H]."""

    tier, allocate = Tier.HBM, staticmethod(allocate)
