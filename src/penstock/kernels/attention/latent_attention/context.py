"""What a query attends to where it sees all that is before it: entries of a block table in place of slots.

    B queries   R rows of the table   M entries of a row   G page size   S rows of the longest context
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Query b sees positions `first` to `context_B[b]`, this not included, of row `row_B[b]`: one at a context
    of `first` or less all of it, and none at 0.

    table_RM            int32, dense: pages, one for each position that a query sees
    row_B, context_B    int32, dense
    """

    table_RM: Tensor
    row_B: Tensor
    context_B: Tensor
    first: int = 0

    def part(self, queries: slice) -> PagedContext:
        return replace(self, row_B=self.row_B[queries], context_B=self.context_B[queries])

    def slots(self, size: int) -> Tensor:
        """slot_BS of pages of so many rows, of the longest that a row may be."""
        return seen_slots(self.table_RM, size, self.row_B, self.context_B - 1, self.first,
                          size * self.table_RM.shape[1])


def seen_slots(pages_RM: Tensor, size: int, row_B: Tensor, position_B: Tensor, first: int,
             longest: int) -> Tensor:
    """[B, S] int32: where the rows are that queries at these positions see, from position `first` on, of
    tables in which the longest has so many tokens; -1 behind them, and throughout for a position of -1."""
    position_B1 = position_B[:, None]
    at_S = torch.arange(first, max(longest, first + 1), dtype=torch.int32, device=pages_RM.device)
    if first:                   # a query before it sees its own
        at_S = at_S - first * (position_B1 < first).int()
    page_BS = pages_RM[row_B[:, None], at_S // size]
    return torch.where(at_S <= position_B1, page_BS * size + at_S % size, -1)


def slots_of(seen: Tensor | PagedContext, size: int) -> Tensor:
    """slot_BS of whatever `LatentAttention` takes for it."""
    return seen if isinstance(seen, Tensor) else seen.slots(size)
