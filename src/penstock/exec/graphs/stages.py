"""Decode steps of one of several stages, captured: hidden states come in and go out in tensors that stay.

What a stage hands to the next has shapes that only the one in front knows (a model's choices, what drafts
read), so stages are captured together: each bucket's first step is run with padding and handed on, as step 0.

    B rows of a step, padded to a bucket
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from penstock.core.plan import StepId
from penstock.exec.graphs.capture import DecodeGraphs, Replays
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Ran, wait
from penstock.exec.step.links import Links
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import RowTables
from penstock.kernels.fused.step import begin
from penstock.memory.mover import Arrivals
from penstock.model.base import Boundary, Model

CAPTURED = StepId(0)           # what is handed on while stages are captured; steps of plans are behind it


class StageGraphs(DecodeGraphs):
    """The decode steps of a stage: all but the last leave a `Boundary` instead of logits."""

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws | None, replays: Replays,
                 buckets: Sequence[int], links: Links) -> None:
        super().__init__(model, tables, attending, draws, replays, buckets)
        self._links = links
        self._names = ("row_N", "position_N", *(("id_N",) if links.before is None else ()))
        self._in: Boundary | None = None                        # of the largest bucket
        self._out: Boundary | None = None                       # likewise: of the last run

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        if not self.takes(batch):
            return None
        wait(arrivals)
        rows = len(batch.rows)
        bucket, kind = next(b for b in self._buckets if b >= rows), self._attending.kind(batch.rows)
        self._tables.check(batch.rows, batch.ends)
        self._attending.states.go_on(dict(zip(batch.rows, batch.start, strict=True)))
        if self._links.before is not None:
            self._take(batch.before or self._links.before.take(batch.step), bucket)
        lines = dict(zip(self._names, (batch.rows, batch.start, batch.heard), strict=False))
        logits_BV, answer_XB = self._replay((kind, bucket, False), lines, (0, bucket))
        if self._links.after is None:
            return Ran(batch.rows, logits_BV[:rows], answer_XB, counted=self._attending.looks.count_LRKE is not None)
        assert self._out is not None
        self._links.after.put(batch.step, _each(lambda x: x[:rows], self._out)._replace(inputs=batch.inputs))
        return Ran(batch.sample_rows)

    def _take(self, before: Boundary, bucket: int) -> None:
        """Where the captured step reads it; its padding has chosen nothing."""
        assert self._in is not None, "a step before the capture"
        for here, x in zip(self._in.parts, before.parts, strict=True):
            here[:len(x)].copy_(x)
        if self._in.chosen_TS is not None and len(before.h_TD) < bucket:
            self._in.chosen_TS[len(before.h_TD):bucket].fill_(-1)

    def capture(self) -> None:
        for bucket, kind in product(reversed(self._buckets), self._attending.kinds):
            first = kind == self._attending.kinds[0]
            if first and self._links.before is not None:
                before = self._links.before.take(CAPTURED)
                self._in = self._in or _each(torch.clone, before)
                self._take(before, bucket)
            self._record((kind, bucket, False), self._names, (0, bucket), functools.partial(self._stage, kind))
            if first and self._links.after is not None:
                self._graphs[kind, bucket, False][0].replay()
                assert self._out is not None
                self._links.after.put(CAPTURED, _each(lambda x: x[:bucket], self._out))  # noqa: B023 - called here

    def _stage(self, kind: str, given: Mapping[str, Tensor], logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """What is captured; of the first stage with ids of tokens, -1: the row's last one."""
        row_B, position_B, looks = given["row_N"], given["position_N"], self._attending.looks
        queries = begin(row_B, position_B, self._tables.last_R, looks)
        if self._in is None:
            id_B = given["id_N"]
            x = self._model.embed(torch.where(id_B < 0, queries.token_B, id_B.long()))
        else:
            x = _each(lambda x: x[:len(row_B)], self._in)
        x = self._model.layers(x, queries.at_B, self._attending.decode(kind, queries))
        if self._links.after is None:
            return self._next_tokens(self._model.norm(x), row_B, position_B, logits_RV, looks.count_LRKE)
        if self._out is None:                       # the largest bucket, before it is recorded
            self._out = _each(torch.clone, x)
        for there, part in zip(self._out.parts, x.parts, strict=True):
            there[:len(part)].copy_(part)
        return logits_RV[:len(row_B)], x.h_TD


def _each(of: Callable[[Tensor], Tensor], x: Boundary) -> Boundary:
    return Boundary(of(x.h_TD), x.delta_TD if x.delta_TD is None else of(x.delta_TD),
                    x.chosen_TS if x.chosen_TS is None else of(x.chosen_TS), None, tuple(map(of, x.tapped)),
                    x.own_TX if x.own_TX is None else of(x.own_TX))
