"""The hybrid recall model keeps 512 pairs in its states: it finds them the same way whatever happens to its
row, and a wrong state is a wrong answer.

Questions are read while decoding, their answers given, so that each answer is a step of its own.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pair_engines import End, PairOfEnds
from recall_engine import ids

from penstock.eval import tasks
from penstock.eval.tasks import Interview, Size
from penstock.exec.step import states

MODEL = str(Path(__file__).parents[1] / "data" / "hybrid")
GRID = 512                          # tokens between states that are kept
OPTIONS = {"kv_cache_memory_bytes": "200M", "max_model_len": 4608, "step_tokens": 512, "state_interval": GRID}
# A device that holds a context and its states, and the next one's not beside it.
SMALL = {"kv_cache_memory_bytes": "12M", "kv_offloading_size": "200M"}


class Said(NamedTuple):
    """Of an interview: which questions were answered right, and each given token's logprob."""

    right: list[bool]
    logprobs: list[float]


@functools.cache
def interviews(samples: int = 2) -> list[Interview]:
    return tasks.interviews("recall", Size(contexts=(4000,), samples=samples, questions=32, seed=3,
                                           tokens_of=lambda text: len(text.split())))


def submit(end: End, interview: Interview, **more: object) -> int:
    given = ids(interview.dialogue)
    return end.submit(ids(interview.context), len(given), forced=given, logprobs=0,
                      ignore_eos=True, max_tokens=len(given), **more)


def said(end: End, rid: int, interview: Interview) -> Said:
    found = end.logprobs[rid]
    return Said([all(found[at].rank == 1 for at in places) for places in interview.answers],
                [each.logprob for each in found])


def ask(end: End, script: Callable[[int], None] = lambda turn: None, turn: Callable[[], None] | None = None,
        samples: int = 2) -> list[Said]:
    """All interviews at once; script: what happens at each turn."""
    rids, turns = [submit(end, one) for one in interviews(samples)], 0
    while end.open:
        script(turns)
        (turn or end.turn)()
        turns += 1
    return [said(end, rid, one) for rid, one in zip(rids, interviews(samples), strict=True)]


@functools.cache
def undisturbed() -> list[Said]:
    return ask(End(MODEL, **OPTIONS))


def same(got: Sequence[Said], want: Sequence[Said]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.right == other.right
        torch.testing.assert_close(*(torch.tensor(x.logprobs) for x in (one, other)), rtol=0, atol=1e-3)


def share(found: Sequence[Said]) -> float:
    return sum(sum(one.right) for one in found) / sum(len(one.right) for one in found)


def test_it_recalls_512_pairs() -> None:
    print(f"{share(undisturbed()):.3f} of {sum(len(one.right) for one in undisturbed())}")
    assert share(undisturbed()) >= 0.95


def test_with_fp8_kv_it_recalls_as_much() -> None:
    [found], [want] = ask(End(MODEL, **OPTIONS, kv_cache_dtype="fp8_e4m3"), samples=1), undisturbed()[:1]
    assert found.right == want.right
    assert 0 < max(abs(a - b) for a, b in zip(found.logprobs, want.logprobs, strict=True)) < 1


def paused_every_5_steps(end: End) -> Callable[[int], None]:
    def script(turn: int) -> None:
        if turn % 5 == 4 and (live := sorted(end.open)):
            end.pause(live[turn // 5 % len(live)])
    return script


def test_paused_through_host_pages_it_answers_the_same() -> None:
    end = End(MODEL, **{**OPTIONS, **SMALL})
    same(ask(end, paused_every_5_steps(end)), undisturbed())
    assert end.core.stats()["pauses"] >= 10


def test_behind_a_hit_at_each_line_of_the_grid_it_answers_the_same() -> None:
    end, [interview] = End(MODEL, **{**OPTIONS, "kv_cache_memory_bytes": "600M"}), interviews(1)
    context = ids(interview.context)
    for n, line in enumerate(range(GRID, len(context), GRID)):
        end.submit(context[:line + 1], 1, namespace=n)
    while end.open:
        end.turn()
    for n, line in enumerate(range(GRID, len(context), GRID)):
        rid = submit(end, interview, namespace=n)
        while end.open:
            end.turn()
        assert sum(end.cached[rid].cached_by_tier.values()) == line
        same([said(end, rid, interview)], undisturbed()[:1])


def test_on_two_stages_with_pauses_it_answers_the_same() -> None:
    end = End(MODEL, **{**OPTIONS, **SMALL, "pp": 2})
    try:
        same(ask(end, paused_every_5_steps(end)), undisturbed())
    finally:
        end.close()


def test_over_a_pair_it_answers_the_same(tmp_path: Path) -> None:
    with PairOfEnds(MODEL, tmp_path, **OPTIONS) as pair:
        same(ask(pair.decode, turn=pair.turn), undisturbed())
        assert pair.decode.loop.stats()["pair_delivered_total"] == len(interviews())


def test_pairs_that_lie_behind_a_state_of_the_boundary_before_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second chunk of the context goes on from it; it still has what lies before."""
    right = states._places
    monkeypatch.setattr(states, "_places", lambda ragged, runs: right(ragged, [
        replace(run, start=run.start - GRID * (run.start % (2 * GRID) == 0 < run.start and run.end - run.first > 1))
        for run in runs]))
    [interview] = interviews(1)
    [told] = ask(End(MODEL, **OPTIONS), samples=1)
    context, dialogue = ids(interview.context), ids(interview.dialogue)
    found: dict[bool, list[bool]] = {True: [], False: []}
    for (at, *_), ok in zip(interview.answers, told.right, strict=True):
        place = context.index(dialogue[at - 1])
        lost = place // GRID % 2 == 1 and place < len(context) // (2 * GRID) * 2 * GRID
        found[lost].append(ok)
    print({lost: (sum(oks), len(oks)) for lost, oks in found.items()})
    assert len(found[True]) >= 8 and sum(found[True]) < 0.2 * len(found[True])
    assert sum(found[False]) >= 0.95 * len(found[False])


def test_with_a_state_that_is_zeroed_it_answers_wrong() -> None:
    """Behind the context, once."""
    end = End(MODEL, **OPTIONS)
    rank = end.built.executor._ranks[0]

    def script(turn: int) -> None:
        if any(len(tokens) == 1 for tokens in end.got.values()):
            for _, pool_PE in rank._attending.states._layers.values():
                pool_PE.zero_()
    found = ask(end, script, samples=1)
    print(f"{share(found):.3f} with a state that is zeroed")
    assert share(found) <= 0.3
