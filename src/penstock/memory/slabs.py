"""How the cache groups of a model share one memory: slabs that go from group to group.

A slab is one page of the largest group, or several pages of another. Page i of a group lies
at i times its page stride, whichever slab that is in: the strides divide the slab.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.memory.pool import PageLayout

ALIGN = 64                  # bytes: pages begin with a cache line, and a DMA has its 16
_SIZES = 1024               # that are tried


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
    """Slabs for these groups: of sizes a little above the largest page, that in which a page of every
    group takes least. One group wastes nothing."""
    page_bytes = tuple(layout.page_bytes for layout in layouts)
    if len(page_bytes) == 1:
        return Slabs(page_bytes[0], (1,), page_bytes)
    least = [-(-n // ALIGN) for n in page_bytes]
    best, lines = math.inf, 0
    for size in range(max(least), max(least) + min(max(least) // 8, _SIZES) + 1):
        taken = sum(_stride(size, n) for n in least)
        if taken < best:
            best, lines = taken, size
    return Slabs(lines * ALIGN, tuple(lines // _stride(lines, n) for n in least), page_bytes)


def of_counts(layouts: Sequence[PageLayout], slab_pages: tuple[int, ...]) -> Slabs:
    """The smallest slabs that hold so many pages of each of these groups; a group may have no layers."""
    page_bytes = tuple(layout.page_bytes for layout in layouts)
    if len(page_bytes) == 1:
        return Slabs(page_bytes[0] * slab_pages[0], slab_pages, page_bytes)
    lines = max(-(-size // ALIGN) * n for size, n in zip(page_bytes, slab_pages, strict=True))
    each = math.lcm(*slab_pages)
    return Slabs(-(-lines // each) * each * ALIGN, slab_pages, page_bytes)


def _stride(size: int, least: int) -> int:
    """The smallest divisor of `size` from `least` on."""
    count = next(n for n in range(size // least, 0, -1) if size % n == 0)
    return size // count
