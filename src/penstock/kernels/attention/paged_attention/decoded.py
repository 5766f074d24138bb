"""Attention over pages in fp8 by kernels that read floats: pages of some rows are decoded first, of one layer.

So many rows at once as have no more pages than the longest: what is decoded takes no more memory than that row's.

    T tokens of the part   P pages   n pages that are decoded   M pages a row   K KV heads   G page size   W bytes
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.spec import AttentionSpec, Prepared, Row, Sound, begin_of, pages_of
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged

Make: TypeAlias = Callable[[Sequence[Row], AttentionSpec, Ragged], Prepared]


@dataclass(frozen=True, slots=True)
class _Some:
    """Rows that are attended to together. at: their queries in the part; page_n: int64, what is decoded for them."""

    at: slice
    page_n: Tensor
    run: Prepared


class Decoded(Prepared):
    """Attend to rows whose pages are codes. make: of floats, whose queries are those of its rows, in order."""

    def __init__(self, make: Make, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> None:
        self._dtype, self._some = spec.dtype, list[_Some]()
        plain, first = replace(spec, coded=False), 0
        for some in _together(rows, spec, layout):
            pages = [pages_of(row, layout, begin_of(row, spec, layout)) for row in some]
            begins = [begin_of(row, spec, layout) // layout.page_size for row in some]
            page_n = torch.cat(pages).long()
            table_RM = layout.pages_RM.new_full((len(some), max(map(len, pages)) + max(begins)), -1)
            at_n, done = torch.arange(len(page_n), dtype=torch.int32, device=page_n.device), 0
            for row_M, begin, num in zip(table_RM, begins, map(len, pages), strict=True):
                row_M[begin:begin + num] = at_n[done:done + num]
                done += num
            moved = [replace(row, index=i) for i, row in enumerate(some)]
            end = first + sum(row.count for row in some)
            self._some.append(_Some(slice(first, end), page_n, make(moved, plain, replace(layout, pages_RM=table_RM))))
            first = end

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        outs = []
        for some in self._some:
            k_nKGH, v_nKGH = (fp8.decode_heads(pool[some.page_n], self._dtype) for pool in (k_PKGH, v_PKGH))
            outs.append(some.run(q_TNH[some.at], k_nKGH, v_nKGH, sinks_N))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def of_floats(make: Make, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> Prepared:
    """What `make` makes, over decoded pages where pages are codes."""
    return Decoded(make, rows, spec, layout) if spec.coded else make(rows, spec, layout)


def sound_of(make: Callable[[Row, AttentionSpec, Ragged], Prepared]) -> Make:
    """`Sound`, of one row."""
    def made(rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> Prepared:
        [row] = rows
        return Sound(make, row, spec, layout)
    return made


def _together(rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> Iterator[Sequence[Row]]:
    """Rows in their order, as many at once as fit."""
    nums = [-(-(row.context - begin_of(row, spec, layout)) // layout.page_size) for row in rows]
    first, held = 0, 0
    for i, num in enumerate(nums):
        if held and held + num > max(nums):
            yield rows[first:i]
            first, held = i, 0
        held += num
    yield rows[first:]
