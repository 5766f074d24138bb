"""Decode steps as CUDA graphs: captured at start for each bucket of rows; `DecodeGraphs.step` replays them.

A replay reads one small tensor of the host: which rows decode, and at which position. Block tables and last tokens
stay on the device, where table edits and earlier steps have put them. The graph ends with each row's sampled token.

    B rows of a step, padded to a bucket   R rows of the tables   P pages   K KV heads   G page size
    H head dim   V vocabulary
"""
from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.exec.graphs.halves import Copies, Halves
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Ran, Steps, wait
from penstock.exec.step.step_batch import PADDING, Bucket, Line, StepBatch, pad, parts, sizes
from penstock.exec.step.tables import RowTables
from penstock.kernels.fused.step import Queries, begin, best, say
from penstock.memory.mover import Arrivals
from penstock.model.base import Model

# With its logits_BV float32 and answer_XB, as `Graphs` has them.
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
    """What all captured steps of a rank share: `input`, int32, which they read of the host; their logits, which
    the next step overwrites; and their memory. rehearses: `record` launches a step, and captures nothing.
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


class Graphs:
    """Captured steps of one kind, one graph per bucket that their lines are padded to. They read and write the tables
    and pools in place, so the tensors of these may not be replaced."""

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws | None,
                 replays: Replays) -> None:
        self._model, self._tables, self._attending = model, tables, attending
        self._draws, self._replays = draws, replays
        self._graphs: dict[Any, Recorded] = {}

    def _record(self, key: Any, names: Iterable[str], bucket: Bucket,
                step: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, Tensor]]) -> None:
        """step: of these lines, padding alone here, and where logits go; it writes no page."""
        given = parts(self._replays.input, [*names], bucket)
        for name, line in given.items():
            line.fill_(-1 if PADDING.get(name) == -1 else 0)
        self._graphs[key] = self._replays.record(functools.partial(step, given))

    def _replay(self, key: Any, lines: Mapping[str, Line], bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(logits_BV float32, answer_XB int64: the best or the drawn tokens, whether the logits are finite, and the
        counts of `Attending.looks`), valid until the next one. Does not wait. Padding means nothing."""
        self._replays.write(sum(sizes(lines, bucket)), functools.partial(pad, lines, bucket))
        graph, logits_BV, answer_XB = self._graphs[key]
        graph.replay()
        return logits_BV, answer_XB

    def _next_tokens(self, hidden_SD: Tensor, row_S: Tensor, position_S: Tensor, logits_RV: Tensor,
                     count_LRKE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `_replay` returns them."""
        logits_SV = logits_RV[:len(hidden_SD)]
        found = best(self._model.head(hidden_SD), logits_SV)
        if self._draws is not None:
            self._draws.draw(logits_SV, found.token_B, row_S, position_S)
        return logits_SV, say(found, row_S, position_S, self._tables.last_R, count_LRKE)


class DecodeGraphs(Graphs, Steps):
    """Decode steps: one query for each of up to `buckets[-1]` rows, through all layers, to the next token, which
    becomes the row's last."""

    def __init__(self, model: Model, tables: RowTables, attending: Attending, draws: Draws | None, replays: Replays,
                 buckets: Sequence[int]) -> None:
        assert list(buckets) == sorted(set(buckets)), f"buckets {buckets}"
        super().__init__(model, tables, attending, draws, replays)
        self._buckets, self._halved = tuple(buckets), 0

    def takes(self, batch: StepBatch) -> bool:
        """Whether every row decodes one token, from its own last one, and all fit into a bucket."""
        rows = len(batch.rows)
        return rows <= self._buckets[-1] and len(batch.tokens) == rows and max(batch.tokens) < 0 and all(
            batch.samples)

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        if not self.takes(batch):
            return None
        wait(arrivals)
        rows = batch.rows
        bucket, kind = next(b for b in self._buckets if b >= len(rows)), self._attending.kind(rows)
        self._tables.check(rows, batch.ends)
        halves = (kind, bucket, True) in self._graphs and self._attending.halves()
        self._halved += halves
        logits_BV, answer_XB = self._replay((kind, bucket, halves), {"row_N": rows, "position_N": batch.start},
                                            (0, bucket))
        return Ran(rows, logits_BV[:len(rows)], answer_XB, counted=self._attending.looks.count_LRKE is not None)

    def capture(self) -> None:
        """Capture every bucket, the largest first: the others fit into its memory."""
        halves = None
        for bucket, kind in product(reversed(self._buckets), self._attending.kinds):
            if may := self._attending.may_halve(kind, bucket):
                halves = halves or Halves()
            for of in (None, halves) if may else (None,):
                self._record((kind, bucket, of is not None), ("row_N", "position_N"), (0, bucket),
                             functools.partial(self._step, kind, of))

    def _step(self, kind: str, halves: Halves | None, given: Mapping[str, Tensor],
              logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """halves: runs the layers of half of the rows beside the others'; None: all at once."""
        row_B, position_B, looks = given["row_N"], given["position_N"], self._attending.looks
        queries = begin(row_B, position_B, self._tables.last_R, looks)

        def layers(queries: Queries, copies: Copies | None = None) -> Tensor:
            return self._model.forward(queries.token_B, queries.at_B,
                                       self._attending.decode(kind, queries, copies=copies))
        hidden_BD = layers(queries) if halves is None else halves.run(queries, layers)
        return self._next_tokens(hidden_BD, row_B, position_B, logits_RV, looks.count_LRKE)

    def stats(self) -> dict[str, float]:
        return {"executor_halved_steps_total": float(self._halved)}
