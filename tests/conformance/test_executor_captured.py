"""What a CUDA graph of hosted decode computes, step by step on a CPU: as steps that are not captured."""
from __future__ import annotations

import hosted
import pytest
import torch
from drafters import Dice, as_a_device
from driven import PAGE
from hosted import NEW, Engine, hosted_work, kind, play, resident

from penstock.core.plan import Paused, RequestId, Spilled
from penstock.exec.graphs.capture import DecodeGraphs, decode_step
from penstock.exec.graphs.drafts import DraftGraphs, draft_step
from penstock.exec.sparse import captured as selecting_graphs
from penstock.kernels.types.ragged import Ragged

BUCKET, WIDTH = 5, 4


class Plain:
    """`PagedDecode` without Triton: attention of the executor's own back-end, a row at a time."""

    def __init__(self, spec, table_RM, page_size, row_B, position_B):
        self.spec, self.table_RM, self.size = spec, table_RM, page_size
        self.row_B, self.position_B = row_B, position_B

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


class Eager(DecodeGraphs):
    """`DecodeGraphs` that computes each step when it runs, with rows of padding."""

    def __init__(self, rank):
        self._model, self._tables, self._decodes = rank._model, rank._tables, rank._attending.decodes(BUCKET)
        self._buckets, self.kinds = (BUCKET,), []

    def run(self, rows, positions):
        kind = self._decodes.kind(rows)
        self.kinds.append(kind)
        input_2B = torch.zeros(2, BUCKET, dtype=torch.int32)
        input_2B[1] = -1
        input_2B[:, :len(rows)] = torch.tensor([rows, positions])
        logits_BV, answer_2B = decode_step(self._model, self._tables, self._decodes, kind, input_2B)
        return logits_BV[:len(rows)], answer_2B


class EagerDrafts(DraftGraphs):
    """`DraftGraphs` that computes each step when it runs, with padding behind it."""

    def __init__(self, rank):
        self._model, self._tables, self._draws = rank._model, rank._tables, rank._tokens.draws
        self._buckets, self.widths = (4 * WIDTH + 1,), []
        self._decodes = rank._attending.decodes(*self._buckets)

    def run(self, rows, positions, ids, turns):
        kind = self._decodes.kind(rows)
        self.widths.append(max(turns) + 1)
        input_4B = torch.zeros(4, *self._buckets, dtype=torch.int32)
        input_4B[1] = -1
        input_4B[:, :len(rows)] = torch.tensor([rows, positions, ids, turns])
        logits_BV, answer_2B = draft_step(self._model, self._tables, self._decodes, kind, input_4B,
                                          self._draws, WIDTH)
        return logits_BV[:len(rows)], answer_2B


def slots(table_RM, size, row_B, at_B):
    """`triton_places.find` without a device."""
    if table_RM is None:
        return torch.full(at_B.shape, -1, dtype=torch.int64)
    page_B = table_RM[row_B, at_B.clamp_min(0) // size].long()
    return torch.where((at_B < 0) | (page_B < 0), -1, page_B * size + at_B % size)


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(selecting_graphs, "PagedDecode", Plain)
    monkeypatch.setattr(selecting_graphs, "_slots", slots)

    def put(engine):
        graphs = Eager(engine.rank)
        engine.rank._steps.insert(0, graphs)
        return engine, graphs
    return put


def test_rows_that_select_decode_as_without(captured):
    engine, graphs = captured(Engine(hbm_pages=70, step_tokens=100))
    play(engine, lambda turn: [(Paused, Spilled)[turn % 2](RequestId(1 + turn % 4))] if turn % 5 == 4 else ())
    hosted_work(engine)
    assert graphs.kinds.count("select") > NEW


def test_rows_that_read_all_beside_them(captured):
    engine, graphs = captured(Engine(hbm_pages=110, step_tokens=60))
    most, prompts = kind().budget, kind().prompts
    budgets = {1: most, 2: 0, 3: most - 2, 4: most}
    for rid, prompt in prompts.items():
        engine.add(rid, prompt, NEW, budgets[rid])
    engine.drain()
    hosted_work(engine)
    assert {"select", "mixed"} == set(graphs.kinds)
    for rid, prompt in prompts.items():
        assert tuple(engine.got[rid]) == resident(prompt, NEW, budgets[rid]), rid


@pytest.mark.parametrize("name", ["bounds", "latent"])
@pytest.mark.parametrize("budgets", [1, 4])
def test_rows_that_draft_as_far_as_their_hot_buffers_hold_it(captured, budgets, name, monkeypatch):
    """All that a row's positions miss comes at once."""
    monkeypatch.setattr(hosted, "KIND", [name])
    pages = kind().budget * budgets // PAGE + 1
    engine = as_a_device(Engine(hbm_pages=160, hot_pages=pages, draft_tokens=3, drafter=Dice(resident, 0.7),
                                always=True, step_tokens=200))
    engine.rank._steps.insert(0, graphs := EagerDrafts(engine.rank))
    play(engine)
    assert engine.total("hot_misses") > 0 and engine.total("hot_evictions") > 0
    proposed, right = (engine.total(f"spec_{what}_tokens_total") for what in ("draft", "accepted"))
    assert max(graphs.widths) == budgets
    assert proposed == 0 if budgets == 1 else 0 < right < proposed


def test_the_largest_budget_is_what_a_graph_has_room_for():
    assert Engine().rank._attending.decodes(1).most == kind().budget // kind().selection.unit
