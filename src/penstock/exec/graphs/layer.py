"""The layer of a model that drafts, in captured steps: it proposes in front of a step's positions, and keeps
what these leave behind for it once it is known which are right.

    N rows of the step, each of W positions: B in all   D model dim   P pages   G page size   H row dim
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.exec.drafts.device import OnDevice
from penstock.exec.drafts.mtp import MTP, put_rows
from penstock.exec.step.states import lasts
from penstock.exec.step.tables import RowTables
from penstock.kernels.fused.step import begin


class LayerDrafts(OnDevice):
    """`MTP` as a function of tensors on the device alone."""

    layer = True

    def __init__(self, mtp: MTP, tables: RowTables) -> None:
        self._mtp, self._last_R = mtp, tables.last_R
        self._hidden = tables.groups[-1]

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
