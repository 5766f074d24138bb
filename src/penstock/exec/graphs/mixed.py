"""Steps with prompts on a CUDA device, decodes among them, captured for each bucket of tokens and rows.

A replay reads one small tensor of the host: of each token its id, row and position; of each row its queries
and context; which rows decode and which sample. All else is on the device, as in `capture.py`. Buckets are
captured at the start: a capture takes .1 s, with kernels to compile .9 s, in which all rows would wait.

    T tokens of the step, B rows of it, D of these that decode, S that sample, each padded
    R rows of the tables   M pages a row   N query heads   K KV heads   G page size   H head dim
"""
from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import StepPlan
from penstock.exec.graphs.capture import PagedDecode, Recorded, Replays, next_tokens
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Grouped, NoIndexer
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.tables import RowTables
from penstock.kernels.attention.paged_attention import flash
from penstock.memory.mover import Arrivals
from penstock.model.base import Attend, LocalLayer, Model

TOKENS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = (8, 64)                      # and as many as there are
START_S = 5.0                       # after which no further bucket is captured
Bucket = tuple[int, int]            # T, B


@dataclass(frozen=True, slots=True)
class StepInput:
    """Views of one int32 tensor. Padding: a position, a decode context or a sample position of -1 or 0.

    id_T, row_T, position_T, decode_T    id -1: the row's last token; position -1: padding; decode: which of
                                         the D rows that decode it is, or -1
    row_B, context_B, start_B1           of all rows, for their prompts: one that decodes has a context of 1
    at_D, row_D, context_D               token, row and context of those that decode; context 0: padding
    at_S, row_S, position_S              token and row of those that sample; position -1: padding
    """

    id_T: Tensor
    row_T: Tensor
    position_T: Tensor
    decode_T: Tensor
    row_B: Tensor
    context_B: Tensor
    start_B1: Tensor
    at_D: Tensor
    row_D: Tensor
    context_D: Tensor
    at_S: Tensor
    row_S: Tensor
    position_S: Tensor


def lengths(bucket: Bucket) -> list[int]:
    """Of the parts of a StepInput, in order."""
    tokens, rows = bucket
    return [tokens] * 4 + [rows, rows, rows + 1] + [rows] * 6


def input_of(values: Tensor, bucket: Bucket) -> StepInput:
    """Its parts, as views."""
    sizes = lengths(bucket)
    return StepInput(*torch.split(values[:sum(sizes)], sizes))


def lay_out(plan: StepPlan, rows: Sequence[int], bucket: Bucket, out: np.ndarray) -> None:
    """A plan as the parts of a StepInput in `out`; `rows` are table indices."""
    parts = dict(zip(StepInput.__slots__, np.split(out, np.cumsum(lengths(bucket))[:-1]), strict=True))
    row, count, start = (np.asarray(x, dtype=np.int32) for x in (rows, plan.count, plan.start))
    first = np.concatenate(([0], np.cumsum(count, dtype=np.int32)))
    num = int(first[-1])
    for name, values, padding in (
            ("id_T", plan.tokens, 0), ("row_T", np.repeat(row, count), 0),
            ("position_T", np.arange(num) + np.repeat(start - first[:-1], count), -1), ("decode_T", (), -1),
            ("row_B", row, 0), ("context_B", np.where(count == 1, 1, start + count), 1),
            ("start_B1", first, num)):
        parts[name][:len(values)], parts[name][len(values):] = values, padding
    decode = np.flatnonzero(count == 1)
    parts["decode_T"][first[decode]] = np.arange(len(decode))
    sample = np.flatnonzero(plan.samples)
    for names, which, last, padding in ((("at_D", "row_D", "context_D"), decode, start + 1, 0),
                                        (("at_S", "row_S", "position_S"), sample, start + count - 1, -1)):
        for name, values, rest in zip(names, (first[1:] - 1, row, last), (0, 0, padding), strict=True):
            parts[name][:len(which)], parts[name][len(which):] = values[which], rest


def step(model: Model, tables: RowTables, grouped: Grouped, given: StepInput, draws: Draws | None,
         logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """What is captured: (logits_SV, answer_2S int64), as `DecodeGraphs.run` returns, with padding.
    logits_RV: as for `decode_step`."""
    id_T = torch.where(given.id_T < 0, tables.last_R[given.row_T.long()], given.id_T.long())
    attend: Attend = _Mixed(grouped, tables, given)
    hidden_TD = model.forward(id_T, given.position_T.clamp(min=0).long(), attend)
    return next_tokens(model, tables, hidden_TD[given.at_S.long()], given.row_S, given.position_S,
                       draws, logits_RV)


class _Mixed(NoIndexer):
    """`model.base.Attend` of such a step."""

    def __init__(self, grouped: Grouped, tables: RowTables, given: StepInput) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode  # needs Triton
        self._write_kv, self._grouped, self._given = triton_decode.write_kv, grouped, given
        self._tables = [table.device_RM for table in tables.groups]
        at = given.row_D, given.context_D - 1, given.context_D
        self._decodes = [PagedDecode(spec, table.device_RM, table.size, *at)
                         for spec, table in zip(grouped.specs, tables.groups, strict=True)]
        # Entries without a page are not read, and may be looked at.
        self._pages = [table_RM[given.row_B.long()].clamp_min(0) for table_RM in self._tables]
        self._decode_T = given.decode_T.clamp(min=0).long()
        self._decodes_T11 = (given.decode_T >= 0)[:, None, None]
        self._padding_T11 = (given.position_T < 0)[:, None, None]

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None and sinks_N is None, "only plain attention is in one call"
        group, k_PKGH, v_PKGH = self._grouped.places[layer]
        given = self._given
        self._write_kv(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH, self._tables[group], given.row_T,
                       given.position_T)
        decode_DNH = self._decodes[group](q_TNH[given.at_D.long()], k_PKGH, v_PKGH)
        pages_BM = self._pages[group]
        out_TNH = flash.attend(
            q_TNH, k_PKGH.transpose(1, 2), v_PKGH.transpose(1, 2),
            scale=self._grouped.specs[group].scale, max_query=len(q_TNH),
            max_key=pages_BM.shape[1] * k_PKGH.shape[2], start_B1=given.start_B1, context_B=given.context_B,
            table_BM=pages_BM)
        out_TNH = torch.where(self._decodes_T11, decode_DNH[self._decode_T], out_TNH)
        return out_TNH.masked_fill_(self._padding_T11, 0)


class MixedGraphs(Steps):
    """Steps of up to TOKENS[-1] tokens and `rows` rows, of a whole model whose KV heads read all.

    Reads and writes the tables and pools in place: nobody may replace their tensors.
    """

    def __init__(self, model: Model, tables: RowTables, grouped: Grouped, draws: Draws | None, rows: int,
                 replays: Replays) -> None:
        self._model, self._tables, self._grouped, self._draws = model, tables, grouped, draws
        self._rows, self._replays = (*(r for r in ROWS if r < rows), rows), replays
        self._graphs: dict[Bucket, Recorded] = {}
        self.launched: Counter[str] = Counter()         # steps that were not replayed, by cause

    def step(self, plan: StepPlan, arrivals: Arrivals) -> Ran | None:
        if not (bucket := self.bucket(plan)):
            return None
        rows = tuple(map(self._tables.index, plan.rows))
        samples = tuple(row for row, samples in zip(rows, plan.samples, strict=True) if samples)
        return Ran(samples, *self.run(plan, rows, bucket))

    def stats(self) -> dict[str, float]:
        return {f'executor_launched_total{{cause="{cause}"}}': float(n) for cause, n in self.launched.items()}

    def bucket(self, plan: StepPlan) -> Bucket | None:
        """The smallest that a plan fits into; None, and the cause is counted: it has to be launched."""
        if plan.waits:
            self.launched["waits"] += 1         # its layers wait for their own copies
        elif len(plan.tokens) > TOKENS[-1]:
            self.launched["tokens"] += 1
        else:
            fits = [(t, r) for t, r in self._graphs if t >= len(plan.tokens) and r >= len(plan.rows)]
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

    def run(self, plan: StepPlan, rows: Sequence[int], bucket: Bucket) -> tuple[Tensor, Tensor]:
        """The plan's step; `rows` are table indices. Does not wait. Returns as `DecodeGraphs.run`, of the
        rows that sample; valid until the next run."""
        self._replays.write(sum(lengths(bucket)), lambda values: lay_out(plan, rows, bucket, values))
        self._tables.check(rows, [start + count for start, count in zip(plan.start, plan.count, strict=True)])
        graph, logits_SV, answer_2S = self._graphs[bucket]
        graph.replay()
        return logits_SV[:sum(plan.samples)], answer_2S

    def _recorded(self, bucket: Bucket) -> Recorded:
        given = input_of(self._replays.input, bucket)
        # Padding only: nothing is written, nobody is drawn for.
        self._replays.input.zero_()
        for part in (given.position_T, given.decode_T, given.position_S):
            part.fill_(-1)
        return self._replays.record(
            functools.partial(step, self._model, self._tables, self._grouped, given, self._draws))
