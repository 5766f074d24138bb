"""What an engine without a selection plans and asks of its kernels is what it was before there were any.

`tests/data/calls_before_selection.json` was recorded with the executor of 0efe645, which knew no sparse
decode, by this very work: of each step a digest of its plan, and of its calls of `write_kv` and attention in
order, each with shapes, slots, rows and pages. Only how they are passed has changed since (pools by page,
tables of rows): slots and pages are compared as numbers.
"""
from __future__ import annotations

import functools
import hashlib
import itertools
import json
from pathlib import Path

import pytest
from driven import InProcess, backends
from hosted import CONFIG, model, text

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Outcome, Paused, RequestId, Retired, StepPlan
from penstock.exec.step import dense
from penstock.kernels.attention import paged_attention
from penstock.memory.lateness import Promptly

BEFORE = Path(__file__).parents[1] / "data" / "calls_before_selection.json"
PAGE, LAYERS = 4, CONFIG["num_hidden_layers"]
# Shared beginnings, a prompt of many chunks, a device too small for all of them, a host tier.
PROMPTS = {1: text(1, 50), 2: text(1, 40) + text(2, 9), 3: text(3, 70), 4: text(4, 5),
           5: text(1, 48) + text(5, 3)}
SETTINGS = dict(page_size=PAGE, rows=4, hbm_pages=42, dram_pages=80, step_tokens=16, max_len=128,
                overlap=True, hbm_base=500, dram_base=90_000, row_base=70, take_pages=512)
NEW = 12


def plan_of(plan: StepPlan) -> list[object]:
    """Without what only several groups or hosted rows have, which must be empty, and without the token of a
    row that decodes: of one that came back it was in the plan, and now the device knows it."""
    assert not plan.remaps and not plan.waits and not any(b.hot for b in plan.binds)
    ends = itertools.accumulate(plan.count)
    decodes = {end for end, n, last in zip(ends, plan.count, plan.samples, strict=True) if n == 1 and last}
    tokens = [-1 if i in decodes else token for i, token in enumerate(plan.tokens, 1)]
    return [plan.step, plan.rows, plan.rids, plan.start, plan.count, plan.samples, tokens,
            [(g.row, g.pages) for g in plan.grows],
            [(b.row, b.rid, b.pages, b.emitted) for b in plan.binds],
            [(m.id, m.src.value, m.src_pages, m.dst.value, m.dst_pages, m.tokens, m.after)
             for m in plan.moves]]


def digest(what: object) -> str:
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=6).hexdigest()


def drive(engine: InProcess, calls: list[object]) -> list[list[object]]:
    """[plan, calls] of each step in order. Two requests come later, one is paused for a while."""
    waiting, steps = dict(PROMPTS), []
    for turn in range(400):
        for rid in [r for r in waiting if turn >= 4 * r - 4]:
            engine.tell(rid, waiting.pop(rid), NEW, SamplingParams(temperature=0.0))
        engine.inbox += [Paused(RequestId(2))] if turn == 14 else []
        engine.turn()
        steps += [[plan_of(plan)] for plan in engine.plans[len(steps):]]
        for event in engine.inbox:
            if isinstance(event, Retired):
                steps[event.step - 1].append(calls[:])
                calls.clear()
        if not waiting and engine.ended.keys() == engine.got.keys():
            assert {end.outcome for end in engine.ended.values()} == {Outcome.LENGTH}
            return steps
    raise AssertionError("requests never end")


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    calls: list[object] = []
    inner, prepare = dense.write_kv, functools.partial(
        paged_attention.prepare, backend=backends(("paged_attention",))["paged_attention"].name)

    def write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, page_T, offset_T):
        calls.append(["store", list(k_TKH.shape), (page_T * PAGE + offset_T).tolist()])
        inner(k_TKH, v_TKH, k_PKGH, v_PKGH, page_T, offset_T)

    def plan(layout, spec):
        pages = [layout.pages_RM[row, :-(-context // PAGE)].tolist()
                 for row, context in zip(layout.rows, layout.context, strict=True)]
        calls.append(["plan", layout.query_start, layout.context, pages])
        run = prepare(layout, spec)

        def attention(q_TNH, k_PKGH, v_PKGH, sinks_N=None):
            calls.append(["attend", list(q_TNH.shape)])
            return run(q_TNH, k_PKGH, v_PKGH, sinks_N)
        return attention

    monkeypatch.setattr(dense, "write_kv", write_kv)
    engine = InProcess()
    engine.build(model, model().groups, attention=plan, num_layers=LAYERS, lateness=Promptly(), **SETTINGS)
    return drive(engine, calls)


def test_plans_and_kernel_calls_are_those_before_there_were_selections(monkeypatch):
    steps = recorded(monkeypatch)
    flat = [call for _, calls in steps for call in calls]
    assert {call[0] for call in flat} == {"plan", "store", "attend"}
    assert sum(call[0] == "attend" for call in flat) == LAYERS * sum(call[0] == "plan" for call in flat)
    moved = [m for plan, _ in steps for m in plan[9]]
    assert {m[1] for m in moved} == {"hbm", "dram"}, "the host tier has both been written and read"
    before = json.loads(BEFORE.read_text())
    for n, (step, want) in enumerate(zip(steps, before, strict=True)):
        assert [digest(part) for part in step] == want, f"step {n + 1}: {step}"
