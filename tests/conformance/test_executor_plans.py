"""The executor against hand-written plans: tokens equal a dense recompute, whatever the plan.

Rows, device pages and host pages have disjoint ids; every pool starts as NaN, so a slot that is
read before it was written shows in the tokens.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest
import ranks
import torch
import where
from counting import bytecodes
from late_copies import Latest
from plain_attention import causal, plain

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.core.plan import (
    Aborted,
    Bind,
    DramPage,
    Group,
    Grow,
    HbmPage,
    Move,
    Moved,
    MoveId,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
    Tier,
)
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import caches_of
from penstock.kernels.attention import paged_attention
from penstock.memory.lateness import Promptly
from penstock.memory.pool import PageLayout

G, HBM, DRAM, ROWS = 4, 500, 9000, 70
LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, page_size=G, head_dim=8)
CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


pytestmark = pytest.mark.usefixtures("stages")


@functools.cache
def model(stage=None):
    return where.model(CONFIG, torch.float32, 3, 8, stage)


@functools.cache
def with_experts(stage=None):
    return where.model({**CONFIG, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 24, "norm_topk_prob": True}, torch.float32, 3, 8, stage)


@functools.cache
def dense(prompt: tuple[int, ...], n: int, made=model) -> tuple[int, ...]:
    """Greedy tokens, recomputing everything for each."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            hidden = made().forward(*where.sequence(tokens), causal)
            tokens.append(int(made().logits(hidden[-1:]).argmax()))
    return tuple(tokens[len(prompt):])


@dataclass
class Hand:
    """Writes plans. `give` and `take` act on the next plan; `send` submits it."""

    ex: Executor
    step: int = 0
    moves_made: int = 0
    work: list = field(default_factory=list)      # (row, rid, start, tokens, samples)
    binds: list = field(default_factory=list)
    grows: list = field(default_factory=list)
    moves: list = field(default_factory=list)

    def bind(self, row, rid, pages, emitted=0):
        self.binds.append(Bind(Row(ROWS + row), RequestId(rid),
                               (tuple(HbmPage(HBM + p) for p in pages),), emitted))

    def grow(self, row, index, *pages):
        self.grows.append(Grow(Row(ROWS + row), Group(0), index, tuple(HbmPage(HBM + p) for p in pages)))

    def run(self, row, rid, start, tokens, samples=True):
        self.work.append((Row(ROWS + row), RequestId(rid), start, tuple(tokens), samples))

    def down(self, pages, host, tokens):
        self._move(Tier.HBM, [HbmPage(HBM + p) for p in pages], Tier.DRAM,
                   [DramPage(DRAM + p) for p in host], tokens)

    def up(self, host, pages, tokens):
        self._move(Tier.DRAM, [DramPage(DRAM + p) for p in host], Tier.HBM,
                   [HbmPage(HBM + p) for p in pages], tokens)

    def _move(self, src, a, dst, b, tokens):
        self.moves_made += 1
        self.moves.append(Move(MoveId(self.moves_made), Group(0), src, tuple(a), dst, tuple(b),
                               tokens, StepId(self.step + 1)))

    def send(self) -> StepPlan:
        self.step += 1
        rows, rids, start, tokens, samples = zip(*self.work, strict=True) if self.work else [()] * 5
        plan = StepPlan(StepId(self.step), rows, rids, start, tuple(len(t) for t in tokens),
                        samples, tuple(t for ts in tokens for t in ts), tuple(self.grows),
                        tuple(self.binds), tuple(self.moves))
        self.work, self.binds, self.grows, self.moves = [], [], [], []
        self.ex.submit(plan)
        return plan

    def drain(self) -> list:
        events = []
        while got := self.ex.poll(block=True):
            events += got
        return events


def executor(*, lateness=None, attention=None, seed=0, with_model=None) -> Executor:
    groups = model().groups
    caches = caches_of(groups, G, torch.float32)
    cfg = CoreConfig(page_size=G, rows=6, hbm_pages=40, dram_pages=40, hbm_base=HBM, dram_base=DRAM,
                     row_base=ROWS, groups=caches.groups)
    ex, hbm, dram = ranks.front(with_model or model, attention or plain, groups, caches, cfg,
                                max_len=40 * G, seed=seed, lateness=lateness)
    for pool in (*hbm, *dram):
        pool.fill(float("nan"))
    return ex


def tokens_of(events) -> list[int]:
    """All sampled tokens, in order."""
    return [t for e in events if isinstance(e, Retired) for row in e.tokens for t in row]


PROMPT = (5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 12)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 64])
def test_chunked_prefill_then_decode_equals_dense(chunk, ahead):
    """With `ahead` 2, every plan is made before the step in front of it has run."""
    h, n = Hand(executor()), 9
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.bind(2, 1, [7])
    pages, events, sent = [7], [], 0

    def room(end):
        while len(pages) * G < end:
            pages.append((pages[-1] + 27) % 40)
            h.grow(2, len(pages) - 1, pages[-1])

    starts = list(range(0, len(PROMPT), chunk))
    for at in starts + [None] * (n - 1):
        start = len(PROMPT) + sent - len(starts) if at is None else at
        ids = (-1,) if at is None else PROMPT[at:at + chunk]
        room(start + len(ids))
        h.run(2, 1, start, ids, samples=at is None or at == starts[-1])
        h.send()
        sent += 1
        if sent >= ahead:
            events += h.ex.poll(block=True)
    assert len(set(pages)) == len(pages)
    events += h.drain()
    assert tokens_of(events) == list(dense(PROMPT, n))
    assert [e.step for e in events] == list(range(1, sent + 1))


def test_mixed_steps_do_not_disturb_each_other():
    """A decode, a finished prefill, a middle chunk and a one-token prompt in the same steps."""
    prompts = {1: PROMPT, 2: PROMPT[3:9], 3: PROMPT * 2, 4: (50,)}
    h = Hand(executor())
    got = {rid: [] for rid in prompts}
    for rid, prompt in prompts.items():
        h.ex.open(RequestId(rid), prompt, GREEDY)
        h.bind(rid, rid, range(10 * rid - 10, 10 * rid))
    at = dict.fromkeys(prompts, 0)
    for step in range(12):
        order = []
        for rid in [(3, 1, 4, 2), (2, 3, 1, 4)][step % 2]:
            if step < rid - 1:                       # they join one after the other
                continue
            left = prompts[rid][at[rid]:]
            ids = left[:[3, 5][rid % 2]] or (-1,)
            samples = len(ids) == len(left) or not left
            h.run(rid, rid, at[rid], ids, samples)
            at[rid] += len(ids)
            order += [rid] * samples
        h.send()
        [retired] = h.ex.poll(block=True)
        for rid, tokens in zip(order, retired.tokens, strict=True):
            got[rid] += tokens
    assert all(len(tokens) >= 5 for tokens in got.values())
    assert {rid: tuple(t) for rid, t in got.items()} == {
        rid: dense(prompt, len(got[rid])) for rid, prompt in prompts.items()}


@pytest.mark.covers(kind="experts")
def test_rows_whose_tokens_visit_experts_decode_together_as_each_does_alone():
    """A step of more tokens than a device treats as few, then decodes of both rows at once."""
    h, prompts = Hand(executor(with_model=with_experts)), {1: PROMPT * 7, 2: PROMPT[3:]}
    for rid, prompt in prompts.items():
        h.ex.open(RequestId(rid), prompt, GREEDY)
        h.bind(rid, rid, range(30 * rid - 30, min(40, 30 * rid)))
    for i in range(6):
        for rid, prompt in prompts.items():
            h.run(rid, rid, len(prompt) + i - 1 if i else 0, (-1,) if i else prompt)
        h.send()
    steps = [e.tokens for e in h.drain() if isinstance(e, Retired)]
    assert [tuple(a[0] for a in row) for row in zip(*steps, strict=True)] == [
        dense(prompt, 6, with_experts) for prompt in prompts.values()]


@pytest.mark.parametrize("lateness", [None, Promptly(), Latest()])
def test_pause_through_host_pages_and_resume_elsewhere(lateness):
    """KV goes down behind the step that wrote it, and comes back into other pages; the first
    input after the resume is the last retired token, which only the device knows."""
    h = Hand(executor(lateness=lateness))
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.ex.open(RequestId(2), PROMPT[::-1], GREEDY)
    h.bind(0, 1, [0, 1, 2, 3, 4])
    h.run(0, 1, 0, PROMPT)
    h.send()
    h.run(0, 1, 11, (-1,))
    h.down([0, 1, 2], [30, 20, 10], 12)
    h.send()
    events = h.drain()
    assert [e for e in events if isinstance(e, Moved)] == [Moved(MoveId(1), True)]
    h.bind(0, 2, [0, 1, 2])                          # someone else takes row and pages
    h.run(0, 2, 0, PROMPT[::-1])
    h.up([30, 20, 10], [11, 12, 13], 12)
    h.send()
    assert tokens_of(h.drain()) == list(dense(PROMPT[::-1], 1))
    h.bind(3, 1, [11, 12, 13, 14], emitted=2)
    for start in range(12, 16):
        h.run(3, 1, start, (-1,))
        h.send()
    events += h.drain()
    assert tokens_of(events) == list(dense(PROMPT, 6))


def test_tokens_sampled_ahead_are_forgotten_by_bind():
    """A drop: KV recomputed from prompt and retired tokens; two over-run samples never count."""
    h = Hand(executor())
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, logprobs=1)
    h.ex.open(RequestId(1), PROMPT, params)
    h.bind(0, 1, range(6))
    h.run(0, 1, 0, PROMPT)
    h.send()
    for start in range(11, 16):
        h.run(0, 1, start, (-1,))
        h.send()
    first = tokens_of(h.drain())
    kept = [h.ex.take_logprobs(RequestId(1), i) for i in range(4)]
    h.bind(4, 1, range(20, 26), emitted=4)
    assert h.ex.take_logprobs(RequestId(1), 5) is not None
    h.run(4, 1, 0, (*PROMPT, *first[:4]))
    h.send()
    h.run(4, 1, 15, (-1,))
    h.send()
    assert tokens_of(h.drain()) == first[4:]
    assert len(set(first)) == 6                      # the penalty was felt
    again = [h.ex.take_logprobs(RequestId(1), i) for i in range(6)]
    assert again[:4] == [None] * 4
    assert None not in kept + again[4:]


@pytest.mark.parametrize("backend", [
    one.name for one in paged_attention.OP.implementations if where.DEVICE in one.devices])
def test_the_work_of_a_step_does_not_grow_with_context(backend):
    """A decode behind 1 page and one behind 39 execute the same bytecodes."""
    h = Hand(executor(attention=functools.partial(paged_attention.prepare, backend=backend)))
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.bind(0, 1, range(40))
    h.run(0, 1, 0, [3] * 156)
    h.send()
    h.ex.poll(block=True)
    counts = []
    for start in (2, 3, 154, 155):          # each twice: the first may load what the second has
        h.run(0, 1, start, (-1,))
        h.send()
        counts.append(bytecodes(lambda: h.ex.poll(block=True)))
    assert counts[1] == counts[3]


def test_a_plan_without_rows_retires_and_moves():
    h = Hand(executor())
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.send()
    h.bind(0, 1, [0, 1, 2])
    h.down([0], [0], 1)
    h.send()
    assert h.ex.poll(block=False) == []
    assert h.drain() == [Retired(StepId(1), ()), Retired(StepId(2), ()), Moved(MoveId(1), True)]


def test_late_copies_keep_poll_alive_until_the_last():
    h = Hand(executor(lateness=Latest()))
    for n in range(3):
        h.down([n], [n], G)
        h.send()
    assert h.ex.stats()["executor_pending_moves"] == 0
    first = [h.ex.poll(block=True) for _ in range(3)]
    assert first == [[Retired(StepId(n), ())] for n in (1, 2, 3)]
    assert h.ex.poll(block=False) == []
    assert h.ex.stats()["executor_pending_moves"] == 3
    assert [h.ex.poll(block=True) for _ in range(3)] == [[Moved(MoveId(n), True)]
                                                         for n in (1, 2, 3)]
    assert h.ex.poll(block=True) == []
    assert h.ex.stats()['moved_bytes_total{src="hbm",dst="dram",group="full"}'] == 3 * G * 2 * 2 * 2 * 8 * 4


def test_state_outlives_close_while_a_plan_is_in_flight():
    h = Hand(executor())
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.bind(0, 1, [0, 1, 2, 3])
    h.run(0, 1, 0, PROMPT)
    h.send()
    h.run(0, 1, 11, (-1,))
    h.send()
    h.ex.poll(block=True)
    h.ex.close(RequestId(1))
    assert h.ex.stats()["executor_requests"] == 1
    assert tokens_of(h.drain()) == list(dense(PROMPT, 2))[1:]
    assert h.ex.stats()["executor_requests"] == 0
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.ex.close(RequestId(1))
    assert h.ex.stats()["executor_requests"] == 0


def test_a_refused_open_keeps_nothing():
    ex = executor()
    with pytest.raises(RequestError, match="prompt has token id 97"):
        ex.open(RequestId(1), (1, 97), GREEDY)
    assert ex.stats()["executor_requests"] == 0


class Damaged:
    """A model whose logits turn NaN when the newest input is token `bad`. `ids` are its last inputs."""

    ids: torch.Tensor

    def __init__(self, bad, stage=None):
        self.bad, self.inner = bad, model(stage)
        self.vocab_size, self.groups = self.inner.vocab_size, self.inner.groups
        self.reads, self.layers = self.inner.reads, self.inner.layers
        self.logits, self.head = self.inner.logits, self.inner.head
        self.stage, self.drafting, self.selector = self.inner.stage, None, self.inner.selector

    def forward(self, ids, positions, attend):
        return self.norm(self.layers(self.embed(ids), positions, attend))

    def embed(self, ids):
        Damaged.ids = ids
        return self.inner.embed(ids)

    def norm(self, x):
        return torch.where((Damaged.ids == self.bad).unsqueeze(1), torch.nan, self.inner.norm(x))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, seed=1, logprobs=1)])
def test_logits_that_are_not_finite_fail_their_request_only(params, monkeypatch):
    if ranks.NUM[0] > 1:            # captured stages do not see what another has had last
        monkeypatch.setattr(where, "captured", lambda rank, drafts: rank)
    h = Hand(executor(with_model=functools.partial(Damaged, PROMPT[4])))
    h.ex.open(RequestId(1), PROMPT[:5], params)
    h.ex.open(RequestId(2), PROMPT, GREEDY)
    h.bind(0, 1, [0, 1])
    h.bind(1, 2, [2, 3, 4, 5])
    h.run(0, 1, 0, PROMPT[:5])
    h.run(1, 2, 0, PROMPT)
    h.send()
    h.run(1, 2, 11, (-1,))
    h.run(0, 1, 4, PROMPT[4:5])
    h.send()
    a, b = dense(PROMPT, 2)
    assert h.drain() == [Retired(StepId(1), ((), (a,))), Aborted(RequestId(1), damaged=True),
                         Retired(StepId(2), ((b,), ())), Aborted(RequestId(1), damaged=True)]
    assert "not finite" in h.ex.fault(RequestId(1))
    assert h.ex.fault(RequestId(2)) is None
    assert h.ex.stats()["executor_nonfinite_rows_total"] == 2


def test_the_scale_of_attention_is_the_models_own():
    class Scaled(Damaged):
        def __init__(self, stage):
            super().__init__(-5, stage)
            self.reads = {layer: replace(reads, scale=0.25) for layer, reads in self.inner.reads.items()}

    seen = []

    def attention(layout, spec):
        seen.append(spec)
        return plain(layout, spec)

    h = Hand(executor(with_model=Scaled, attention=attention))
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    h.bind(0, 1, [0, 1, 2])
    h.run(0, 1, 0, PROMPT)
    h.send()
    assert len(tokens_of(h.drain())) == 1
    assert {(s.num_heads, s.num_kv_heads, s.head_dim, s.scale) for s in seen} == {(4, 2, 8, 0.25)}


def bad_bind_tier(h):
    h.bind(0, 1, [DRAM - HBM])


def bad_row(h):
    h.bind(6, 1, [0])


def unbound_row(h):
    h.run(1, 1, 0, PROMPT[:2])


def unbound_grow(h):
    h.grow(1, 0, 5)


def too_few_pages(h):
    h.bind(0, 1, [0])
    h.run(0, 1, 0, PROMPT[:5])


def owed_in_the_middle(h):
    h.bind(0, 1, [0])
    h.run(0, 1, 0, (3, -1, 5))


def drafts(h):
    h.bind(0, 1, [0])
    h.run(0, 1, 0, (-1, -1))


def unknown_request(h):
    h.bind(0, 2, [0])


def emitted_never_sampled(h):
    h.bind(0, 1, [0], emitted=1)


@pytest.mark.parametrize("write", [bad_bind_tier, bad_row, unbound_row, unbound_grow,
                                   too_few_pages, owed_in_the_middle, drafts, unknown_request,
                                   emitted_never_sampled])
def test_a_wrong_plan_fails_at_once(write):
    h = Hand(executor())
    h.ex.open(RequestId(1), PROMPT, GREEDY)
    write(h)
    with pytest.raises(AssertionError):
        h.send()
        h.drain()


def test_steps_are_dense():
    h = Hand(executor())
    h.step = 1
    with pytest.raises(AssertionError, match="step 2 after step 0"):
        h.send()
