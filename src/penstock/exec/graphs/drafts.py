"""Steps in which rows that decode have several positions, as `exec.drafts.narrow` makes them: which of the
tokens count is found on the device, and captured with the step.

    B positions of the step, those of a row one after the other   R rows of the tables   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.plan import StepPlan
from penstock.exec.graphs.capture import DecodeGraphs, Decodes, Replays, index_of
from penstock.exec.sampling.on_device import Draws, turns_of
from penstock.exec.step.tables import RowTables
from penstock.model.base import Model


def widest(rows: int, width: int, most: int) -> tuple[int, ...]:
    """Numbers of positions to capture, of up to `rows` rows of up to `width`, `most` in all."""
    top = min(rows * width, most)
    return (*(b for b in (4, 8, 16, 32, 64) if b < top), top)


class DraftGraphs(DecodeGraphs):
    """As `DecodeGraphs`, of steps in which a row has up to `width` positions. `buckets` are of positions."""

    lines = 4           # rows, positions, ids (-1: the row's last token), turns

    def __init__(self, model: Model, tables: RowTables, decodes: Decodes, draws: Draws,
                 buckets: Sequence[int], replays: Replays, width: int) -> None:
        super().__init__(model, tables, decodes, draws, buckets, replays)
        self._width = width

    def takes(self, plan: StepPlan) -> bool:
        """Whether rows that decode are all there is."""
        return len(plan.rows) <= self._buckets[-1] and len(plan.tokens) == len(plan.rows) and all(
            plan.samples) and all(token < 0 or plan.rows[i - 1] == plan.rows[i]
                                  for i, token in enumerate(plan.tokens))

    def _more(self, plan: StepPlan, rows: Sequence[int]) -> Sequence[Sequence[int]]:
        return plan.tokens, turns_of(rows)

    def _step(self, kind: str, given: Tensor) -> tuple[Tensor, Tensor]:
        return draft_step(self._model, self._tables, self._decodes, kind, given, self._draws, self._width)


def draft_step(model: Model, tables: RowTables, decodes: Decodes, kind: str, input_4B: Tensor, draws: Draws,
               width: int) -> tuple[Tensor, Tensor]:
    """What is captured: as `capture.decode_step`, of `DraftGraphs.lines`. Positions of a row are queries
    like others, each with its own context: what all of them write comes before what any reads."""
    row_B, position_B, id_B, turn_B = input_4B
    index_B = index_of(tables, row_B, position_B)
    attend = decodes.attend(kind, row_B, position_B, turn_B)
    token_B = torch.where(id_B < 0, tables.last_R[index_B], id_B.long())
    logits_BV = model.logits(model.forward(token_B, position_B.clamp(min=0).long(), attend))
    return logits_BV, draws.checked(logits_BV, tables.last_R, row_B, index_B, position_B, id_B, turn_B, width)
