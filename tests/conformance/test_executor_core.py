"""The real core drives the executor: tokens equal a dense recompute under every schedule.

Small pools force pauses and drops; copies come as late as their fences permit, out of order or
torn. Free pages are filled with NaN at every turn and ids are disjoint, so a wrong page shows.
"""
from __future__ import annotations

from itertools import product

import pytest
import torch
import where
from dense_attend import Dense
from late_copies import Latest, Shuffled
from prompts_engine import BACKENDS, CONFIGS, PROMPTS, SHARED, SMALL, THREE, Engine, dense, model, play

from penstock.config.request.params import SamplingParams
from penstock.core.plan import (
    Aborted,
    Dropped,
    Outcome,
    Paused,
    RequestId,
    Retired,
)
from penstock.exec.step.latent import Latent
from penstock.memory.lateness import Promptly

LATENESS = {"thread": lambda: None, "prompt": Promptly, "latest": Latest,
            "shuffled": lambda: Shuffled(1), "torn": lambda: Shuffled(2, torn=0.3)}


pytestmark = pytest.mark.usefixtures("stages")
FAMILIES = {"grouped": "ordinary", "latent": "latent", "state": "states"}       # as tools/cells.py names them


def thinned(*axes):
    """Cases of these axes for each family; of all but the first family every second one is for a long run, so
    that what is left has each pair of values. Those with sinks and experts take long: for the sweep."""
    cases = []
    for *at, (i, family) in product(*map(enumerate, axes), enumerate(CONFIGS)):
        odd = i > 0 and sum(n for n, _ in at) % 2 != i % 2
        marks = [pytest.mark.soak] if odd else [pytest.mark.sweep] * (family == "sinks")
        cases.append(pytest.param(*(value for _, value in at), family, marks=marks))
    return cases


@pytest.mark.covers(kind=FAMILIES)
@pytest.mark.parametrize("chunk, overlap, family", thinned([1, 2, 3, 7, 64], [False, True]))
def test_any_chunk_size_in_mixed_batches(chunk, overlap, family):
    engine = Engine(step_tokens=chunk, overlap=overlap, family=family)
    play(engine)
    assert engine.ex.stats()["executor_sampled_tokens_total"] >= 12 * len(PROMPTS)


@pytest.mark.covers(kind=FAMILIES, feature="tier")
@pytest.mark.parametrize("chunk, overlap, lateness, family", thinned([3, 64], [False, True], LATENESS))
def test_a_device_pool_that_is_too_small(chunk, overlap, lateness, family):
    """Rows outgrow the pool, so requests pause through host pages and resume."""
    engine = Engine(step_tokens=chunk, overlap=overlap, hbm_pages=SMALL[family],
                    lateness=LATENESS[lateness](), family=family)
    play(engine)
    assert engine.core.stats()["pauses"] >= 1
    assert {m.ok for m in engine.moved} == ({True, False} if lateness == "torn" else {True})


@pytest.mark.parametrize("chunk, lateness, family", thinned([3, 64], LATENESS))
def test_steps_that_wait_for_their_loads(chunk, lateness, family):
    """A row that comes back computes in the step that carries its loads, or the next; a load that fails there
    spoils what was computed, and nothing else."""
    engine = Engine(step_tokens=chunk, hbm_pages=SMALL[family], wait_pages=1000,
                    lateness=LATENESS[lateness](), family=family)
    play(engine)
    if (family, lateness) != ("gemma4", "latest"):      # whose windows are given back before anybody has to pause
        assert engine.core.stats()["pauses"] >= 1 and engine.waited >= 1
    assert {m.ok for m in engine.moved} == ({True, False} if lateness == "torn" else {True})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dram_pages", [0, 2])
def test_drops_recompute_when_the_host_has_no_room(dram_pages, family):
    engine = Engine(hbm_pages=SMALL[family], dram_pages=dram_pages, family=family)
    play(engine)
    assert engine.core.stats()["drops"] >= 1


@pytest.mark.covers(kind=FAMILIES, feature="paused")
@pytest.mark.parametrize("kind, lateness, family", thinned([Paused, Dropped], LATENESS))
def test_pause_or_drop_of_anyone_at_any_moment(kind, lateness, family):
    engine = Engine(step_tokens=5, lateness=LATENESS[lateness](), family=family)
    play(engine, lambda turn: [kind(RequestId(1 + turn % 7))] if turn % 3 == 0 else [])
    # How many find their request running depends on when a thread's copies land.
    least = 1 if lateness == "thread" else 5
    assert engine.core.stats()["pauses" if kind is Paused else "drops"] >= least


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lateness", ["latest", "shuffled", "torn"])
def test_steps_launched_ahead_of_the_answers_of_those_in_front(lateness, family, stages):
    """As a CUDA device is given them: rows pause, resume and are bound anew while steps are in flight."""
    if stages > 1:
        pytest.skip("only a whole model is launched ahead")
    engine = Engine(step_tokens=5, hbm_pages=SMALL[family] + 2, lateness=LATENESS[lateness](), family=family)
    [rank] = engine.ex._ranks
    launch, flying = rank._launch, []
    rank._ahead = True
    rank._launch = lambda plan: (launch(plan), flying.append((len(rank._flights), len(plan.binds))))
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 5 == 0 else [])
    assert engine.core.stats()["pauses"] >= 1
    ahead = [binds for flights, binds in flying if flights == 2]
    assert len(ahead) > 20 and any(ahead) and max(flying)[0] == 2


@pytest.mark.parametrize("family, backend", [
    *(("grouped", name) for name in BACKENDS), *(("window", name) for name in BACKENDS),
    *(("sinks", name) for name in BACKENDS), ("latent", "c"),
    ("mla", "c")])
def test_every_attention_back_end(backend, family):
    engine = Engine(step_tokens=7, hbm_pages=SMALL[family] + 3, backend=backend, family=family)
    play(engine, lambda turn: [Paused(RequestId(1))] if turn == 9 else [])


def test_latent_rows_are_named_a_part_of_the_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(Latent, "SLOTS", 50)
    play(Engine(step_tokens=16, family="mla"))


@pytest.mark.parametrize("lateness", ["thread", "torn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_share_slabs(backend, lateness, stages):
    """Pages of one group lie where another's were, at strides that are larger than they are. A stage may
    have no layer of a group, or some."""
    engine = Engine(step_tokens=7, hbm_pages=28, backend=backend, lateness=LATENESS[lateness](),
                    groups=THREE)
    strides = {pool.layout.page_bytes: pool.pages.stride(0) * 4 for pool in (*engine.device, *engine.host)}
    assert strides == ({512: 512, 112: 128} if stages == 1 else {512: 512, 0: 512, 56: 128})
    play(engine, lambda turn: [Paused(RequestId(1))] if turn == 9 else [])
    stats = engine.ex.stats()
    assert engine.core.stats()["pauses"] >= 1
    assert all(stats[f'moved_bytes_total{{src="hbm",dst="dram",group="{g.name}"}}'] for g in THREE)


@pytest.mark.covers(feature="cache")
def test_a_prefix_hit_in_either_tier_changes_no_token():
    engine = Engine(hbm_pages=12, lateness=Latest())
    for rid, prompt in ((1, SHARED * 2), (2, SHARED * 2), (3, PROMPTS[5] * 8), (4, SHARED * 2)):
        engine.add(rid, prompt, 10)
        engine.drain()
        assert tuple(engine.got[rid]) == dense(prompt, 10)
    assert engine.started[2].hbm_tokens == 20
    assert engine.started[3].hbm_tokens == engine.started[3].dram_tokens == 0
    assert engine.started[4].dram_tokens > 0


@pytest.mark.covers(kind="experts", feature="tier cache paused")
@pytest.mark.parametrize("lateness", ["latest", "torn"])
def test_experts_on_a_device_that_is_too_small(lateness):
    """Pauses, asked for and needed, and prefixes found in either tier."""
    engine = Engine(step_tokens=5, hbm_pages=SMALL["experts"], lateness=LATENESS[lateness](),
                    family="experts")
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 3 == 0 else [])
    assert engine.core.stats()["pauses"] >= 3
    assert any(started.hbm_tokens + started.dram_tokens for started in engine.started.values())
    assert {m.ok for m in engine.moved} == ({True, False} if lateness == "torn" else {True})


def test_sampling_does_not_depend_on_the_schedule():
    """Seeded and penalised requests: alone in a large pool, or squeezed, paused and dropped."""
    kinds = [SamplingParams(seed=3), SamplingParams(seed=4, top_p=0.8, presence_penalty=1.0),
             SamplingParams(seed=-1, temperature=2.0, frequency_penalty=0.5, top_k=20),
             SamplingParams(seed=3, temperature=1.5, repetition_penalty=1.3, min_p=0.02),
             SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=2)]
    alone = []
    for i, params in enumerate(kinds):
        engine = Engine(overlap=False)
        engine.add(1, PROMPTS[i + 1], 20, params)
        engine.drain()
        alone.append(engine.got[1])
    assert all(len(set(tokens)) > 4 for tokens in alone)
    for chunk, kind, lateness in ((3, Paused, Latest()), (64, Dropped, Shuffled(3, torn=0.2))):
        engine = Engine(step_tokens=chunk, hbm_pages=22, lateness=lateness)
        for i, params in enumerate(kinds):
            engine.add(i, PROMPTS[i + 1], 20, params)
        for turn in range(60):
            engine.inbox += [kind(RequestId(turn % 5))] if turn % 4 == 0 else []
            engine.turn()
        engine.drain()
        assert engine.core.stats()["pauses"] + engine.core.stats()["drops"] >= 5
        assert list(engine.got.values()) == alone


def logprobs_of(tokens: tuple[int, ...], given: int) -> list[float]:
    """Of each token from `given` on after those before it, in one pass over all."""
    with torch.inference_mode():
        hidden = model().forward(*where.sequence(tokens), Dense(model().reads))
        all_TV = model().logits(hidden).log_softmax(-1)
    return [float(all_TV[i - 1, tokens[i]]) for i in range(given, len(tokens))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [None, Paused, Dropped])
def test_forced_tokens_have_the_logprobs_of_one_pass_over_them(kind, overlap):
    """Teacher forcing, whatever happens to the row; what comes after it is the model's own."""
    engine = Engine(step_tokens=5, overlap=overlap, hbm_pages=22)
    forced = {rid: tuple((rid * 7 + i * i) % 61 for i in range(16)) for rid in PROMPTS}
    found: dict[int, dict[int, float]] = {rid: {} for rid in PROMPTS}
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, 18, SamplingParams(temperature=0.0, forced=forced[rid], logprobs=0))
    for turn in range(400):
        engine.inbox += [kind(RequestId(1 + turn % 7))] if kind and turn % 4 == 0 and turn < 80 else []
        had = {rid: len(tokens) for rid, tokens in engine.got.items()}
        closing: list[RequestId] = []
        engine.ex.close = closing.append                    # as the loop: read, then close
        more = engine.turn()
        del engine.ex.close
        for rid, tokens in engine.got.items():
            for index in range(had[rid], len(tokens)):
                found[rid][index] = engine.ex.take_logprobs(rid, index)[0]
        for rid in closing:
            engine.ex.close(rid)
        if not more:
            break
    for rid, prompt in PROMPTS.items():
        assert tuple(engine.got[rid][:16]) == forced[rid]
        assert tuple(engine.got[rid][16:]) == dense((*prompt, *forced[rid]), 2)
        torch.testing.assert_close(
            [found[rid][i] for i in range(18)],
            logprobs_of((*prompt, *engine.got[rid]), len(prompt)), rtol=0, atol=2e-5)
    stats = engine.core.stats()
    assert kind is None or stats["pauses" if kind is Paused else "drops"] >= 3


def test_aborts_leave_nothing_behind_and_disturb_nobody():
    engine = Engine(step_tokens=5, hbm_pages=16, lateness=Latest())
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, 12)
    for turn in range(60):
        engine.inbox += [Aborted(RequestId(r)) for r in (2, 4, 6) if turn == 3 * r]
        engine.turn()
    engine.drain()
    for rid, prompt in PROMPTS.items():
        whole = dense(prompt, 12)
        assert tuple(engine.got[rid]) == whole[:len(engine.got[rid])]
        assert len(engine.got[rid]) == 12 or engine.ended[rid].outcome is Outcome.ABORT
    assert {r for r, f in engine.ended.items() if f.outcome is Outcome.ABORT} <= {2, 4, 6}


def test_a_stop_token_ends_a_request_and_its_over_run_is_dropped():
    stop = dense(PROMPTS[1], 6)[5]
    engine = Engine(overlap=True)
    engine.add(1, PROMPTS[1], 12, stop=frozenset({stop}))
    engine.drain()
    first = dense(PROMPTS[1], 12).index(stop)
    assert tuple(engine.got[1]) == dense(PROMPTS[1], first + 1)
    assert engine.ended[1].outcome is Outcome.STOP


def test_retired_lists_only_rows_that_sample():
    engine = Engine(step_tokens=4)
    engine.add(1, PROMPTS[1], 3)
    retired = []
    while engine.turn():
        retired += [len(e.tokens) for e in engine.inbox if isinstance(e, Retired)]
    assert retired[:4] == [0, 0, 0, 1]
