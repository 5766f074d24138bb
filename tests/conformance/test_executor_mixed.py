"""What a captured step with prompts computes: step by step on a CPU, in graphs on a device, as launched ones.

Stand-ins for flash-attn-4, which takes no float32, and on a CPU for Triton.
"""
from __future__ import annotations

import hosted
import numpy as np
import on_a_device
import pytest
import torch
import where
from prompts_engine import PROMPTS, Engine, dense, play

from penstock.core import schedule
from penstock.core.plan import Aborted, Paused, RequestId, Row, StepId, StepPlan
from penstock.exec.graphs import mixed
from penstock.exec.graphs.mixed import MixedGraphs
from penstock.exec.graphs.steps import WHY, cause, uncaptured
from penstock.exec.step.step_batch import MIXED, StepBatch, pad, parts, sizes
from penstock.kernels.attention.paged_attention import flash, triton_decode


def attend(q_TNH, k_PGKH, v_PGKH, *, scale, max_query, max_key, start_B1, context_B, table_BM):
    """Every token over all that its row's table holds, what it may not see masked: capturable."""
    tokens, heads = len(q_TNH), k_PGKH.shape[2]
    t = torch.arange(tokens, device=q_TNH.device)
    row_T = (t[:, None] >= start_B1[None, 1:]).sum(1)
    inside_T = row_T < len(context_B)
    row_T = row_T.clamp(max=len(context_B) - 1)
    last_T = context_B[row_T] - start_B1[row_T + 1] + t          # position of the token
    k_BSKH, v_BSKH = (x[table_BM.long()].flatten(1, 2) for x in (k_PGKH, v_PGKH))
    seen_TS = (torch.arange(k_BSKH.shape[1], device=q_TNH.device) <= last_T[:, None]) & inside_T[:, None]
    k, v = (x.nan_to_num(0)[row_T].repeat_interleave(q_TNH.shape[1] // heads, 2) for x in (k_BSKH, v_BSKH))
    scores = torch.einsum("tnh,tsnh->tns", q_TNH, k) * scale
    scores = scores.masked_fill(~seen_TS[:, None], -1e30)
    return torch.einsum("tns,tsnh->tnh", scores.softmax(-1), v)


def write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, table_RP, row_T, position_T):
    at = position_T >= 0
    size = k_PKGH.shape[2]
    row, position = row_T[at].long(), position_T[at].long()
    page = table_RP[row, position // size].long()
    k_PKGH[page, :, position % size], v_PKGH[page, :, position % size] = k_TKH[at], v_TKH[at]


def decode(q_BNH, k_PKGH, v_PKGH, table_RP, row_B, context_B, *, spec, cut, sinks_N):
    assert sinks_N is None
    start = torch.arange(len(q_BNH) + 1, dtype=torch.int32)
    out = attend(q_BNH, k_PKGH.transpose(1, 2), v_PKGH.transpose(1, 2), scale=spec.scale, max_query=1,
                 max_key=0, start_B1=start, context_B=context_B.clamp(min=1),
                 table_BM=table_RP[row_B.long()].clamp_min(0))
    return out * (context_B > 0)[:, None, None]


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(flash, "attend", attend)
    monkeypatch.setattr(flash, "ready", lambda *_: True)
    monkeypatch.setattr(mixed, "TOKENS", (4, 8, 64))
    monkeypatch.setattr(mixed, "ROWS", (2,))
    if where.DEVICE == "cpu":
        monkeypatch.setattr(triton_decode, "write_kv", write_kv)
        monkeypatch.setattr(triton_decode, "decode", decode)

    def put(engine):
        [rank] = engine.ex._ranks
        if where.DEVICE == "cpu":
            rank._steps.insert(0, on_a_device.recomputed(MixedGraphs, rank, None, rank._tables.last_R.numel() - 1))
        [graphs] = [way for way in rank._steps if isinstance(way, MixedGraphs)]
        replay, graphs.replayed = graphs._replay, set()
        graphs._replay = lambda key, *of: (graphs.replayed.add(key), replay(key, *of))[1]
        return engine, graphs
    return put


@pytest.mark.parametrize("chunk", [2, 3, 7, 64])
def test_mixed_batches_of_any_chunk(chunk, captured):
    engine, graphs = captured(Engine(step_tokens=chunk))
    play(engine)
    assert set(graphs._graphs) == {(t, r) for t in (4, 8, 64) for r in (2, 4)}
    assert len(graphs.replayed) > (0 if chunk < 4 else 2) and not graphs.launched


def test_several_unfinished_prompts_in_a_captured_step(captured, monkeypatch):
    """Short ones that take 2 of 8 tokens behind a long one."""
    monkeypatch.setattr(schedule, "SHORT_PART", 0.6)
    engine, graphs = captured(Engine(step_tokens=8, rows=6, hbm_pages=120))
    long = tuple((5 * i * i + 3 * i) % 61 for i in range(48))
    engine.add(1, long, 8)
    engine.turn()
    for rid in (2, 4, 7):
        engine.add(rid, PROMPTS[rid], 8)
    engine.drain()
    assert all(tuple(engine.got[rid]) == dense(PROMPTS[rid] if rid > 1 else long, 8) for rid in engine.got)
    ends = {1: 48, **{rid: len(PROMPTS[rid]) for rid in (2, 4, 7)}}
    assert max(sum(at + n < ends[rid] for rid, at, n in zip(plan.rids, plan.start, plan.count, strict=True))
               for plan in engine.plans) >= 2
    assert graphs.replayed and not graphs.launched


def test_pauses_aborts_and_binds_between_replays(captured):
    engine, graphs = captured(Engine(hbm_pages=22, step_tokens=9))
    turns = {turn: Paused(RequestId(rid)) for turn, rid in ((5, 1), (9, 4), (13, 7), (17, 2))}
    play(engine, lambda turn: [turns[turn]] if turn in turns else ())
    assert engine.ex.stats()["executor_sampled_tokens_total"] and graphs.replayed
    engine.add(90, PROMPTS[7], 12)
    engine.turn()
    engine.inbox.append(Aborted(RequestId(90)))
    engine.add(91, PROMPTS[4], 12)
    engine.drain()
    assert tuple(engine.got[91]) == dense(PROMPTS[4], 12)


def test_what_waits_for_copies_or_is_too_large_is_launched_and_counted(captured, monkeypatch):
    monkeypatch.setattr(mixed, "TOKENS", (4, 8))
    engine, graphs = captured(Engine(step_tokens=64, wait_pages=8, hbm_pages=11))
    play(engine)
    engine.add(90, PROMPTS[7], 3)
    engine.drain()
    assert graphs.launched["tokens"] > 0
    if engine.waited:
        assert graphs.launched["waits"] > 0
    assert any("executor_launched_total" in name for name in engine.ex.stats())


LEFT = {        # by cause: an engine whose steps it leaves, and what they are
    "drafts": (lambda: Engine(family="mtp", draft_tokens=3), "prompts, as a layer drafts behind each step"),
    "latent": (lambda: Engine(family="mla"), "prompts, as layers are MLA"),
    "selects": (hosted.Engine, "prompts, as requests select what they read"),
    "states": (lambda: Engine(family="state"), "prompts, as layers keep a state"),
    "backend": (Engine, "prompts, as one call cannot read pages of this model"),
}


@pytest.mark.parametrize("name", LEFT)
def test_each_cause_says_which_steps_are_not_captured_and_why(name, monkeypatch):
    """Once steps are captured; and as many are launched as the counter says."""
    make, why = LEFT[name]
    on_a_device.plainly(monkeypatch)
    engine, ahead = make(), None
    if name == "drafts":
        on_a_device.drafting(engine, 3)
        ahead = engine.rank._drafts.graphs.ahead
    engine.rank._eager.cause = ""
    assert engine.rank.uncaptured == "" and WHY.keys() - LEFT.keys() == {"off", "stages", "shared", "layer", "fp8"}
    assert cause(engine.rank._attending, ahead) == name
    engine.rank._eager.cause = name
    assert engine.rank.uncaptured == why and why.startswith("prompts, as ")
    engine.add(1, PROMPTS[4], 1)
    engine.drain()
    assert engine.ex.stats()[f'executor_launched_total{{cause="{name}"}}'] == len([p for p in engine.plans if p.rows])


def test_what_is_told_of_all_ranks():
    def told(ranks, graphs=True, alone=True):
        return uncaptured(ranks, graphs=graphs, alone=alone)
    assert told(["", ""]) == "" and told([WHY["latent"]] * 2) == WHY["latent"]
    assert told(["", WHY["backend"]]) == f"rank 0: none; rank 1: {WHY['backend']}"
    assert told(["", ""], graphs=False) == "all, as --no-cuda-graphs says"
    assert told(["", ""], alone=False) == "all, as ranks share a GPU"


def short_of(lacking, graphs, monkeypatch):
    """Captured again, with too little memory for the buckets that it is asked of."""
    def record(self, key, names, bucket, step):
        if lacking(*bucket):
            raise torch.OutOfMemoryError("a small device")
        return real(self, key, names, bucket, step)

    real = type(graphs)._record
    graphs._graphs.clear()
    monkeypatch.setattr(type(graphs), "_record", record)
    with torch.inference_mode():
        graphs.capture()


def test_a_bucket_that_was_not_captured_is_replayed_in_a_larger_one(captured, monkeypatch):
    engine, graphs = captured(Engine(step_tokens=7))
    short_of(lambda tokens, rows: tokens == 8, graphs, monkeypatch)
    play(engine)
    assert not graphs.launched and {tokens for tokens, _ in graphs.replayed} == {4, 64}


def test_what_no_bucket_has_room_for_is_launched_and_counted(captured, monkeypatch):
    engine, graphs = captured(Engine(step_tokens=7))
    short_of(lambda tokens, rows: tokens > 4, graphs, monkeypatch)
    play(engine)
    assert graphs.launched["memory"] > 0 and {tokens for tokens, _ in graphs.replayed} == {4}


def test_buckets_are_captured_for_so_long_the_largest_first(captured):
    _, graphs = captured(Engine())
    graphs._graphs.clear()
    graphs._seconds = 0
    with torch.inference_mode():
        graphs.capture()
    assert set(graphs._graphs) == {(64, 4)}


def test_the_layout_of_a_step():
    plan = StepPlan(step=StepId(1), rows=(Row(5), Row(3), Row(4)), rids=(RequestId(1),) * 3, start=(6, 0, 2),
                    count=(1, 3, 2), samples=(True, False, True), tokens=(-1, 11, 12, 13, 14, 15), grows=(),
                    moves=(), binds=())
    bucket, values = (8, 4), np.full(sum(sizes(MIXED, (8, 4))), 99, dtype=np.int32)
    pad(StepBatch.of(plan, int).mixed, bucket, values)
    given = parts(torch.from_numpy(values), MIXED, bucket)
    assert {name: given[name].tolist() for name in MIXED} == {
        "id_T": [-1, 11, 12, 13, 14, 15, 0, 0], "row_T": [5, 3, 3, 3, 4, 4, 0, 0],
        "position_T": [6, 0, 1, 2, 2, 3, -1, -1], "decode_T": [0, -1, -1, -1, -1, -1, -1, -1],
        "row_B": [5, 3, 4, 0], "context_B": [1, 3, 4, 1], "start_B1": [0, 1, 4, 6, 6],
        "at_D": [0, 0, 0, 0], "row_D": [5, 0, 0, 0], "context_D": [7, 0, 0, 0],
        "at_S": [0, 5, 0, 0], "row_S": [5, 4, 0, 0], "position_S": [6, 3, -1, -1]}
