"""Prompts of 2,000 and 6,000 tokens: greedy output of the demo equals transformers', however it is computed.

What transformers says, token by token, is in `demo_long.json` (`python tests/parity/demo_engine.py`
writes it, in minutes); the sweep computes it again.
"""
from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from late_copies import Latest, Shuffled

sys.path.insert(0, str(Path(__file__).parent))
demo_reference = importlib.import_module("demo_reference")
demo_engine = importlib.import_module("demo_engine")

EXPECTED = {int(seed): (tuple(said["tokens"]), said["logprobs"]) for seed, said in
            json.loads((demo_reference.DATA / "demo_long.json").read_text()).items()}
MEASURED = demo_engine.MEASURED
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    demo = demo_engine.Demo()
    yield demo
    demo.close()


@pytest.fixture(scope="module")
def prompts(demo: Any) -> dict[int, Tokens]:
    assert {*EXPECTED} == {*demo_engine.LONG}
    return {seed: demo.long_prompt(seed) for seed in EXPECTED}


def agree(demo: Any, seed: int, answer: Any) -> None:
    """The answer is what is expected, down to the logprobs."""
    tokens, logprobs = EXPECTED[seed]
    if tuple(answer.tokens) == tokens:
        demo_reference.near(answer.logprobs, logprobs)
    else:                                      # a tie is no difference
        answer.judged(demo_reference.Reference.load(demo.files))


def test_chunks_beside_others_with_pauses_then_a_prefix_hit(demo, prompts):
    others = [demo.prompt(m) for _, m in demo_reference.conversations()[:3]]
    engine = demo.engine(step_tokens=200, kv_cache_memory_bytes="400M", kv_offloading_size="300M", lateness=Latest(),
                         pause_every=8)
    first = engine.ask([prompts[4], *others], params=MEASURED)[0]
    agree(demo, 4, first)
    assert engine.pauses >= 3
    [again] = engine.ask([prompts[4]], params=MEASURED)
    agree(demo, 4, again)
    assert sum(again.cached.values()) == 1984


@pytest.mark.parametrize("seed", [pytest.param(4, marks=pytest.mark.sweep),
                                  pytest.param(2, marks=pytest.mark.sweep),
                                  pytest.param(1, marks=pytest.mark.soak)])
def test_what_is_expected_is_what_transformers_says(demo, prompts, seed):
    reference = demo_reference.Reference.load(demo.files)
    tokens, logprobs = reference.greedy(prompts[seed], 32)
    assert tokens == EXPECTED[seed][0]
    demo_reference.near(logprobs, EXPECTED[seed][1])
    if seed == 4:                              # the long ones: as long again, and nothing new
        reference.judge(prompts[seed], tokens, logprobs)
    print("\n" + reference.report())


@pytest.mark.parametrize("chunk, every, page_size", [
    pytest.param(511, 5, 7, marks=pytest.mark.sweep), pytest.param(8192, 0, 256, marks=pytest.mark.sweep),
    pytest.param(64, 40, 16, marks=pytest.mark.soak), pytest.param(512, 0, 16, marks=pytest.mark.soak),
    pytest.param(1, 1500, 16, marks=pytest.mark.soak)])
def test_any_chunk_size(demo, prompts, chunk, every, page_size):
    """A chunk of one token is 6,000 steps."""
    engine = demo.engine(step_tokens=chunk, page_size=page_size, kv_cache_memory_bytes="700M",
                         kv_offloading_size="600M", lateness=Latest(), pause_every=every)
    for again in (False, True):
        [answer] = engine.ask([prompts[2]], params=MEASURED)
        agree(demo, 2, answer)
        found = sum(answer.cached.values())
        assert found == (5999 // page_size * page_size if again else 0)
    assert bool(engine.pauses) == bool(every)


@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.soak),
                                     pytest.param(False, marks=pytest.mark.soak)])
def test_a_pool_for_one_and_torn_copies(demo, prompts, overlap):
    """Three prompts want the device: they wait, pause and come back from the host."""
    engine = demo.engine(step_tokens=512, kv_cache_memory_bytes="290M", kv_offloading_size="600M", overlap=overlap,
                         lateness=Shuffled(3, torn=0.1), pause_every=9)
    seeds = (1, 2, 1)
    answers = engine.ask([prompts[seed] for seed in seeds], params=MEASURED)
    for seed, answer in zip(seeds, answers, strict=True):
        agree(demo, seed, answer)
    assert engine.pauses >= 3 and engine.core.stats()["failed_moves"] >= 1
