"""What the tokens of a step attend to where requests may select, and where pages may be on the host.

Owns the split of a step: prompts read all that is before them, from device pages or in windows of host
pages; each position behind its prompt reads what it selects. What is computed follows from the request;
where its bytes are changes no token. Knows rows and positions; refuses to know phases.

    T tokens of the step   R rows of the tables   P pages of a row   K KV heads   G page size   H head dim
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind
from penstock.exec.graphs.capture import DecodeAttention, Decoding, PagedDecode
from penstock.exec.sparse.layers import (
    DEVICE,
    HOST,
    BoundsSelector,
    SparseLayers,
    SparseStep,
    unit_attention,
)
from penstock.exec.sparse.prompts import GPU_WINDOW, HostedPrompts, PromptChunk
from penstock.exec.sparse.rows import HotRows, Selects
from penstock.exec.step.attend import NoIndexer, spec_of
from penstock.exec.step.states import StatePools, StepStates
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.paged_attention import Prepare, Prepared, write_kv
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.fused.step import Queries
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Model

MIXED = "mixed"         # captured steps in which not every row selects
# attend(layer of the group, q_TNH, k_TKH, v_TKH, sinks_N) -> out_TNH
_Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]


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

    groups     group 0 has the KV of the layers that select, group 1 the bounds of its units; layers of
               others, if there are any, read all of theirs, from device pages, or keep a state there
    prepare    attention of what reads all
    """

    def __init__(self, selector: Selector, model: Model, groups: Sequence[CacheShape], tables: RowTables,
                 device: Sequence[BlockPool], host: Sequence[BlockPool], prepare: Prepare) -> None:
        rule = selector.rule
        assert rule is not None, "ordinary models select by bounds"
        self._tables, self._prepare = tables, prepare
        self._kv, self._bounds = tables.groups[0], tables.groups[1]
        self._local = {layer: i for i, layer in enumerate(groups[0].layers)}
        attends = [*zip(groups, device, strict=True)][:sum(not group.snapshot for group in groups)]
        self._specs = [spec_of(model.attention, *of) for of in attends]
        self.states = StatePools(groups, device)
        self._dense = {layer: (g, pool.pages[:, i, :, 0], pool.pages[:, i, :, 1])
                       for g, (group, pool) in enumerate(attends)
                       if g > 1 for i, layer in enumerate(group.layers)}
        layout = device[0].layout
        self._unit = rule.unit
        self._device, self._host, bounds = (
            [] if pool is None else [pool.pages[:, i] for i in range(layout.num_layers)]
            for pool in (device[0], host[0] if host else None, device[1]))
        self.rows = HotRows(tables, device[0], unit=rule.unit, hot_pages=selector.hot_pages,
                            layers=groups[0].layers, stage=model.stage)
        backends = selector.backends
        self._layers = SparseLayers(
            unit_attention(backends["sparse_attention"], unit=rule.unit, scale=model.attention.scale),
            unit=rule.unit, device=self._device, host=self._host, bounds=bounds, device_RP=self._kv.device_RM,
            host_RP=self.rows.host_RM, hot=self.rows.hot, backends=backends)
        self._selector = BoundsSelector(rule, bounds, self._bounds.device_RM, backends["select"],
                                        model.queries if model.attention.shared else None)
        self._prompts = HostedPrompts(self._kv, self.rows, self._device, self._host,
                                      num_kv_heads=self._specs[0].num_kv_heads,
                                      scale=model.attention.scale, backends=backends,
                                      window=GPU_WINDOW if self._kv.device_RM.is_cuda else 0)
        self._most = selector.budget // rule.unit
        self._budget_R = torch.zeros_like(self._kv.device_RM[:, 0])     # for captured steps

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        self.rows.bind(bind, budget=budget // self._unit, first=num_prompt)
        self._budget_R[self._tables.index(bind.row)] = budget // self._unit

    def decodes(self, most: int) -> SelectingDecodes:
        """Of steps of up to `most` tokens that rows decode behind their prompts."""
        return SelectingDecodes(self)

    # ------------------------------------------------------------ a step
    def step(self, lowered: Lowered) -> Attend:
        """The attention of a step whose binds, grows, remaps and resizes are applied."""
        others = {g: self._prepare(lowered.ragged[g], self._specs[g]) for g, *_ in self._dense.values()}
        return _SelectingStep(self._local, self._selects(lowered), self._dense, others, lowered,
                              self.states.step(lowered))

    def _selects(self, lowered: Lowered) -> _Attend:
        dense, windows, queries = self._split(lowered.batch)
        through = [(chunk, self._prompts.windows(chunk)) for chunk in windows]
        at = self.rows.write_at(lowered, self._bounds)
        ragged = lowered.ragged[0]
        whole = not windows and not queries
        tokens_at = slice(None) if whole else _where(dense, ragged.page_T.device)
        run = (self._prepare(ragged if whole else _part(ragged, dense, tokens_at), self._specs[0])
               if dense else None)
        sparse = None
        if queries:
            device = ragged.page_T.device
            query_at = on_device([t for t, _, _ in queries], device, torch.int64)
            rows = [r for _, r, _ in queries]
            budgets = [self.rows[r].budget for r in rows]
            budget_B = on_device(budgets, device, torch.int32)
            sparse = self._layers.step(rows, [p for _, _, p in queries],
                                       [*map(self.rows.at_once, rows)])

        def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor,
                   sinks_N: Tensor | None) -> Tensor:
            self._layers.write_kv(layer, (k_TKH, v_TKH), at)
            pool_PK2GH = self._device[layer]
            if whole and run is not None:
                return run(q_TNH, pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1], sinks_N)
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
            if run is not None:
                out_TNH[tokens_at] = run(q_TNH[tokens_at], pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1], sinks_N)
            for chunk, pages in through:
                of = chunk.tokens
                out_TNH[of] = self._prompts.attend(layer, chunk, pages, q_TNH[of], k_TKH[of], v_TKH[of],
                                                   sinks_N)
            if sparse is not None:
                q_BNH = q_TNH[query_at]
                chosen_BKC = self._selector.choose(layer, q_BNH, sparse, budget_B, max(budgets))
                out_TNH[query_at] = self._layers.attend(layer, q_BNH, chosen_BKC, sparse, sinks_N)
            return out_TNH
        return attend

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


class _SelectingStep(NoIndexer):
    """`model.base.Attend` of one step."""

    def __init__(self, local: Mapping[LocalLayer, int], selects: _Attend,
                 dense: Mapping[LocalLayer, tuple[int, Tensor, Tensor]], prepared: Mapping[int, Prepared],
                 lowered: Lowered, states: StepStates) -> None:
        self.state = states
        self._local, self._selects, self._dense, self._prepared = local, selects, dense, prepared
        self._ragged = lowered.ragged

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None, "what is read of KV heads is chosen here"
        k_TKH, v_TKH = kv_TCKH[:, 0], kv_TCKH[:, 1]
        if (i := self._local.get(layer)) is not None:
            return self._selects(i, q_TNH, k_TKH, v_TKH, sinks_N)
        group, k_PKGH, v_PKGH = self._dense[layer]
        ragged = self._ragged[group]
        write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, ragged.page_T, ragged.offset_T)
        return self._prepared[group](q_TNH, k_PKGH, v_PKGH, sinks_N)


class SelectingDecodes(DecodeAttention):
    """Of a `Selecting`: steps in which every row selects, by whether any lacks a device page; the others also
    read all pages of the rows that do not."""

    def __init__(self, selecting: Selecting) -> None:
        self._of = selecting
        self.kinds = (DEVICE, MIXED) if selecting._kv.host_RM is None else (DEVICE, HOST, MIXED)
        kv, rows = selecting._kv, selecting.rows
        self.looks = rows.looks(kv.place, kv.host_place, rows.units(selecting._bounds), budget_R=selecting._budget_R)

    def kind(self, rows: Sequence[int]) -> str:
        if not all(self._of.rows[r].budget for r in rows):
            return MIXED
        return DEVICE if all(map(self._of._kv.is_resident, rows)) else HOST

    def attend(self, kind: str, queries: Queries, turn_NW: Tensor | None = None) -> Attend:
        return _DecodeStep(self._of, kind, queries, turn_NW)


class _DecodeStep(Decoding):
    def __init__(self, of: Selecting, kind: str, queries: Queries, turn_NW: Tensor | None) -> None:
        row_B, position_B, budget_B, select_B = (
            queries.row_B, queries.position_B, queries.budget_B, queries.select_B)
        assert budget_B is not None and select_B is not None, "begun without `SelectingDecodes.looks`"
        device_B, host_B, bounds_B = queries.slot_LB
        self._of, self._budget_B = of, budget_B
        self._at = WriteAt(device_B, host_B, bounds_B, queries.own_B, position_B, of._unit)
        self._step = SparseStep(row_B, select_B, (slice(None),), of.rows.hot.now_11,
                                None if turn_NW is None else turn_NW.flatten(), kind != DEVICE)

        def whole(group: int, position_B: Tensor, context_B: Tensor) -> PagedDecode:
            table = of._tables.groups[group]
            return PagedDecode(of._specs[group], table.device_RM, table.size, row_B, position_B, context_B)
        self._whole = None
        if kind == MIXED:
            self._selects_B = budget_B > 0
            others_B = position_B.where(~self._selects_B, -1)
            self._whole = whole(0, others_B, others_B + 1)
        self._others = {g: whole(g, position_B, queries.context_B) for g, *_ in of._dense.values()}
        self.state = of.states.decode(of._tables.groups, row_B, position_B, turn_NW)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None, "what is read of KV heads is chosen here"
        of, k_TKH, v_TKH = self._of, kv_TCKH[:, 0], kv_TCKH[:, 1]
        if (i := of._local.get(layer)) is None:
            group, k_PKGH, v_PKGH = of._dense[layer]
            self._others[group].write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH)
            return self._others[group](q_TNH, k_PKGH, v_PKGH, sinks_N)
        of._layers.write_kv(i, (k_TKH, v_TKH), self._at)
        chosen_BKC = of._selector.choose(i, q_TNH, self._step, self._budget_B, of._most)
        out_TNH = of._layers.attend(i, q_TNH, chosen_BKC, self._step, sinks_N)
        if self._whole is None:
            return out_TNH
        pool_PK2GH = of._device[i]
        all_TNH = self._whole(q_TNH, pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1], sinks_N)
        return torch.where(self._selects_B[:, None, None], out_TNH, all_TNH)


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
