"""The device pool: per layer one k and one v tensor over all pages, as attention kernels read them.

Owns device bytes; knows pages, not requests. Nothing is cleared: a page holds whatever was there
until a step or a copy writes it. On a CPU an unused page costs no resident memory.

    L layers   P pages   G page size   K KV heads   H head dim
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.plan import Tier
from penstock.memory.pool import PageRange, PageShape


class HbmPool(PageRange):
    """`k[l]` and `v[l]` are [P, G, K, H], contiguous, for every layer `l`.

    One allocation behind all of them, so that a page's copy is one strided operation.
    """

    tier = Tier.HBM

    def __init__(self, shape: PageShape, num_pages: int, *, base: int = 0,
                 device: torch.device | str = "cpu") -> None:
        super().__init__(shape, num_pages, base)
        self._all = torch.empty(
            (shape.num_layers, 2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype, device=device)
        self.k: tuple[Tensor, ...] = tuple(layer[0] for layer in self._all)
        self.v: tuple[Tensor, ...] = tuple(layer[1] for layer in self._all)

    def page(self, page: int) -> Tensor:
        return self._all[:, :, self.index(page)].permute(0, 3, 1, 2, 4)

    def fill(self, value: float) -> None:
        """Overwrite every slot. For tests: a NaN that is read shows."""
        self._all.fill_(value)
