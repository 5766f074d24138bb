"""Decode steps on a CUDA device, captured once for each bucket of rows and replayed.

A replay reads nothing of the host but one small tensor: which rows decode, and at which position. Page
tables and last tokens stay on the device, where binds, grows and earlier steps have put them.

    B rows of a step, padded to a bucket   R rows of the tables   P pages   K KV heads   G page size
    H head dim   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.core.plan import StepPlan
from penstock.exec.attend import Grouped
from penstock.exec.lower import RowTables
from penstock.model.base import LocalLayer, Model

if TYPE_CHECKING:
    from penstock.kernels.paged_attention.triton_decode import Tuning

# Steps between a replay and the reuse of its staging buffer, which a copy may still read.
_STAGES = 4


def buckets_of(rows: int) -> tuple[int, ...]:
    """Batch sizes to capture for up to `rows` rows: powers of two to 8, then steps of 8 and of 16."""
    sizes = [b for b in (1, 2, 4, 8, *range(16, 65, 8), *range(80, rows + 16, 16)) if b < rows]
    return (*sizes, rows)


class DecodeGraphs:
    """One query for each of up to `buckets[-1]` rows, through all layers, to the best token.

    Reads and writes the tables and pools in place: nobody may replace their tensors. The best tokens
    become the rows' last tokens.
    """

    def __init__(self, model: Model, tables: RowTables, grouped: Grouped, buckets: Sequence[int]) -> None:
        assert list(buckets) == sorted(set(buckets)), f"buckets {buckets}"
        self._model, self._tables, self._grouped = model, tables, grouped
        self._buckets, device = tuple(buckets), tables.last_R.device
        shape = 2, self._buckets[-1]                                    # row, position
        self._input = torch.zeros(shape, dtype=torch.int32, device=device)
        self._staging = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def takes(self, plan: StepPlan) -> bool:
        """Whether every row decodes one token, from its own last one, and all fit into a bucket."""
        rows = len(plan.rows)
        return rows <= self._buckets[-1] and len(plan.tokens) == rows and max(plan.tokens) < 0 and all(
            plan.samples)

    def capture(self) -> None:
        """Capture every bucket, the largest first: the others fit into its memory. Writes no page."""
        self._input[1] = -1
        memory = torch.cuda.graph_pool_handle()
        for bucket in reversed(self._buckets):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(bucket)                  # compiles what is not compiled yet
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                out = self._step(bucket)
            self._graphs[bucket] = graph, *out

    def run(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Decode these rows of the tables, whose last tokens are at `positions`. Does not wait.

        Returns (logits_BV float32, answer_2B int64: the best tokens, and whether their logits are
        finite), valid until the next run; of `answer_2B` entries beyond the rows mean nothing.
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
        graph, logits_BV, answer_2B = self._graphs[bucket]
        graph.replay()
        return logits_BV[:len(rows)], answer_2B

    def _step(self, bucket: int) -> tuple[Tensor, Tensor]:
        row_B, position_B = self._input[0, :bucket], self._input[1, :bucket]
        from penstock.kernels.paged_attention import triton_decode  # needs Triton
        context_B, last_R = position_B + 1, self._tables.last_R
        # A position of -1 is padding: no context, nothing stored, and its token goes behind the rows.
        index_B = torch.where(position_B < 0, len(last_R) - 1, row_B).long()
        cuts = [triton_decode.tuning(bucket, spec.num_kv_heads,
                                     table.device_RM.shape[1] * table.size, self._processors)
                for spec, table in zip(self._grouped.specs, self._tables.groups, strict=True)]
        attend = _Attend(self._grouped, self._tables, row_B, position_B, context_B, cuts)
        hidden_BD = self._model.forward(last_R[index_B], position_B.clamp(min=0).long(), attend)
        logits_BV = self._model.logits(hidden_BD)
        best_B, token_B = logits_BV.max(-1)
        last_R.index_copy_(0, index_B, token_B)
        return logits_BV, torch.stack((token_B, best_B.isfinite().long()))


class _Attend:
    """`model.base.Attend` of a captured step: its tokens T are the B rows."""

    def __init__(self, grouped: Grouped, tables: RowTables, row_B: Tensor, position_B: Tensor,
                 context_B: Tensor, cuts: Sequence[Tuning]) -> None:
        self._grouped, self._tables, self._cuts = grouped, tables, cuts
        self._row_B, self._position_B, self._context_B = row_B, position_B, context_B

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None) -> Tensor:
        from penstock.kernels.paged_attention import triton_decode
        assert chosen_TS is None, "KV heads are attended to as a whole here"
        group, k_PKGH, v_PKGH = self._grouped.places[layer]
        table_RM = self._tables.groups[group].device_RM
        triton_decode.store(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH, table_RM, self._row_B,
                            self._position_B)
        return triton_decode.decode(q_TNH, k_PKGH, v_PKGH, table_RM, self._row_B, self._context_B,
                                    scale=self._grouped.specs[group].scale, cut=self._cuts[group])

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        raise AssertionError("a model with an indexer and KV heads")
