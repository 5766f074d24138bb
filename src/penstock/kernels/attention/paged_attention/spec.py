"""What stays the same from step to step about a model's attention, and the geometry of one row."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.types.ragged import Ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Heads, head dim, type and scale. `group` query heads share one KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "query heads must share KV heads evenly"

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step. Queries [first, first + count) of T; `index` in the tables."""

    first: int
    count: int
    context: int
    index: int


def rows_of(layout: Ragged) -> list[Row]:
    """The rows of a step. Asserts what `prepare` promises about its input."""
    rows = []
    width = layout.pages_RM.shape[1] * layout.page_size
    for i, (context, index) in enumerate(zip(layout.context, layout.rows, strict=True)):
        first, end = layout.query_start[i], layout.query_start[i + 1]
        assert 1 <= end - first <= context, f"row {i}: {end - first} queries, context {context}"
        assert context <= width, f"row {i}: context {context}, and tables hold {width}"
        rows.append(Row(first, end - first, context, index))
    return rows


def pages_of(row: Row, layout: Ragged) -> Tensor:
    """The table's entries that the row reads, int32: a view."""
    return layout.pages_RM[row.index, :-(-row.context // layout.page_size)]
