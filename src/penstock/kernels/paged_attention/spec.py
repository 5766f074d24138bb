"""What stays the same from step to step about a model's attention, and the geometry of one row."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.ragged import Ragged


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
    """One row of a step. Queries [first, first + count) of T; pages cut to those in use."""

    first: int
    count: int
    context: int
    pages: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Whether the pages are one ascending run, so that the row's KV is a view of the pool."""
        first = self.pages[0]
        return self.pages == tuple(range(first, first + len(self.pages)))


def rows_of(layout: Ragged) -> list[Row]:
    """The rows of a step. Asserts what `plan` promises about its input."""
    rows = []
    for i, (context, pages) in enumerate(zip(layout.context, layout.pages, strict=True)):
        first, end = layout.query_start[i], layout.query_start[i + 1]
        used = -(-context // layout.page_size)
        assert 1 <= end - first <= context, f"row {i}: {end - first} queries, context {context}"
        assert used <= len(pages), f"row {i}: context {context} needs {used} pages"
        rows.append(Row(first, end - first, context, pages[:used]))
    return rows
