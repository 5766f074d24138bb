"""A rank on a CPU that does what one on a CUDA device does: draws, launches ahead, captured steps.

With doubles of the kernels that only Triton has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import where

from penstock.exec.drafts.device import Ahead
from penstock.exec.graphs.drafts import DraftGraphs, every, widths
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.tokens import GpuSampler
from penstock.exec.step import dense
from penstock.kernels.types.ragged import Ragged


class Plain:
    """`PagedDecode` without Triton: attention of the executor's own back-end, a row at a time."""

    def __init__(self, spec, table_RM, page_size, row_B, position_B, context_B):
        self.spec, self.table_RM, self.size = spec, table_RM, page_size
        self.row_B, self.position_B = row_B, position_B

    def write_kv(self, k_BKH, v_BKH, k_PKGH, v_PKGH):
        from penstock.kernels.attention.paged_attention import write_kv
        own = self.position_B >= 0
        row_b, at_b = self.row_B[own].long(), self.position_B[own].long()
        write_kv(k_BKH[own], v_BKH[own], k_PKGH, v_PKGH, self.table_RM[row_b, at_b // self.size].long(),
                 at_b % self.size)

    def __call__(self, q_BNH, k_PKGH, v_PKGH, sinks_N=None):
        from penstock.kernels.attention.paged_attention import prepare
        out = torch.zeros_like(q_BNH)
        for b, (row, position) in enumerate(zip(self.row_B.tolist(), self.position_B.tolist(), strict=True)):
            if position >= 0:
                layout = Ragged((0, 1), (position + 1,), (row,), self.table_RM, torch.empty(0),
                                torch.empty(0), self.size)
                attend = prepare(layout, self.spec, backend="reference")
                out[b] = attend(q_BNH[b:b + 1], k_PKGH, v_PKGH, sinks_N)[0]
        return out


def plainly(monkeypatch: Any) -> None:
    """On a CPU: without Triton's kernels."""
    if where.DEVICE == "cuda":
        return
    monkeypatch.setattr(dense, "PagedDecode", Plain)


def as_a_device(engine: Any) -> Any:
    """Its rank launches ahead, draws for rows and finds what counts, as a CUDA device does."""
    rank = engine.rank
    if not rank._ahead:
        rank._ahead, old = True, rank._tokens
        rank._tokens = GpuSampler(old._sampler, rank._tables,
                             Draws(61, rank._tables.last_R.numel() - 1, torch.device("cpu"), "reference"))
        narrowing = rank._drafts.host
        narrowing._history, narrowing._forced = rank._tokens.history, rank._tokens.forced
        narrowing._beside = False
        narrowing._at_once = rank._drafts.at_once
    return engine


class Recomputed:
    """`Replays` on a CPU: a replay computes the step again, with what there is by then."""

    def __init__(self, model: Any, size: int = 1024, rows: int = 64):
        self.input = torch.zeros(size, dtype=torch.int32, device=where.DEVICE)
        self._logits_BV = torch.empty(rows, model.vocab_size, device=where.DEVICE)

    def write(self, size, fill):
        given = np.full(size, 99, dtype=np.int32)
        fill(given)
        self.input[:size] = torch.from_numpy(given)

    def record(self, step):
        logits_BV, answer_XB = step(self._logits_BV)

        def replay():
            found = step(self._logits_BV)
            assert found[0].data_ptr() == logits_BV.data_ptr()
            answer_XB.copy_(found[1])
        return SimpleNamespace(replay=replay), logits_BV, answer_XB


def recomputed(kind: type, rank: Any, draws: Any, *more: Any) -> Any:
    """Captured steps of this kind on a CPU. `used`: key of each that was replayed."""
    graphs = kind(rank._model, rank._tables, rank._attending, draws, Recomputed(rank._model), *more)
    with torch.inference_mode():
        graphs.capture()
    replay, graphs.used = graphs._replay, []

    def replayed(key, *of):
        logits_BV, answer_XB = replay(key, *of)
        graphs.used.append(key)
        return logits_BV, answer_XB.clone()         # a device's goes to the host before the next replay
    graphs._replay = replayed
    return graphs


def drafting(engine: Any, drafts: int) -> Any:
    """Its rank makes drafts as captured steps do, on a CPU under `plainly`."""
    rank = as_a_device(engine).rank
    if where.DEVICE == "cuda":
        return engine
    rows, max_len = rank._tables.last_R.numel() - 1, 64 * 16
    drafter, layer = rank._drafts.host._drafter, rank._drafts.layer
    ahead = Ahead((layer or drafter).on_device(rows, max_len, torch.device("cpu")), rank._tokens.history,
                  rank._tokens.simple, rank._drafts.at_once, rank._tables.index,
                  tp_size=1, beyond=rank._tokens.beyond,
                  keeps=layer is not None or bool(rank._attending.states))
    buckets = every((1, 2, rows), 1 + drafts, 32) if layer else widths(rows, 1 + drafts, 32)
    rank._drafts.captured(recomputed(DraftGraphs, rank, rank._tokens.draws, buckets, ahead))
    return engine


# How steps of rows that draft run: by a host that has all answers, by one that launches ahead of them, and
# captured, with drafts that the device makes.
WAYS = ("host", "launched", "captured")


def by(way: str, make: Callable[[], Any], drafts: int, monkeypatch: Any) -> Any:
    """The engine that `make` makes, whose steps run so, on whichever device."""
    whole = ranks.NUM[0] == 1
    if way == "host":
        if whole and where.DEVICE == "cuda":
            pytest.skip("a GPU launches ahead")
        return make()
    if not whole:
        pytest.skip("stages launch nothing ahead")
    plainly(monkeypatch)
    if way == "captured":
        return drafting(make(), drafts)
    monkeypatch.setattr(where, "captured", lambda rank, drafts: rank)
    return as_a_device(make())
