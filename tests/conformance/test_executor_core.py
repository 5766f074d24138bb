"""The real core drives the executor: tokens equal a dense recompute under every schedule.

Small pools force pauses and drops; copies come as late as their fences permit, out of order or
torn. Free pages are filled with NaN at every turn and ids are disjoint, so a wrong page shows.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest
import ranks
import torch
import where
from dense_attend import Dense
from late_copies import Latest, Shuffled

from penstock.config.request.params import SamplingParams
from penstock.core.core import Core
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Event,
    Finished,
    Moved,
    Outcome,
    Paused,
    RequestId,
    Retired,
    Started,
    Token,
)
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.exec.step.attend import LatentOps
from penstock.kernels.attention import paged_attention
from penstock.kernels.attention.latent_attention import latent_attention
from penstock.kernels.choose.index_select import index_select
from penstock.memory.lateness import Promptly
from penstock.model.base import CacheShape

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LATENT = {
    "model_type": "deepseek_v32", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4,
    "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}
CONFIGS = {"grouped": CONFIG, "latent": LATENT}       # one cache group; two, and a choice of 4 tokens
EXPERTS = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24, "norm_topk_prob": True}
GREEDY = SamplingParams(temperature=0.0)
LATENESS = {"thread": lambda: None, "prompt": Promptly, "latest": Latest,
            "shuffled": lambda: Shuffled(1), "torn": lambda: Shuffled(2, torn=0.3)}


pytestmark = pytest.mark.usefixtures("stages")


@functools.cache
def model(family="grouped", stage=None):
    return where.model({**CONFIGS, "experts": EXPERTS}[family], torch.float32, 5, 10, stage)


# Each layer a group, and what a selector would have: a quarter of a page of theirs, less two rows.
THREE = (CacheShape(name="even", layers=(0,), num_kv_heads=2, head_dim=8),
         CacheShape(name="odd", layers=(1,), num_kv_heads=2, head_dim=8),
         CacheShape(name="index", layers=(0, 1), num_kv_heads=1, head_dim=7, planes=1, unit=2,
                    selector=True))


@functools.cache
def dense(prompt: tuple[int, ...], n: int, family="grouped") -> tuple[int, ...]:
    """Greedy tokens, recomputing everything for each. Every choice is clear-cut."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            m = model(family)
            hidden = m.forward(*where.sequence(tokens), Dense(m.attention))
            best = m.logits(hidden[-1:])[0].topk(2)
            assert best.values[0] - best.values[1] > 3e-5, "choose another seed for the weights"
            tokens.append(int(best.indices[0]))
    return tuple(tokens[len(prompt):])


@dataclass
class Engine:
    """The loop of an engine process, without the process."""

    hbm_pages: int = 64
    dram_pages: int = 64
    step_tokens: int = 64
    wait_pages: int = 0
    overlap: bool = True
    rows: int = 4
    lateness: object = field(default_factory=Promptly)
    backend: str = field(default_factory=lambda: "cuda" if where.DEVICE == "cuda" else "reference")
    groups: tuple[CacheShape, ...] = ()         # of the model; () for its own
    family: str = "grouped"
    got: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Finished] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    waited: int = 0                             # plans that named loads
    inbox: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.family == "latent" and where.DEVICE != "cpu":
            pytest.skip("ops of latent rows run on the CPU only")
        groups = self.groups or model(self.family).groups
        caches = caches_of(groups, 4, torch.float32)
        self.cfg = CoreConfig(
            page_size=4, rows=self.rows, hbm_pages=self.hbm_pages, dram_pages=self.dram_pages,
            step_tokens=self.step_tokens, wait_pages=self.wait_pages, overlap=self.overlap, hbm_base=500,
            dram_base=9000,
            group_base=50_000, row_base=70, groups=caches.groups)
        self.core = Core(self.cfg)
        ops = (functools.partial(paged_attention.plan, backend=self.backend) if self.family != "latent"
               else LatentOps(index_select(self.backend), latent_attention(self.backend)))
        self.ex, hbm, dram = ranks.front(functools.partial(model, self.family), ops, groups, caches,
                                         self.cfg, max_len=64, lateness=self.lateness)
        kv = self.core.kv
        self.pools = [(pool, side[pool.group].pool) for pools, side in ((hbm, kv.device), (dram, kv.host))
                      for pool in pools]
        self.poison()

    def poison(self) -> None:
        """Nobody may read a page that is on a free list before it is written again."""
        for pool, units in self.pools:
            for page in units._free:
                pool.page(page).fill_(float("nan"))

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, params=GREEDY, **more) -> None:
        self.ex.open(RequestId(rid), prompt, params, stop_ids=tuple(more.get("stop", ())))
        self.got[rid] = []
        self.inbox.append(Arrived(RequestId(rid), prompt, max_new, **more))

    def turn(self) -> bool:
        """Advance, submit, poll. False when nothing is left to do."""
        events, self.inbox = self.inbox, []
        while True:
            adv = self.core.advance(events)
            events = []
            for o in adv.outputs:
                match o:
                    case Token(rid, index, token):
                        assert index == len(self.got[rid])
                        self.got[rid].append(token)
                    case Started(rid):
                        self.started[rid] = o
                    case Finished(rid):
                        self.ended[rid] = o
                        self.ex.close(rid)
            if adv.plan is None:
                break
            self.waited += bool(adv.plan.waits)
            self.ex.submit(adv.plan)
        self.core.check()
        self.poison()
        found = self.ex.poll(block=True)
        self.moved += [e for e in found if isinstance(e, Moved)]
        self.inbox += found
        return bool(found)

    def drain(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if not self.turn():
                break
        assert set(self.ended) == set(self.got), "a request never ended"
        assert self.ex.stats()["executor_requests"] == 0
        held = self.core.stats()
        assert held["hbm_pages_in_use"] == held["moves_in_flight"] == 0


SHARED = (7, 3, 29, 41, 5, 5, 18, 60, 2, 33, 9)
BACKENDS = where.backends()
SMALL = {"grouped": 11, "latent": 18, "experts": 11}     # device pages of group 0, too few; slabs of 1
PROMPTS = {1: (*SHARED, 1, 2), 2: (*SHARED, 40), 3: (50,), 4: SHARED * 2, 5: (12, 8, 30, 21),
           6: SHARED[:8], 7: (*SHARED, *SHARED, 4, 4)}


def play(engine: Engine, script=lambda turn: (), new: int = 12, arrive=lambda rid: 2 * rid) -> None:
    """All PROMPTS, one after the other, with the events that `script` adds at each turn."""
    waiting = dict(PROMPTS)
    for turn in range(400):
        for rid in [r for r in waiting if turn >= arrive(r)]:
            engine.add(rid, waiting.pop(rid), new)
        engine.inbox += script(turn)
        engine.turn()
    engine.drain()
    assert {rid: tuple(t) for rid, t in engine.got.items()} == {
        rid: dense(p, new, engine.family) for rid, p in PROMPTS.items()}
    assert {f.outcome for f in engine.ended.values()} == {Outcome.LENGTH}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_any_chunk_size_in_mixed_batches(chunk, overlap, family):
    engine = Engine(step_tokens=chunk, overlap=overlap, family=family)
    play(engine)
    assert engine.ex.stats()["executor_sampled_tokens_total"] >= 12 * len(PROMPTS)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lateness", LATENESS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_device_pool_that_is_too_small(chunk, overlap, lateness, family):
    """Rows outgrow the pool, so requests pause through host pages and resume."""
    engine = Engine(step_tokens=chunk, overlap=overlap, hbm_pages=SMALL[family],
                    lateness=LATENESS[lateness](), family=family)
    play(engine)
    assert engine.core.stats()["pauses"] >= 1
    assert {m.ok for m in engine.moved} == ({True, False} if lateness == "torn" else {True})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lateness", LATENESS)
@pytest.mark.parametrize("chunk", [3, 64])
def test_steps_that_wait_for_their_loads(chunk, lateness, family):
    """A row that comes back computes in the step that carries its loads, or the next; a load that fails there
    spoils what was computed, and nothing else."""
    engine = Engine(step_tokens=chunk, hbm_pages=SMALL[family], wait_pages=1000,
                    lateness=LATENESS[lateness](), family=family)
    play(engine)
    assert engine.core.stats()["pauses"] >= 1 and engine.waited >= 1
    assert {m.ok for m in engine.moved} == ({True, False} if lateness == "torn" else {True})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dram_pages", [0, 3])
def test_drops_recompute_when_the_host_has_no_room(dram_pages, family):
    engine = Engine(hbm_pages=SMALL[family], dram_pages=dram_pages, family=family)
    play(engine)
    assert engine.core.stats()["drops"] >= 1


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lateness", LATENESS)
@pytest.mark.parametrize("kind", [Paused, Dropped])
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
    rank._launch = lambda plan: (launch(plan), flying.append(len(rank._flights)))
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 5 == 0 else [])
    assert engine.core.stats()["pauses"] >= 1
    assert max(flying) == 2 and flying.count(2) > 20


@pytest.mark.parametrize("family, backend", [
    *(("grouped", name) for name in BACKENDS), ("latent", "native")])
def test_every_attention_back_end(backend, family):
    engine = Engine(step_tokens=7, hbm_pages=SMALL[family] + 3, backend=backend, family=family)
    play(engine, lambda turn: [Paused(RequestId(1))] if turn == 9 else [])


@pytest.mark.parametrize("lateness", ["thread", "torn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_share_slabs(backend, lateness, stages):
    """Pages of one group lie where another's were, at strides that are larger than they are. A stage may
    have no layer of a group, or some."""
    engine = Engine(step_tokens=7, hbm_pages=28, backend=backend, lateness=LATENESS[lateness](),
                    groups=THREE)
    strides = {pool.layout.page_bytes: pool.pages.stride(0) * 4 for pool, _ in engine.pools}
    assert strides == ({512: 512, 112: 128} if stages == 1 else {512: 512, 0: 512, 56: 128})
    play(engine, lambda turn: [Paused(RequestId(1))] if turn == 9 else [])
    stats = engine.ex.stats()
    assert engine.core.stats()["pauses"] >= 1
    assert all(stats[f'moved_bytes_total{{src="hbm",dst="dram",group="{g.name}"}}'] for g in THREE)


def test_a_prefix_hit_in_either_tier_changes_no_token():
    engine = Engine(hbm_pages=12, lateness=Latest())
    for rid, prompt in ((1, SHARED * 2), (2, SHARED * 2), (3, PROMPTS[5] * 8), (4, SHARED * 2)):
        engine.add(rid, prompt, 10)
        engine.drain()
        assert tuple(engine.got[rid]) == dense(prompt, 10)
    assert engine.started[2].hbm_tokens == 20
    assert engine.started[3].hbm_tokens == engine.started[3].dram_tokens == 0
    assert engine.started[4].dram_tokens > 0


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
        hidden = model().forward(*where.sequence(tokens), Dense(model().attention))
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
