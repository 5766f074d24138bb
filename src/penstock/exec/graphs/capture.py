"""Decode steps on a CUDA device, captured once for each bucket of rows and replayed.

A replay reads nothing of the host but one small tensor: which rows decode, and at which position. Page
tables and last tokens stay on the device, where binds, grows and earlier steps have put them.

    B rows of a step, padded to a bucket   R rows of the tables   P pages   K KV heads   G page size
    H head dim   V vocabulary
"""
from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.exec.graphs.halves import Copies, Halves
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Ran, Steps, wait
from penstock.exec.step.step_batch import StepBatch, pad
from penstock.exec.step.tables import RowTables
from penstock.kernels.fused.step import Queries, begin, best, say
from penstock.memory.mover import Arrivals
from penstock.model.base import Model

# With its logits_BV float32 and answer_XB, as `DecodeGraphs.run` returns them.
Recorded: TypeAlias = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]
# Steps between a replay and the reuse of its staging buffer, which a copy may still read.
_STAGES = 4


def buckets_of(rows: int) -> tuple[int, ...]:
    """Batch sizes to capture for up to `rows` rows: powers of two to 8, then steps of 8 and of 16."""
    sizes = [b for b in (1, 2, 4, 8, *range(16, 65, 8), *range(80, rows + 16, 16)) if b < rows]
    return (*sizes, rows)


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
    """What runs in it is recorded into `graph`, whose memory is of the pool `memory`.

    Other threads go on meanwhile: one registers host memory with the device. This one collects no garbage:
    what frees another graph or pinned memory ends the recording, and fails itself.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


_replays: weakref.WeakSet[Replays] = weakref.WeakSet()


def recorded() -> bool:
    """Whether this process has captured steps: they use the workspaces of cuBLAS that there were then."""
    return len(_replays) > 0


class Replays:
    """What captured steps have in common: `input`, int32, which they read of the host, where they leave their
    logits, and their memory. The next step overwrites it. rehearses: `record` launches a step, and no more.
    """

    def __init__(self, size: int, rows: int, vocab_size: int, device: torch.device,
                 rehearses: bool = False) -> None:
        self._rehearses = rehearses
        self.input = torch.zeros(size, dtype=torch.int32, device=device)
        # Of whichever bucket ran last: some for each bucket would be gigabytes with hundreds of rows.
        self._logits_BV = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
        self._staging = [(torch.empty(size, dtype=torch.int32, pin_memory=True),
                          torch.cuda.Event()) for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        # One for all: cuBLAS keeps a workspace for each stream that it has seen.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        if not rehearses:
            _replays.add(self)

    def write(self, size: int, fill: Callable[[np.ndarray], None]) -> None:
        """The first so many values of the next step's `input`. Does not wait for the device."""
        self._staging.append(self._staging.pop(0))
        staging, copied = self._staging[0]
        copied.synchronize()
        fill(staging[:size].numpy())
        self.input[:size].copy_(staging[:size], non_blocking=True)
        copied.record()

    def record(self, step: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Recorded:
        """A step, which leaves its logits at the beginning of what it gets; with padding alone, as `input`
        has: nothing is written."""
        run = functools.partial(step, self._logits_BV)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            out = run()                         # compiles what is not compiled yet
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        if self._rehearses:
            return graph, *out
        with recording(graph, self._memory):
            out = run()
        return graph, *out


class DecodeGraphs(Steps):
    """One query for each of up to `buckets[-1]` rows, through all layers, to the next token.

    Reads and writes the tables and pools in place: nobody may replace their tensors. The tokens become the
    rows' last tokens.
    """

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws,
                 buckets: Sequence[int], replays: Replays) -> None:
        assert list(buckets) == sorted(set(buckets)), f"buckets {buckets}"
        self._model, self._tables, self._attending, self._draws = model, tables, attending, draws
        self._buckets, self._replays = tuple(buckets), replays
        self._graphs: dict[tuple[str, int, bool], Recorded] = {}
        self._halved = 0

    def takes(self, batch: StepBatch) -> bool:
        """Whether every row decodes one token, from its own last one, and all fit into a bucket."""
        rows = len(batch.rows)
        return rows <= self._buckets[-1] and len(batch.tokens) == rows and max(batch.tokens) < 0 and all(
            batch.samples)

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        if not self.takes(batch):
            return None
        wait(arrivals)
        return Ran(batch.rows, *self.run(batch.rows, batch.start), counted=self._attending.looks.count_LRKE is not None)

    def capture(self) -> None:
        """Capture every bucket, the largest first: the others fit into its memory. Writes no page."""
        halves = None
        for bucket, kind in product(reversed(self._buckets), self._attending.kinds):
            given = self._replays.input[:2 * bucket].view(2, bucket)
            given.zero_()
            given[1] = -1
            if may := self._attending.may_halve(kind, bucket):
                halves = halves or Halves()
            for of in (None, halves) if may else (None,):
                self._graphs[kind, bucket, of is not None] = self._replays.record(functools.partial(
                    decode_step, self._model, self._tables, self._attending, kind, given, self._draws, halves=of))

    def run(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Decode these rows of the tables, whose last tokens are at `positions`. Does not wait.

        Returns (logits_BV float32, answer_XB int64: the best or the drawn tokens, whether the logits are
        finite, and the counts of `looks`), valid until the next run; of `answer_XB` entries beyond the rows
        mean nothing.
        """
        bucket = next(b for b in self._buckets if b >= len(rows))
        self._replays.write(2 * bucket, functools.partial(
            pad, {"row_N": rows, "position_N": positions}, (0, bucket)))
        self._tables.check(rows, [position + 1 for position in positions])
        kind = self._attending.kind(rows)
        halves = (kind, bucket, True) in self._graphs and self._attending.halves()
        self._halved += halves
        graph, logits_BV, answer_XB = self._graphs[kind, bucket, halves]
        graph.replay()
        return logits_BV[:len(rows)], answer_XB

    def stats(self) -> dict[str, float]:
        return {"executor_halved_steps_total": float(self._halved)}


def decode_step(model: Model, tables: RowTables, attending: Attending, kind: str, input_2B: Tensor,
                draws: Draws | None, logits_RV: Tensor, halves: Halves | None = None) -> tuple[Tensor, Tensor]:
    """What is captured, as a function of rows and positions: as `DecodeGraphs.run`, with padding.

    input_2B    int32, device: row of the tables and position of each query; -1: padding
    logits_RV   float32, dense: logits_BV are its beginning
    halves      runs the layers of half of the rows beside the others'; None: all at once
    """
    row_B, position_B = input_2B
    queries = begin(row_B, position_B, tables.last_R, attending.looks)

    def layers(queries: Queries, copies: Copies | None = None) -> Tensor:
        return model.forward(queries.token_B, queries.at_B, attending.decode(kind, queries, copies=copies))
    hidden_BD = layers(queries) if halves is None else halves.run(queries, layers)
    return next_tokens(model, tables, hidden_BD, row_B, position_B, draws, logits_RV,
                       attending.looks.count_LRKE)


def next_tokens(model: Model, tables: RowTables, hidden_SD: Tensor, row_S: Tensor, position_S: Tensor,
                draws: Draws | None, logits_RV: Tensor,
                count_LRKE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(logits_SV, answer_XS), as `DecodeGraphs.run` returns, with padding."""
    logits_SV = logits_RV[:len(hidden_SD)]
    found = best(model.head(hidden_SD), logits_SV)
    if draws is not None:
        draws.draw(logits_SV, found.token_B, row_S, position_S)
    return logits_SV, say(found, row_S, position_S, tables.last_R, count_LRKE)
