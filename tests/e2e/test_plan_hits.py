"""`penstock plan` against an engine that runs: the same trace, the same pools, the same share of cached tokens."""
from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from penstock import SamplingParams
from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import Config
from penstock.engine.client.client import EngineClient
from penstock.plan.agents import Agents, agents
from penstock.plan.rates import Rates
from penstock.plan.shape import plan_engine
from penstock.plan.trace import Conversation, Session, Span, Text, Trace, Turn
from penstock.plan.world import World

pytestmark = pytest.mark.by_exec
VOCAB = 128
PAUSE_S = 0.05                  # after an answer: its pages have reached the host, here and there
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32"}
PAGE_BYTES = 2 * 2 * 2 * 8 * 4 * 16      # k and v, layers, KV heads, head dim, float32, page
CPU = Rates(name="a CPU", device="cpu", step_us=1_000, weights_bytes_s=1e9, prompt_flops_s=1.2e10, request_us=50,
            kv_bytes_s=1e9, selecting_us=0, miss_share=0, miss_bytes_s=1e9, load_bytes_s=2e9, save_bytes_s=2e9,
            store_read_bytes_s=1e9, store_write_bytes_s=1e9, store_us=500, memory_bytes=0, workspace_bytes=0)


def in_turn(trace: Trace) -> Trace:
    """The turns of all sessions in a random order, one at a time: no clock decides."""
    turns, rng = [], Random(1)
    for n, session in enumerate(trace.sessions):
        spans: tuple[Span, ...] = ()
        for t, turn in enumerate(session.turns):
            spans = (*spans, *turn.spans)
            turns.append((t + rng.uniform(0, 2), Turn(spans, turn.output, PAUSE_S)))
            spans = (*spans, Span(f"said {n} {t}", turn.output))
    turns.sort(key=lambda one: one[0])
    return Trace("", (Session(0.0, tuple(turn for _, turn in turns)),))


TRACE = in_turn(agents(Agents(sessions=5, turns=5, seed=3), scale=190))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


async def play(client: EngineClient, trace: Trace) -> dict[str, float]:
    """Send the trace as its clients would. Return shares of the prompt tokens by tier, as the engine counts them."""
    text = Text(VOCAB)

    async def one(session: Session) -> None:
        talk = Conversation(text)
        await asyncio.sleep(session.start_s)
        for turn in session.turns:
            await asyncio.sleep(turn.pause_s)
            params = SamplingParams(max_tokens=turn.output, temperature=0.0, ignore_eos=True)
            [stream] = client.submit(list(talk.arrive(turn)), params)
            answer: list[int] = []
            async for chunk in stream:
                answer += chunk.tokens
            talk.answer(answer)

    await asyncio.gather(*map(one, trace.sessions))
    stats = await client.stats()
    return {tier: stats[f"prefix_{name}_hits"] / stats["prefix_queries"]
            for tier, name in (("device", "hbm"), ("host", "dram"))}


def real(config: Config, trace: Trace) -> dict[str, float]:
    async def whole() -> dict[str, float]:
        client = EngineClient(resolve(config, probe()))
        await client.start()
        try:
            return await play(client, trace)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(whole(), 120))


@pytest.mark.parametrize("host_pages", [0, 300])
def test_planned_hits_are_those_of_an_engine_that_runs(folder: Path, host_pages: int) -> None:
    """Device pages for 2,400 tokens, and five sessions of up to 1,700 tokens each."""
    config = from_options(str(folder), {"load_format": "dummy", "threads": 1, "hbm_bytes": 150 * PAGE_BYTES,
                                        "kv_offloading_size": f"{host_pages * PAGE_BYTES}B", "max_num_seqs": 4})
    result = World(TRACE, plan_engine(config, CPU), CPU).run()
    prompts = result.prompt_tokens
    planned = {"device": result.device_tokens / prompts, "host": result.host_tokens / prompts}
    measured = real(config, TRACE)
    assert result.hits < result.largest_hits - 0.05, "the pools hold everything: nothing is tested"
    assert planned["device"] > 0.1 and (planned["host"] > 0.1) == bool(host_pages)
    assert all(abs(planned[tier] - measured[tier]) <= 0.01 for tier in planned), f"{planned}, measured {measured}"
