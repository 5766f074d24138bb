"""Decode that reads a selection of its KV: the five ops in order, for one layer, wherever pages are.

Owns the composition and the rounds of a step; memory and tables belong to others. Rows that are all
on the device, all on the host or both are one code path.

    B queries of the step   R rows of the tables   P pages of a row   N query heads   H head dim
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import gather, resolve, sparse_attention, store
from penstock.kernels import select as selection
from penstock.kernels.select import SelectRule
from penstock.kernels.store import StoreAt
from penstock.memory.hot import HotBuffers

OPS = ("store", "select", "resolve", "gather", "sparse_attention")


@dataclass(frozen=True, slots=True)
class SparseStep:
    """The queries of a step that select, made once and used for every layer.

    row, position, budget_B   int32, device: as `select` takes them
    chosen                    the largest budget, units
    rounds                    queries of each round, as an index of B: no round has two queries of a row
                              that has a page without a device copy, since what both choose need not
                              fit its hot buffer
    now_R1                    int32, device: stamp of each round
    """

    row_B: Tensor
    position_B: Tensor
    budget_B: Tensor
    chosen: int
    rounds: tuple[slice | Tensor, ...]
    now_R1: Tensor


class SparseLayers:
    """Attention of one cache group through whatever tier its units are in.

    device, host   one view [P, K, 2, G, H] a layer of the pools; `host` is empty without that tier
    bounds         one view [P, K, 2, S, H] a layer of the pool of summaries
    device_RP, host_RP, bounds_RP   int32 tables of the rows: pool indices, -1 for none. Read anew in
                   every call: whoever owns them changes them between steps
    backends       op -> name of its implementation, for each of `OPS`
    """

    def __init__(self, *, rule: SelectRule, scale: float, device: Sequence[Tensor],
                 host: Sequence[Tensor], bounds: Sequence[Tensor], device_RP: Tensor, host_RP: Tensor,
                 bounds_RP: Tensor, hot: HotBuffers, backends: Mapping[str, str]) -> None:
        self._rule, self._scale, self._hot = rule, scale, hot
        self._device, self._host, self._bounds = tuple(device), tuple(host), tuple(bounds)
        self._device_RP, self._host_RP, self._bounds_RP = device_RP, host_RP, bounds_RP
        # A stage whose layers all read everything has none that select.
        self._page_units = device[0].shape[3] // rule.unit if device else 1
        self._store = store.store(backends["store"])
        self._select = selection.select(backends["select"])
        self._resolve = resolve.resolve(backends["resolve"])
        self._gather = gather.gather(backends["gather"])
        self._attend = sparse_attention.sparse_attention(backends["sparse_attention"])

    def step(self, rows: Sequence[int], positions: Sequence[int], budgets: Sequence[int],
             hosted: Sequence[bool]) -> SparseStep:
        """The selecting queries of a step, in the order of their tokens.

        budgets   units, each at least `rule.least_units`
        hosted    whether the query's row has a page without a device copy
        """
        device = self._device_RP.device
        row_B, position_B, budget_B = (torch.tensor(x, dtype=torch.int32, device=device)
                                       for x in (rows, positions, budgets))
        rounds = _rounds(rows, hosted)
        at = tuple(slice(None) if len(queries) == len(rows) else torch.tensor(queries, device=device)
                   for queries in rounds)
        return SparseStep(row_B, position_B, budget_B, max(budgets), at, self._hot.tick(len(rounds)))

    def store(self, layer: int, values: Sequence[Tensor], at: StoreAt) -> None:
        """Write a step's new rows, of all its tokens, to every copy; before any `attend` of the layer."""
        self._store(values, at, self._device[layer], self._host[layer] if self._host else None,
                    self._hot.layers[layer] if self._hot.hot_pages else None, self._bounds[layer])

    def attend(self, layer: int, q_BNH: Tensor, step: SparseStep) -> Tensor:
        """out_BNH: each query over what it chooses. Brings what it misses into the rows' hot buffers."""
        device, hot = self._device[layer], self._hot.layers[layer]
        chosen_BKC = self._select(q_BNH, self._bounds[layer], self._bounds_RP, step.row_B,
                                  step.position_B, step.budget_B, rule=self._rule, chosen=step.chosen)
        outs = []
        for at, now_1 in zip(step.rounds, step.now_R1, strict=True):
            chosen, row, position = chosen_BKC[at], step.row_B[at], step.position_B[at]
            slot, miss, num = self._resolve(chosen, row, self._device_RP, self._host_RP, hot, now_1,
                                            page_units=self._page_units)
            if self._host:
                self._gather(self._host[layer], device, miss, num, unit=self._rule.unit)
            outs.append(self._attend(q_BNH[at], device, chosen, slot, position, unit=self._rule.unit,
                                     scale=self._scale)[0])
        if len(outs) == 1:
            return outs[0]
        out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
        for at, out in zip(step.rounds, outs, strict=True):
            out_BNH[at] = out
        return out_BNH


def _rounds(rows: Sequence[int], hosted: Sequence[bool]) -> list[list[int]]:
    """Queries by round: the n-th of a hosted row is in the n-th, all others are in the first."""
    rounds: list[list[int]] = [[]]
    seen: dict[int, int] = {}
    for query, (row, on_host) in enumerate(zip(rows, hosted, strict=True)):
        n = seen.get(row, 0) if on_host else 0
        seen[row] = n + 1
        if n == len(rounds):
            rounds.append([])
        rounds[n].append(query)
    return rounds
