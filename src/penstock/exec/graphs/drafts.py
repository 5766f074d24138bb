"""Steps in which rows that decode have several positions, with drafts that the device makes: what they are,
where each row begins and which of the tokens count is found there, and captured with the step.

    N rows of the step, each of W positions, one after the other: B in all, some of them padding
    R rows of the tables   V vocabulary
"""
from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from penstock.core.plan import RequestId, StepPlan
from penstock.exec.drafts.device import OUT, Ahead
from penstock.exec.graphs.capture import Graphs, Replays
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending, KeepsStates
from penstock.exec.step.eager import Ran, wait
from penstock.exec.step.tables import RowTables
from penstock.kernels.fused.step import begin
from penstock.memory.mover import Arrivals
from penstock.model.base import Model


def widths(rows: int, width: int, most: int) -> dict[int, int]:
    """Positions of a row in steps to capture, by rows: of up to `rows`, up to `width` each, `most` in all."""
    found = {}
    for bucket in (1, 2, 4, 8, 16, 32, 64):
        if (positions := min(width, most // min(bucket, rows))) > 1:
            found[min(bucket, rows)] = positions
    return found


def every(buckets: Sequence[int], width: int, most: int) -> dict[int, int]:
    """As `widths`, of all steps with so many rows: one position where there is no room for more."""
    return {rows: max(1, min(width, most // rows)) for rows in buckets}


class DraftGraphs(Graphs):
    """Of up to so many rows, each with up to so many positions: as `widths` has them. The tokens become the
    rows' last ones, and `tables.length_R` says how many tokens there are by now."""

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws, replays: Replays,
                 buckets: Mapping[int, int], ahead: Ahead) -> None:
        super().__init__(model, tables, attending, draws, replays)
        self._buckets, self.ahead, self._checks = dict(sorted(buckets.items())), ahead, draws.checked

    def takes(self, plan: StepPlan) -> bool:
        """Whether rows that decode are all there is, and not too many to draft."""
        return 0 < len(plan.rows) <= max(self._buckets) and max(plan.tokens) < 0 and all(plan.samples)

    def capture(self) -> None:
        """Capture every bucket. Lines: rows, positions of their last tokens (-1: padding, or OUT), drafts at most."""
        for (rows, width), kind in product(reversed(self._buckets.items()), self._attending.kinds):
            self._record((kind, rows), ("row_N", "position_N", "most_N"), (0, rows),
                         functools.partial(self._step, kind, width))

    def step(self, plan: StepPlan, arrivals: Arrivals, flying: Mapping[RequestId, int],
             out: Collection[RequestId]) -> Ran:
        """Of a plan that it takes: as `Steps.step`; flying, out: as `Ahead.lines` takes them."""
        wait(arrivals)
        rows = tuple(map(self._tables.index, plan.rows))
        bucket = next(b for b in self._buckets if b >= len(rows))
        width = self._buckets[bucket]
        position_N, most_N = self.ahead.lines(plan, width, flying, out)
        self._tables.check(rows, [start + count for start, count in zip(plan.start, plan.count, strict=True)])
        logits_BV, answer_3B = self._replay(
            (self._attending.kind(rows), bucket), {"row_N": rows, "position_N": position_N, "most_N": most_N},
            (0, bucket))
        return Ran([row for row in rows for _ in range(width)], logits_BV[:len(rows) * width], answer_3B,
                   width=width)

    def _step(self, kind: str, width: int, given: Mapping[str, Tensor], logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Its answer is as `Draws.checked` returns it. Positions of a row are queries like others, each with its own
        context: what all of them write comes before what any reads."""
        model, tables, drafter = self._model, self._tables, self.ahead.drafter
        row_N, given_N, most_N = given["row_N"], given["position_N"], given["most_N"]
        rows = begin(row_N, torch.where(given_N == OUT, 0, given_N), tables.last_R)
        index_N, last_N = rows.index_B, rows.token_B
        at_N = torch.where(given_N == OUT, tables.length_R[index_N] - 1, given_N)
        turn_W = torch.arange(width, dtype=torch.int32, device=row_N.device)
        draft_ND = drafter.propose(index_N, at_N, last_N, most_N, width - 1)
        good_ND = (draft_ND >= 0) & (draft_ND < model.vocab_size) & (turn_W[:-1] < most_N[:, None])
        may_ND = good_ND.long().cumprod(1) > 0
        id_NW = torch.cat((torch.full_like(last_N, -1)[:, None], draft_ND.where(may_ND, -1)), 1)
        computes_NW = torch.cat(((at_N >= 0)[:, None], may_ND & (at_N >= 0)[:, None]), 1)
        token_B = torch.where(turn_W == 0, last_N[:, None], id_NW.clamp(min=0)).flatten()
        position_B = torch.where(computes_NW, at_N[:, None] + turn_W, -1).flatten()
        row_B, index_B = (x.repeat_interleave(width) for x in (row_N, index_N))
        turn_B = turn_W.repeat(len(row_N))
        queries = begin(row_B, position_B, tables.last_R, self._attending.looks)
        attend = self._attending.decode(kind, queries, turn_B.view(-1, width))
        hidden_BD = model.forward(token_B, queries.at_B, attend)
        logits_BV = logits_RV[:len(token_B)].copy_(model.head(hidden_BD))
        answer_3B, counts_B = self._checks(logits_BV, tables.last_R, row_B, index_B, position_B,
                                           id_NW.flatten().int(), turn_B, width)
        if isinstance(attend, KeepsStates):
            attend.state.checked(counts_B)
        drafter.ran(token_B, hidden_BD, row_B, position_B, turn_B, counts_B)
        drafter.said(index_N, at_N, answer_3B[0].view(-1, width))
        says_N = counts_B.view(-1, width).sum(1).int()
        tables.length_R.index_copy_(0, index_N, at_N + 1 + says_N)
        return logits_BV, answer_3B
