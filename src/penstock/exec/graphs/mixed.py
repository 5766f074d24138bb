"""Steps with prompts on a CUDA device, decodes among them, captured for each bucket of tokens and rows.

A replay reads one small tensor of the host: of each token its id, row and position; of each row its queries
and context; which rows decode and which sample. All else is on the device, as in `capture.py`. Buckets are
captured at the start: a capture takes .1 s, with kernels to compile .9 s, in which all rows would wait.

    T tokens of the step, B rows of it, D of these that decode, S that sample, each padded
    R rows of the tables
"""
from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from penstock.exec.graphs.capture import Recorded, Replays, next_tokens
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.step_batch import MIXED, Bucket, StepBatch, pad, parts, sizes
from penstock.exec.step.tables import RowTables
from penstock.memory.mover import Arrivals
from penstock.model.base import Model

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = (8, 64)                      # and as many as there are
START_S = 5.0                       # after which no further bucket is captured


def step(model: Model, tables: RowTables, attending: Attending, given: Mapping[str, Tensor], draws: Draws | None,
         logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """What is captured: (logits_SV, answer_2S int64), as `DecodeGraphs.run` returns, with padding.
    logits_RV: as for `decode_step`."""
    id_T = torch.where(given["id_T"] < 0, tables.last_R[given["row_T"].long()], given["id_T"].long())
    hidden_TD = model.forward(id_T, given["position_T"].clamp(min=0).long(), attending.prompts(given))
    return next_tokens(model, tables, hidden_TD[given["at_S"].long()], given["row_S"], given["position_S"],
                       draws, logits_RV)


class MixedGraphs(Steps):
    """Steps of up to TOKENS[-1] tokens and `rows` rows, of a whole model whose KV heads read all.

    Reads and writes the tables and pools in place: nobody may replace their tensors.
    """

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws | None, rows: int,
                 replays: Replays) -> None:
        self._model, self._tables, self._attending, self._draws = model, tables, attending, draws
        self._rows, self._replays = (*(r for r in ROWS if r < rows), rows), replays
        self._graphs: dict[Bucket, Recorded] = {}
        self.launched: Counter[str] = Counter()         # steps that were not replayed, by cause

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        if not (bucket := self.bucket(batch)):
            return None
        return Ran(batch.sample_rows, *self.run(batch, bucket))

    def stats(self) -> dict[str, float]:
        return {f'executor_launched_total{{cause="{cause}"}}': float(n) for cause, n in self.launched.items()}

    def bucket(self, batch: StepBatch) -> Bucket | None:
        """The smallest that a step fits into; None, and the cause is counted: it has to be launched."""
        if batch.waits:
            self.launched["waits"] += 1         # its layers wait for their own copies
        elif len(batch.tokens) > TOKENS[-1]:
            self.launched["tokens"] += 1
        else:
            fits = [(t, r) for t, r in self._graphs if t >= len(batch.tokens) and r >= len(batch.rows)]
            if fits:
                return min(fits)
            self.launched["memory"] += 1
        return None

    def capture(self, seconds: float = START_S) -> None:
        """Capture the largest bucket, whose memory the others fit into, then for so long the others, those of
        few rows first. What is not captured is replayed in a larger one, with more padding."""
        until = time.perf_counter() + seconds
        largest = TOKENS[-1], self._rows[-1]
        others = [(t, r) for fewer, r in pairwise((0, *self._rows)) for t in reversed(TOKENS) if t > fewer]
        for bucket in (largest, *(b for b in others if b != largest)):
            with contextlib.suppress(torch.OutOfMemoryError):
                self._graphs[bucket] = self._recorded(bucket)
            if time.perf_counter() > until:
                return

    def run(self, batch: StepBatch, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Does not wait. Returns as `DecodeGraphs.run`, of the rows that sample; valid until the next run."""
        self._replays.write(sum(sizes(MIXED, bucket)), functools.partial(pad, batch.mixed, bucket))
        self._tables.check(batch.rows, batch.ends)
        graph, logits_SV, answer_2S = self._graphs[bucket]
        graph.replay()
        return logits_SV[:len(batch.sample_rows)], answer_2S

    def _recorded(self, bucket: Bucket) -> Recorded:
        given = parts(self._replays.input, MIXED, bucket)
        # Padding only: nothing is written, nobody is drawn for.
        self._replays.input.zero_()
        for part in (given["position_T"], given["decode_T"], given["position_S"]):
            part.fill_(-1)
        return self._replays.record(
            functools.partial(step, self._model, self._tables, self._attending, given, self._draws))
