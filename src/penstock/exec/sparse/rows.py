"""Hot buffers of the rows that select, and counts of what each of their requests read from which tier.

Owns what all selectors share. Knows rows, requests and counters, not how units are selected.

    L layers of the group   T tokens of the step
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.plan import Bind, HotResize, RequestId
from penstock.exec.step.attend import ANY, Counts, ReadCounts, none_read
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.fused.step import BlockTableRef, Looks
from penstock.kernels.kv.write_kv import WriteAt
from penstock.memory.hot import HotBuffers
from penstock.memory.pool import BlockPool
from penstock.model.base import LocalLayer, Stage

COUNTS = ("device", "hot_hits", "hot_misses", "hot_evictions")      # columns of HotLayer.count_RKE
_MISSES = COUNTS.index("hot_misses")
READS = (*COUNTS, "host_bytes")             # what the units that a request selected were read from


@dataclass(slots=True)
class HotRow:
    """What a bound row reads: `budget` units for each query from position `first` on; 0: it reads all."""

    rid: RequestId | None = None
    budget: int = 0
    first: int = 0
    hot_pages: int = 0


class HotRows:
    """Rows by table index, of the layers of one offloaded cache group.

    group       its number
    pool        its device pages, of which hot buffers are made
    unit        tokens that are selected together
    hot_pages   of a row's hot buffer, at most; 0 if no row is ever offloaded
    layers      of the group, numbered in `stage`; reported by their numbers in the whole model
    readers     layers that read the same entries, at most
    """

    def __init__(self, tables: RowTables, group: int, pool: BlockPool, *, unit: int, hot_pages: int,
                 layers: Sequence[LocalLayer], stage: Stage, readers: int = 1) -> None:
        self.group, layout = group, pool.layout
        self._tables, self._pool, self._unit = tables, pool, unit
        self._names = [stage.first + layer for layer in layers]
        kv = tables.groups[self.group]
        rows, pages = kv.device_RM.shape
        self.hot = HotBuffers(layers=layout.num_layers, rows=rows, kv_heads=layout.num_kv_heads,
                              pages=pages, hot_pages=hot_pages, page_units=layout.page_size // unit,
                              device=kv.device_RM.device, readers=readers)
        self.host_RM = torch.full_like(kv.device_RM, -1) if kv.host_RM is None else kv.host_RM
        self._rows = [HotRow() for _ in range(rows)]
        # Of each row by all requests, as last reported.
        self._counted: list[Sequence[int]] = [(0,) * len(COUNTS)] * rows
        self.missed_bytes = 0                               # by the step that was reported last
        self._reads: dict[RequestId, list[int]] = {}        # COUNTS, and bytes of windows
        self._unit_bytes = layout.planes * layout.head_dim * unit * layout.dtype.itemsize
        self._page_rows = layout.num_kv_heads * layout.page_size
        self._window_pages = [0] * layout.num_layers

    def __getitem__(self, row: int) -> HotRow:
        return self._rows[row]

    def at_once(self, r: int) -> int:
        """Queries of row `r` of which its hot buffer holds all that they choose, whatever that is: 1 at
        least, ANY where every page is on the device, next to that where the buffer holds the whole row."""
        row, table, size = self._rows[r], self._tables.groups[self.group], self._pool.layout.page_size
        if not row.budget or table.is_resident(r):
            return ANY
        if row.hot_pages * size >= table.end(r):
            return ANY - 1                      # what they choose may be missing
        return max(1, row.hot_pages * (size // self._unit) // row.budget)

    def bind(self, bind: Bind, *, budget: int, first: int) -> None:
        """The row's tables are bound already. budget: units that each query behind position `first`
        chooses; 0: this request reads all of its KV."""
        r = self._tables.index(bind.row)
        row, hot = self._rows[r], bind.hot[self.group] if bind.hot else ()
        if hot or row.hot_pages:
            self.hot.bind(r, [self._pool.index(h.page) for h in hot], [h.keeps for h in hot])
        self._rows[r] = HotRow(bind.rid, budget, first, len(hot))

    def resize(self, resize: HotResize) -> None:
        """The row is bound. Of the pages only those where a buffer begins hold an entry already."""
        r, pages = self._tables.index(resize.row), [self._pool.index(hot.page) for hot in resize.pages]
        keeps, had = [hot.keeps for hot in resize.pages], self._rows[r].hot_pages
        assert resize.group == self.group and self._rows[r].rid is not None, f"no hot buffer for {resize}"
        if had and pages:
            assert max(keeps) < 0, f"a hot buffer that goes on holds what it held: {resize}"
            self.hot.resize(r, pages)
        else:
            self.hot.bind(r, pages, keeps)
        self._rows[r].hot_pages = len(pages)

    def window(self, layer: int, row: int, pages: int) -> None:
        """A window of a prompt has brought so many pages from the host."""
        self._window_pages[layer] += pages
        rid = self._rows[row].rid
        if rid is not None:
            self._of(rid)[-1] += pages * self._page_rows * self._unit_bytes // self._unit

    def _of(self, rid: RequestId) -> list[int]:
        if (found := self._reads.get(rid)) is None:
            found = self._reads[rid] = [0] * (len(COUNTS) + 1)
        return found

    def looks(self, *places: BlockTableRef, budget_R: Tensor | None = None) -> Looks:
        """What captured steps ask of rows, which they tell in their answers what they have read."""
        return Looks(places, budget_R, self.hot.now_1, self.hot.count_LRKE)

    def reads(self, rows: Sequence[int], counted: bool = False) -> ReadCounts:
        """(request, READS) of those of these rows that select, up to the steps that the device has been given
        by now. What it returns tells them, once the last of these has run, in order of the steps, each once;
        counted: by what the step's answer has of each of these rows."""
        before = [(i, r, row.rid, self._of(row.rid)[-1])
                  for i, r in enumerate(rows) if (row := self._rows[r]).rid is not None and row.budget]
        if not before:
            return none_read
        count_LRKE = None if counted else self.hot.all_counts()

        def told(answered: Counts) -> tuple[tuple[RequestId, tuple[int, ...]], ...]:
            counts = None if count_LRKE is None else count_LRKE.sum((0, 2)).tolist()
            found, missed = [], 0
            for i, r, rid, window_bytes in before:
                count = answered[i] if counts is None else counts[r]
                now, had = self._reads[rid], self._counted[r]
                missed += count[_MISSES] - had[_MISSES]
                for at, had_at in enumerate(had):
                    now[at] += count[at] - had_at
                self._counted[r] = count
                found.append((rid, (*now[:-1], now[_MISSES] * self._unit_bytes + window_bytes)))
            self.missed_bytes = missed * self._unit_bytes
            return tuple(found)
        return told

    def close(self, rid: RequestId) -> None:
        """No plan names `rid` any more."""
        for row in self._rows:
            if row.rid == rid:
                row.rid = None
        self._reads.pop(rid, None)

    def stats(self) -> dict[str, float]:
        """By metric name: units that were selected, by layer and where they were; rows that either they or
        windows of prompts brought from the host. Waits for a device, once."""
        out: dict[str, float] = {}
        for layer, counts, pages in zip(self._names, self.hot.count_LRKE.sum((1, 2)).tolist(),
                                        self._window_pages, strict=True):
            named = dict(zip(COUNTS, counts, strict=True))
            at = f'{{layer="{layer}"}}'
            out[f"selected_device_units_total{at}"] = named["device"]
            out[f"hot_hits_total{at}"] = named["hot_hits"]
            out[f"hot_misses_total{at}"] = named["hot_misses"]
            out[f"hot_evictions_total{at}"] = named["hot_evictions"]
            out[f"hot_window_pages_total{at}"] = pages
            out[f"host_rows_read_total{at}"] = named["hot_misses"] * self._unit + pages * self._page_rows
        return out

    def write_at(self, lowered: Lowered, bounds_T: Tensor) -> WriteAt:
        """Where the tokens of a step go, and the bounds of their units."""
        at, kv = (lowered.row_T, lowered.positions_T), self._tables.groups[self.group]
        device_T, host_T = (place.slots(*at) for place in (kv.place, kv.host_place))
        return WriteAt(device_T, host_T, bounds_T, lowered.row_T.int(), lowered.positions_T.int(), self._unit)
