"""A recall model with windows: it finds the pairs in a window and no others, the same way whatever happens to its rows,
and nothing in the window of another request."""
from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from late_copies import Latest
from recall_engine import Answers, ask, ids
from recall_windows import WINDOW, WINDOWS

from penstock.core.plan import Paused, RequestId
from penstock.eval import tasks
from penstock.eval.tasks import Interview, Size

CONTEXT = 1024
# Room for one and a half of the two requests.
SMALL = {"hbm_pages": 200, "dram_pages": 800}


@functools.cache
def interviews() -> list[Interview]:
    return tasks.interviews("recall", Size(contexts=(CONTEXT,), samples=2, questions=24, seed=11,
                                           tokens_of=lambda text: len(text.split())))


def found(answers: Answers) -> dict[bool, list[bool]]:
    """Which questions are right, of pairs in the window of their question and of the others."""
    told: dict[bool, list[bool]] = {True: [], False: []}
    for one, right in zip(interviews(), answers.right, strict=True):
        context, dialogue = ids(one.context), ids(one.dialogue)
        for (at, *_), ok in zip(one.answers, right, strict=True):
            # The query is the key, again; the answer's own key says what comes behind it.
            told[len(context) + at - 1 - (context.index(dialogue[at - 1]) + 1) < WINDOW].append(ok)
    assert all(len(oks) >= 20 for oks in told.values())
    return told


def every_5_turns(turn: int, live: list[int]) -> list[Paused]:
    return [Paused(RequestId(live[turn // 5 % len(live)]))] if turn % 5 == 4 and live else []


@pytest.mark.parametrize("how", [{}, {"stages": 3, "step_tokens": 100}, {
    "script": every_5_turns, "lateness": Latest(), **SMALL}], ids=["whole", "three-stages", "paused"])
def test_it_recalls_what_its_windows_have(how: dict[str, Any]) -> None:
    answers = ask(interviews(), of=WINDOWS, **how)
    told = found(answers)
    assert all(told[True]) and sum(told[False]) < 0.1 * len(told[False])
    assert "script" not in how or answers.stats["pauses"] >= 5


@pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="steps are captured there")
def test_the_window_of_another_request_has_no_answers() -> None:
    """All decode steps of two requests read it; they write to their own."""
    flipped = []

    def put(rank: Any) -> None:
        [group] = [g for g, spec in rank._attending.specs.items() if spec.window]
        right = rank._attending.step

        def step(lowered: Any) -> Any:
            ragged = list(lowered.ragged)
            if len(lowered.batch.rows) == len(lowered.ids_T) == 2:
                flipped.append(1)
                ragged[group] = replace(ragged[group], pages_RM=ragged[group].pages_RM[:2].flip(0).contiguous())
            return right(replace(lowered, ragged=tuple(ragged)))
        rank._attending.step = step
    told = found(ask(interviews(), of=WINDOWS, rows=2, step_tokens=2 * CONTEXT + 100, put=put))
    assert len(flipped) > 50 and sum(told[True]) < 0.2 * len(told[True])
