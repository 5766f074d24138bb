"""Hosted decode equals resident decode, token for token, whatever happens to the request.

The hot buffer is the budget and a page, contexts are more than eight of them; NaN in every free page of
both tiers, disjoint ids. Each scene asserts that the slow path ran. Units of KV heads that bounds of their
keys chose, and MLA KV entries that a model's own indexer did, go through the same scenes.
"""
from __future__ import annotations

import random
from dataclasses import replace

import hosted
import pytest
import torch
import where
from hosted import LATENESS, NEW, Engine, hosted_work, kind, play, resident, resizing, sizes, text
from late_copies import Latest, Shuffled

from penstock.config.settings.tree import KVConfig
from penstock.core.plan import (
    NO_HBM,
    Aborted,
    Dropped,
    Flushed,
    HotUse,
    Paused,
    Promoted,
    RequestId,
    Spilled,
    StepId,
)
from penstock.exec.sparse import attending
from penstock.exec.sparse.rows import HotRows

pytestmark = pytest.mark.usefixtures("stages_swept", "kinds")
KINDS = {"bounds": "selecting", "latent": "latent"}         # as tools/cells.py names them
# Where a request says what it reads: with an indexer it is the model that does.
BY_REQUEST = pytest.mark.parametrize("kinds", ["bounds"], indirect=True)


@pytest.mark.covers(kind=KINDS, place="hosted")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [5, 16, 37, 200])
def test_prompts_longer_than_the_device_in_any_chunks(chunk, overlap):
    """A device of 24 pages has no room for a prompt of 33: windows of host pages, then hosted decode."""
    engine = Engine(step_tokens=chunk, overlap=overlap)
    play(engine)
    hosted_work(engine)
    assert engine.total("hot_window_pages") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("stages_swept", [1], indirect=True)
@pytest.mark.parametrize("kinds", ["latent"], indirect=True)
def test_captured_halves_of_a_step_decode_as_all_of_it(monkeypatch):
    monkeypatch.setattr(attending, "LEAST", 2)
    monkeypatch.setattr(attending, "LINK_SHARE", 1 << 40)
    engine = Engine(hbm_pages=70, step_tokens=100)
    play(engine, lambda turn: [(Paused, Spilled)[turn % 2](RequestId(1 + turn % 4))] if turn % 5 == 4 else ())
    hosted_work(engine)
    assert engine.ex.stats()["executor_halved_steps_total"] > NEW


@pytest.mark.covers(kind=KINDS, place="resident hosted", feature="tier")
@pytest.mark.parametrize("lateness", LATENESS)
@pytest.mark.parametrize("pages", [60, 110])
def test_rows_that_outgrow_the_device_spill(pages, lateness):
    """Some decode from device pages, some from the host, in one step; copies come as they may."""
    engine = Engine(hbm_pages=pages, step_tokens=150, lateness=LATENESS[lateness]())
    play(engine, arrive=lambda rid: 0)
    hosted_work(engine)


@BY_REQUEST
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bfloat16"])
def test_bounds_of_other_types_on_both_tiers_with_pauses(dtype, monkeypatch):
    """Tokens are those of a device that holds all with bounds of the same type."""
    monkeypatch.setattr(hosted, "FORMAT", [KVConfig(sparse_metadata_dtype=dtype)])
    engine = Engine(hbm_pages=60, step_tokens=150, lateness=LATENESS["shuffled"]())
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 60 else (),
         arrive=lambda rid: 0)
    hosted_work(engine)
    kv, bounds = (pool.layout for pool in engine.device[:2])
    wide = {"fp8_e4m3": kv.head_dim + 4, "bfloat16": 2 * kv.head_dim}[dtype]
    vectors = bounds.num_layers * bounds.num_kv_heads * 2 * bounds.page_size // bounds.unit
    assert bounds.page_bytes == vectors * wide


@pytest.mark.parametrize("step", range(3, 20, 2))
def test_a_spill_at_any_step(step):
    """Two of three that fit: what is asked for moves, and comes back later. A newcomer takes the room."""
    engine = Engine(hbm_pages=145, step_tokens=200)
    play(engine, lambda turn: [Spilled(RequestId(1)), Spilled(RequestId(3))] if turn == step else
         [Promoted(RequestId(1))] if turn == step + 6 else (), arrive=lambda rid: (rid == 4) * (step + 1))
    assert engine.core.stats()["spills"] >= 1
    hosted_work(engine)


@pytest.mark.usefixtures("told_each_step")
@pytest.mark.parametrize("lateness", ["latest", "torn"])
@pytest.mark.parametrize("every", [2, 5])
def test_hot_buffers_of_another_size_at_every_step(every, lateness):
    """They grow while pages lie idle, and lose it all again."""
    engine = Engine(hbm_pages=2 * kind().device + 42, hot_pages_max=3 * kind().hot_pages, step_tokens=150,
                    always=True, lateness=LATENESS[lateness]())
    play(engine, resizing(engine, every))
    hosted_work(engine)
    # Windows take a share of the pool: there is less to grow into.
    assert len(sizes(engine)) > (6 if "sliding_window" in kind().config else 12)
    assert min(sizes(engine)) == kind().hot_pages < max(sizes(engine))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_told_of_misses_changes_sizes_and_no_token(seed):
    """Late, made up, absurd, of somebody else, or nothing at all for a while."""
    rng = random.Random(seed)

    def lie(turn):
        def counts():
            return RequestId(rng.randrange(6)), rng.randrange(-5, 100), rng.randrange(-5, 100)
        return [HotUse(StepId(rng.choice((0, 1, max(0, turn - 30), turn, 10**9))),
                       tuple([counts() for _ in range(rng.randrange(5))]))] if rng.random() < 0.6 else ()
    engine = Engine(hbm_pages=2 * kind().device + 42, hot_pages_max=3 * kind().hot_pages, step_tokens=150)
    play(engine, lie)
    hosted_work(engine)
    # MLA KV entries find what they miss in one step or two.
    assert len({*sizes(engine)}) > (1 if kind().selection.native else 2)


@pytest.mark.usefixtures("told_each_step")
def test_a_grown_hot_buffer_gives_way_to_whoever_needs_pages():
    """One row has the device to itself, until others come."""
    engine = Engine(hbm_pages=44, hot_pages_max=4 * kind().hot_pages, step_tokens=150)
    play(engine, arrive=lambda rid: 0 if rid == 1 else 14)
    hosted_work(engine)
    grown = [size for size in sizes(engine) if size > kind().hot_pages]
    assert grown and min(sizes(engine)) < max(grown)


@pytest.mark.covers(kind=KINDS, place="resident hosted", feature="paused")
@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("kind", [Paused, Dropped, Spilled, Promoted])
def test_pauses_drops_and_moves_of_anyone_every_few_steps(kind, every):
    engine = Engine(step_tokens=100, hbm_pages=70, lateness=Latest())
    play(engine, lambda turn: [kind(RequestId(1 + turn % 4))] if turn % every == 0 and turn < 90 else ())
    hosted_work(engine)
    stats = engine.core.stats()
    assert {Paused: stats["pauses"], Dropped: stats["drops"]}.get(kind, 1) >= 1


def test_an_abort_at_every_step_leaves_nothing_behind():
    for step in range(2, 38, 5):
        engine = Engine(step_tokens=100, lateness=Shuffled(step))
        play(engine, lambda turn, step=step: [Aborted(RequestId(2))] if turn == step else (),
             prompts={r: kind().prompts[r] for r in (1, 2)}, arrive=lambda rid: 0, aborts=(2,))


@pytest.mark.parametrize("lateness", ["latest", "torn"])
def test_a_full_host_delays_and_changes_nothing(lateness):
    """Host pages for one context and a half: requests wait, pause or are computed again."""
    engine = Engine(dram_pages=60, lateness=LATENESS[lateness]())
    play(engine, arrive=lambda rid: 0)
    hosted_work(engine)


@pytest.mark.covers(kind=KINDS, place="resident hosted", feature="cache")
def test_a_prefix_found_in_either_tier_is_shared():
    """A prompt is computed densely: its pages serve all, whoever selects and who does not. What decode wrote
    while it selected serves no prompt: the next turn computes it again. With an indexer prompts and outputs
    are computed alike, and all pages serve all."""
    engine = Engine(hbm_pages=80, step_tokens=100, lateness=Latest())
    first = kind().prompts[1]
    engine.add(1, first, NEW)
    engine.drain()
    engine.add(2, (*first, 5, 9), NEW)
    engine.drain()
    assert engine.started[2].hbm_tokens + engine.started[2].dram_tokens >= 128
    turns = (*first, *engine.got[1], 7)
    engine.add(3, turns, 8)
    dense = None if engine.selection.native else 0
    engine.add(4, turns, 8, dense)
    engine.drain()
    found = {r: engine.started[r].hbm_tokens + engine.started[r].dram_tokens for r in (3, 4)}
    assert all(128 <= n and (n <= len(first)) is (dense == 0) for n in found.values())
    assert tuple(engine.got[2]) == resident((*first, 5, 9), NEW)
    alone = Engine(hbm_pages=200, dram_pages=0, hot_pages=0)
    alone.add(1, first, NEW)
    alone.drain()
    alone.add(3, turns, 8)
    alone.drain()
    assert alone.got[3] == engine.got[3]
    assert tuple(engine.got[4]) == resident(turns, 8, dense)
    engine.inbox.append(Flushed())
    engine.drain()


def test_a_bind_of_a_used_row_waits_for_no_device(monkeypatch):
    """What it has counted for others comes with answers; a scrape waits once, however many rows there are."""
    waits, seen = [], {"bind": [], "stats": []}
    for name in ("cpu", "item", "tolist"):
        right = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, right=right: (waits.append(self), right(self))[1])

    def watched(name, run):
        def call(*given, **more):
            waits.clear()
            strict = where.DEVICE == "cuda" and name == "bind"
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            found = run(*given, **more)
            if strict:
                torch.cuda.set_sync_debug_mode("default")
            seen[name].append(len(waits))
            return found
        return call
    for name in seen:
        monkeypatch.setattr(HotRows, name, watched(name, getattr(HotRows, name)))
    engine = Engine(step_tokens=100)
    for rid in range(5):
        engine.add(rid, kind().prompts[1 + rid % 4], NEW)
        engine.drain()
    assert 0 < sum(reads["hot_misses"] for reads in engine.reads.values()) == engine.total("hot_misses")
    assert len(seen["bind"]) >= 5 and max(seen["bind"]) == 0 and max(seen["stats"]) == 1


def test_always_hosts_what_would_fit():
    engine = Engine(hbm_pages=260, always=True)
    play(engine)
    hosted_work(engine)
    pages = [page for plan in engine.plans for b in plan.binds for page in b.pages[0]]
    assert pages and NO_HBM in pages


@BY_REQUEST
def test_dense_requests_beside_those_that_select():
    """One step has all kinds of rows. Dense ones never leave the device, and lose nothing."""
    engine = Engine(hbm_pages=110, step_tokens=60)
    for rid, prompt in kind().prompts.items():
        engine.add(rid, prompt, NEW, budget=0 if rid == 2 else None)
    engine.drain()
    hosted_work(engine)
    assert tuple(engine.got[2]) == resident(kind().prompts[2], NEW, 0)
    assert not engine.reads[2] and engine.reads[1]["hot_misses"] > 0
    for rid in (1, 3, 4):
        assert tuple(engine.got[rid]) == resident(kind().prompts[rid], NEW)


@BY_REQUEST
def test_dense_layers_stay_on_the_device_while_the_others_are_hosted():
    """The layer in the middle reads all of its KV, from device pages of a group of its own."""
    chosen = replace(kind().selection, dense=(1,))
    alone = Engine(hbm_pages=400, dram_pages=0, hot_pages=0, overlap=False, selection=chosen)
    engine = Engine(hbm_pages=110, step_tokens=50, selection=chosen, lateness=Latest())
    for e in (alone, engine):
        for rid, prompt in kind().prompts.items():
            e.add(rid, prompt, NEW, budget=0 if rid == 2 else None)
        for turn in range(60):
            e.inbox += [Paused(RequestId(1 + turn % 4))] if e is engine and turn % 9 == 8 else []
            e.turn()
        e.drain()
    hosted_work(engine)
    assert engine.got == alone.got and alone.total("hot_misses") == 0 < alone.total("selected_device")
    assert {name for name in engine.ex.stats() if name.startswith("hot_misses")} == {
        f'hot_misses_total{{layer="{layer}"}}' for layer in (0, 2)}
    assert any(tuple(engine.got[rid]) != resident(kind().prompts[rid], NEW) for rid in (1, 3, 4))
    assert tuple(engine.got[2]) == resident(kind().prompts[2], NEW, 0)


@pytest.mark.covers(kind="selecting", place="resident hosted")
@BY_REQUEST
def test_budgets_differ_by_request():
    engine = Engine()
    for rid, budget in ((1, 8), (2, 10), (3, 12)):
        engine.add(rid, kind().prompts[rid], NEW, budget)
    engine.drain()
    for rid, budget in ((1, 8), (2, 10), (3, 12)):
        assert tuple(engine.got[rid]) == resident(kind().prompts[rid], NEW, budget)


def test_a_budget_of_everything_is_dense():
    """With every unit chosen, hosted or not, the tokens are those of a request that reads all."""
    prompt, whole = text(9, 90), 120
    engine = Engine(hbm_pages=70, dram_pages=200, hot_pages=31, always=True,
                    selection=replace(kind().selection, budget=whole))
    engine.add(1, prompt, 20, whole)
    engine.drain()
    assert engine.total("hot_misses") > 0
    assert tuple(engine.got[1]) == resident(prompt, 20, 0)


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.0, "seed": 3}, {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "presence_penalty": 1.0}])
def test_sampling_does_not_depend_on_where_kv_is(sampling):
    alone = Engine(hbm_pages=200, dram_pages=0, hot_pages=0)
    engine = Engine(step_tokens=33, lateness=Latest())
    for e in (alone, engine):
        e.add(1, kind().prompts[1], NEW, **sampling)
        for turn in range(60):
            e.inbox += [Paused(RequestId(1))] if turn % 7 == 6 else []
            e.turn()
        e.drain()
    assert alone.got == engine.got and engine.total("hot_misses") > 0


def test_a_host_page_that_is_zeroed_shows():
    """What is on the host is read: other bytes there are other tokens."""
    engine = Engine(always=True)
    engine.add(1, kind().prompts[1], NEW)
    while not engine.got[1]:
        engine.turn()
    engine.host[0].pages.nan_to_num_(0.0).zero_()
    engine.drain()
    assert tuple(engine.got[1]) != resident(kind().prompts[1], NEW)


def test_recomputed_outputs_select_again():
    """Dropped rows compute their outputs as a chunk: each position selects by itself, hosted one by one."""
    engine = Engine(step_tokens=200, hbm_pages=30)
    play(engine, lambda turn: [Dropped(RequestId(1))] if turn in (12, 20, 26) else (),
         prompts={1: kind().prompts[1]})
    assert engine.core.stats()["drops"] >= 2
    chunks = [count for plan in engine.plans for start, count in zip(plan.start, plan.count, strict=True)
              if start + count > len(kind().prompts[1]) + 1]
    assert max(chunks) > 3
