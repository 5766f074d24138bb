"""Steps with prompts on a CUDA device, decodes among them, captured for each bucket of tokens and rows.

A replay reads one small tensor of the host: of each token its id, row and position; of each row its queries
and context; which rows decode and which sample. All else is on the device, as in `capture.py`. Buckets are
captured at the start: a capture takes .1 s, with kernels to compile .9 s, in which all rows would wait.

    T tokens of the step, B rows of it, D of these that decode, S that sample, each padded
    R rows of the tables
"""
from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from penstock.exec.graphs.capture import Graphs, Replays
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.step_batch import MIXED, Bucket, StepBatch
from penstock.exec.step.tables import RowTables
from penstock.memory.mover import Arrivals
from penstock.model.base import Model

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = (8, 64)                      # and as many as there are
START_S = 5.0                       # after which no further bucket is captured


class MixedGraphs(Graphs, Steps):
    """Steps of up to TOKENS[-1] tokens and `rows` rows, captured for so many seconds."""

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws | None, replays: Replays,
                 rows: int, seconds: float = START_S) -> None:
        super().__init__(model, tables, attending, draws, replays)
        self._rows, self._seconds = (*(r for r in ROWS if r < rows), rows), seconds
        self.launched: Counter[str] = Counter()         # steps that were not replayed, by cause

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        if not (bucket := self.bucket(batch)):
            return None
        self._tables.check(batch.rows, batch.ends)
        logits_SV, answer_2S = self._replay(bucket, batch.mixed, bucket)
        return Ran(batch.sample_rows, logits_SV[:len(batch.sample_rows)], answer_2S)

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

    def capture(self) -> None:
        """Capture the largest bucket, whose memory the others fit into, then for so long the others, those of
        few rows first. What is not captured is replayed in a larger one, with more padding."""
        until = time.perf_counter() + self._seconds
        largest = TOKENS[-1], self._rows[-1]
        others = [(t, r) for fewer, r in pairwise((0, *self._rows)) for t in reversed(TOKENS) if t > fewer]
        for bucket in (largest, *(b for b in others if b != largest)):
            with contextlib.suppress(torch.OutOfMemoryError):
                self._record(bucket, MIXED, bucket, self._step)
            if time.perf_counter() > until:
                return

    def _step(self, given: Mapping[str, Tensor], logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        id_T = torch.where(given["id_T"] < 0, self._tables.last_R[given["row_T"].long()], given["id_T"].long())
        hidden_TD = self._model.forward(id_T, given["position_T"].clamp(min=0).long(), self._attending.prompts(given))
        return self._next_tokens(hidden_TD[given["at_S"].long()], given["row_S"], given["position_S"], logits_RV)
