"""How the cache groups of a model share one memory: slabs that go from group to group.

A slab is one page of the largest group, or as many pages of another as fit. Page i of a group lies
at i times its page stride, whichever slab that is in: the strides divide the slab.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.memory.pool import PageLayout

ALIGN = 64                  # bytes: pages begin with a cache line, and a DMA has its 16


@dataclass(frozen=True, slots=True)
class Slabs:
    """slab_pages    of each group: pages that fill one slab
    page_bytes    of each group: what is used of its page stride"""

    slab_bytes: int
    slab_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]

    def page_stride(self, group: int) -> int:
        return self.slab_bytes // self.slab_pages[group]

    def unused(self, group: int) -> float:
        """Share of a slab that `group` leaves unused."""
        return 1 - self.slab_pages[group] * self.page_bytes[group] / self.slab_bytes


def share(layouts: Sequence[PageLayout]) -> Slabs:
    """Slabs for these groups, as small as the largest page allows. One group wastes nothing."""
    page_bytes = tuple(layout.page_bytes for layout in layouts)
    if len(page_bytes) == 1:
        return Slabs(page_bytes[0], (1,), page_bytes)
    slab_pages = tuple(max(page_bytes) // n for n in page_bytes)
    step = math.lcm(*(n * ALIGN for n in slab_pages))
    return Slabs(-(-max(page_bytes) // step) * step, slab_pages, page_bytes)
