"""Speculation changes no token: whatever is proposed, however much of it, whatever happens to the row.

Drafters are one that knows the answer and errs by dice, and one that proposes noise. Free pages are NaN.
"""
from __future__ import annotations

import re
from itertools import accumulate

import on_a_device
import printable
import prompts_engine
import pytest
import torch
import where
from drafters import Broken, Dice, Noise
from late_copies import Latest, Shuffled
from prompts_engine import PROMPTS, SMALL, Engine, dense, play

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.core.plan import Aborted, Dropped, Outcome, Paused, RequestId
from penstock.exec.drafts.drafter import NGram
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.step import states

pytestmark = pytest.mark.usefixtures("stages")
FAMILIES = ["grouped", "window", "latent", "mla", "state"]
# All widths by `make soak`.
WIDTHS = [pytest.param(1, marks=pytest.mark.soak), 3, pytest.param(7, marks=pytest.mark.soak)]


def drafting(family="grouped", chance=0.7, drafts=3, **more) -> Engine:
    drafter = Noise() if chance == 0 else Dice(lambda prompt, n: dense(prompt, n, family), chance)
    return Engine(family=family, drafter=drafter, draft_tokens=drafts, **more)


def counts(engine) -> tuple[int, int]:
    """Drafts of all rows, and how many of them were right."""
    return engine.total("spec_draft_tokens_total"), engine.total("spec_accepted_tokens_total")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chance", [0, 0.7, 1])
@pytest.mark.parametrize("drafts", WIDTHS)
def test_speculation_of_ordinary_rows(drafts, chance, overlap):
    engine = drafting(chance=chance, drafts=drafts, overlap=overlap)
    play(engine)
    proposed, right = counts(engine)
    assert max(engine.drafter.asked) == drafts
    assert {0: 0 <= right < proposed / 4, 0.7: 0 < right < proposed, 1: 0 < right == proposed}[chance]


@pytest.mark.parametrize("lateness", ["latest", pytest.param("torn", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_while_anyone_pauses(family, lateness):
    late = {"latest": Latest(), "torn": Shuffled(2, torn=0.3)}[lateness]
    engine = drafting(family, step_tokens=9, hbm_pages=SMALL[family], lateness=late)
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 2 == 0 else [])
    proposed, right = counts(engine)
    assert engine.core.stats()["pauses"] >= 2
    assert 0 < right < proposed


@pytest.mark.parametrize("chance", [0.3, 0.8])
@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("way", on_a_device.WAYS)
def test_speculation_leaves_states_as_one_token_a_step_does(way, drafts, chance, stages, monkeypatch):
    """A prefix that was an answer goes on from the states that drafts have left, on either tier."""
    if stages > 1:
        pytest.skip("one stage has the states")
    monkeypatch.setattr(prompts_engine, "INTERVAL", 4)
    engine = on_a_device.by(way, lambda: drafting("state", chance, drafts, hbm_pages=40, dram_pages=200,
                                                  lateness=Latest()), drafts, monkeypatch)
    asked, prompt = 0, PROMPTS[7][:9]
    for shared in (0, 5, 9, 14, 17):
        for tail in ((), (4, 4)):
            ask = (*prompt, *dense(prompt, 20, "state")[:shared], *tail)
            engine.add(asked, ask, 20)
            engine.drain()
            assert tuple(engine.got[asked]) == dense(ask, 20, "state")
            found = engine.started[asked]
            assert found.hbm_tokens + found.dram_tokens >= (len(prompt) + shared - 1) // 4 * 4 * (asked > 0)
            asked += 1
    assert 0 < counts(engine)[1] < counts(engine)[0]


def test_speculation_of_rows_that_drop_and_abort():
    engine = drafting(step_tokens=5, hbm_pages=16, dram_pages=0, lateness=Latest())
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, 12)
    for turn in range(60):
        engine.inbox += [Aborted(RequestId(r)) for r in (2, 6) if turn == 2 * r]
        engine.inbox += [Dropped(RequestId(1 + turn % 7))] if turn % 3 == 0 else []
        engine.turn()
    engine.drain()
    for rid, prompt in PROMPTS.items():
        assert tuple(engine.got[rid]) == dense(prompt, 12)[:len(engine.got[rid])]
        assert len(engine.got[rid]) == 12 or engine.ended[rid].outcome is Outcome.ABORT
    assert engine.core.stats()["drops"] >= 3 and 0 < counts(engine)[1] < counts(engine)[0]


KINDS = {
    "seeded": SamplingParams(seed=3), "filtered": SamplingParams(seed=4, top_p=0.8, top_k=20, min_p=0.02),
    "penalised": SamplingParams(seed=-1, presence_penalty=1.0, frequency_penalty=0.5),
    "repetition": SamplingParams(seed=3, temperature=1.5, repetition_penalty=1.3),
    "logprobs": SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=2),
    "min_tokens": SamplingParams(seed=8, min_tokens=17, logit_bias={5: 6.0}),
    "forced": SamplingParams(seed=8, forced=(9, 9, 1, 9, 9, 1), logprobs=0)}


def sampled(drafter, drafts, **more) -> tuple[Engine, dict]:
    """Tokens and logprobs of KINDS, all in one engine."""
    engine, told = Engine(drafter=drafter, draft_tokens=drafts, **more), {}
    for rid, params in enumerate(KINDS.values()):
        engine.add(rid, PROMPTS[1 + rid % 7], 20, params, stop=frozenset({5}), min_new=params.min_tokens)
    close = engine.ex.close

    def read(rid):
        logprobs = [engine.ex.take_logprobs(rid, i) for i in range(len(engine.got[rid]))]
        told[rid] = logprobs, engine.ex.drafts(rid)
        close(rid)
    engine.ex.close = read
    engine.drain()
    del engine.ex.close
    return engine, told


@pytest.mark.parametrize("chance", [0, 0.7, 1])
def test_speculation_that_a_device_checks(chance, stages):
    """Rows of all kinds; steps in front of those without drafts are flown ahead of."""
    if stages > 1:
        pytest.skip("stages: the host drafts")
    alone, _ = sampled(None, 0)
    said = {PROMPTS[1 + rid % 7]: tokens for rid, tokens in alone.got.items()}
    drafter = Noise() if chance == 0 else Dice(lambda prompt, n: said[prompt][:n], chance)
    engine = on_a_device.as_a_device(Engine(drafter=drafter, draft_tokens=3))
    flights, launch = [], engine.rank._launch
    engine.rank._launch = lambda plan: (launch(plan), flights.append(len(engine.rank._flights)))
    for rid, params in enumerate(KINDS.values()):
        engine.add(rid, PROMPTS[1 + rid % 7], 20, params, stop=frozenset({5}), min_new=params.min_tokens,
                   drafts=0 if rid > 1 else None)
    engine.drain()
    assert engine.got == alone.got and max(flights) == 2
    proposed, right = counts(engine)
    assert {0: right < proposed / 4, 0.7: 0 < right < proposed, 1: 0 < right == proposed}[chance]


@pytest.mark.parametrize("chance", [0, 0.7, 1])
@pytest.mark.parametrize("drafter", ["dice", "lookup"])
@pytest.mark.parametrize("family", ["grouped", "state"])
def test_speculation_whose_drafts_a_device_makes(family, drafter, chance, stages, monkeypatch):
    """Rows of all kinds of sampling, which pause; no step waits for an answer because it drafts."""
    if stages > 1:
        pytest.skip("stages: the host drafts")
    on_a_device.plainly(monkeypatch)
    monkeypatch.setattr(prompts_engine, "INTERVAL", 4)
    code = Grammar("regex", "([0-9]{2}-[A-F][G-Z]){9}")
    kinds = [*KINDS.values(), SamplingParams(grammar=code, logprobs=1)]
    prompts = [*PROMPTS.values(), (9, 9, 3)]

    def ask(engine):
        engine.rank._tokens._sampler._grammars = Grammars(printable.vocabulary)
        for rid, params in enumerate(kinds):
            engine.add(rid, prompts[rid], 20, params, stop=frozenset({5}), min_new=params.min_tokens)
        return engine
    (alone := ask(Engine(family=family))).drain()
    said = {prompts[rid]: tokens for rid, tokens in alone.got.items()}
    dice = Noise() if chance == 0 else Dice(lambda prompt, n: said[prompt][:n], chance)
    engine = on_a_device.drafting(Engine(
        family=family, drafter=dice if drafter == "dice" else NGram(), draft_tokens=3), 3)
    ask(engine)
    for turn in range(40):
        engine.inbox += [Paused(RequestId(turn % 7))] if turn % 6 == 5 else []
        engine.turn()
    engine.drain()
    assert engine.got == alone.got and engine.rank._launches["ahead"] > len(engine.plans) / 2
    proposed, right = counts(engine)
    if drafter == "dice":
        assert {0: right < proposed / 4, 0.7: 0 < right < proposed, 1: 0 < right == proposed}[chance]


@pytest.mark.parametrize("chance", [0, 0.7, 1])
@pytest.mark.parametrize("drafts", WIDTHS)
def test_speculation_keeps_streams_of_every_way_to_sample(drafts, chance):
    alone, want = sampled(None, 0)
    assert all(len(set(tokens)) > 2 for tokens in alone.got.values())
    said = {PROMPTS[1 + rid % 7]: tokens for rid, tokens in alone.got.items()}
    drafter = Noise() if chance == 0 else Dice(lambda prompt, n: said[prompt][:n], chance)
    engine, told = sampled(drafter, drafts)
    assert engine.got == alone.got
    assert {f.outcome for f in engine.ended.values()} == {f.outcome for f in alone.ended.values()}
    for rid, (logprobs, (proposed, right)) in told.items():
        for one, other in zip(want[rid][0], logprobs, strict=True):
            assert (one is None) is (other is None) is (rid in (0, 1, 2, 3, 5))
            if one is not None:
                assert other[0] == pytest.approx(one[0], abs=2e-5) and other[1] == one[1]
        assert right <= proposed and (chance < 1 or right == proposed)
    proposed, right = (sum(column) for column in zip(*[drafts for _, drafts in told.values()], strict=True))
    assert proposed <= counts(engine)[0] and right <= counts(engine)[1]      # with steps behind an end
    assert {0: right < proposed / 4, 0.7: 0 < right < proposed, 1: 0 < right == proposed}[chance]


@pytest.mark.parametrize("seed", [None, 4])
def test_speculation_by_what_a_grammar_leaves_no_choice_for(seed, stages):
    """It is right whatever the model says, and asked before the drafter, who knows nothing of grammars."""
    if where.DEVICE == "cuda":
        pytest.skip("rows with a grammar say one token a step")
    grammar = Grammar("regex", "(AB[0-9]CDEFG[HI]){9}")
    params = SamplingParams(grammar=grammar, **({"temperature": 0.0} if seed is None else {"seed": seed}))

    def answer(**more) -> Engine:
        engine = Engine(**more)
        engine.ex._ranks[-1]._tokens._sampler._grammars = Grammars(printable.vocabulary)
        engine.add(1, PROMPTS[1], 40, params)
        engine.add(2, PROMPTS[2], 40)
        engine.drain()
        return engine
    alone, engine = answer(), answer(drafter=Noise(), draft_tokens=5)
    text = printable.text(engine.got[1])
    assert engine.got == alone.got and re.match("(AB[0-9]CDEFG[HI]){4}", text)
    steps = sum(1 in plan.rids for plan in engine.plans)
    assert steps < 25, "seven of nine characters are forced, five at once"


def test_speculation_drops_what_no_drafter_may_say():
    engine = Engine(drafter=Broken(), draft_tokens=3)
    play(engine)
    assert counts(engine) == (0, 0) and engine.total("spec_dropped_tokens_total") > 40


def test_speculation_of_a_row_without_finite_logits_ends_that_row():
    """Which is all that its step decodes."""
    if where.DEVICE == "cuda":
        pytest.skip("captured steps have logits of their own")
    engine = drafting(chance=1)
    engine.add(1, PROMPTS[1], 12)
    model = engine.ex._ranks[-1]._model
    right = model.logits
    model.logits = lambda hidden: right(hidden) * (float("nan") if len(engine.got[1]) > 4 else 1)
    try:
        engine.drain()
    finally:
        model.logits = right
    assert engine.ended[1].outcome is Outcome.ABORT
    assert 4 < len(engine.got[1]) < 12 and tuple(engine.got[1]) == dense(PROMPTS[1], 12)[:len(engine.got[1])]


def test_speculation_is_as_much_as_a_request_asks_for():
    engine = drafting(chance=1)
    asked = {1: 0, 2: 1, 4: 2, 7: None, 6: 9}
    for rid, drafts in asked.items():
        engine.add(rid, PROMPTS[rid], 12, drafts=drafts)
    engine.drain()
    assert all(tuple(engine.got[rid]) == dense(PROMPTS[rid], 12) for rid in asked)
    widths = {rid: max(count for plan in engine.plans for r, count, at in zip(
        plan.rids, plan.count, accumulate((0, *plan.count)), strict=False)
        if r == rid and plan.tokens[at] < 0) for rid in asked}
    assert widths == {1: 1, 2: 2, 4: 3, 7: 4, 6: 4}


# ---------------------------------------------------------------- faults
def behind_a_wrong_draft(mp):
    right = states.StepStates.checked
    mp.setattr(states.StepStates, "checked", lambda self, counts_B: right(self, torch.ones_like(counts_B)))


def of_the_page_before_the_step(mp):
    """Not that behind the row's first token."""
    right = states.StepStates.checked

    def checked(self, counts_B):
        for g, (from_N, _) in self._places.items():
            self._pages[g] = torch.cat((from_N[:, None], self._pages[g][:, 1:]), 1)
        right(self, counts_B)
    mp.setattr(states.StepStates, "checked", checked)


def none_at_the_end_of_a_page_of_drafts(mp):
    right = states.lasts
    mp.setattr(states, "lasts", lambda *given: right(*given[:-1], 1 << 30))


def none_behind_drafts(mp):
    mp.setattr(states.StepStates, "checked", lambda self, counts_B: None)


@pytest.mark.parametrize("fault", [
    behind_a_wrong_draft, of_the_page_before_the_step, none_at_the_end_of_a_page_of_drafts,
    none_behind_drafts],
    ids=lambda fault: fault.__name__)
def test_speculation_sees_faults_of_captured_states(fault, stages, monkeypatch):
    if where.DEVICE == "cuda" or stages > 1:
        pytest.skip("captured steps of one stage, computed when they run")
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_speculation_leaves_states_as_one_token_a_step_does("captured", 3, .8, 1, monkeypatch)
