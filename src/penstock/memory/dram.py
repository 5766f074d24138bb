"""The host pool, page-first: [P][layer][KV head][k|v][token][dim], so a page is one block.

Owns host bytes; knows pages, not requests. The memory is mapped, not touched: the pool is usable
at once and a page costs resident memory only after its first write.

    P pages   L layers   K KV heads   G page size   H head dim
"""
from __future__ import annotations

import mmap

import torch
from torch import Tensor

from penstock.core.plan import Tier
from penstock.memory.pool import PageRange, PageShape


class DramPool(PageRange):
    """Pages in anonymous memory of this process, each one contiguous run of `page_bytes`."""

    tier = Tier.DRAM

    def __init__(self, shape: PageShape, num_pages: int, *, base: int = 0) -> None:
        super().__init__(shape, num_pages, base)
        self._map = mmap.mmap(-1, self.nbytes)
        self._all = torch.frombuffer(self._map, dtype=shape.dtype).view(
            num_pages, shape.num_layers, shape.num_kv_heads, 2, shape.page_size, shape.head_dim)

    def page(self, page: int) -> Tensor:
        return self._all[self.index(page)]

    def fill(self, value: float) -> None:
        """Overwrite every slot, which makes the whole pool resident. For tests."""
        self._all.fill_(value)
