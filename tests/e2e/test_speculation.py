"""Speculation of the demo model: the same answers as without, and what usage says of it."""
from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock import LLM, SamplingParams
from penstock.config.request.grammar import Grammar

CODE = "Write a Python class Stack with push, pop and peek, each with a docstring."
REPEAT = "Repeat this word for word: the quick brown fox jumps over the lazy dog, the quick brown fox jumps."
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
CHATS = json.loads((Path(__file__).parents[1] / "data/demo_chats.json").read_text())
KINDS = {
    "greedy": GREEDY, "seeded": SamplingParams(seed=5, max_tokens=40, temperature=0.7, top_p=0.9),
    "several": SamplingParams(seed=9, n=3, max_tokens=24, frequency_penalty=0.4),
    "stop": SamplingParams(temperature=0.0, max_tokens=40, stop=("fox jumps",), logprobs=2),
    "grammar": SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar(
        "regex", r"(one two three|one two four)( and (one two three|one two four)){8,12}")),
    "minimum": SamplingParams(temperature=0.0, min_tokens=30, max_tokens=32, repetition_penalty=1.1)}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1, max_num_seqs=8, kv_cache_memory_bytes="300M", dtype="float32", seed=1,
             speculative_config='{"method": "ngram", "num_speculative_tokens": 3}') as llm:
        yield llm


def both(llm, asks, params):
    """Answers without drafts and with them; the second ones find their prompts in the cache."""
    chats = [[{"role": "user", "content": ask}] for ask in asks]
    return (llm.chat(chats, msgspec.structs.replace(params, speculative_tokens=0)), llm.chat(chats, params))


def words(answers):
    return [[(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in a.outputs] for a in answers]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.sweep)
                                  if kind in ("seeded", "minimum") else kind for kind in KINDS])
def test_speculation_changes_no_answer(llm, kind):
    without, answers = both(llm, [CODE, REPEAT], KINDS[kind])
    assert words(answers) == words(without)
    assert all(a.draft_tokens == a.accepted_draft_tokens == 0 for a in without)
    proposed, right = sum(a.draft_tokens for a in answers), sum(a.accepted_draft_tokens for a in answers)
    assert 0 < right <= proposed
    for a, b in zip(answers, without, strict=True):
        for one, other in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
            assert {t: p.logprob for t, p in one.items()} == pytest.approx(
                {t: p.logprob for t, p in other.items()}, abs=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=40)], ids=["greedy", "seeded"])
def test_speculation_of_40_chats(llm, params):
    asks = [chat[-1]["content"] for kind in CHATS.values() for chat in kind if isinstance(chat[-1], dict)]
    asks = [ask + more for more in ("", " Answer in a list.", " Be brief.") for ask in asks][:40]
    without, answers = both(llm, asks, params)
    assert len(asks) == 40 and words(answers) == words(without)
    assert 0 < sum(a.accepted_draft_tokens for a in answers) < sum(a.draft_tokens for a in answers)
