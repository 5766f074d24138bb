"""The recall model with its layer that drafts: 32 questions of 12 tokens are answered as without, and much of
what it drafts is right."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pair_engines import End, PairOfEnds

from penstock.eval import words

MODEL = str(Path(__file__).parents[1] / "data" / "recall")
ANSWER, SHARE = 12, 0.9      # what it was trained to is 1.0
OPTIONS = {"kv_cache_memory_bytes": "32M", "kv_offloading_size": "16M", "step_tokens": 256}
MTP = {"speculative_method": "mtp", "speculative_tokens": 3}
PLACES = {"resident": {"host_decode": "off"}, "hosted": {"host_decode": "always"}}


def questions() -> list[tuple[list[int], list[int]]]:
    """Distinct words, and a few of them again: what comes next are the words that followed these. Of 128, 256
    and 512 words; some prompts end with a page."""
    dice, found = random.Random(5), []
    for number in range(32):
        context = dice.sample(range(words.KEY, words.VALUE + words.NUM_VALUES), (128, 256, 512)[number % 3])
        first, known = dice.randrange(len(context) - 8 - ANSWER), 8 - number % 4
        run = context[first:first + known + ANSWER]
        found.append((context + run[:known], run[known:]))
    return found


def answers(end: End, turn: Callable[[], None] | None = None) -> dict[int, list[int]]:
    for prompt, _ in questions():
        end.submit(prompt, ANSWER)
    while end.open:
        (turn or end.turn)()
    return end.got


def as_on_a_gpu(end: End) -> End:
    """Hosted rows draft no further than their hot buffers hold what all positions select."""
    [rank] = end.built.executor._ranks
    rank._widths._narrowing._at_once = rank._at_once
    return end


def share(end: End) -> float:
    """Of what was drafted, how much was said."""
    stats = end.built.executor.stats()
    assert sum(n for key, n in stats.items() if key.startswith("spec_dropped_tokens_total")) == 0
    drafted, accepted = (sum(column) for column in zip(*(
        chunk.drafts for chunk in end.ended.values() if chunk.drafts), strict=True))
    print(f"{drafted} drafted")
    assert drafted > 100
    return accepted / drafted


@pytest.mark.parametrize("place", PLACES)
def test_32_questions_are_answered_as_without(place: str) -> None:
    plain = End(MODEL, **OPTIONS, **PLACES[place])
    drafts = as_on_a_gpu(End(MODEL, **OPTIONS, **PLACES[place], **MTP))
    said = answers(plain)
    assert said == answers(drafts)
    right = sum(one == want for one, (_, want) in zip(said.values(), questions(), strict=True))
    accepted = share(drafts)
    print(f"{place}: {right} of 32 right, {accepted:.3f} of drafts accepted")
    assert right >= 28 and accepted >= SHARE


@pytest.mark.parametrize("place, layout", [("resident", {"pp": 2}), *(
    pytest.param(*cell, marks=pytest.mark.sweep) for cell in (
        ("hosted", {"pp": 2}), ("hosted", {"tp": 2}), ("resident", {"pp": 2, "tp": 2})))], ids=str)
def test_32_questions_are_answered_as_without_by_several_ranks(place: str, layout: dict[str, int]) -> None:
    plain = answers(End(MODEL, **OPTIONS, **PLACES[place]))
    several = End(MODEL, **OPTIONS, **PLACES[place], **MTP, **layout)
    try:
        assert answers(several) == plain
        accepted = share(several)
        print(f"{place}, {layout}: {accepted:.3f} of drafts accepted")
        assert accepted >= SHARE
    finally:
        several.close()


@pytest.mark.sweep
@pytest.mark.parametrize("prefill, decode", [({}, {}), ({"pp": 2}, {"tp": 2}), ({}, {"pp": 2})], ids=str)
def test_32_questions_are_answered_as_without_over_a_pair(
        tmp_path: Path, prefill: dict[str, object], decode: dict[str, object]) -> None:
    plain = answers(End(MODEL, **OPTIONS, host_decode="off"))
    with PairOfEnds(MODEL, tmp_path, **OPTIONS, host_decode="off", prefill=prefill, decode=decode,
                    **MTP) as pair:
        assert answers(pair.decode, pair.turn) == plain
        print(f"pair: {share(pair.decode):.3f} of drafts accepted")
        assert share(pair.decode) >= SHARE
