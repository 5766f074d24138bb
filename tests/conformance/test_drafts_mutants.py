"""Faults of steps that check drafts: each is put in, and a scene that the right executor passes sees it."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import hosted
import printable
import pytest
import ranks
import torch
from drafters import Dice
from prompts_engine import PROMPTS, Engine, dense, play

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.exec.drafts import narrow
from penstock.exec.sampling import sampler
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.sampling.masks import Masks
from penstock.exec.sampling.tokens import HostSampler
from penstock.exec.step.states import StatePools
from penstock.exec.step.step_batch import StepBatch

Put = Callable[[pytest.MonkeyPatch], object]
KINDS = {"seeded": SamplingParams(seed=3),
         "grammar": SamplingParams(grammar=Grammar("regex", "([0-9]{2}-[A-F][G-Z]){20}"), seed=1)}


# ---------------------------------------------------------------- faults
def length_from_the_plan(mp):
    """Where a row would be, had all drafts been right."""
    positions_of_the_plan(mp, lambda before: True)


def positions_of_the_plan(mp, wrong):
    right = StepBatch.of

    def of(plan, index, inputs=None, before=None):
        at, left, out = 0, iter(inputs or ()), []
        for start, count in zip(plan.start, plan.count, strict=True):
            if inputs and plan.tokens[at] < 0:
                _, drafts = next(left), next(left)
                out += (start, drafts, *(next(left) for _ in range(drafts)))
            at += count
        return right(plan, index, tuple(out) if inputs and wrong(before) else inputs, before)
    mp.setattr(StepBatch, "of", staticmethod(of))


def length_kept_over_a_bind(mp):
    """The first step of a row is where its last request was."""
    bind, right, rows, lengths = HostSampler.bind, HostSampler.history, {}, {}

    def bound(self, bound):
        rows[bound.rid] = bound.row
        return bind(self, bound)

    def history(self, rid):
        prompt, outputs = right(self, rid)
        length, lengths[rows[rid]] = lengths.get(rows[rid]), (rid, len(prompt) + len(outputs))
        if length is not None and length[0] != rid:
            outputs = [*outputs, *(0 for _ in range(length[1]))][:max(1, length[1] - len(prompt))]
        return prompt, outputs
    mp.setattr(HostSampler, "bind", bound)
    mp.setattr(HostSampler, "history", history)


def one_accepted_too_many(mp):
    """What follows the first wrong draft is said as well."""
    right = HostSampler._checked

    def checked(self, plan, ran, pairs):
        found = right(self, plan, ran, pairs)
        firsts = {rid: plan.rids.index(rid) for rid, _, _ in found.drafts}
        for rid, drafts, good in found.drafts:
            n = [r for r, _ in pairs].index(rid)
            if good < drafts and found.tokens[n]:
                token = int(ran.logits_BV[firsts[rid] + good + 1].argmax())
                found.tokens[n] += (token,)
                self._open[rid].outputs.append(token)
                self._tables.sampled([ran.rows[firsts[rid]]], torch.tensor([token]))
        return found
    mp.setattr(HostSampler, "_checked", checked)


def uniform_of_the_wrong_index(mp):
    """All positions of a row draw with that of its first."""
    right, first = HostSampler._checked, {}

    def checked(self, plan, ran, pairs):
        first.update({s.key: len(s.outputs) for _, s in pairs})
        try:
            return right(self, plan, ran, pairs)
        finally:
            first.clear()
    uniform = sampler.uniform
    mp.setattr(HostSampler, "_checked", checked)
    mp.setattr(sampler, "uniform", SimpleNamespace(
        stream=uniform.stream, uniform=lambda key, index: uniform.uniform(key, first.get(key, index))))


def mask_one_early(mp):
    """Positions behind the first are masked as if the draft before them had not been said."""
    right, steps = Masks.apply, {}

    def checked(self, plan, ran, pairs, was=HostSampler._checked):
        steps.update({id(s.outputs): len(s.outputs) for _, s in pairs})
        try:
            return was(self, plan, ran, pairs)
        finally:
            steps.clear()

    def apply(self, masked_BV, some, matchers, outputs):
        return right(self, masked_BV, some, matchers, [
            o[:-1] if len(o) > steps.get(id(o), len(o)) else o for o in outputs])
    mp.setattr(HostSampler, "_checked", checked)
    mp.setattr(Masks, "apply", apply)


def positions_of_a_later_stage(mp):
    """It takes them from the plan."""
    positions_of_the_plan(mp, lambda before: before is not None)


def drafts_of_an_ended_request(mp):
    """A drafter remembers it for ever."""
    mp.setattr(narrow.Narrowing, "forget", lambda self, rid: None)


def _again(mp, change) -> None:
    """Writes of positions that were written before are done by `change(right, values, at, *pools)`."""
    def engine(was=hosted_engine):
        made, seen = was(), set()
        for rank in made.ex._ranks:
            layers, chooser = rank._attending._layers, rank._attending._chooser
            layers._write_kv = functools.partial(write, layers._write_kv, seen)
            if hasattr(chooser, "write_kv"):
                chooser.write_kv = functools.partial(write, chooser.write_kv, seen)
        return made

    def write(right, seen, values, at, device, *pools):
        keys = [(device.data_ptr(), *key) for key in
                zip(at.row_T.tolist(), at.position_T.tolist(), strict=True)]
        old = torch.tensor([key in seen for key in keys])
        seen.update(keys)
        for which, do in ((~old, right), (old, functools.partial(change, right))):
            if which.any():
                fields = {f.name: getattr(at, f.name) for f in dataclasses.fields(at)}
                part = type(at)(**{name: x[which] if torch.is_tensor(x) else x for name, x in fields.items()})
                do([v[which] for v in values], part, device, *pools)
    mp.setitem(globals(), "hosted_engine", engine)


def state_not_replayed(mp):
    """Of tokens that were right when they were drafts."""
    mp.setattr(StatePools, "settle", lambda self, step, right: bool(self._open.pop(step, None)))


def state_of_a_rejected_token(mp):
    """All drafts are scanned once more."""
    right = StatePools.settle

    def settle(self, step, found):
        open = self._open.get(step)
        return right(self, step, {} if open is None else {
            row: run.end - run.first - 1 for row, run in open._drafting.items()})
    mp.setattr(StatePools, "settle", settle)


def hot_unit_of_a_rejected_token(mp):
    """It stays hot as it was."""
    def change(right, values, at, device, host=None, hot=None, bounds=None):
        right(values, at, device, host, None, bounds)
    _again(mp, change)


def summary_not_rewritten(mp):
    """Of a unit that a rejected token closed."""
    def change(right, values, at, device, host=None, hot=None, bounds=None):
        right(values, at, device, host, hot, bounds if bounds is None else bounds.clone())
    _again(mp, change)


def index_key_left(mp):
    """Of a rejected token."""
    def change(right, values, at, device, *pools):
        if pools:                       # not where the keys of an indexer are
            right(values, at, device, *pools)
    _again(mp, change)


# ---------------------------------------------------------------- scenes
def drafting(**more) -> Engine:
    return Engine(drafter=Dice(dense, .6), draft_tokens=3, **more)


def plain() -> None:
    engine = drafting()
    play(engine)
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")
    assert all(engine.drafter.forgotten.count(rid) >= 2 for rid in PROMPTS), "at its bind and its end"


def stateful() -> None:
    engine = Engine(family="state", drafter=Dice(functools.partial(dense, family="state"), .6),
                    draft_tokens=3)
    play(engine)
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")


def staged() -> None:
    ranks.NUM, before = [2], ranks.NUM
    try:
        plain()
    finally:
        ranks.NUM = before


@functools.cache
def _alone(kind: str) -> tuple[int, ...]:
    return _answer(Engine(), kind)


def _answer(engine: Engine, kind: str) -> tuple[int, ...]:
    engine.rank._tokens._sampler._grammars = Grammars(printable.vocabulary)
    engine.add(1, PROMPTS[1], 16, KINDS[kind])
    engine.drain()
    return tuple(engine.got[1])


def said(kind: str) -> None:
    engine = Engine(drafter=Dice(lambda _, n: _alone(kind)[:n], .7), draft_tokens=3)
    assert _answer(engine, kind) == _alone(kind)
    assert engine.total("spec_accepted_tokens_total") > 0


def hosted_engine() -> hosted.Engine:
    return hosted.Engine(draft_tokens=3, drafter=Dice(hosted.resident, .3), step_tokens=200)


def on_the_host(kind: str) -> None:
    hosted.KIND, before = [kind], hosted.KIND
    try:
        engine = hosted_engine()
        hosted.play(engine, prompts={1: hosted.kind().prompts[1]}, arrive=lambda rid: 0)
    finally:
        hosted.KIND = before


SCENES = {"plain": plain, "staged": staged, "stateful": stateful,
          **{kind: functools.partial(said, kind) for kind in KINDS},
          **{kind: functools.partial(on_the_host, kind) for kind in ("bounds", "latent")}}
FAULTS: dict[Put, str] = {
    length_from_the_plan: "plain", length_kept_over_a_bind: "plain", one_accepted_too_many: "plain",
    uniform_of_the_wrong_index: "seeded", hot_unit_of_a_rejected_token: "bounds",
    summary_not_rewritten: "bounds", index_key_left: "latent", mask_one_early: "grammar",
    state_not_replayed: "stateful", state_of_a_rejected_token: "stateful",
    positions_of_a_later_stage: "staged", drafts_of_an_ended_request: "plain"}
QUICK = (length_from_the_plan, one_accepted_too_many, drafts_of_an_ended_request)


@pytest.mark.sweep
@pytest.mark.parametrize("scene", SCENES)
def test_the_right_executor_passes(scene):
    SCENES[scene]()


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.__name__, marks=(
    [] if fault in QUICK else [pytest.mark.sweep])) for fault in FAULTS])
def test_a_fault_is_seen(fault, monkeypatch):
    for prompt in PROMPTS.values():
        dense(prompt, 12), dense(prompt, 12, "state")                   # of the right one
    if (kind := FAULTS[fault]) in ("seeded", "grammar"):
        _alone(kind)
    if kind in ("bounds", "latent"):
        monkeypatch.setattr(hosted, "KIND", [kind])
        hosted.resident(hosted.kind().prompts[1], hosted.NEW)
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        SCENES[kind]()
