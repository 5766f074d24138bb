"""Tokens that a device cannot choose by itself, chosen while the step is in flight: as if nothing flew.

A CPU rank is made to launch ahead, as on a CUDA device. Then faults of the choice and of the matchers, each
seen: by other tokens than those of each request alone, or by an assertion of ours.
"""
from __future__ import annotations

import functools
import importlib.util
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import printable
import pytest
import torch
import where
from printable import CHARACTERS
from prompts_engine import PROMPTS, Engine

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.core.plan import Dropped, Outcome, Paused, RequestId
from penstock.exec.sampling import sampler as sampling
from penstock.exec.sampling import tokens
from penstock.exec.sampling.grammar import Grammars, Matcher
from penstock.exec.sampling.on_device import Draws
from penstock.exec.worker import Worker

NEW = 18
# The model has the first 61 characters only: no lower case, and no end.
CODE, WORD = Grammar("regex", "([0-9]{2}-[A-F][G-Z]){20}"), Grammar("regex", "[A-C]{3}[a-z]{2}")
KINDS = {
    1: SamplingParams(grammar=CODE, seed=1, logprobs=1), 2: SamplingParams(seed=2),
    3: SamplingParams(grammar=CODE, temperature=0.0, logit_bias={CHARACTERS.index("7"): 2.0}),
    4: SamplingParams(temperature=0.0, frequency_penalty=3.0, logprobs=2),
    5: SamplingParams(seed=3, presence_penalty=2.0, top_k=20),
    6: SamplingParams(grammar=CODE, seed=4, top_p=0.9, frequency_penalty=1.0),
    7: SamplingParams(temperature=0.0, forced=tuple(range(30, 41)), logprobs=0),
    8: SamplingParams(temperature=0.0), 9: SamplingParams(grammar=WORD, seed=5),
}
DEAD = 9                    # after three letters
Answers = dict[int, tuple[list[int], list[object]]]


@functools.cache
def grammars() -> Grammars:
    return Grammars(printable.vocabulary)


def answers(engine: Engine, kinds: list[int], script=lambda turn: ()) -> Answers:
    """Tokens and logprobs of each request; of one that fails, up to there."""
    sampler = engine.rank._tokens._sampler
    sampler._grammars = sampler._grammars or grammars()
    scores: dict[int, list[object]] = {rid: [] for rid in kinds}
    for rid in kinds:
        engine.add(rid, PROMPTS[1 + rid % 7], NEW, KINDS[rid])
    said = engine.said

    def scored(token) -> None:
        said(token)
        if KINDS[token.rid].logprobs is not None:
            own, rank, best = engine.ex.take_logprobs(token.rid, token.index)
            scores[token.rid].append((round(own, 3), rank, [i for i, _ in best]))
    engine.said = scored
    for turn in range(80):
        engine.inbox += script(turn)
        engine.turn()
    engine.drain(500)
    for rid, ended in engine.ended.items():
        assert (ended.outcome is Outcome.ABORT) == (rid == DEAD), (rid, ended)
    return {rid: (engine.got[rid], scores[rid]) for rid in kinds}


@functools.cache
def alone() -> Answers:
    """Nothing flies, and nobody else is there."""
    found: Answers = {}
    for rid in KINDS:
        found |= answers(Engine(overlap=False), [rid])
    for rid in (1, 3, 6):
        text = printable.text(found[rid][0])
        assert len(text) == NEW and all(text[i + 2] == "-" for i in range(0, NEW - 2, 5)), text
    assert len(found[DEAD][0]) == 3
    return found


def assert_same(got: Answers, want: Answers) -> None:
    """Some devices sum in another order in a batch, which logprobs show."""
    assert {rid: said for rid, (said, _) in got.items()} == {rid: said for rid, (said, _) in want.items()}
    for rid, (_, scores) in want.items():
        for (own, rank, best), (other, place, others) in zip(got[rid][1], scores, strict=True):
            assert own == pytest.approx(other, abs=2e-3), rid
            assert (rank, best) == (place, others), rid


def flying(fault: Callable[[pytest.MonkeyPatch, Worker], None] | None = None,
           patch: pytest.MonkeyPatch | None = None) -> tuple[Answers, list[int]]:
    """All at once, launched ahead, with pauses and drops; and how many steps flew at each launch."""
    engine = Engine(step_tokens=9, hbm_pages=40)
    rank, flights = engine.rank, []
    rank._ahead = True
    launch = rank._launch
    rank._launch = lambda plan: (launch(plan), flights.append(len(rank._flights)))
    if fault is not None:
        fault(patch, rank)
    kinds = (Paused, Dropped)
    return answers(engine, list(KINDS), lambda turn: (
        [kinds[turn // 4 % 2](RequestId(1 + turn % 9))] if turn % 4 == 0 and turn < 60 else [])), flights


@pytest.fixture(autouse=True)
def whole(request):
    pytest.importorskip("llguidance")


def test_rows_of_every_kind_fly_and_say_what_they_say_alone() -> None:
    got, flights = flying()
    assert_same(got, alone())
    assert max(flights) == 2 and flights.count(2) > 20


def draws_itself(patch: pytest.MonkeyPatch, rank: Worker) -> None:
    """As a CUDA device: it draws for every row in the step, and again for those that are chosen late."""
    if isinstance(rank._tokens, tokens.GpuSampler):
        return
    old = rank._tokens
    rank._tokens = tokens.GpuSampler(old._sampler, rank._tables, Draws(61, 4, torch.device("cpu"), "reference"))


def test_rows_that_the_device_draws_for_are_drawn_again_with_the_same_uniforms(monkeypatch) -> None:
    got, flights = flying(draws_itself, monkeypatch)
    assert_same(got, alone())
    assert flights.count(2) > 20


def test_a_second_draw_with_another_uniform_is_seen(monkeypatch) -> None:
    def again(self, logits_BV, token_B, states, rows):
        row_B = torch.tensor(rows, dtype=torch.int32, device=token_B.device)
        self.draw(logits_BV, token_B, row_B, torch.zeros_like(row_B))
    monkeypatch.setattr(Draws, "again", again)
    assert flying(draws_itself, monkeypatch)[0] != alone()


# ---------------------------------------------------------------- faults
def a_row_off(patch, rank: Worker) -> None:
    masks = rank._tokens._sampler._masks
    right = masks._mask
    patch.setattr(masks, "_mask", lambda logits_BV, words_MW, at_M: right(logits_BV, words_MW, at_M.roll(1)))


def one_token_late(patch, rank: Worker) -> None:
    right = Matcher.fill
    patch.setattr(Matcher, "fill", lambda self, outputs, address: right(self, outputs[:-1], address))


def one_matcher_for_all(patch, rank: Worker) -> None:
    rank._tokens._sampler._grammars = Grammars(printable.vocabulary)      # which this spoils
    right = Grammars.matcher

    def shared(self, grammar):
        made = right(self, grammar)
        future = made._compiled
        made._compiled = SimpleNamespace(exception=future.exception, result=lambda: SimpleNamespace(
            deep_copy=lambda: future.result()))
        return made
    patch.setattr(Grammars, "matcher", shared)


def another_uniform(patch, rank: Worker) -> None:
    """Of a rank that draws on the host; of a device the same is `Draws.again`, above."""
    right = sampling.uniform
    patch.setattr(sampling, "uniform", SimpleNamespace(
        stream=right.stream, uniform=lambda key, index: right.uniform(key, index + 1)))


def raw_at_a_dead_end(patch, rank: Worker) -> None:
    right = sampling.Sampler._masked
    patch.setattr(sampling.Sampler, "_masked", lambda self, raw, states: (right(self, raw, states)[0], None))


def provisional_tokens_fly_on(patch, rank: Worker) -> None:
    """The next step is launched before the choice."""
    right, land = rank._choose, rank._land

    def landing(flight):
        right(flight)
        return land(flight)
    rank._choose, rank._land = (lambda flight: None), landing


def tables_keep_the_provisional_token(patch, rank: Worker) -> None:
    right = tokens.HostSampler._choose

    def choose(self, *args):
        sampled, self._tables.sampled = self._tables.sampled, lambda rows, tokens_B: None
        try:
            return right(self, *args)
        finally:
            self._tables.sampled = sampled
    patch.setattr(tokens.HostSampler, "_choose", choose)


def the_provisional_answer_is_told(patch, rank: Worker) -> None:
    right = tokens.HostSampler._choose

    def choose(self, ran, answer_2B, *args):
        before = answer_2B.clone()
        return before, right(self, ran, answer_2B, *args)[1]
    patch.setattr(tokens.HostSampler, "_choose", choose)


def chosen_twice(patch, rank: Worker) -> None:
    """Penalties count twice."""
    right = tokens.HostSampler._choose
    patch.setattr(tokens.HostSampler, "_choose", lambda self, *args: (right(self, *args), right(self, *args))[1])


def penalties_are_taken_for_simple(patch, rank: Worker) -> None:
    kind = type(rank._tokens)
    right = kind._late
    patch.setattr(kind, "_late", lambda self, s: right(self, s) and not s.penalised)


def logprobs_one_token_off(patch, rank: Worker) -> None:
    right = tokens.told

    def told(states, fine, recorded):
        for s, code in zip(states, fine, strict=False):
            s.outputs += [0] if code == sampling.FINE else []
        right(states, fine, recorded)
        for s, code in zip(states, fine, strict=False):
            del s.outputs[len(s.outputs) - (code == sampling.FINE):]
    patch.setattr(tokens, "told", told)


FAULTS = (a_row_off, one_token_late, one_matcher_for_all, another_uniform, raw_at_a_dead_end,
          provisional_tokens_fly_on, tables_keep_the_provisional_token, the_provisional_answer_is_told,
          chosen_twice, penalties_are_taken_for_simple, logprobs_one_token_off)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_late_choice_is_seen(fault, monkeypatch) -> None:
    if fault is another_uniform and where.DEVICE == "cuda":
        pytest.skip("a device draws by its own kernel")
    want = alone()
    try:
        got, _ = flying(fault, monkeypatch)
    except (AssertionError, TypeError):
        return
    assert got != want


def plans_by_hand():
    spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_executor_plans.py"))
    module = sys.modules["plans"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Hand, module.executor, module.tokens_of


# ---------------------------------------------------------------- further ahead than the core plans
def deep(steps: int, *, forget: bool = False, again: int = 0) -> list[int]:
    """Tokens of one row with a grammar, all steps submitted at once to a rank that flies. again: then the row
    is bound anew with so many of its tokens, and goes on."""
    Hand, executor, tokens_of = plans_by_hand()
    ex = executor()
    [rank] = ex._ranks
    rank._ahead, rank._tokens._sampler._grammars = True, grammars()
    if forget:
        right = rank._choose

        def choose(flight):
            flights, rank._flights = rank._flights, deque([flight])
            right(flight)
            rank._flights = flights
        rank._choose = choose
    hand, prompt = Hand(ex), (5, 6, 7, 8)
    ex.open(RequestId(1), prompt, SamplingParams(grammar=CODE, seed=7))
    hand.bind(0, 1, [0, 1, 2, 3])
    hand.run(0, 1, 0, prompt)
    hand.send()
    for step in range(steps):
        hand.run(0, 1, len(prompt) + step, [-1])
        hand.send()
    assert len(rank._flights) == steps + 1
    said = tokens_of(hand.drain())
    if again:
        hand.bind(0, 1, [0, 1, 2, 3], again)
        hand.run(0, 1, 0, [*prompt, *said[:again]])
        hand.send()
        for step in range(again, steps):
            hand.run(0, 1, len(prompt) + step, [-1])
            hand.send()
        said = said[:again] + tokens_of(hand.drain())
    return said


def test_a_choice_first_learns_every_step_in_front_of_it() -> None:
    said = printable.text(deep(6))
    assert len(said) == 7 and said[:2].isdigit() and said[2] == "-" and said[3] in "ABCDEF", said
    try:
        wrong = deep(6, forget=True)
    except AssertionError:
        return
    assert printable.text(wrong) != said


def test_a_row_that_forgets_tokens_chooses_them_again(monkeypatch) -> None:
    """Matchers roll back, and one that does not is seen."""
    want = deep(6)
    assert deep(6, again=2) == want
    monkeypatch.setattr(Matcher, "rewind", lambda self, count: None)
    try:
        wrong = deep(6, again=2)
    except AssertionError:
        return
    assert wrong != want


def test_no_mask_is_copied_where_no_row_has_a_grammar() -> None:
    """What it costs those without: nothing."""
    sampler = sampling.Sampler(61, 4, grammars=grammars())
    raw = torch.randn(2, 61)
    states = [sampler.open(i, (1,), SamplingParams(seed=i), 0, ()) for i in range(2)]
    masked, ok = sampler._masked(raw, states)
    assert masked is raw and ok is None
