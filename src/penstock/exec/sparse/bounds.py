"""What the tokens of a step attend to where requests may select, and where pages may be on the host.

Owns the split of a step: prompts read all that is before them, from device pages or in windows of host
pages; each position behind its prompt reads what it selects. What is computed follows from the request;
where its bytes are changes no token. Knows rows and positions; refuses to know phases.

    T tokens of the step   B queries of a captured one, or that select   N query heads   K KV heads   H head dim
    R rows of the tables   G page size
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind
from penstock.exec.graphs.halves import Copies
from penstock.exec.sparse.layers import (
    DEVICE,
    HOST,
    BoundsSelector,
    SparseLayers,
    SparseStep,
    unit_attention,
)
from penstock.exec.sparse.prompts import GPU_WINDOW, HostedPrompts, PromptChunk, Window
from penstock.exec.sparse.rows import HotRows, Selects, offloaded_of
from penstock.exec.step.attend import KeepsStates, places_of
from penstock.exec.step.dense import Dense, DenseStep
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.paged_attention import Prepare
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.fused.step import Queries
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Model

MIXED = "mixed"         # captured steps in which not every row selects
# Of a layer that selects: the layer of the group's pages that it reads, and how many have read that before it.
_Place: TypeAlias = tuple[int, int]
# read(place, q_TNH, k_TKH, v_TKH, sinks_N) -> out_TNH of a part of the tokens
_Read: TypeAlias = Callable[[_Place, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """How rows select. `budget`: tokens, at most; `hot_pages`: of a row's hot buffer, at most, 0 if no row is
    ever hosted; backends: op -> name of its implementation, of every op that selecting needs.
    rule: None where the model's own indexer chooses."""

    rule: SelectRule | None
    budget: int
    hot_pages: int
    backends: Mapping[str, str]

    @property
    def least(self) -> int:
        """Tokens of the smallest budget that a request can have; 0 where requests have none."""
        return 0 if self.rule is None else self.rule.least_units * self.rule.unit


class Selecting(Selects):
    """`Selects` of a model of KV heads, by bounds of their keys.

    groups     one has the KV of the layers that select, one the bounds of its units; layers of
               others, if there are any, read all of theirs, from device pages, or keep a state there
    prepare    attention of what reads all
    """

    def __init__(self, selector: Selector, model: Model, groups: Sequence[CacheShape], tables: RowTables,
                 device: Sequence[BlockPool], host: Sequence[BlockPool], prepare: Prepare) -> None:
        rule = selector.rule
        assert rule is not None, "ordinary models select by bounds"
        self._tables, self._prepare = tables, prepare
        [g], [b] = offloaded_of(groups)
        self._kv, self._bounds = tables.groups[g], tables.groups[b]
        self.local: dict[LocalLayer, _Place] = {}
        self.readers = Counter[int]()           # of each layer of pages
        for layer, (group, i) in places_of(model.reads, groups).items():
            if group == g:
                self.local[layer] = i, self.readers[i]
                self.readers[i] += 1
        self._dense = Dense(model.reads, groups, prepare, device, tables.groups, others=self.local)
        self.states, layout = self._dense.states, device[g].layout
        self._dtype = layout.dtype
        self._spec = self._dense.specs.get(g)       # None: a stage without layers that select
        scale = 1.0 if self._spec is None else self._spec.scale
        self._unit = rule.unit
        self._device, self._host, bounds = (
            [] if pool is None else [pool.pages[:, i] for i in range(layout.num_layers)]
            for pool in (device[g], host[g] if host else None, device[b]))
        self.rows = HotRows(tables, g, device[g], unit=rule.unit, hot_pages=selector.hot_pages,
                            layers=groups[g].layers, stage=model.stage, readers=max(self.readers.values(), default=1))
        backends = selector.backends
        self._layers = SparseLayers(
            unit_attention(backends["sparse_attention"], unit=rule.unit, scale=scale),
            unit=rule.unit, device=self._device, host=self._host, bounds=bounds, device_RP=self._kv.device_RM,
            host_RP=self.rows.host_RM, hot=self.rows.hot, backends=backends)
        shared = any(model.reads[layer].shared for layer in self.local)
        self._selector = BoundsSelector(rule, bounds, self._bounds.device_RM, backends["select"],
                                        model.queries if shared else None)
        self._prompts = HostedPrompts(self._kv, self.rows, self._device, self._host,
                                      num_kv_heads=layout.num_kv_heads, scale=scale, backends=backends,
                                      window=GPU_WINDOW if self._kv.device_RM.is_cuda else 0)
        self._most = selector.budget // rule.unit
        self._budget_R = torch.zeros_like(self._kv.device_RM[:, 0])     # for captured steps
        self.kinds = (DEVICE, MIXED) if self._kv.host_RM is None else (DEVICE, HOST, MIXED)
        self.looks = self.rows.looks(self._kv.place, self._kv.host_place, self.rows.units(self._bounds),
                                     budget_R=self._budget_R)

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        self.rows.bind(bind, budget=budget // self._unit, first=num_prompt)
        self._budget_R[self._tables.index(bind.row)] = budget // self._unit

    def kind(self, rows: Sequence[int]) -> str:
        """Whether every row selects, and whether any lacks a device page."""
        if not all(self.rows[r].budget for r in rows):
            return MIXED
        return DEVICE if all(map(self._kv.is_resident, rows)) else HOST

    # ------------------------------------------------------------ a step
    def step(self, lowered: Lowered) -> Attend:
        dense, windows, queries = self._split(lowered.batch)
        ragged, parts = lowered.ragged[self.rows.group], list[tuple[slice | Tensor, _Read]]()
        device = ragged.page_T.device
        if dense and self._spec is not None:
            at: slice | Tensor = _where(dense, device) if windows or queries else slice(None)
            run = self._prepare(_part(ragged, dense, at) if windows or queries else ragged, self._spec)
            parts.append((at, lambda place, q_TNH, _k, _v, sinks_N: run(
                q_TNH[at], *self._pools(place), sinks_N)))
        for chunk in windows:
            parts.append((chunk.tokens, partial(self._through, chunk, self._prompts.windows(chunk))))
        if queries:
            tokens, rows, positions = zip(*queries, strict=True)
            budgets = [self.rows[r].budget for r in rows]
            step = self._layers.step(rows, positions, [*map(self.rows.at_once, rows)])
            query_at = on_device(tokens, device, torch.int64) if dense or windows else slice(None)
            parts.append((query_at, partial(self._selected, query_at, step, on_device(budgets, device, torch.int32),
                                            max(budgets))))
        return _SelectingStep(self, self.rows.write_at(lowered, self._bounds), parts, self._dense.step(lowered))

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> Attend:
        """Of rows that do not select it reads all pages, too."""
        row_B, position_B, budget_B, select_B = (
            queries.row_B, queries.position_B, queries.budget_B, queries.select_B)
        assert budget_B is not None and select_B is not None, "begun without `looks`"
        device_B, host_B, bounds_B = queries.slot_LB
        at = WriteAt(device_B, host_B, bounds_B, queries.own_B, position_B, self._unit)
        step = SparseStep(row_B, select_B, (slice(None),), self.rows.hot.now_R11,
                          None if turn_NW is None else turn_NW.flatten(), kind != DEVICE)
        read: _Read = partial(self._selected, slice(None), step, budget_B, self._most)
        if kind == MIXED and self.local:
            selects_B, selected = budget_B > 0, read
            others_B = position_B.where(~selects_B, -1)
            whole = self._dense.decodes(self.rows.group, row_B, others_B, others_B + 1)

            def read(place: _Place, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None) -> Tensor:
                return torch.where(selects_B[:, None, None], selected(place, q_TNH, k_TKH, v_TKH, sinks_N),
                                   whole(q_TNH, *self._pools(place), sinks_N))
        return _SelectingStep(self, at, [(slice(None), read)], self._dense.decode(kind, queries, turn_NW))

    def kept(self, kv_TCKH: Tensor) -> Tensor:
        """As pages have them: a chunk's own keys are what the next one reads."""
        return fp8.kept_heads(kv_TCKH, self._dtype)

    def write_kv(self, layer: int, k_TKH: Tensor, v_TKH: Tensor, at: WriteAt) -> None:
        self._layers.write_kv(layer, (k_TKH, v_TKH), at)

    def _pools(self, place: _Place) -> tuple[Tensor, Tensor]:
        pool_PK2GH = self._device[place[0]]
        return pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1]

    def _through(self, chunk: PromptChunk, windows: Sequence[Window], place: _Place, q_TNH: Tensor, k_TKH: Tensor,
                 v_TKH: Tensor, sinks_N: Tensor | None) -> Tensor:
        of = chunk.tokens
        if place[1]:            # windows go where queries of an earlier reader have made units hot
            self.rows.hot.void(chunk.row)
        return self._prompts.attend(place[0], chunk, windows, q_TNH[of], k_TKH[of], v_TKH[of], sinks_N)

    def _selected(self, at: slice | Tensor, step: SparseStep, budget_B: Tensor, most: int, place: _Place,
                  q_TNH: Tensor, _k_TKH: Tensor, _v_TKH: Tensor, sinks_N: Tensor | None) -> Tensor:
        q_BNH = q_TNH[at]
        layer, reader = place
        chosen_BKC = self._selector.choose(layer, q_BNH, step, budget_B, most)
        return self._layers.attend(layer, q_BNH, chosen_BKC, step, sinks_N, reader)

    def _split(self, batch: StepBatch) -> tuple[list[PromptChunk], list[PromptChunk], list[tuple[int, int, int]]]:
        """Chunks that read all from device pages, those whose pages are not all there, and queries that
        select: (token, row, position)."""
        dense: list[PromptChunk] = []
        windows: list[PromptChunk] = []
        queries: list[tuple[int, int, int]] = []
        at = 0
        for r, start, count in zip(batch.rows, batch.start, batch.count, strict=True):
            who, end = self.rows[r], start + count
            split = min(max(who.first, start), end) if who.budget else end
            if split > start:
                chunk = PromptChunk(r, at, start, split)
                (dense if self._kv.is_resident(r) else windows).append(chunk)
            queries += [(at + p - start, r, p) for p in range(split, end)]
            at += count
        return dense, windows, queries


class _SelectingStep(KeepsStates):
    """`model.base.Attend` of one step, launched or captured: its tokens in parts, each of which reads by itself."""

    def __init__(self, of: Selecting, at: WriteAt, parts: Sequence[tuple[slice | Tensor, _Read]],
                 dense: DenseStep) -> None:
        self._of, self._at, self._parts, self._dense, self.state = of, at, parts, dense, dense.state
        self._written: dict[int, Tensor] = {}       # kv_TCKH of this step, for later readers

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        if (place := self._of.local.get(layer)) is None:
            return self._dense(layer, q_TNH, kv_TCKH, chosen_TS, sinks_N)
        assert chosen_TS is None, "what is read of KV heads is chosen here"
        i, reader = place
        if kv_TCKH is None:
            kept_TCKH = self._written[i]
        else:
            kept_TCKH = self._of.kept(kv_TCKH)
            self._of.write_kv(i, kept_TCKH[:, 0], kept_TCKH[:, 1], self._at)
            if self._of.readers[i] > 1:
                self._written[i] = kept_TCKH
        if reader == self._of.readers[i] - 1:
            self._written.pop(i, None)
        given = place, q_TNH, kept_TCKH[:, 0], kept_TCKH[:, 1], sinks_N
        if len(self._parts) == 1:
            [(_, read)] = self._parts
            return read(*given)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for at, read in self._parts:
            out_TNH[at] = read(*given)
        return out_TNH


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
