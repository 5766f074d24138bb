"""What stays the same from step to step about a layer's attention, and the geometry of one row."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.attention import hidden
from penstock.kernels.types.ragged import Ragged, on_device


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Heads, head dim, type of queries, and scale. `group` query heads share one KV head.

    coded     pages are uint8, of `types.fp8.encode_heads`; else of the type of queries
    window    tokens that a query sees, itself and those just before it; 0: all
    softcap   scores s become softcap * tanh(s / softcap), scaled before; 0: they stay
    sinks     each call has a logit of each query head, which counts in the weights' sum and has no value
    first     1: the first token is seen by its own query alone; 0: by all. Only without a window
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    first: int = 0
    coded: bool = False

    def __post_init__(self) -> None:
        assert self.first in (0, 1) and not (self.first and self.window), "a first token beside a window"
        assert self.num_heads % self.num_kv_heads == 0, "query heads must share KV heads evenly"

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def plain(self) -> bool:
        """Every earlier key counts with its score alone."""
        return not (self.window or self.softcap or self.sinks or self.first)

    def first_seen(self, position: int) -> int:
        """The first position that a query sees."""
        return max(0, position + 1 - self.window) if self.window else min(self.first, position)


class Prepared(Protocol):
    """One layer's attention, for the step that it was made for or some of its rows."""

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        """out_TNH. See `paged_attention.prepare`."""
        ...


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


def begin_of(row: Row, spec: AttentionSpec, layout: Ragged) -> int:
    """The position that the first page which the row reads begins with: those before it may be gone."""
    if not spec.window:
        return 0
    return spec.first_seen(row.context - row.count) // layout.page_size * layout.page_size


def pages_of(row: Row, layout: Ragged, begin: int = 0) -> Tensor:
    """The table's entries that the row reads, int32: a view. begin: of `begin_of`."""
    return layout.pages_RM[row.index, begin // layout.page_size:-(-row.context // layout.page_size)]


Part: TypeAlias = tuple[Sequence[Row], Prepared]        # rows in the order of their tokens, and theirs


def compose(parts: Sequence[Part], layout: Ragged) -> Prepared:
    """One attention out of parts that have every row of the step once."""
    if len(parts) == 1:
        return parts[0][1]
    placed = [(_tokens(rows, layout.pages_RM.device), part) for rows, part in parts]

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for at, part in placed:
            out_TNH[at] = part(q_TNH[at], k_PKGH, v_PKGH, sinks_N)
        return out_TNH
    return attend


class Sound:
    """A chunk of one row, by a kernel that lets what a query does not see reach its result: where that is not
    finite it is computed again with zeros in place of the bad keys and values, see `attention.hidden`."""

    def __init__(self, make: Callable[[Row, AttentionSpec, Ragged], Prepared], row: Row, spec: AttentionSpec,
                 layout: Ragged) -> None:
        self._make, self._row, self._spec, self._layout = make, row, spec, layout
        self._run = make(row, spec, layout)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        out_TNH = self._run(q_TNH, k_PKGH, v_PKGH, sinks_N)
        return out_TNH if hidden.is_finite(out_TNH) else self._again(q_TNH, k_PKGH, v_PKGH, sinks_N)

    def _again(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None) -> Tensor:
        """Over a copy of the row's pages. What sound queries get has the same bits as beside a sound key."""
        row, spec, layout = self._row, self._spec, self._layout
        begin, size = begin_of(row, spec, layout), layout.page_size
        pages_n = pages_of(row, layout, begin).long()
        k_nKGH, v_nKGH, bad_nKG = hidden.split(k_PKGH[pages_n], v_PKGH[pages_n])
        table_1M = torch.full((1, -(-row.context // size)), -1, dtype=torch.int32)
        table_1M[0, begin // size:] = torch.arange(len(pages_n))
        run = self._make(replace(row, index=0), spec, replace(layout, pages_RM=table_1M))
        out_TNH = run(q_TNH, k_nKGH, v_nKGH, sinks_N)
        end_T = torch.arange(row.context - row.count + 1, row.context + 1) - begin
        first_T = torch.tensor([spec.first_seen(int(end) + begin - 1) - begin for end in end_T])
        bad_SK = bad_nKG.transpose(1, 2).flatten(0, 1)
        return hidden.spoil(out_TNH, hidden.seen(bad_SK, first_T, end_T))


def _tokens(rows: Sequence[Row], device: torch.device) -> slice | Tensor:
    """Where the queries of these rows are in the step."""
    first, last = rows[0].first, rows[-1].first + rows[-1].count
    if last - first == sum(row.count for row in rows):
        return slice(first, last)
    return on_device([row.first + i for row in rows for i in range(row.count)], device, torch.int64)


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """What is left of a mean [..., H] when a sink is in its sum of weights, whose logarithm is `lse`."""
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
