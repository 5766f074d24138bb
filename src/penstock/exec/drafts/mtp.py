"""The model's own layer that drafts, `model.mtp`: its KV grows with each step, and it proposes behind that.

Owns what of a rank's pools only drafts read. Knows rows and tokens; refuses to know how drafts are checked.

    T tokens of the step   B rows   D model dim   P pages   G page size   C planes   K KV heads
    N query heads   H head dim   S slots of a row
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.plan import RequestId, StepId, StepPlan
from penstock.exec.drafts.drafter import Ask, Drafter
from penstock.exec.step.attend import Attending, Latent, LatentOps, OfHeads, check_pools
from penstock.exec.step.states import StatePools
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.paged_attention import Prepare, write_kv
from penstock.kernels.types.ragged import Ragged
from penstock.kernels.types.states import States
from penstock.memory.hbm import HbmPool
from penstock.model.base import Attend, AttentionShape, CacheShape, LocalLayer, Model

LAYER = LocalLayer(0)


class Heads(Attending):
    """KV heads of one layer, of which others see the entries from `first` on: by torch, row by row."""

    def __init__(self, shape: AttentionShape, groups: Sequence[CacheShape], pool: HbmPool,
                 first: int) -> None:
        """As of `Latent`."""
        check_pools(groups, (pool,))
        assert not (shape.latent_dim or shape.softcap or shape.sinks), "attention that drafts has not"
        self.scale, self.first = shape.scale, first
        self.kv_CPKGH = pool.pages[:, 0].permute(2, 0, 1, 3, 4)

    def step(self, plan: StepPlan, lowered: Lowered) -> Attend:
        return _HeadsStep(self, lowered.ragged[0])


class _HeadsStep(OfHeads):
    def __init__(self, heads: Heads, ragged: Ragged) -> None:
        self._heads, self._ragged = heads, ragged

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None and sinks_N is None, "KV heads are attended to as a whole here"
        ragged, (k_PKGH, v_PKGH) = self._ragged, self._heads.kv_CPKGH
        write_kv(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH, ragged.page_T, ragged.offset_T)
        outs = []
        for row, context, (begin, end) in zip(ragged.rows, ragged.context, pairwise(ragged.query_start),
                                              strict=True):
            at_S = torch.arange(context, device=q_TNH.device)
            at_T1 = at_S[context - (end - begin):, None]
            page_S = ragged.pages_RM[row, at_S // ragged.page_size].long()
            k_KSH, v_KSH = (pool[page_S, :, at_S % ragged.page_size].transpose(0, 1)
                            for pool in (k_PKGH, v_PKGH))
            outs.append(F.scaled_dot_product_attention(
                q_TNH[begin:end].transpose(0, 1)[None], k_KSH[None], v_KSH[None], enable_gqa=True,
                attn_mask=(at_S <= at_T1) & (at_S >= at_T1.clamp(max=self._heads.first)),
                scale=self._heads.scale)[0].transpose(0, 1))
        return torch.cat(outs)


class MTP(Drafter):
    """Of a model whose stage drafts. Each draft is the likeliest token; one behind logits that are not finite
    is -1, which no row may say."""

    def __init__(self, model: Model, ops: Prepare | LatentOps, groups: Sequence[CacheShape],
                 tables: RowTables, hbm: Sequence[HbmPool]) -> None:
        """groups and pools of all cache groups: the last two are the layer's KV and the hidden states."""
        assert model.drafting is not None, "nothing drafts"
        self.name = model.drafter
        self._model, self._tables = model, tables
        kv, self._hidden = (replace(group, drafts=False) for group in groups[-2:])
        self._kv: Attending = (
            Latent(model.drafting, (kv,), ops, hbm[-2:-1], first=1)
            if isinstance(ops, LatentOps) and model.drafting.latent_dim else
            Heads(model.drafting, (kv,), hbm[-2], first=1))
        self._states = StatePools((self._hidden,), hbm[-1:])
        self._pool_PD = hbm[-1].pages[:, 0, 0, 0, 0]

    def step(self, plan: StepPlan, lowered: Lowered, hidden_TD: Tensor) -> None:
        """What a step leaves behind for drafts: its tokens' KV, and the hidden state of the last one of each
        row and page. hidden_TD: behind the model's last norm."""
        hidden_TD = self._model.made(hidden_TD)
        states = self._states.step(plan.step, replace(lowered, ragged=lowered.ragged[-1:]))(
            LAYER, len(hidden_TD))
        before_TD = hidden_TD.roll(1, 0)
        kept_BD = self._pool_PD[states.from_B]
        before_TD[states.start_B[:-1]] = torch.where((states.from_B >= 0)[:, None], kept_BD, 0)
        self._layer(plan, lowered, before_TD)
        self._keep(hidden_TD, states)
        if states.again is not None:
            states.again.append(lambda at_t, more: self._keep(hidden_TD[at_t], more))

    def _layer(self, plan: StepPlan, lowered: Lowered, before_TD: Tensor) -> Tensor:
        """hidden_TD of the layer."""
        attend = self._kv.step(plan, replace(lowered, ragged=lowered.ragged[-2:-1]))
        return self._model.draft(lowered.ids_T, before_TD, lowered.positions_T, attend)

    def _keep(self, hidden_TD: Tensor, states: States) -> None:
        at_t = (states.to_T >= 0).nonzero().flatten()
        self._pool_PD[states.to_T[at_t]] = hidden_TD[at_t]

    def settle(self, step: StepId, right: Mapping[int, int]) -> None:
        """As `StatePools.settle`."""
        self._states.settle(step, right)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        said = [[ask.outputs[-1]] for ask in asks]
        live, hidden_BD = [*range(len(asks))], self._last(asks)
        while going := [b for b, i in enumerate(live) if len(said[i]) <= asks[i].most and said[i][-1] >= 0]:
            live, hidden_BD = [live[b] for b in going], hidden_BD[going]
            plan = StepPlan(
                step=StepId(0), rows=tuple(asks[i].row for i in live), rids=tuple(asks[i].rid for i in live),
                start=tuple(_position(asks[i]) + len(said[i]) - 1 for i in live), count=(1,) * len(live),
                samples=(True,) * len(live), tokens=tuple(said[i][-1] for i in live), grows=(), moves=(),
                binds=())
            hidden_BD = self._layer(plan, self._tables.lower(plan), hidden_BD)
            best_B, id_B = self._model.guess(hidden_BD)
            for i, token in zip(live, id_B.where(best_B.isfinite(), -1).tolist(), strict=True):
                said[i].append(token)
        return [tokens[1:] for tokens in said]

    def _last(self, asks: Sequence[Ask]) -> Tensor:
        """hidden_BD of the token before each row's last."""
        table = self._tables.groups[-1]
        pages = [table.device_RM[self._tables.index(ask.row), (_position(ask) - 1) // table.size]
                 for ask in asks]
        return self._pool_PD[torch.stack(pages).long()]

    def forget(self, rid: RequestId) -> None:
        return


def _position(ask: Ask) -> int:
    """Of its last token, which no step has computed."""
    return len(ask.prompt) + len(ask.outputs) - 1
