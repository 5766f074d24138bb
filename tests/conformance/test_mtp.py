"""A layer that drafts proposes what it would with all of its KV made anew, whatever happened to the row.

Free pages are NaN, so a draft out of one would be none. Tokens are those without: `play` says so.
"""
from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import on_a_device
import prompts_engine
import pytest
import ranks
import torch
import where
from dense_attend import Dense
from driven import PAGE
from late_copies import Latest, Shuffled
from prompts_engine import PROMPTS, SHARED, SMALL, Engine, dense, model, play

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Aborted, Dropped, Paused, RequestId
from penstock.exec.drafts.mtp import MTP as DraftMTP
from penstock.exec.drafts.mtp import LayerDrafts
from penstock.exec.sampling.tokens import SampledStep
from penstock.exec.step.dense import Dense as DenseAttention
from penstock.exec.step.latent import Latent
from penstock.model.base import LocalLayer

FAMILIES = ["mtp", "mtp_chosen", "mtp_state", "eagle"]
pytestmark = pytest.mark.usefixtures("stages")


class From(Dense):
    """Of entries from 1 on: the first token has none before it."""

    def __call__(self, layer, q_TNH, kv_TCKH, chosen_TS=None, sinks_N=None):
        assert chosen_TS is None, "the layer that drafts chooses nothing"
        return super().__call__(layer, q_TNH, kv_TCKH)


@functools.cache
def drafts(tokens: tuple[int, ...], n: int, family: str) -> list[int]:
    """What the layer says behind `tokens`, everything computed at once."""
    m, said = model(family), list[int]()
    with torch.inference_mode():
        ids_T, position_T = where.sequence(list(tokens))
        hidden_TD = m.made(m.forward(ids_T, position_T, Dense(m.reads, m.groups)))[:-1]
        attend = From({LocalLayer(0): m.drafting})
        for _ in range(n):
            last_TD = m.draft(ids_T[1:], hidden_TD, position_T[1:], attend)[-1:]
            said.append(int(m.guess(last_TD)[1]))
            last = torch.tensor([[-1, said[-1]], [-1, len(tokens) + len(said) - 1]], device=where.DEVICE)
            (ids_T, position_T), hidden_TD = last, last_TD
    return said


LAST: list[Engine] = []         # that was made, by its proposals


def drafting(family: str, **more) -> Engine:
    """Each of its proposals is compared, when the host makes it or hears of it."""
    engine = Engine(family=family, **{"draft_tokens": 3, **more})
    mtp, engine.proposed, LAST[:] = engine.ex._ranks[-1]._drafts.layer, Counter(), [engine]
    propose = mtp.propose

    def compared(asks):
        found = propose(asks)
        for ask, got in zip(asks, found, strict=True):
            assert len(got) == ask.most
            same(ask.rid, ask.prompt, ask.outputs, got)
        return found
    mtp.propose = compared
    return engine


def same(rid, prompt, outputs, got) -> None:
    assert list(got) == drafts((*prompt, *outputs), len(got), LAST[0].family)
    LAST[0].proposed[rid] += len(got)


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Of a device that proposes the host hears with the answers of the step."""
    LAST[:], learn = [], SampledStep.learn

    def learnt(self):
        if self.firsts and LAST and LAST[0].rank._drafts.graphs is not None:
            for first, end in pairwise((*self.firsts, len(self.states))):
                rid, s = self.states[first]
                took = self.answer_2B[2, first + 1:end]
                same(rid, s.prompt, s.outputs, took[took >= 0].tolist())
        learn(self)
    monkeypatch.setattr(SampledStep, "learn", learnt)


def counts(engine) -> tuple[int, int, int]:
    return tuple(engine.total(f"spec_{name}_tokens_total") for name in ("draft", "accepted", "dropped"))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num", [1, 3, pytest.param(7, marks=pytest.mark.soak)])
def test_speculation_by_a_layer_of_the_model(num, family, overlap):
    engine = drafting(family, draft_tokens=num, overlap=overlap)
    play(engine)
    proposed, right, dropped = counts(engine)
    assert 0 < right < proposed <= engine.proposed.total() and dropped == 0
    # What the last of several stages proposes is not always asked for.
    assert ranks.NUM[0] > 1 or proposed == engine.proposed.total()


@pytest.mark.parametrize("family", ["mtp_lanes", "eagle_latent"])
def test_speculation_by_a_layer_with_the_kernel_that_an_engine_chooses(family):
    """Which reads slots up to the first that is none; and KV heads that draft for MLA KV entries."""
    engine = drafting(family, backend=None)
    play(engine)
    assert engine.proposed.total() > 20


@pytest.mark.parametrize("lateness", ["latest", pytest.param("torn", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_by_a_layer_while_anyone_pauses(family, lateness):
    late = {"latest": Latest(), "torn": Shuffled(2, torn=0.3)}[lateness]
    engine = drafting(family, step_tokens=9, hbm_pages=SMALL[family], lateness=late)
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 2 == 0 else [])
    assert engine.core.stats()["pauses"] >= 3 and 0 < counts(engine)[1] < counts(engine)[0]


@pytest.mark.parametrize("step_tokens", [5, 16])           # prompts leave few drafts of five
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_by_a_layer_of_rows_that_drop_and_abort(family, step_tokens):
    engine = drafting(family, step_tokens=step_tokens, hbm_pages=2 * SMALL[family], dram_pages=0, lateness=Latest())
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, 12)
    for turn in range(60):
        engine.inbox += [Aborted(RequestId(r)) for r in (2, 6) if turn == 2 * r]
        engine.inbox += [Dropped(RequestId(1 + turn % 7))] if turn % 3 == 0 else []
        engine.turn()
    engine.drain()
    for rid, prompt in PROMPTS.items():
        assert tuple(engine.got[rid]) == dense(prompt, 12, family)[:len(engine.got[rid])]
    assert engine.core.stats()["drops"] >= 3
    proposed, right, _ = counts(engine)
    # Where steps with prompts have no drafts, none may be right.
    assert (right < proposed and (right or step_tokens == 5)) or where.DEVICE == "cuda"


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_by_a_layer_behind_a_prefix_hit(family, monkeypatch):
    """On either tier, at any page's end: its first step drafts, from what the page keeps."""
    monkeypatch.setattr(prompts_engine, "INTERVAL", PAGE)
    engine = drafting(family, hbm_pages=120, dram_pages=200, lateness=Latest())
    asked, prompt = 0, SHARED
    for shared in (0, 2, 5, 9, 14, 17):
        for tail in ((), (4,), (4, 4)):
            ask = (*prompt, *dense(prompt, 20, family)[:shared], *tail)
            before = engine.proposed.total()
            engine.add(asked, ask, 3)
            engine.drain()
            assert tuple(engine.got[asked]) == dense(ask, 3, family) and engine.proposed.total() > before
            found = engine.started[asked]
            assert found.hbm_tokens + found.dram_tokens >= 8 * (asked > 2)
            asked += 1


@pytest.mark.parametrize("family, way, num", [
    ("mtp", "launched", 3), ("mtp", "captured", 3), ("mtp_chosen", "captured", 3), ("mtp_state", "launched", 3),
    ("mtp_state", "captured", 3), ("mtp_state", "captured", 1), ("eagle", "captured", 3)])
def test_speculation_by_a_layer_on_a_device(family, way, num, monkeypatch):
    """Rows pause, the host samples one. Captured steps wait for no answer because they draft, others do."""
    engine = on_a_device.by(way, lambda: drafting(
        family, step_tokens=9, hbm_pages=2 * SMALL[family], lateness=Latest(), draft_tokens=num), num,
        monkeypatch)
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 5 == 4 else [])
    proposed, right, dropped = counts(engine)
    assert 0 < right < proposed == engine.proposed.total() and dropped == 0 < engine.core.stats()["pauses"]
    captured = engine.rank._drafts.graphs is not None
    assert (engine.rank._launches["ahead"] > len(engine.plans) / 2) is captured is (way == "captured")
    engine.add(8, PROMPTS[1], 12, SamplingParams(temperature=0.0, logprobs=2))
    engine.add(9, PROMPTS[4], 24)
    engine.drain()
    assert [tuple(engine.got[rid]) for rid in (8, 9)] == [
        dense(PROMPTS[1], 12, family), dense(PROMPTS[4], 24, family)]
    assert engine.proposed[9] > 0 and (engine.proposed[8] == 0) is captured


def test_speculation_by_a_layer_whose_logits_are_not_finite_is_dropped():
    engine = Engine(family="mtp", draft_tokens=3)
    weights = engine.ex._ranks[-1]._model._draft.norm_last
    right = weights.value.clone()
    weights.value.fill_(float("nan"))       # in place: captured steps read it there
    try:
        play(engine)
    finally:
        weights.value.copy_(right)
    proposed, _, dropped = counts(engine)
    assert proposed == 0 and (dropped > 20 or where.DEVICE == "cuda")       # a device makes none of them


def entry_at_slot_p(mp):
    """What is made of (hidden p, token p + 1) lies at p."""
    was = DraftMTP.step
    mp.setattr(DraftMTP, "step", lambda self, lowered, hidden_TD: was(
        self, replace(lowered, ids_T=lowered.ids_T.roll(-1)), hidden_TD.roll(-1, 0)))


def hidden_state_lost_over_a_bind(mp):
    """A chunk begins as if nothing were before it."""
    was = DraftMTP.step

    def step(self, lowered, hidden_TD):
        right, pools = self._states.step, self._states
        self._states = SimpleNamespace(step=lambda *of: lambda *at: replace(
            found := right(*of)(*at), from_B=torch.full_like(found.from_B, -1)))
        was(self, lowered, hidden_TD)
        self._states = pools
    mp.setattr(DraftMTP, "step", step)


def hidden_state_of_the_first_token_kept(mp):
    """The one behind drafts that were right is not written."""
    mp.setattr(DraftMTP, "settle", lambda self, step, right: False)


def first_entry_is_seen(mp):
    """Which is of no hidden state."""
    for kind in (Latent, DenseAttention):
        mp.setattr(kind, "__init__", functools.partialmethod(
            lambda self, was, *args, first=0: was(self, *args, first=0), kind.__init__))


def test_a_layer_waits_for_its_own_pages(stages, monkeypatch):
    """Which loads bring as they do those of the model's layers."""
    if stages > 1 or where.DEVICE == "cuda":
        pytest.skip("one stage has all groups, and a device has streams of its own")
    engine, waited = Engine(family="mtp"), []
    eager, groups = engine.rank._steps[-1], range(len(model("mtp").groups))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append))
    step, own = eager.step, engine.rank._drafts.layer.step
    eager.step = lambda plan, _: step(plan, [(g, (g,)) for g in groups])

    def behind(*given):
        assert waited[-len(groups):] == [*groups]
        own(*given)
    engine.rank._drafts.layer.step = behind
    engine.add(1, PROMPTS[4], 3)
    engine.drain()
    assert tuple(engine.got[1]) == dense(PROMPTS[4], 3, "mtp") and len(waited) == 3 * len(groups)


def drafts_that_were_wrong_are_kept(mp):
    was = LayerDrafts.ran
    mp.setattr(LayerDrafts, "ran", lambda self, *step: was(self, *step[:-1], torch.ones_like(step[-1])))


def entries_are_as_they_were_proposed(mp):
    """Of hidden states that the layer has made itself."""
    def ran(self, token_B, hidden_BD, row_B, position_B, turn_B, counts_B):
        first_B = turn_B == 0
        was(self, token_B, hidden_BD, row_B, position_B.where(first_B, -1), turn_B, counts_B & first_B)
        keep(self, hidden_BD, row_B, position_B, turn_B, counts_B)
    was, keep = LayerDrafts.ran, LayerDrafts._keep
    mp.setattr(LayerDrafts, "ran", ran)


@pytest.mark.parametrize("fault", [drafts_that_were_wrong_are_kept, entries_are_as_they_were_proposed,
                                   first_entry_is_seen], ids=lambda fault: fault.__name__)
def test_speculation_by_a_layer_on_a_device_sees_its_faults(fault, stages, monkeypatch):
    if where.DEVICE == "cuda" or stages > 1:
        pytest.skip("captured steps of one stage, computed when they run")
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        play(on_a_device.by("captured", lambda: drafting("eagle", step_tokens=9), 3, monkeypatch))


@pytest.mark.parametrize("family", ["mtp", "mtp_state", "eagle"])
@pytest.mark.parametrize("fault", [entry_at_slot_p, hidden_state_lost_over_a_bind,
                                   hidden_state_of_the_first_token_kept, first_entry_is_seen],
                         ids=lambda fault: fault.__name__)
def test_speculation_by_a_layer_sees_its_faults(fault, family, monkeypatch):
    if where.DEVICE == "cuda":
        pytest.skip("of steps that are not captured")
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        engine = drafting(family, step_tokens=9)
        play(engine)
