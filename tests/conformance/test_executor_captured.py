"""What a CUDA graph of hosted decode computes, step by step on a CPU: as steps that are not captured."""
from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import hosted
import on_a_device
import prompts_engine
import pytest
import torch
from drafters import Dice
from driven import PAGE
from hosted import NEW, Engine, hosted_work, kind, play, resident

from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Paused, RequestId, Spilled
from penstock.exec.graphs import capture, halves
from penstock.exec.graphs.capture import DecodeGraphs
from penstock.exec.load.sizing import groups_of
from penstock.exec.sparse import attending as sparse
from penstock.exec.sparse.layers import HOST
from penstock.kernels.attention.latent_attention import PagedContext

BUCKET = 5


class InTurn:
    """`Halves` without streams: one half after the other."""

    def run(self, queries, forward):
        return torch.cat([forward(part, SimpleNamespace(of=nullcontext)) for part in halves.halved(queries)])


@pytest.fixture
def captured(monkeypatch):
    on_a_device.plainly(monkeypatch)

    def put(engine):
        graphs = on_a_device.recomputed(DecodeGraphs, engine.rank, None, (BUCKET,))
        engine.rank._steps.insert(0, graphs)
        return engine, graphs
    return put


def kinds(graphs):
    return [kind for kind, *_ in graphs.used]


@pytest.mark.parametrize("name", ["bounds", "shared", "blocks"])
def test_rows_that_select_decode_as_without(captured, name, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [name])
    engine, graphs = captured(Engine(hbm_pages=70, step_tokens=100))
    play(engine, lambda turn: [(Paused, Spilled)[turn % 2](RequestId(1 + turn % 4))] if turn % 5 == 4 else ())
    hosted_work(engine)
    assert kinds(graphs).count("host") > NEW


def test_halves_of_a_step_decode_as_all_of_it(captured, monkeypatch):
    """Where a step misses much it is worth it, and no longer where all is found."""
    monkeypatch.setattr(hosted, "KIND", ["latent"])
    monkeypatch.setattr(capture, "Halves", InTurn)
    monkeypatch.setattr(sparse, "LEAST", BUCKET)
    engine, graphs = captured(Engine(hbm_pages=70, step_tokens=100))
    attending, wanted = engine.rank._attending, []
    play(engine, lambda turn: wanted.append(attending.halves()) or ())
    assert kinds(graphs).count(HOST) > NEW and {True, False} <= {*wanted} and graphs._halved > NEW / 2
    monkeypatch.undo()
    assert attending.may_halve(HOST, 16) and not (attending.may_halve(HOST, 8) or attending.may_halve("device", 16))
    attending.rows.missed_bytes = attending.weight_bytes // 64
    assert not attending.halves()


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_halves_are_recorded_in_turn(ends):
    """Up to their next copies, and one goes on alone when the other has ended, or failed."""
    turns, seen = halves.Turns(alone=False), []

    def half(i, copies):
        turns.begin(i)
        for n in range(copies):
            seen.append((i, n))
            turns.hand_over(i)
        turns.end(i)
    second = threading.Thread(target=half, args=(1, 2))
    second.start()
    half(0, ends)
    second.join(10)
    assert not second.is_alive()
    assert seen == [[(1, 0), (1, 1)], [(0, 0), (1, 0), (1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)]][ends]


@pytest.mark.parametrize("name", ["bounds", "latent"])
def test_answers_say_what_rows_have_read(captured, name, monkeypatch):
    """Those of captured steps as the others, whose counts come by themselves; of rows that other steps have
    moved, too, and of rows that are sampled late."""
    monkeypatch.setattr(hosted, "KIND", [name])
    found = []
    for put in (captured, lambda engine: (engine, None)):
        engine, _ = put(Engine(hbm_pages=70, step_tokens=100))
        told = []

        def script(turn, engine=engine, told=told):
            told.append({rid: engine.ex.kv_reads(rid) for rid in engine.ex._open})
            return [Paused(RequestId(1 + turn % 4))] if turn % 5 == 4 else ()
        engine.add(9, kind().prompts[1][:40], 30, presence_penalty=0.5)
        play(engine, script)
        found.append((told, engine.reads))
    assert found[0] == found[1] and sum(reads["hot_misses"] for reads in found[0][1].values()) > 0


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
def test_rows_of_mla_entries_without_an_indexer_decode_as_without(captured, kept, monkeypatch):
    """A query is given its row of the table and how far it sees, not a slot for each token that a row may have."""
    groups = groups_of(prompts_engine.model("mla"), None, KVConfig(kv_cache_dtype=kept))

    def launched(prompt, new, family):
        alone = prompts_engine.Engine(family=family, groups=groups)
        alone.add(1, prompt, new)
        alone.drain()
        return tuple(alone.got[1])
    if kept != "auto":
        monkeypatch.setattr(prompts_engine, "dense", launched)
    engine, graphs = captured(prompts_engine.Engine(family="mla", groups=groups, step_tokens=9, hbm_pages=22))
    latent, given = engine.rank._attending, []
    attend = latent.attend
    latent.attend = lambda q, pool, seen, **of: (given.append((seen, pool.dtype)), attend(q, pool, seen, **of))[1]
    prompts_engine.play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 9 == 8 else ())
    assert len(graphs.used) > 10 and sum(isinstance(seen, PagedContext) for seen, _ in given) > 20
    assert {dtype for _, dtype in given} == {torch.uint8 if kept == "fp8_e4m3" else torch.float32}


@pytest.mark.parametrize("name", ["bounds", "shared"])
def test_rows_that_read_all_beside_them(captured, name, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [name])
    engine, graphs = captured(Engine(hbm_pages=110, step_tokens=60))
    most, prompts = kind().budget, kind().prompts
    budgets = {1: most, 2: 0, 3: most - 2, 4: most}
    for rid, prompt in prompts.items():
        engine.add(rid, prompt, NEW, budgets[rid])
    engine.drain()
    hosted_work(engine)
    assert {"device", "host", "mixed"} == set(kinds(graphs))
    for rid, prompt in prompts.items():
        assert tuple(engine.got[rid]) == resident(prompt, NEW, budgets[rid]), rid


@pytest.mark.parametrize("name", [
    "bounds", "states", "shared", "latent", pytest.param("blocks", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("budgets", [1, 4])
def test_rows_that_draft_as_far_as_their_hot_buffers_hold_it(captured, budgets, name, monkeypatch):
    """All that a row's positions miss comes at once, and steps are launched ahead of answers."""
    monkeypatch.setattr(hosted, "KIND", [name])
    pages = kind().budget * budgets // PAGE + 1
    engine = Engine(hbm_pages=160, hot_pages=pages, draft_tokens=3, drafter=Dice(resident, 0.7), always=True,
                    step_tokens=200)
    on_a_device.drafting(engine, 3)
    play(engine)
    assert engine.total("hot_misses") > 0 and engine.total("hot_evictions") > 0
    proposed, right = (engine.total(f"spec_{what}_tokens_total") for what in ("draft", "accepted"))
    assert proposed == 0 if budgets == 1 else 0 < right < proposed
    assert engine.rank._launches["ahead"] > len(engine.plans) / 2


@pytest.mark.parametrize("name", ["bounds", "states", "latent"])
def test_rows_draft_whatever_they_like_where_hot_buffers_hold_all_of_them(captured, name, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [name])
    pages = kind().budget // PAGE + 1            # of less than two positions
    engine = Engine(hbm_pages=160, hot_pages=pages, draft_tokens=3, drafter=Dice(resident, 0.7), always=True,
                    step_tokens=200)
    on_a_device.drafting(engine, 3)
    for rid, prompt in kind().prompts.items():
        engine.add(rid, prompt[:pages * PAGE - 12], 13)
    engine.drain()
    for rid, prompt in kind().prompts.items():
        assert tuple(engine.got[rid]) == resident(prompt[:pages * PAGE - 12], 13), rid
    proposed, right = (engine.total(f"spec_{what}_tokens_total") for what in ("draft", "accepted"))
    assert engine.total("hot_misses") > 0 and 3 < right < proposed


def test_the_largest_budget_is_what_a_graph_has_room_for():
    assert Engine().rank._attending._selector.top_k == kind().budget // kind().selection.unit
