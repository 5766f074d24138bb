"""What every tier of node-local memory looks like to the mover: pages of one shape, by id.

Owns the shape of a page and the id check. Knows nothing of requests, rows or steps.

    L layers   K KV heads   G page size, tokens   H head dim   P pages
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.plan import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """One page of one cache group: `num_layers` x `num_kv_heads` x (k, v) x tokens x dim."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes


class Pool(Protocol):
    """Pages of one tier. Page ids are `base .. base + num_pages - 1`; ranges of tiers may be
    disjoint, so that an id of another tier fails at once."""

    tier: Tier
    shape: PageShape
    base: int
    num_pages: int

    def index(self, page: int) -> int:
        """Position of `page` in this pool. Asserts that the id belongs to it."""
        ...

    def page(self, page: int) -> Tensor:
        """View [L, K, 2, G, H] of one page, with whatever strides the tier has."""
        ...

    @property
    def nbytes(self) -> int: ...


class PageRange:
    """Ids and bytes that all pools share: `index` and `nbytes` of a Pool."""

    tier: Tier

    def __init__(self, shape: PageShape, num_pages: int, base: int) -> None:
        assert num_pages >= 1, f"a {self.tier.name} pool of {num_pages} pages"
        self.shape, self.num_pages, self.base = shape, num_pages, base

    def index(self, page: int) -> int:
        i = page - self.base
        assert 0 <= i < self.num_pages, (
            f"page {page} is not a page of {self.tier.name}, "
            f"which has {self.base} .. {self.base + self.num_pages - 1}")
        return i

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.shape.page_bytes
