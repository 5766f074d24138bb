"""The model's own layer that drafts, `model.mtp`: its KV grows with each step, and it proposes behind that.

Owns what of a rank's pools only drafts read. Knows rows and tokens; refuses to know how drafts are checked.

    T tokens of the step   B rows   D model dim   P pages   G page size   H row dim
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.plan import RequestId, StepId
from penstock.exec.drafts.device import OnDevice
from penstock.exec.drafts.drafter import Drafter, DraftQuery
from penstock.exec.step.attend import LatentOps
from penstock.exec.step.dense import Dense
from penstock.exec.step.latent import Latent
from penstock.exec.step.states import StatePools, lasts
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import GroupTable, Lowered, RowTables
from penstock.kernels.attention.paged_attention import Prepare
from penstock.kernels.fused.step import begin
from penstock.kernels.types.ragged import on_device
from penstock.memory.hbm import HbmPool
from penstock.model.base import CacheShape, LocalLayer, Model, Reads

LAYER = LocalLayer(0)


class MTP(Drafter):
    """Of a model whose stage drafts. Each draft is the likeliest token; one behind logits that are not finite
    is -1, which no row may say."""

    def __init__(self, model: Model, ops: Prepare | LatentOps, groups: Sequence[CacheShape],
                 tables: RowTables, hbm: Sequence[HbmPool]) -> None:
        """groups and pools of all cache groups: two that draft are the layer's KV and the hidden states."""
        assert model.drafting is not None, "nothing drafts"
        self.name = model.drafter
        self.model, self._tables = model, tables
        self._kv, self._hidden = (g for g, group in enumerate(groups) if group.drafts)
        kv, hidden = (replace(groups[g], drafts=False) for g in (self._kv, self._hidden))
        self.attending = _attending(model.drafting, kv, ops, hbm[self._kv], tables.groups[self._kv])
        self._states, self.table = StatePools((hidden,), (hbm[self._hidden],)), tables.groups[self._hidden]
        self.pool_PD = hbm[self._hidden].pages[:, 0, 0, 0, 0]

    def step(self, lowered: Lowered, hidden_TD: Tensor) -> None:
        """What a step leaves behind for drafts: its tokens' KV, and the hidden state of the last one of each
        row and page. hidden_TD: behind the model's last norm."""
        hidden_TD = self.model.made(hidden_TD)
        states = self._states.step(replace(lowered, ragged=(lowered.ragged[self._hidden],)))(
            LAYER, len(hidden_TD))
        before_TD = hidden_TD.roll(1, 0)
        kept_BD = self.pool_PD[states.from_B]
        before_TD[states.start_B[:-1]] = torch.where((states.from_B >= 0)[:, None], kept_BD, 0)
        self._layer(lowered, before_TD)
        pages_P1D = self.pool_PD[:, None]
        put_rows(pages_P1D, states.to_T, hidden_TD)
        if states.again is not None:
            states.again.append(lambda at_t, more: put_rows(pages_P1D, more.to_T, hidden_TD[at_t]))

    def _layer(self, lowered: Lowered, before_TD: Tensor) -> Tensor:
        """hidden_TD of the layer."""
        attend = self.attending.step(replace(lowered, ragged=(lowered.ragged[self._kv],)))
        return self.model.draft(lowered.ids_T, before_TD, lowered.positions_T, attend)

    def settle(self, step: StepId, right: Mapping[int, int]) -> bool:
        """As `StatePools.settle`."""
        return self._states.settle(step, right)

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        said = [[ask.outputs[-1]] for ask in asks]
        live, hidden_BD = [*range(len(asks))], self._last(asks)
        while going := [b for b, i in enumerate(live) if len(said[i]) <= asks[i].most and said[i][-1] >= 0]:
            live, hidden_BD = [live[b] for b in going], hidden_BD[going]
            batch = StepBatch(
                StepId(0), [asks[i].rid for i in live], [self._tables.index(asks[i].row) for i in live],
                [_position(asks[i]) + len(said[i]) - 1 for i in live], (1,) * len(live), (True,) * len(live),
                [said[i][-1] for i in live], (0,) * len(live))
            hidden_BD = self._layer(self._tables.lower(batch), hidden_BD)
            best_B, id_B = self.model.guess(hidden_BD)
            for i, token in zip(live, id_B.where(best_B.isfinite(), -1).tolist(), strict=True):
                said[i].append(token)
        return [tokens[1:] for tokens in said]

    def _last(self, asks: Sequence[DraftQuery]) -> Tensor:
        """hidden_BD of the token before each row's last."""
        rows, before = [self._tables.index(ask.row) for ask in asks], [_position(ask) - 1 for ask in asks]
        at = on_device([*rows, *before], self.pool_PD.device, torch.int64).view(2, -1)
        return self.pool_PD[self.table.place.pages(*at)]

    def forget(self, rid: RequestId) -> None:
        return

    def on_device(self, rows: int, max_len: int, device: torch.device) -> LayerDrafts:
        return LayerDrafts(self, self._tables)


class LayerDrafts(OnDevice):
    """`MTP` in captured steps, as a function of tensors on the device alone: it proposes in front of a step's
    positions, and keeps what these leave for it once it is known which are right. N rows, each of W positions: B in
    all."""

    layer = True

    def __init__(self, mtp: MTP, tables: RowTables) -> None:
        self._mtp, self._last_R = mtp, tables.last_R
        self._hidden = mtp.table

    def propose(self, index_N: Tensor, at_N: Tensor, last_N: Tensor, most_N: Tensor, most: int) -> Tensor:
        row_N = index_N.clamp(max=len(self._hidden.device_RM) - 1).int()
        hidden_ND, token_N, drafts = self._before(row_N, at_N), last_N, list[Tensor]()
        for n in range(most):
            position_N = (at_N + n).where((at_N >= 0) & (n < most_N), -1)
            hidden_ND = self._layer(token_N, hidden_ND, row_N, position_N)
            best_N, id_N = self._mtp.model.guess(hidden_ND)
            drafts.append(id_N.where(best_N.isfinite(), -1))
            token_N = drafts[-1].clamp(min=0)
        return torch.stack(drafts, 1) if drafts else last_N[:, None][:, :0]

    def ran(self, token_B: Tensor, hidden_BD: Tensor, row_B: Tensor, position_B: Tensor, turn_B: Tensor,
            counts_B: Tensor) -> None:
        hidden_BD = self._mtp.model.made(hidden_BD)
        before_BD = torch.where((turn_B == 0)[:, None], self._before(row_B, position_B), hidden_BD.roll(1, 0))
        self._layer(token_B, before_BD, row_B, position_B)
        self._keep(hidden_BD, row_B, position_B, turn_B, counts_B)

    def _keep(self, hidden_BD: Tensor, row_B: Tensor, position_B: Tensor, turn_B: Tensor,
              counts_B: Tensor) -> None:
        """Behind the last position of each row and page that counts."""
        table = self._hidden
        keeps_B = lasts(counts_B, position_B, turn_B, table.size)
        page_B = table.place.pages(row_B.long(), position_B.clamp(min=0))
        put_rows(self._mtp.pool_PD[:, None], page_B.where(keeps_B, -1), hidden_BD)

    def _before(self, row_B: Tensor, position_B: Tensor) -> Tensor:
        """hidden_BD of the tokens in front of these, as pages have it; 0 for a first token."""
        page_B = self._hidden.place.pages(row_B.long(), (position_B - 1).clamp(min=0)).clamp(min=0)
        return torch.where((position_B > 0)[:, None], self._mtp.pool_PD[page_B], 0)

    def _layer(self, token_B: Tensor, before_BD: Tensor, row_B: Tensor, position_B: Tensor) -> Tensor:
        attending = self._mtp.attending
        queries = begin(row_B, position_B, self._last_R, attending.looks)
        return self._mtp.model.draft(token_B, before_BD, queries.at_B, attending.decode("all", queries))


def _position(ask: DraftQuery) -> int:
    """Of its last token, which no step has computed."""
    return len(ask.prompt) + len(ask.outputs) - 1


def _attending(reads: Reads, kv: CacheShape, ops: Prepare | LatentOps,
               pool: HbmPool, table: GroupTable) -> Dense | Latent:
    """The first entry is of no hidden state: others do not see it."""
    if isinstance(ops, LatentOps):
        if reads.value_dim:
            return Latent({LAYER: reads}, (kv,), ops, (pool,), (table,), first=1)
        assert ops.heads is not None, "no op for KV heads was chosen"
        ops = ops.heads
    return Dense({LAYER: reads}, (kv,), ops, (pool,), (table,), first=1)


def put_rows(pool_PGH: Tensor, slot_B: Tensor, row_BH: Tensor) -> None:
    """Write these rows to their slots, token n % G of page n // G; those of -1 nowhere: they write what
    another one does, and if nobody writes what is there, so that nothing asks the host."""
    size, writes_B = pool_PGH.shape[1], slot_B >= 0
    from_B = torch.arange(len(slot_B), device=slot_B.device).where(writes_B, writes_B.int().argmax())
    slot_B = slot_B[from_B].clamp(min=0)
    page_B, offset_B = slot_B // size, slot_B % size
    pool_PGH[page_B, offset_B] = torch.where(writes_B.any(), row_BH[from_B], pool_PGH[page_B, offset_B])
