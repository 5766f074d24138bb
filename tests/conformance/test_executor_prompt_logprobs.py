"""Logprobs of prompts: those of a forward over all of it, whatever is cached, chunked, dropped or hosted."""
from __future__ import annotations

import functools

import hosted
import pytest
import torch
import where
from dense_attend import Dense
from prompts_engine import CONFIGS, PROMPTS, SHARED, SMALL, Engine, model

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Dropped, Flushed, Paused, RequestId

pytestmark = pytest.mark.usefixtures("stages")


@functools.cache
def exact(prompt: tuple[int, ...], family: str) -> torch.Tensor:
    """logprob_TV."""
    with torch.inference_mode():
        m = model(family)
        hidden_TD = m.forward(*where.sequence(list(prompt)), Dense(m.reads, m.groups))
        return m.logits(hidden_TD).log_softmax(-1)


def check(engine, rid: int, prompt: tuple[int, ...], logprob_TV: torch.Tensor, params: SamplingParams):
    scores = engine.ex.take_prompt(RequestId(rid))
    assert scores is not None and scores.is_whole and engine.ex.take_prompt(RequestId(rid)) is None
    whole, first = scores.whole(), max(1, params.prompt_logprobs_start)
    assert whole.first == first and len(whole) == max(0, len(prompt) - first)
    for at, (own, rank, best) in enumerate(whole.rows(), first):
        right_V = logprob_TV[at - 1]
        top = right_V.topk(params.prompt_logprobs)
        assert own == pytest.approx(right_V[prompt[at]].item(), abs=1e-4)
        assert rank == 1 + (right_V > right_V[prompt[at]]).sum().item()
        assert [i for i, _ in best] == top.indices.tolist()
        assert [p for _, p in best] == pytest.approx(top.values.tolist(), abs=1e-4)


def params(best: int, start: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.0, prompt_logprobs=best, prompt_logprobs_start=start)


def looking(engine: Engine) -> tuple[Engine, dict]:
    """What was told of each prompt that is asked for is looked at with its first token."""
    asked, said = {}, engine.said

    def look(token) -> None:
        said(token)
        if token.index == 0 and token.rid in asked:
            check(engine, token.rid, *asked.pop(token.rid))
    engine.said = look
    return engine, asked


@pytest.mark.parametrize("family", CONFIGS)
def test_they_are_those_of_the_whole_prompt(family):
    """In small steps on a small device: chunks, cached prefixes, pauses, drops, others that ask nothing."""
    engine, asked = looking(Engine(family=family, hbm_pages=SMALL[family] + 6, step_tokens=7))
    for turn in range(60):
        for i, (rid, prompt) in enumerate(PROMPTS.items()):
            if turn == 5 * i:
                engine.add(rid, prompt, 6)
            if turn == 5 * i + 3:                               # its prompt is cached, in part or as a whole
                start = (0, len(prompt) // 2, len(prompt) - 1, len(prompt) + 5)[i % 4]
                asked[100 + rid] = prompt, exact(prompt, family), params(i % 3, start)
                engine.add(100 + rid, prompt, 6, asked[100 + rid][-1])
        victim = RequestId(101 + turn % 7)
        engine.inbox += {2: (Paused(victim),), 4: (Dropped(victim),), 6: (Flushed(),)}.get(turn % 8, ())
        engine.turn()
    engine.drain()
    assert not asked and len(engine.ended) == 14


def test_what_lies_before_the_first_wanted_token_is_taken_from_the_cache():
    prompt, (engine, asked) = SHARED * 3, looking(Engine())
    engine.add(1, prompt, 1)
    engine.drain()
    for rid, start, cached in ((2, 0, 0), (3, 17, 16), (4, 16, 12), (5, 40, 32)):
        asked[rid] = prompt, exact(prompt, "grouped"), params(2, start)
        engine.add(rid, prompt, 1, asked[rid][-1])
        engine.drain()
        assert engine.started[rid].hbm_tokens == cached
    assert not asked


@pytest.mark.parametrize("kind", hosted.KINDS)
def test_prompts_of_requests_whose_pages_are_on_the_host(monkeypatch, kind):
    """They are read by all of themselves, whatever decode selects: as of a device that holds them."""
    monkeypatch.setattr(hosted, "KIND", [kind])
    got = []
    for engine in (hosted.Engine(hbm_pages=200, dram_pages=0, hot_pages=0), hosted.Engine(always=True)):
        found = {}
        engine.said = lambda token, e=engine, found=found: (
            e.got[token.rid].append(token.token),
            token.index or found.update({token.rid: list(e.ex.take_prompt(token.rid).whole().rows())}))
        for rid, prompt in hosted.kind().prompts.items():
            engine.add(rid, prompt, 4, prompt_logprobs=3)
        engine.drain()
        got.append(found)
    assert engine.total("host_rows_read") > 0
    for rid, prompt in hosted.kind().prompts.items():
        assert len(got[0][rid]) == len(prompt) - 1
        for (own, rank, best), (other, place, others) in zip(got[0][rid], got[1][rid], strict=True):
            assert own == pytest.approx(other, abs=1e-4) and abs(rank - place) <= 1
            assert [p for _, p in best] == pytest.approx([p for _, p in others], abs=1e-4)
