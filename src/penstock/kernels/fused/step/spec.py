"""What a captured step looks up of its rows in front of the layers, and what it has found.

    B queries of the step   R rows of the tables   M entries of a row   L tables   S vocabulary in parts
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class BlockTableRef(NamedTuple):
    """A table of the rows, int32 [R, M], of pages that have `size` entries: that of a token is
    `position // unit`. None: no row has a page there."""

    table_RM: Tensor | None
    size: int
    unit: int = 1

    def pages(self, row_B: Tensor, position_B: Tensor) -> Tensor:
        """int64: index in the pool of the page that has this position of each row of the table; -1: none."""
        assert self.table_RM is not None
        return self.table_RM[row_B, position_B // (self.unit * self.size)].long()

    def slots(self, row_B: Tensor, position_B: Tensor) -> Tensor:
        """int64: where in the pool it is: entry n % `size` of page n // `size`; -1: nowhere."""
        if self.table_RM is None:
            return torch.full_like(position_B, -1, dtype=torch.int64)
        page_B = self.pages(row_B, position_B)
        return torch.where(page_B < 0, -1, page_B * self.size + position_B // self.unit % self.size)


@dataclass(frozen=True, slots=True)
class Looks:
    """What the attention of a step wants to know.

    places       up to three
    budget_R     int32: what rows may choose, 0: they read all; None: no row has a budget
    now_1        int32: the stamp of steps, which goes on by one; None: there is none
    count_LRKE   int64 [layers, R, heads, 4]: counts that each row gets with its token
    """

    places: tuple[BlockTableRef, ...] = ()
    budget_R: Tensor | None = None
    now_1: Tensor | None = None
    count_LRKE: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of a step, each of a row at a position; a position of -1 is padding.

    row_B, position_B   int32, as they were given
    context_B, own_B    int32: position + 1, and the row or, of padding, -1
    index_B             int64: into `last_R`, of padding its last place
    token_B, at_B       int64: what `last_R` has there, and the position or, of padding, 0
    slot_LB             int64: of each place where the token goes in its pool; -1: nowhere
    budget_B, select_B  int32, where there are budgets: the row's, and the position or, of padding and of
                        rows that read all, -1
    """

    row_B: Tensor
    position_B: Tensor
    context_B: Tensor
    own_B: Tensor
    index_B: Tensor
    token_B: Tensor
    at_B: Tensor
    slot_LB: Tensor
    budget_B: Tensor | None = None
    select_B: Tensor | None = None


class Best(NamedTuple):
    """The largest logit of each part of a row and where it is, the first of equal ones, f32 and int32; and
    token_B, int64: -1, which a draw overwrites."""

    peak_BS: Tensor
    at_BS: Tensor
    token_B: Tensor
