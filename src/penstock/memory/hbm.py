"""The device pool. Nothing is cleared: a page holds whatever was there until a step or a copy writes
it. On a CPU an unused page costs no resident memory."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pool import ONE_GROUP, BlockPool, PageLayout, Part


def allocate(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [nbytes] on the device, not cleared."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class HbmPool(BlockPool):
    """Pages that attention reads: for layer l of the group, k is `pages[:, l, :, 0]` [P, K, U, H]."""

    tier = Tier.HBM

    def __init__(self, layout: PageLayout, num_pages: int, *, base: int = 0,
                 group: Group = ONE_GROUP, device: torch.device | str = "cpu",
                 memory: Tensor | None = None, page_stride: int | None = None,
                 part: Part | None = None) -> None:
        """`memory` and `page_stride` of a slab; without them it allocates what it needs."""
        stride = layout.page_bytes if page_stride is None else page_stride
        if memory is None:
            memory = allocate(num_pages * stride, device)
        super().__init__(layout, num_pages, memory, stride, base, group, part)
