"""What every tier of node-local memory looks like to the mover: pages of one layout, by id.

Owns the bytes of a page and the id check. Knows nothing of requests, rows or steps.

    P pages   L layers of the group   K KV heads   C planes   U units of a page   H head dim
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.plan import Group, Tier

ONE_GROUP = Group(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """One page of one cache group: a block [L, K, C, U, H], the same bytes in every tier.

    planes      C: 2 for k and v or a lower and an upper bound, 1 for an MLA KV entry
    page_size   tokens that a page covers
    unit        tokens that one vector stands for: 1 for KV, more for summaries; divides page_size
    """

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    planes: int = 2
    unit: int = 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        assert self.page_size % self.unit == 0, f"units of {self.unit} in pages of {self.page_size}"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[L, K, C, U, H]."""
        return (self.num_layers, self.num_kv_heads, self.planes, self.page_size // self.unit,
                self.head_dim)

    def units(self, tokens: int) -> int:
        """Units that hold the first `tokens` tokens of a page; the last may stand for fewer."""
        return -(-tokens // self.unit)

    @property
    def unit_bytes(self) -> int:
        return (self.num_layers * self.num_kv_heads * self.planes * self.head_dim
                * self.dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        return self.page_size // self.unit * self.unit_bytes


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Which layers and heads of whole pages a pool has.

    whole         layout of such a page
    layer, head   the first of them
    writes        copies to a memory that several ranks see are made here, not by another that has the same
    """

    whole: PageLayout
    layer: int = 0
    head: int = 0
    writes: bool = True

    @property
    def at(self) -> int:
        """Byte of a whole page at which it begins."""
        of_head = self.whole.page_bytes // max(1, self.whole.num_layers) // self.whole.num_kv_heads
        return of_head * (self.layer * self.whole.num_kv_heads + self.head)


class PagePool(Protocol):
    """Pages of one cache group in one tier. Page ids are `base .. base + num_pages - 1`; ranges of
    tiers and groups may be disjoint, so that an id of another one fails at once."""

    tier: Tier
    group: Group
    layout: PageLayout
    base: int
    num_pages: int

    @property
    def writes(self) -> bool:
        """See `PoolPart`."""

    def index(self, page: int) -> int:
        """Position of `page` in this pool. Asserts that the id belongs to it."""

    def page(self, page: int) -> Tensor:
        """[L, K, C, U, H]: one page as a view, dense behind K."""

    def together(self, page: int) -> int:
        """How many pages from this one on, at most, one copy may take."""

    def block(self, page: int, count: int) -> Tensor:
        """[count, L, K, C, U, H]: so many pages from this one on."""


class BlockPool:
    """Pages in one memory: `pages` is [P, L, K, C, U, H] over it, each page one block, or some layers and
    heads of one.

    memory        uint8 [bytes], at least (P - 1) * page_stride + page_bytes of it; None: its own
    page_stride   bytes from one page to the next, None: a page; more where several groups share the
                  memory (`memory.slabs`)
    part          which layers and heads these are; None: whole pages
    spread        they lie in whole pages, the first of them where `memory` begins
    """

    tier: Tier
    allocate: Callable[[int], Tensor]       # uint8, so many bytes of this tier

    def __init__(self, layout: PageLayout, num_pages: int, *, base: int = 0, group: Group = ONE_GROUP,
                 memory: Tensor | None = None, page_stride: int | None = None, part: PoolPart | None = None,
                 spread: bool = False) -> None:
        assert num_pages >= 1, f"a {self.tier.name} pool of {num_pages} pages"
        page_stride = layout.page_bytes if page_stride is None else page_stride
        memory = self.allocate(num_pages * page_stride) if memory is None else memory
        assert page_stride >= layout.page_bytes, (
            f"pages of {layout.page_bytes} bytes every {page_stride}")
        self.layout, self.num_pages, self.base, self.group = layout, num_pages, base, group
        self.part = part or PoolPart(layout)
        elements = torch.empty((self.part.whole if spread else layout).shape, device="meta").stride()
        itemsize = layout.dtype.itemsize
        assert page_stride % itemsize == 0, f"a page stride of {page_stride} bytes"
        whole = memory[:memory.numel() // itemsize * itemsize].view(layout.dtype)
        self.pages = whole.as_strided((num_pages, *layout.shape), (page_stride // itemsize, *elements))

    @property
    def writes(self) -> bool:
        return self.part.writes

    def index(self, page: int) -> int:
        i = page - self.base
        assert 0 <= i < self.num_pages, (
            f"page {page} is not a page of {self.tier.name}, "
            f"which has {self.base} .. {self.base + self.num_pages - 1}")
        return i

    def page(self, page: int) -> Tensor:
        return self.pages[self.index(page)]

    def together(self, page: int) -> int:
        return self.base + self.num_pages - page

    def block(self, page: int, count: int) -> Tensor:
        last = self.index(page + count - 1)
        return self.pages[last + 1 - count:last + 1]

    def fill(self, value: float) -> None:
        """Overwrite every slot, which makes the whole pool resident. For tests: a NaN that is read
        shows. Bytes are filled with what is NaN in all formats."""
        self.pages.fill_(255 if self.layout.dtype == torch.uint8 and value != value else value)

    @property
    def nbytes(self) -> int:
        """Bytes of its pages, without what lies between them."""
        return self.num_pages * self.layout.page_bytes
