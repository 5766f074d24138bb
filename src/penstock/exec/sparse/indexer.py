"""What a model of latent rows with an indexer attends to, where its rows may be on the host.

Every position, of a prompt and behind it alike, reads the tokens that the model's own indexer chooses: from
device pages, from the row's hot buffer, or from the host into it, row by row. So a prompt may be longer than
the device without anything else: no window of it is ever read as a whole. Index keys stay on the device.

    T tokens of the step   N query heads   H row dim   I index heads   J index head dim   S chosen tokens
    G page size
"""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.core.plan import Bind, StepPlan
from penstock.exec.sparse.bounds import Selector
from penstock.exec.sparse.layers import SparseLayers, SparseStep, row_attention
from penstock.exec.sparse.rows import HotRows, Selects
from penstock.exec.step.attend import LatentOps
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.kv.store import StoreAt
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Model


class Indexed(Selects):
    """`Selects` of a model that chooses its tokens itself.

    groups    group 0 has the latent rows of all layers, group 1 the keys of those that have an indexer
    """

    def __init__(self, selector: Selector, model: Model, groups: Sequence[CacheShape], tables: RowTables,
                 device: Sequence[BlockPool], host: Sequence[BlockPool], ops: LatentOps) -> None:
        self._tables, self._ops, self._shape = tables, ops, model.attention
        assert self._shape.latent_dim and self._shape.topk, "ops for latent rows and another model"
        self._local = {layer: i for i, layer in enumerate(groups[0].layers)}
        self._keys_PGJ = {layer: device[1].pages[:, i, 0, 0] for i, layer in enumerate(groups[1].layers)}
        self.rows = HotRows(tables, device[0], unit=1, hot_pages=selector.hot_pages,
                            names=[model.stage.first + layer for layer in groups[0].layers])
        layers = range(len(groups[0].layers))
        self._layers = SparseLayers(
            row_attention(ops.attend, value_dim=self._shape.latent_dim, scale=self._shape.scale), unit=1,
            device=[device[0].pages[:, i] for i in layers],
            host=[host[0].pages[:, i] for i in layers] if host else [],
            device_RP=tables.groups[0].device_RM, host_RP=self.rows.host_RM, hot=self.rows.hot,
            backends=selector.backends)

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        self.rows.bind(bind, budget=self._shape.topk, first=0)

    def step(self, plan: StepPlan, lowered: Lowered) -> Attend:
        """The attention of a step whose binds, grows and unmaps are applied."""
        rows: list[int] = []
        positions: list[int] = []
        hosted: list[bool] = []
        for row, start, count in zip(plan.rows, plan.start, plan.count, strict=True):
            r = self._tables.index(row)
            rows += [r] * count
            positions += range(start, start + count)
            hosted += [not self._tables.groups[0].is_resident(r)] * count
        return _IndexedStep(self, lowered, self._layers.step(rows, positions, hosted),
                            self.rows.store_at(lowered))

    def attend(self, layer: LocalLayer, q_TNH: Tensor, row_T1H: Tensor, chosen_TS: Tensor, step: SparseStep,
               at: StoreAt) -> Tensor:
        i = self._local[layer]
        self._layers.store(i, (row_T1H,), at)
        return self._layers.attend(i, q_TNH, chosen_TS[:, None], step)

    def choose(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor, step: SparseStep,
               lowered: Lowered) -> Tensor:
        ragged, keys_PGJ = lowered.ragged[1], self._keys_PGJ[layer]
        keys_PGJ[ragged.page_T, ragged.offset_T] = key_TJ
        return self._ops.select(q_TIJ, weight_TI, keys_PGJ, ragged.pages_RM, step.row_B, step.position_B,
                                topk=self._shape.topk)


class _IndexedStep:
    """`model.base.Attend` of one step."""

    def __init__(self, indexed: Indexed, lowered: Lowered, step: SparseStep, at: StoreAt) -> None:
        self._indexed, self._lowered, self._step, self._at = indexed, lowered, step, at

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None) -> Tensor:
        assert chosen_TS is not None, "nothing has been chosen for this layer"
        return self._indexed.attend(layer, q_TNH, kv_TCKH[:, 0], chosen_TS, self._step, self._at)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        return self._indexed.choose(layer, q_TIJ, weight_TI, key_TJ, self._step, self._lowered)
