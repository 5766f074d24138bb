"""The host pool. The memory is mapped, not touched: the pool is usable at once and a page costs
resident memory only after its first write."""
from __future__ import annotations

import mmap

import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pinned import Pinned
from penstock.memory.pool import ONE_GROUP, BlockPool, PageLayout, PoolPart


def allocate(nbytes: int) -> Tensor:
    """uint8 [nbytes] of anonymous memory of this process, zero."""
    assert nbytes >= 1, "a host pool without memory"
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def mapped(fd: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] of a file of memory, shared with every process that maps it."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class DramPool(BlockPool):
    """Pages in the host's memory."""

    tier, allocate = Tier.DRAM, staticmethod(allocate)

    def __init__(self, layout: PageLayout, num_pages: int, *, base: int = 0,
                 group: Group = ONE_GROUP, memory: Tensor | None = None,
                 page_stride: int | None = None, pinned: Pinned | None = None,
                 part: PoolPart | None = None) -> None:
        """`memory` and `page_stride` of a slab of whole pages. pinned: whose memory that is, for a CUDA
        device."""
        if memory is not None and part is not None:
            memory = memory[part.at:]
        super().__init__(layout, num_pages, base=base, group=group, memory=memory, page_stride=page_stride,
                         part=part, spread=page_stride is not None)
        self._pinned, self._stride = pinned, page_stride or layout.page_bytes

    def index(self, page: int) -> int:
        """As any pool's; waits until a device can reach the page."""
        i = super().index(page)
        if self._pinned is not None:
            self._pinned.wait((i + 1) * self._stride)
        return i

    def together(self, page: int) -> int:
        """No copy crosses the border of two regions that are registered by themselves."""
        if self._pinned is None:
            return super().together(page)
        at = (page - self.base) * self._stride
        return max(1, (self._pinned.border(at) - at) // self._stride)

    def bytes_of(self, page: int) -> memoryview:
        """The bytes of a whole page, writable."""
        return self.page(page).reshape(-1).view(torch.uint8).numpy().data

    room = bytes_of

    def placed(self, page: int, room: memoryview) -> None:
        """They are where they belong."""
