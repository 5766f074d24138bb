"""Greedy output of the demo model equals transformers': 8 languages, 5 chats each, 32 tokens.

Whatever the chunks, the batch around a request, pauses, late or torn copies, prefix hits, the page
size and overlap: every variant is held to the same 1,280 choices of the reference, or a part of them.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from late_copies import Latest, Shuffled

from penstock.kernels.platform import probe
from penstock.kernels.registry import OPS, choose

sys.path.insert(0, str(Path(__file__).parent))
demo_reference = importlib.import_module("demo_reference")
demo_engine = importlib.import_module("demo_engine")

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    demo = demo_engine.Demo()
    yield demo
    demo.close()


@pytest.fixture(scope="module")
def reference(demo: Any) -> Iterator[Any]:
    reference = demo_reference.Reference.load(demo.files)
    yield reference
    print("\n" + reference.report())


@pytest.fixture(scope="module")
def prompts(demo: Any) -> list[Tokens]:
    """Of all chats; every fifth begins a language."""
    return [demo.prompt(messages) for _, messages in demo_reference.conversations()]


def agree(reference: Any, answers: list[Any]) -> None:
    for answer in answers:
        answer.judged(reference)


def test_the_reference_judges_as_it_generates(reference, prompts):
    """One pass over a finished answer tells what token-by-token decoding tells, and not less."""
    for prompt in prompts[2::20]:
        tokens, logprobs = reference.greedy(prompt, 32)
        reference.judge(prompt, tokens, logprobs)
        other = (*tokens[:20], tokens[20] + 1, *tokens[21:])
        with pytest.raises(AssertionError, match=r"output 20 .* the reference says"):
            reference.judge(prompt, other)
    assert not reference.ties


@pytest.mark.covers(weights="gguf")
def test_all_chats_in_one_batch(demo, reference, prompts):
    # What 40 decoding rows leave of a step goes to prompts: chunks of 1 to 47 tokens.
    engine = demo.engine(max_num_seqs=40, step_tokens=47)
    agree(reference, engine.ask(prompts))
    assert engine.core.stats()["steps"] < 120 and engine.pauses == 0


def test_steps_one_after_the_other(demo, reference, prompts):
    engine = demo.engine(max_num_seqs=10, step_tokens=17, overlap=False)
    agree(reference, engine.ask(prompts[1::4]))


@pytest.mark.covers(weights="gguf", feature="cache")
def test_one_after_another_then_again_from_the_cache(demo, reference, prompts):
    some = prompts[3::20]
    engine = demo.engine()
    for again in (False, True):
        for prompt in some:
            [answer] = engine.ask([prompt], params=demo_engine.MEASURED)
            answer.judged(reference)
            if again:                                     # at least one token is computed
                assert answer.cached == {"hbm": (len(prompt) - 1) // 16 * 16, "dram": 0}


def test_chunks_of_one_token(demo, reference, prompts):
    some = sorted(prompts, key=len)[:2]
    engine = demo.engine(step_tokens=1)
    agree(reference, engine.ask(some))
    assert engine.core.stats()["steps"] >= sum(map(len, some)) + 62


@pytest.mark.covers(weights="gguf", feature="tier paused")
def test_pauses_every_other_step_with_copies_as_late_as_allowed(demo, reference, prompts):
    engine = demo.engine(max_num_seqs=6, step_tokens=10, page_size=8, kv_offloading_size="200M",
                         lateness=Latest(), pause_every=2)
    agree(reference, engine.ask(prompts[1::4], params=demo_engine.MEASURED))
    assert engine.pauses >= 40 and engine.core.stats()["drops"] == 0


def test_a_device_pool_that_is_too_small_and_torn_copies(demo, reference, prompts):
    engine = demo.engine(max_num_seqs=16, step_tokens=64, page_size=4, kv_cache_memory_bytes="24M",
                         kv_offloading_size="60M", lateness=Shuffled(1, torn=0.2))
    agree(reference, engine.ask(prompts[::2]))
    assert engine.pauses >= 3 and engine.core.stats()["failed_moves"] >= 10


# ---------------------------------------------------------------- the matrix: once through, and whole
def swept(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.sweep)


def soaked(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize("every", [swept(4), soaked(1)])
def test_every_chat_as_transformers_decodes_it(demo, reference, prompts, every):
    """Without judging: both decode by themselves, one chat after another."""
    engine = demo.engine(prefix_cache=False)
    for prompt in prompts[::every]:
        [answer] = engine.ask([prompt])
        if tuple(answer.tokens) != reference.greedy(prompt, 32)[0]:
            answer.judged(reference)


@pytest.mark.parametrize("chunk, overlap", [soaked(1, True), swept(2, False), soaked(3, True),
                                            soaked(5, False), swept(7, True), swept(512, False)])
def test_every_chunk_size(demo, reference, prompts, chunk, overlap):
    some = prompts if chunk > 7 else prompts[chunk % 5::5]
    engine = demo.engine(max_num_seqs=40, step_tokens=chunk, overlap=overlap)
    agree(reference, engine.ask(some))


LATENESS = {"prompt": lambda: None, "latest": Latest, "torn": lambda: Shuffled(2, torn=0.3)}


ONCE = {("latest", 1), ("prompt", 5), ("torn", 16), ("torn", 256)}     # each of both


@pytest.mark.parametrize("lateness, page_size, overlap", [
    (swept if (lateness, page_size) in ONCE else soaked)(lateness, page_size, overlap)
    for lateness in LATENESS
    for page_size, overlap in ((1, True), (5, False), (16, True), (256, False))])
def test_pauses_with_every_page_size(demo, reference, prompts, lateness, page_size, overlap):
    engine = demo.engine(max_num_seqs=11, step_tokens=31, page_size=page_size, overlap=overlap,
                         kv_offloading_size="500M", kv_cache_memory_bytes="500M", lateness=LATENESS[lateness](),
                         pause_every=3)
    agree(reference, engine.ask(prompts))
    assert engine.pauses >= 20
    agree(reference, engine.ask(prompts))


@pytest.mark.parametrize("every", [swept(4), soaked(1)])
@pytest.mark.parametrize("choice", [f"{op}={name}" for op in ("linear", "paged_attention", "layer")
                                    for name in OPS[op].names])
def test_every_back_end(demo, reference, prompts, choice, every):
    op, _, name = choice.partition("=")
    if any(name == skipped for skipped, _ in choose(probe())[op].skipped):
        pytest.skip("cannot run here")
    engine = demo.engine(max_num_seqs=40, step_tokens=47, kv_offloading_size="100M", pause_every=5,
                         backends=[choice])
    agree(reference, engine.ask(prompts[::every]))
