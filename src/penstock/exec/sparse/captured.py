"""Decode steps of rows that select, for CUDA graphs: all that depends on a row is on the device. Positions of
a row that has several choose each for itself, and what they miss comes at once: its hot buffer holds it.

Of rows that select by bounds, steps in which every row does are one kind; the others also read all pages of
the rows that do not. Rows of a model that chooses its tokens itself are all alike.

    B rows of a step   R rows of the tables   M pages a row   K KV heads   P pages   G page size   H head dim
    N query heads   I index heads   J index head dim   S chosen tokens
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.exec.graphs.capture import PagedDecode
from penstock.exec.sparse.layers import BoundsSelector, SparseLayers, SparseStep, compared
from penstock.exec.step.attend import OfHeads
from penstock.exec.step.states import StatePools
from penstock.exec.step.tables import GroupTable
from penstock.kernels.attention.paged_attention import AttentionSpec
from penstock.kernels.choose.index_pair import IndexPair
from penstock.kernels.choose.index_select import IndexSelect
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.memory.hot import HotBuffers
from penstock.model.base import Attend, LocalLayer

SELECT, MIXED, CHOSEN = "select", "mixed", "chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectingDecodes:
    """`exec.graphs.capture.Decodes` of an `exec.sparse.bounds.Selecting`, whose parts these are.

    specs, tables    by cache group: KV that is selected from, bounds of its units, then the others
    local            layer -> which one of group 0 it is
    dense            layer of the others -> its group, k and v pools
    device           one view [P, K, 2, G, H] a layer of group 0
    selects          whether a row of the tables does
    budget_R         int32, device: units that each row selects; 0: it reads all, from device pages
    most             the largest of all budgets, units
    unit             tokens
    states           of the layers that keep one
    """

    layers: SparseLayers
    selector: BoundsSelector
    hot: HotBuffers
    specs: Sequence[AttentionSpec]
    tables: Sequence[GroupTable]
    local: Mapping[LocalLayer, int]
    dense: Mapping[LocalLayer, tuple[int, Tensor, Tensor]]
    device: Sequence[Tensor]
    selects: Callable[[int], bool]
    budget_R: Tensor
    most: int
    unit: int
    states: StatePools
    kinds: tuple[str, ...] = (SELECT, MIXED)

    def kind(self, rows: Sequence[int]) -> str:
        return SELECT if all(map(self.selects, rows)) else MIXED

    def attend(self, kind: str, row_B: Tensor, position_B: Tensor, turn_B: Tensor | None = None) -> Attend:
        return _Attend(self, kind, row_B, position_B, turn_B)


class _Attend(OfHeads):
    """`model.base.Attend` of a captured step: its tokens T are the B rows."""

    def __init__(self, of: SelectingDecodes, kind: str, row_B: Tensor, position_B: Tensor,
                 turn_B: Tensor | None) -> None:
        self._of, self._at = of, _write_at(of, row_B, position_B)
        self._budget_B = of.budget_R[row_B.long()]
        self._selects_B = self._budget_B > 0
        select_B = position_B.where(self._selects_B, -1)
        self._step = SparseStep(row_B, select_B, (slice(None),), of.hot.tick(1), turn_B)
        self._whole: PagedDecode | None = None
        if kind == MIXED:
            self._whole = PagedDecode(of.specs[0], of.tables[0].device_RM, of.tables[0].size, row_B,
                                      position_B.where(~self._selects_B, -1))
        self._others = {g: PagedDecode(of.specs[g], of.tables[g].device_RM, of.tables[g].size, row_B,
                                       position_B) for g, *_ in of.dense.values()}
        self.state = of.states.decode(of.tables, row_B, position_B)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None, "what is read of KV heads is chosen here"
        of, k_TKH, v_TKH = self._of, kv_TCKH[:, 0], kv_TCKH[:, 1]
        if (i := of.local.get(layer)) is None:
            group, k_PKGH, v_PKGH = of.dense[layer]
            self._others[group].write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH)
            return self._others[group](q_TNH, k_PKGH, v_PKGH, sinks_N)
        of.layers.write_kv(i, (k_TKH, v_TKH), self._at)
        chosen_BKC = of.selector.choose(i, q_TNH, self._step, self._budget_B, of.most)
        out_TNH = of.layers.attend(i, q_TNH, chosen_BKC, self._step, sinks_N)
        if self._whole is None:
            return out_TNH
        pool_PK2GH = of.device[i]
        all_TNH = self._whole(q_TNH, pool_PK2GH[:, :, 0], pool_PK2GH[:, :, 1], sinks_N)
        return torch.where(self._selects_B[:, None, None], out_TNH, all_TNH)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDecodes:
    """`exec.graphs.capture.Decodes` of an `exec.sparse.indexer.Indexed`, whose parts these are.

    tables     by cache group: latent rows, then index keys
    local      layer -> which one of group 0 it is
    keys       layer that has an indexer -> its pages of keys [P, 1, 1, G, J]
    pair       makes what is compared of queries and keys, of fp8 ones
    select     chooses `topk` tokens
    dtype      of pages of rows; of the fp8 ones the first `latent_dim` values are coded
    nowhere_T  int64, device: -1, of as many as a step has tokens
    """

    layers: SparseLayers
    hot: HotBuffers
    tables: Sequence[GroupTable]
    local: Mapping[LocalLayer, int]
    keys: Mapping[LocalLayer, Tensor]
    pair: IndexPair
    select: IndexSelect
    topk: int
    dtype: torch.dtype
    latent_dim: int
    nowhere_T: Tensor
    kinds: tuple[str, ...] = (CHOSEN,)

    def kind(self, rows: Sequence[int]) -> str:
        return CHOSEN

    def attend(self, kind: str, row_B: Tensor, position_B: Tensor, turn_B: Tensor | None = None) -> Attend:
        return _IndexedAttend(self, row_B, position_B, turn_B)


class _IndexedAttend:
    """`model.base.Attend` of a captured step: its tokens T are the B rows."""

    def __init__(self, of: IndexedDecodes, row_B: Tensor, position_B: Tensor, turn_B: Tensor | None) -> None:
        self._of, rows, keys = of, of.tables[0], of.tables[-1]
        nowhere_B = of.nowhere_T[:len(row_B)]
        assert len(nowhere_B) == len(row_B), f"a step of {len(row_B)} tokens"
        row_T = row_B.where(position_B >= 0, -1)
        self._at = WriteAt(
            _slots(rows.device_RM, rows.size, row_B, position_B),
            nowhere_B if rows.host_RM is None else _slots(rows.host_RM, rows.size, row_B, position_B),
            nowhere_B, row_T, position_B, 1)
        self._keys_at = WriteAt(_slots(keys.device_RM, keys.size, row_B, position_B), nowhere_B, nowhere_B,
                                row_T, position_B, 1)
        self._step = SparseStep(row_B, position_B, (slice(None),), of.hot.tick(1), turn_B)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is not None and sinks_N is None, "nothing has been chosen for this layer"
        i = self._of.local[layer]
        kept_T1H = fp8.kept(kv_TCKH[:, 0], self._of.dtype, self._of.latent_dim)
        self._of.layers.write_kv(i, (kept_T1H,), self._at)
        return self._of.layers.attend(i, q_TNH, chosen_TS[:, None], self._step)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        of, step = self._of, self._step
        q_TIJ, kept_TJ = compared(of.pair, q_TIJ, key_TJ, of.keys[layer].dtype)
        of.layers.put((kept_TJ[:, None],), self._keys_at, of.keys[layer])
        return of.select(q_TIJ, weight_TI, of.keys[layer][:, 0, 0], of.tables[-1].device_RM, step.row_B,
                         step.position_B, topk=of.topk)


def _write_at(of: SelectingDecodes, row_B: Tensor, position_B: Tensor) -> WriteAt:
    """-1 throughout for padding."""
    kv, bounds = of.tables[0], of.tables[1]
    return WriteAt(
        device_T=_slots(kv.device_RM, kv.size, row_B, position_B),
        host_T=_slots(kv.host_RM, kv.size, row_B, position_B),
        bounds_T=_slots(bounds.device_RM, kv.size // of.unit, row_B,
                        torch.where(position_B < 0, -1, position_B // of.unit)),
        row_T=row_B.where(position_B >= 0, -1), position_T=position_B, unit=of.unit)


def _slots(table_RM: Tensor | None, size: int, row_B: Tensor, at_B: Tensor) -> Tensor:
    """int64: where entry `at` of each row is in a pool whose pages have `size` of them; -1: nowhere, or
    padding, of which `at` is negative."""
    from penstock.kernels.kv.write_kv import triton_places  # needs Triton
    if table_RM is None:
        return torch.full(at_B.shape, -1, dtype=torch.int64, device=at_B.device)
    return triton_places.find(table_RM, size, row_B, at_B)
