"""Decode steps on a CUDA device, captured once for each bucket of rows and replayed.

A replay reads nothing of the host but one small tensor: which rows decode, and at which position. Page
tables and last tokens stay on the device, where binds, grows and earlier steps have put them.

    B rows of a step, padded to a bucket   R rows of the tables   P pages   K KV heads   G page size
    H head dim   V vocabulary
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from penstock.core.plan import StepPlan
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Grouped
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.tables import RowTables
from penstock.kernels.attention.paged_attention import AttentionSpec
from penstock.memory.mover import Arrivals
from penstock.model.base import Attend, LocalLayer, Model

if TYPE_CHECKING:
    from penstock.kernels.attention.paged_attention.triton_decode import Tuning

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


class Decodes(Protocol):
    """How rows that decode attend, as a function of tensors on the device alone."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of steps, each captured by itself."""
        ...

    def kind(self, rows: Sequence[int]) -> str:
        """Of a step with these rows of the tables."""
        ...

    def attend(self, kind: str, row_B: Tensor, position_B: Tensor) -> Attend:
        """Of a step whose rows have one query each, int32; a position of -1 is padding: no context, and
        nothing is written for it."""
        ...


class DecodeGraphs(Steps):
    """One query for each of up to `buckets[-1]` rows, through all layers, to the next token.

    Reads and writes the tables and pools in place: nobody may replace their tensors. The tokens become the
    rows' last tokens.
    """

    def __init__(self, model: Model, tables: RowTables, decodes: Decodes, draws: Draws,
                 buckets: Sequence[int]) -> None:
        assert list(buckets) == sorted(set(buckets)), f"buckets {buckets}"
        self._model, self._tables, self._decodes, self._draws = model, tables, decodes, draws
        self._buckets, device = tuple(buckets), tables.last_R.device
        shape = 2, self._buckets[-1]                                    # row, position
        self._input = torch.zeros(shape, dtype=torch.int32, device=device)
        self._staging = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._turn = 0
        # Of whichever bucket ran last: some for each bucket would be gigabytes with hundreds of rows.
        self.logits_BV = torch.empty(self._buckets[-1], model.vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.memory = torch.cuda.graph_pool_handle()

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row decodes one token, from its own last one, and all fit into a bucket."""
        rows = len(plan.rows)
        return rows <= self._buckets[-1] and len(plan.tokens) == rows and max(plan.tokens) < 0 and all(
            plan.samples)

    def step(self, plan: StepPlan, arrivals: Arrivals) -> Ran | None:
        if not self.takes(plan):
            return None
        for _, events in arrivals:
            torch.cuda.current_stream().wait_event(events[-1])
        rows = tuple(map(self._tables.index, plan.rows))
        return Ran(rows, *self.run(rows, plan.start))

    def capture(self) -> None:
        """Capture every bucket, the largest first: the others fit into its memory. Writes no page."""
        self._input[1] = -1
        # One for all: cuBLAS keeps a workspace for each stream that it has seen.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for bucket, kind in product(reversed(self._buckets), self._decodes.kinds):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(kind, bucket)            # compiles what is not compiled yet
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self.memory):
                out = self._step(kind, bucket)
            self._graphs[kind, bucket] = graph, *out

    def run(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Decode these rows of the tables, whose last tokens are at `positions`. Does not wait.

        Returns (logits_BV float32, answer_2B int64: the best or the drawn tokens, and whether the logits
        are finite), valid until the next run; of `answer_2B` entries beyond the rows mean nothing.
        """
        bucket = next(b for b in self._buckets if b >= len(rows))
        self._turn = (self._turn + 1) % _STAGES
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        copied.synchronize()
        host = staging.numpy()
        host[0, :len(rows)], host[1, :len(rows)] = rows, positions
        host[0, len(rows):bucket], host[1, len(rows):bucket] = 0, -1
        self._input.copy_(staging, non_blocking=True)
        copied.record()
        for group in self._tables.groups:
            for row, position in zip(rows, positions, strict=True):
                group.check(row, position + 1)
        graph, logits_BV, answer_2B = self._graphs[self._decodes.kind(rows), bucket]
        graph.replay()
        return logits_BV[:len(rows)], answer_2B

    def _step(self, kind: str, bucket: int) -> tuple[Tensor, Tensor]:
        logits_BV, answer_2B = decode_step(self._model, self._tables, self._decodes, kind,
                                           self._input[:, :bucket], self._draws)
        return self.logits_BV[:bucket].copy_(logits_BV), answer_2B


def decode_step(model: Model, tables: RowTables, decodes: Decodes, kind: str,
                input_2B: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
    """What is captured, as a function of rows and positions: as `DecodeGraphs.run`, with padding.

    input_2B   int32, device: row of the tables and position of each query; -1: padding
    """
    (row_B, position_B), last_R = input_2B, tables.last_R
    # Padding has no context, and its token goes behind the rows.
    index_B = torch.where(position_B < 0, len(last_R) - 1, row_B).long()
    attend = decodes.attend(kind, row_B, position_B)
    hidden_BD = model.forward(last_R[index_B], position_B.clamp(min=0).long(), attend)
    logits_BV = model.logits(hidden_BD)
    best_B, token_B = logits_BV.max(-1)
    if draws is not None:
        draws.draw(logits_BV, token_B, row_B, position_B)
    last_R.index_copy_(0, index_B, token_B)
    # As `isfinite`, in half as many launches.
    return logits_BV, torch.stack((token_B, (best_B.abs() < float("inf")).long()))


class PagedDecode:
    """A row's one query over the device pages of one cache group, up to its own position."""

    def __init__(self, spec: AttentionSpec, table_RM: Tensor, page_size: int, row_B: Tensor,
                 position_B: Tensor) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode  # needs Triton
        processors = torch.cuda.get_device_properties(row_B.device).multi_processor_count
        self._row_B, self._position_B, self._context_B = row_B, position_B, position_B + 1
        self._spec, self._table_RM = spec, table_RM
        self._cut: Tuning = triton_decode.tuning(len(row_B), spec.num_kv_heads,
                                                 table_RM.shape[1] * page_size, processors, spec.window)

    def write_kv(self, k_BKH: Tensor, v_BKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode
        triton_decode.write_kv(k_BKH, v_BKH, k_PKGH, v_PKGH, self._table_RM, self._row_B, self._position_B)

    def __call__(self, q_BNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        from penstock.kernels.attention.paged_attention import triton_decode
        return triton_decode.decode(q_BNH, k_PKGH, v_PKGH, self._table_RM, self._row_B, self._context_B,
                                    spec=self._spec, cut=self._cut, sinks_N=sinks_N)


class GroupedDecodes:
    """`Decodes` of layers that read all of their KV, from device pages."""

    kinds = ("all",)

    def __init__(self, grouped: Grouped, tables: RowTables) -> None:
        self._grouped, self._tables = grouped, tables

    def kind(self, rows: Sequence[int]) -> str:
        return "all"

    def attend(self, kind: str, row_B: Tensor, position_B: Tensor) -> Attend:
        return _Attend(self._grouped, [
            PagedDecode(spec, table.device_RM, table.size, row_B, position_B)
            for spec, table in zip(self._grouped.specs, self._tables.groups, strict=True)])


class _Attend:
    """`model.base.Attend` of a captured step: its tokens T are the B rows."""

    def __init__(self, grouped: Grouped, decodes: Sequence[PagedDecode]) -> None:
        self._grouped, self._decodes = grouped, decodes

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None, "KV heads are attended to as a whole here"
        group, k_PKGH, v_PKGH = self._grouped.places[layer]
        self._decodes[group].write_kv(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH)
        return self._decodes[group](q_TNH, k_PKGH, v_PKGH, sinks_N)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        raise AssertionError("a model with an indexer and KV heads")
