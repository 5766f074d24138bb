"""The back-end of sparse decode: layers of the offloaded group select what they read, in whichever tier its pages are.

It splits the tokens of a step. With a DSA model's indexer every token reads what it selects. With `--sparse-top-k`
prompts read all KV before them, from device pages or in windows of host pages, and each position after its prompt
reads what it selects. A decoding row finds that in device pages or in its hot buffer; the rest is fetched from the
host into the buffer. The tier of the bytes changes no token. Knows rows and positions, not phases.

    T tokens of the step   B queries of a captured one, or that select   N query heads   C planes   K KV heads
    H head dim   Y chosen units   R rows of the tables
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind, HotResize, RequestId
from penstock.exec.graphs.halves import LEAST, LINK_SHARE, Copies
from penstock.exec.sparse.layers import (
    DEVICE,
    HOST,
    SparseLayers,
    SparseStep,
    row_attention,
    unit_attention,
)
from penstock.exec.sparse.prompts import GPU_WINDOW, HostedPrompts, PromptChunk, Window
from penstock.exec.sparse.rows import HotRows
from penstock.exec.sparse.selectors import Choosing, chooser_of
from penstock.exec.sparse.whole import Whole, WholeChunk
from penstock.exec.step.attend import Attending, KeepsStates, LatentOps, ReadCounts, places_of
from penstock.exec.step.dense import Dense, DenseStep
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.paged_attention import AttentionSpec, Prepare, Prepared
from penstock.kernels.fused.step import Queries
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Model, Selector, value_dim_of

MIXED = "mixed"         # captured steps in which not every row selects
# Of a layer that selects: the layer of the group's pages that it reads, and how many have read that before it.
_Place: TypeAlias = tuple[int, int]
# read(place, q_TNH, kept_TCKH, chosen_TKY, sinks_N) -> out_TNH of a part of the tokens
_Read: TypeAlias = Callable[[_Place, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
_Part: TypeAlias = tuple[slice | Tensor, _Read]


class Sparse(Attending):
    """`Attending` of a rank on which rows select, and may be offloaded.

    selector    of the layers of the offloaded group; layers of other groups, if there are any, read all of theirs
                from device pages, or keep a state there
    hot_pages   of a row's hot buffer, at most; 0 if no row is ever offloaded
    backends    operation -> name of its implementation, of every operation that selecting needs
    ops         attention of layers that read all, or of MLA KV entries
    """

    selects = True

    def __init__(self, selector: Selector, hot_pages: int, backends: Mapping[str, str], model: Model,
                 groups: Sequence[CacheShape], tables: RowTables, device: Sequence[BlockPool],
                 host: Sequence[BlockPool], ops: Prepare | LatentOps) -> None:
        self._tables, self._selector = tables, selector
        [g] = (g for g, group in enumerate(groups) if group.offloaded)
        self._kv, layout = tables.groups[g], device[g].layout
        self.local: dict[LocalLayer, _Place] = {}
        self.readers = Counter[int]()           # of each layer of pages
        for layer, (group, i) in places_of(model.reads, groups).items():
            if group == g:
                self.local[layer] = i, self.readers[i]
                self.readers[i] += 1
        self._prepare: Prepare = _no_heads if isinstance(ops, LatentOps) else ops
        self._dense = Dense(model.reads, groups, self._prepare, device, tables.groups, others=self.local)
        self.states = self._dense.states
        self._spec = self._dense.specs.get(g)
        # None: a stage without layers that select.
        reads = next((model.reads[layer] for layer in self.local), None)
        scale, self._value_dim = 1.0 if reads is None else reads.scale, value_dim_of(model)
        attend = (row_attention(ops.attend, value_dim=self._value_dim, scale=scale) if isinstance(ops, LatentOps) else
                  unit_attention(backends["sparse_attention"], unit=selector.block, scale=scale))
        self._dtype = layout.dtype
        self._device, self._host = ([] if pool is None else [pool.pages[:, i] for i in range(layout.num_layers)]
                                    for pool in (device[g], host[g] if host else None))
        self.rows = HotRows(tables, g, device[g], unit=selector.block, hot_pages=hot_pages,
                            layers=groups[g].layers, stage=model.stage, readers=max(self.readers.values(), default=1))
        shared = any(model.reads[layer].shared for layer in self.local)
        self._chooser = chooser_of(selector, groups, tables.groups, device, self._kv, backends,
                                   model.queries if shared else None)
        self._layers = SparseLayers(
            attend, unit=selector.block, device=self._device, host=self._host, bounds=self._chooser.bounds,
            device_RP=self._kv.device_RM, host_RP=self.rows.host_RM, hot=self.rows.hot, backends=backends)
        self._budget_R: Tensor | None = None                # for captured steps, where requests say
        self.kinds = (DEVICE,) if self._kv.host_RM is None else (DEVICE, HOST)
        if selector.native:
            self._whole = Whole(self._kv, self.rows, layout, self._device, self._host, attend, selector.tokens,
                                backends)
        else:
            self._prompts = HostedPrompts(self._kv, self.rows, self._device, self._host,
                                          num_kv_heads=layout.num_kv_heads, scale=scale, backends=backends,
                                          window=GPU_WINDOW if self._kv.device_RM.is_cuda else 0)
            self._budget_R = torch.zeros_like(self._kv.device_RM[:, 0])
            self.kinds = (*self.kinds, MIXED)
        self.looks = self.rows.looks(self._kv.place, self._kv.host_place, self._chooser.place,
                                     budget_R=self._budget_R)
        self.weight_bytes, self._tp_size = model.num_bytes, model.stage.tp_rank.size

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        units, first = ((self._selector.top_k, 0) if self._budget_R is None else
                        (budget // self._selector.block, num_prompt))
        self.rows.bind(bind, budget=units, first=first)
        if self._budget_R is not None:
            self._budget_R[self._tables.index(bind.row)] = units

    def uncaptured(self) -> str:
        return "selects"

    def kind(self, rows: Sequence[int]) -> str:
        """Whether every row selects, and whether any lacks a device page."""
        if not all(self.rows[r].budget for r in rows):
            return MIXED
        return DEVICE if all(map(self._kv.is_resident, rows)) else HOST

    def may_halve(self, kind: str, bucket: int) -> bool:
        """What the ranks of a layer add up goes one way at a time."""
        return self._selector.native and kind == HOST and bucket >= LEAST and self._tp_size == 1

    def halves(self) -> bool:
        return self.rows.missed_bytes * LINK_SHARE > self.weight_bytes

    def resize(self, resize: HotResize) -> None:
        self.rows.resize(resize)

    def close(self, rid: RequestId) -> None:
        self.rows.close(rid)

    def at_once(self, row: int) -> int:
        return self.rows.at_once(row)

    def reads(self, rows: Sequence[int], counted: bool = False) -> ReadCounts:
        return self.rows.reads(rows, counted)

    def stats(self) -> dict[str, float]:
        return self.rows.stats()

    # ------------------------------------------------------------ a step
    def step(self, lowered: Lowered) -> Attend:
        dense, windows, whole, queries = self._split(lowered.batch)
        choosing = self._chooser.launched(lowered)
        ragged, parts = lowered.ragged[self.rows.group], list[_Part]()
        device = ragged.page_T.device
        if dense and self._spec is not None:
            at: slice | Tensor = _where(dense, device) if windows or queries else slice(None)
            run = self._prepare(_part(ragged, dense, at) if windows or queries else ragged, self._spec)
            parts.append((at, lambda place, q_TNH, _kept, _chosen, sinks_N: run(
                q_TNH[at], *self._pools(place), sinks_N)))
        parts += [(chunk.tokens, partial(self._through, chunk, self._prompts.windows(chunk))) for chunk in windows]
        parts += [(chunk.tokens, partial(self._over, chunk)) for chunk in whole]
        if queries:
            tokens, rows, positions = zip(*queries, strict=True)
            budgets = [] if self._budget_R is None else [self.rows[r].budget for r in rows]
            step = self._layers.step(rows, positions, [*map(self.rows.at_once, rows)], budgets)
            query_at = on_device(tokens, device, torch.int64) if dense or windows or whole else slice(None)
            parts.append((query_at, partial(self._selected, query_at, step, choosing)))
        return _SparseStep(self, self.rows.write_at(lowered, choosing.bounds_T), parts, choosing,
                           self._dense.step(lowered))

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> Attend:
        """Read all pages of rows that do not select, too."""
        row_B, position_B, budget_B = queries.row_B, queries.position_B, queries.budget_B
        choosing = self._chooser.captured(queries)
        device_B, host_B, _ = queries.slot_LB
        at = WriteAt(device_B, host_B, choosing.bounds_T, queries.own_B, position_B, self._selector.block)
        step = SparseStep(row_B, position_B if queries.select_B is None else queries.select_B, (slice(None),),
                          self.rows.hot.now_R11, None if turn_NW is None else turn_NW.flatten(), kind != DEVICE,
                          copies, budget_B, self._selector.top_k)
        read: _Read = partial(self._selected, slice(None), step, choosing)
        if kind == MIXED and self.local:
            assert budget_B is not None, "begun without `looks`"
            selects_B, selected = budget_B > 0, read
            others_B = position_B.where(~selects_B, -1)
            whole = self._dense.decodes(self.rows.group, row_B, others_B, others_B + 1)

            def read(place: _Place, q_TNH: Tensor, kept_TCKH: Tensor, chosen_TKY: Tensor | None,
                     sinks_N: Tensor | None) -> Tensor:
                return torch.where(selects_B[:, None, None], selected(place, q_TNH, kept_TCKH, chosen_TKY, sinks_N),
                                   whole(q_TNH, *self._pools(place), sinks_N))
        return _SparseStep(self, at, [(slice(None), read)], choosing, self._dense.decode(kind, queries, turn_NW))

    def kept(self, kv_TCKH: Tensor) -> Tensor:
        """Return entries as pages have them: a chunk's own are what the next one reads."""
        if self._value_dim:
            return fp8.kept(kv_TCKH[:, 0], self._dtype, self._value_dim)[:, None]
        return fp8.kept_heads(kv_TCKH, self._dtype)

    def write_kv(self, layer: int, kept_TCKH: Tensor, at: WriteAt) -> None:
        self._layers.write_kv(layer, kept_TCKH.unbind(1), at)

    def out_of(self, q_TNH: Tensor) -> Tensor:
        """What the parts of a step fill."""
        return q_TNH.new_empty(*q_TNH.shape[:2], self._value_dim or q_TNH.shape[2])

    def _pools(self, place: _Place) -> tuple[Tensor, Tensor]:
        pool_PK2GH = self._device[place[0]]
        return pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1]

    def _through(self, chunk: PromptChunk, windows: Sequence[Window], place: _Place, q_TNH: Tensor,
                 kept_TCKH: Tensor, _chosen: Tensor | None, sinks_N: Tensor | None) -> Tensor:
        of = chunk.tokens
        if place[1]:            # windows go where queries of an earlier reader have made units hot
            self.rows.hot.void(chunk.row)
        return self._prompts.attend(place[0], chunk, windows, q_TNH[of], kept_TCKH[of, 0], kept_TCKH[of, 1], sinks_N)

    def _over(self, chunk: WholeChunk, place: _Place, q_TNH: Tensor, kept_TCKH: Tensor, chosen_TKY: Tensor | None,
              sinks_N: Tensor | None) -> Tensor:
        assert chosen_TKY is not None, "nothing has been chosen for this layer"
        of = chunk.tokens
        return self._whole.attend(place[0], chunk, q_TNH[of], kept_TCKH[of], chosen_TKY[of], sinks_N)

    def _selected(self, at: slice | Tensor, step: SparseStep, choosing: Choosing, place: _Place, q_TNH: Tensor,
                  _kept: Tensor, chosen_TKY: Tensor | None, sinks_N: Tensor | None) -> Tensor:
        q_BNH = q_TNH[at]
        layer, reader = place
        chosen_BKY = choosing.chosen(layer, q_BNH, step, None if chosen_TKY is None else chosen_TKY[at])
        return self._layers.attend(layer, q_BNH, chosen_BKY, step, sinks_N, reader)

    def _split(self, batch: StepBatch) -> tuple[list[PromptChunk], list[PromptChunk], list[WholeChunk],
                                                list[tuple[int, int, int]]]:
        """Chunks that read all from device pages, those whose pages are not all there, those that select and read
        from one place, and queries that select row by row: (token, row, position)."""
        dense: list[PromptChunk] = []
        windows: list[PromptChunk] = []
        whole: list[WholeChunk] = []
        queries: list[tuple[int, int, int]] = []
        at = 0
        for r, start, count in zip(batch.rows, batch.start, batch.count, strict=True):
            who, end = self.rows[r], start + count
            split = min(max(who.first, start), end) if who.budget else end
            if split > start:
                (dense if self._kv.is_resident(r) else windows).append(PromptChunk(r, at, start, split))
            if self._budget_R is None and self._whole.together(r, end, count):
                whole.append(self._whole.chunk(r, at, start, end))
            else:
                queries += [(at + p - start, r, p) for p in range(split, end)]
            at += count
        return dense, windows, whole, queries


class _SparseStep(KeepsStates):
    """`model.base.Attend` of one step, eager or captured: its tokens in parts, each of which reads by itself."""

    def __init__(self, of: Sparse, at: WriteAt, parts: Sequence[_Part], choosing: Choosing, dense: DenseStep) -> None:
        self._of, self._at, self._parts, self._dense, self.state = of, at, parts, dense, dense.state
        self._choosing = choosing
        self._written: dict[int, Tensor] = {}       # kept_TCKH of this step, for later readers

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        return self._choosing.select(layer, q_TIJ, weight_TI, key_TJ)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TKY: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        if (place := self._of.local.get(layer)) is None:
            return self._dense(layer, q_TNH, kv_TCKH, chosen_TKY, sinks_N)
        i, reader = place
        if kv_TCKH is None:
            kept_TCKH = self._written[i]
        else:
            kept_TCKH = self._of.kept(kv_TCKH)
            self._of.write_kv(i, kept_TCKH, self._at)
            if self._of.readers[i] > 1:
                self._written[i] = kept_TCKH
        if reader == self._of.readers[i] - 1:
            self._written.pop(i, None)
        given = place, q_TNH, kept_TCKH, chosen_TKY, sinks_N
        if len(self._parts) == 1:
            [(_, read)] = self._parts
            return read(*given)
        out_TNH = self._of.out_of(q_TNH)
        for at, read in self._parts:
            out_TNH[at] = read(*given)
        return out_TNH


def _no_heads(layout: Ragged, spec: AttentionSpec) -> Prepared:
    raise AssertionError("a layer that reads all of its KV, of a model of MLA KV entries")


def _where(chunks: Sequence[PromptChunk], device: torch.device) -> Tensor:
    """int64: indices into T of the chunks' tokens, in their order."""
    return on_device([t for c in chunks for t in range(c.at, c.at + c.end - c.start)], device, torch.int64)


def _part(ragged: Ragged, chunks: Sequence[PromptChunk], at_T: Tensor | slice) -> Ragged:
    """The layout of these chunks alone."""
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    return Ragged(tuple(starts), tuple(c.end for c in chunks), tuple(c.row for c in chunks),
                  ragged.pages_RM, ragged.page_T[at_T], ragged.offset_T[at_T], ragged.page_size)
