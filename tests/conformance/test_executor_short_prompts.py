"""Short prompts that take a part of each step behind a long one: several unfinished prompts in a step, of every
kind of cache, with drafts and choices. The rule itself: tests/unit/test_core_short_prompts.py.
"""
from __future__ import annotations

import pytest
from late_copies import Shuffled
from prompts_engine import SHARED, Engine, dense

from penstock.core import schedule
from penstock.core.plan import Dropped, Paused, RequestId
from penstock.exec.drafts.drafter import NGram

pytestmark = pytest.mark.usefixtures("stages")

LONG = tuple((5 * i * i + 3 * i) % 61 for i in range(48))
SHORT = {2: (*SHARED, 40), 3: SHARED[:8], 4: (*SHARED, *SHARED[:5]), 5: (50,)}


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    """So that prompts of a test are long and short enough: of a step of 8 tokens they take 2."""
    monkeypatch.setattr(schedule, "SHORT_PART", 0.6)


def unfinished(engine: Engine) -> int:
    """Prompts that the fullest plan computes a part of, and not the end."""
    prompts = {1: LONG, **SHORT}
    return max(sum(start + count < len(prompts.get(rid, ())) for rid, start, count in
                   zip(plan.rids, plan.start, plan.count, strict=True)) for plan in engine.plans)


def play(engine: Engine, script=lambda turn: ()) -> None:
    engine.add(1, LONG, 8)
    for turn in range(40):
        if turn in (1, 2):
            for rid in (2, 3) if turn == 1 else (4, 5):
                engine.add(rid, SHORT[rid], 8)
        engine.inbox += script(turn)
        engine.turn()
    engine.drain()
    for rid, prompt in {1: LONG, **SHORT}.items():
        assert tuple(engine.got[rid]) == dense(prompt, 8, engine.family), rid
    assert unfinished(engine) >= 2


@pytest.mark.parametrize("family", ["grouped", "latent", "window", "mla", "sinks", "state"])
@pytest.mark.parametrize("overlap", [False, True])
def test_several_unfinished_prompts_in_a_step_answer_as_alone(family, overlap):
    play(Engine(family=family, step_tokens=8, rows=6, hbm_pages=120, overlap=overlap))


@pytest.mark.parametrize("kind", [Paused, Dropped])
@pytest.mark.parametrize("family", ["grouped", "state"])
def test_they_are_preempted_in_the_middle_of_their_prompts(family, kind):
    engine = Engine(family=family, step_tokens=8, rows=6, hbm_pages=120, lateness=Shuffled(2, torn=0.3))
    play(engine, lambda turn: [kind(RequestId(1 + turn % 4))] if 2 <= turn < 12 else ())


@pytest.mark.parametrize("family", ["grouped", "state"])
def test_drafts_of_decoding_rows_next_to_them(family):
    engine = Engine(family=family, step_tokens=8, rows=6, hbm_pages=120, draft_tokens=2, drafter=NGram(1))
    play(engine)


@pytest.mark.parametrize("family", ["grouped", "state"])
def test_choices_of_a_short_prompt_behind_a_long_one(family):
    engine = Engine(family=family, step_tokens=8, rows=6, hbm_pages=120)
    engine.add(1, LONG, 8)
    engine.turn()
    engine.add(2, SHORT[4], 8)
    for rid in (3, 4):
        engine.add(rid, SHORT[4], 8, leader=RequestId(2))
    engine.drain()
    assert all(tuple(engine.got[rid]) == dense(SHORT[4], 8, family) for rid in (2, 3, 4))
    assert tuple(engine.got[1]) == dense(LONG, 8, family) and unfinished(engine) >= 2
