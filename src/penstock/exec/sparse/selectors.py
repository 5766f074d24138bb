"""What selectors score, and how: one class for indexer keys, which the model gives, and one for bounds of keys, which
writing KV makes. Which of them a selector has follows from `Selector.score`.

    T tokens of the step   B queries that select   N query heads   K KV heads   H head dim   Y chosen blocks
    I index heads   J index head dim   P pages   G page size   S units a page of bounds   R rows   M pages of a row
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.exec.sparse.layers import SparseStep
from penstock.exec.step.attend import NoIndexer
from penstock.exec.step.tables import GroupTable, Lowered
from penstock.kernels.choose import block_select, index_pair, index_select
from penstock.kernels.choose import select as selection
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.fused.step import BlockTableRef, Queries
from penstock.kernels.kv import write_kv
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.memory.pool import BlockPool
from penstock.model.base import CacheShape, LocalLayer, Selector

# score(q_TIJ, weight_TI, key_PGJ, table_RM, row_T, position_T) -> chosen_TKY
Score: TypeAlias = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor]


class Choosing(Protocol):
    """A selector in one step. `bounds_T`, int64: where the bounds of each token's unit go; -1: nowhere."""

    @property
    def bounds_T(self) -> Tensor: ...

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        """See `model.base.Attend.select`."""

    def chosen(self, i: int, q_BNH: Tensor, step: SparseStep, given_BKY: Tensor | None) -> Tensor:
        """chosen_BKY of these queries, which layer i of the pages reads. given: what `select` has chosen for them;
        None: the model has not asked."""


class Chooser(Protocol):
    """A selector of a rank. place: where in its group what belongs to a token is; bounds: by layer of the pages, those
    that are written with KV; (): none are."""

    place: BlockTableRef
    bounds: Sequence[Tensor]

    def launched(self, lowered: Lowered) -> Choosing:
        """In a step that is launched."""

    def captured(self, queries: Queries) -> Choosing:
        """In a captured one, whose third place `place` was."""


class IndexKeys:
    """Keys of tokens: queries of index heads are multiplied with them. Every token of a step chooses."""

    bounds: Sequence[Tensor] = ()

    def __init__(self, selector: Selector, number: int, group: CacheShape, pool: BlockPool, table: GroupTable,
                 backends: Mapping[str, str]) -> None:
        """number: of the group."""
        self._number, self._table, self.place = number, table, table.place
        self.pools = {layer: pool.pages[:, i] for i, layer in enumerate(group.layers)}
        self.pair = index_pair.OP.use(backends["index_pair"])
        self.write_kv = write_kv.OP.use(backends["write_kv"])
        self.score = SCORES[selector.score](selector, backends)
        self._nowhere = dict[int, Tensor]()

    def launched(self, lowered: Lowered) -> Choosing:
        ragged, position_T = lowered.ragged[self._number], lowered.positions_T.int()
        nowhere_T = torch.full_like(ragged.page_T, -1)
        at = WriteAt(ragged.page_T * ragged.page_size + ragged.offset_T, nowhere_T, nowhere_T, nowhere_T.int(),
                     position_T, 1)
        # Only pages that the step sees: scores are as wide as the table.
        table_RM = ragged.pages_RM[:, :-(-max(ragged.context) // ragged.page_size)]
        return _KeysStep(self, nowhere_T, at, table_RM, lowered.row_T.int(), position_T)

    def captured(self, queries: Queries) -> Choosing:
        row_B = queries.row_B
        if (nowhere_B := self._nowhere.get(len(row_B))) is None:        # not of a graph: a step comes before it
            nowhere_B = self._nowhere[len(row_B)] = torch.full_like(queries.at_B, -1)
        at = WriteAt(queries.slot_LB[2], nowhere_B, nowhere_B, queries.own_B, queries.position_B, 1)
        return _KeysStep(self, nowhere_B, at, self._table.device_RM, row_B, queries.position_B)


@dataclass(frozen=True, slots=True)
class _KeysStep:
    """at: where keys are written; the others as `index_select` takes them."""

    keys: IndexKeys
    bounds_T: Tensor
    at: WriteAt
    table_RM: Tensor
    row_T: Tensor
    position_T: Tensor

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        keys_P11GJ = self.keys.pools[layer]
        if keys_P11GJ.dtype == torch.uint8:         # both are mixed and coded
            weight_TI = q_TIJ.new_ones(q_TIJ.shape[:2], dtype=torch.float32) if weight_TI is None else weight_TI
            q_TIJ, weight_TI, kept_TJ = self.keys.pair(q_TIJ, weight_TI, key_TJ)
        else:
            kept_TJ = fp8.kept(key_TJ, keys_P11GJ.dtype, key_TJ.shape[1])
        self.keys.write_kv((kept_TJ[:, None],), self.at, keys_P11GJ)
        return self.keys.score(q_TIJ, weight_TI, keys_P11GJ[:, 0, 0], self.table_RM, self.row_T, self.position_T)

    def chosen(self, i: int, q_BNH: Tensor, step: SparseStep, given_BKY: Tensor | None) -> Tensor:
        assert given_BKY is not None, "nothing has been chosen for this layer"
        return given_BKY


def relu(selector: Selector, backends: Mapping[str, str]) -> Score:
    """One choice of tokens for all heads."""
    run = index_select.OP.use(backends["index_select"])

    def score(q_TIJ: Tensor, weight_TI: Tensor | None, key_PGJ: Tensor, table_RM: Tensor, row_T: Tensor,
              position_T: Tensor) -> Tensor:
        assert weight_TI is not None, "index heads without weights"
        return run(q_TIJ, weight_TI, key_PGJ, table_RM, row_T, position_T, topk=selector.top_k)[:, None]
    return score


def best(selector: Selector, backends: Mapping[str, str]) -> Score:
    """Blocks for each KV head, by an index head of its own."""
    run, block = block_select.OP.use(backends["block_select"]), selector.block

    def score(q_TIJ: Tensor, weight_TI: Tensor | None, key_PGJ: Tensor, table_RM: Tensor, row_T: Tensor,
              position_T: Tensor) -> Tensor:
        return run(q_TIJ, key_PGJ, table_RM, row_T, position_T, block=block, topk=selector.top_k,
                   first=-(-selector.first // block), last=-(-selector.last // block))
    return score


class KeyBounds:
    """Bounds of the keys of units: a query chooses by what its own product with keys can be, when it attends."""

    def __init__(self, rule: SelectRule, bounds: Sequence[Tensor], bounds_RP: Tensor, backend: str,
                 place: BlockTableRef, queries: Callable[[Tensor], Tensor] | None = None) -> None:
        """bounds: one view [P, K, 2, S, H] a layer of the pool; bounds_RP, int32: the rows' pages in it, read anew in
        every call; queries: makes q_BNH of a part of the queries to a KV head all of them; None: they are."""
        self.place, self.bounds, self._rule, self._bounds_RP, self._queries = place, bounds, rule, bounds_RP, queries
        self._select = selection.OP.use(backend)

    def launched(self, lowered: Lowered) -> Choosing:
        return _BoundsStep(self, self.place.slots(lowered.row_T, lowered.positions_T))

    def captured(self, queries: Queries) -> Choosing:
        return _BoundsStep(self, queries.slot_LB[2])

    def choose(self, i: int, q_BNH: Tensor, step: SparseStep) -> Tensor:
        """chosen_BKY. Budgets of the step: units, each at least `rule.least_units`."""
        assert step.budget_B is not None, "queries without a budget"
        if self._queries is not None:
            q_BNH = self._queries(q_BNH)
        return self._select(q_BNH, self.bounds[i], self._bounds_RP, step.row_B, step.position_B, step.budget_B,
                            rule=self._rule, chosen=step.most)


@dataclass(frozen=True, slots=True)
class _BoundsStep(NoIndexer):
    bounds: KeyBounds
    bounds_T: Tensor

    def chosen(self, i: int, q_BNH: Tensor, step: SparseStep, given_BKY: Tensor | None) -> Tensor:
        assert given_BKY is None, "what is read is chosen here"
        return self.bounds.choose(i, q_BNH, step)


SCORES: Mapping[str, Callable[[Selector, Mapping[str, str]], Score]] = {"relu": relu, "max": best}  # of indexer keys


def chooser_of(selector: Selector, groups: Sequence[CacheShape], tables: Sequence[GroupTable],
               device: Sequence[BlockPool], kv: GroupTable, backends: Mapping[str, str],
               queries: Callable[[Tensor], Tensor] | None = None) -> Chooser:
    """tables and pools by cache group; kv: of what is selected; queries: as of `KeyBounds`."""
    [scored] = (g for g, group in enumerate(groups) if group.name == selector.group)
    if selector.score in SCORES:
        return IndexKeys(selector, scored, groups[scored], device[scored], tables[scored], backends)
    pool, table = device[scored], tables[scored]
    return KeyBounds(rule_of(selector), [pool.pages[:, i] for i in range(pool.layout.num_layers)], table.device_RM,
                     backends["select"], BlockTableRef(table.device_RM, kv.size // selector.block, selector.block),
                     queries)


def rule_of(selector: Selector) -> SelectRule:
    """What is always kept, and what is scored, of a selector that goes by bounds."""
    return SelectRule(unit=selector.block, sink=selector.first, window=selector.last)


def least_of(selector: Selector) -> int:
    """Tokens of the smallest budget that a request can have; 0 where requests have none."""
    return 0 if selector.native else rule_of(selector).least_units * selector.block
