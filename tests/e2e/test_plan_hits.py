"""`penstock plan` against an engine that runs: the same trace, the same pools, the same hits, nearly the same times."""
from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from penstock import SamplingParams
from penstock.bench.rates import measure
from penstock.bench.report import percentile
from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import Config
from penstock.engine.client.client import EngineClient
from penstock.plan.agents import Agents, agents
from penstock.plan.rates import parse, unmeasured
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
CPU = unmeasured("cpu", step_us=1_000, prompt_flops_s=1.2e10, request_us=50, load_bytes_s=2e9, save_bytes_s=2e9)


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


@dataclass(slots=True)
class Played:
    hits: dict[str, float] = field(default_factory=dict)    # shares of the prompt tokens by tier, as the engine counts
    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    output_tokens: int = 0


async def play(client: EngineClient, trace: Trace) -> Played:
    """Send the trace as its clients would."""
    text, played, begin = Text(VOCAB), Played(), time.perf_counter()

    async def one(session: Session) -> None:
        talk = Conversation(text)
        await asyncio.sleep(session.start_s)
        for turn in session.turns:
            await asyncio.sleep(turn.pause_s)
            params = SamplingParams(max_tokens=turn.output, temperature=0.0, ignore_eos=True)
            prompt, answer = list(talk.arrive(turn)), list[int]()
            sent = time.perf_counter()
            [stream] = client.submit(prompt, params)
            async for chunk in stream:
                if chunk.tokens and not answer:
                    played.ttft_s.append(time.perf_counter() - sent)
                answer += chunk.tokens
            played.output_tokens += len(answer)
            talk.answer(answer)

    await asyncio.gather(*map(one, trace.sessions))
    played.seconds = time.perf_counter() - begin
    stats = await client.stats()
    played.hits = {tier: stats[f"prefix_{name}_hits"] / stats["prefix_queries"]
                   for tier, name in (("device", "hbm"), ("host", "dram"))}
    return played


def real(config: Config, trace: Trace) -> Played:
    async def whole() -> Played:
        client = EngineClient(resolve(config, probe()))
        await client.start()
        try:
            return await play(client, trace)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(whole(), 300))


@pytest.mark.parametrize("host_pages", [0, 300])
def test_planned_hits_are_those_of_an_engine_that_runs(folder: Path, host_pages: int) -> None:
    """Device pages for 2,400 tokens, and five sessions of up to 1,700 tokens each."""
    config = from_options(str(folder), {"load_format": "dummy", "threads": 1, "hbm_bytes": 150 * PAGE_BYTES,
                                        "kv_offloading_size": f"{host_pages * PAGE_BYTES}B", "max_num_seqs": 4})
    result = World(TRACE, plan_engine(config, CPU), CPU).run()
    prompts = result.prompt_tokens
    planned = {"device": result.device_tokens / prompts, "host": result.host_tokens / prompts}
    measured = real(config, TRACE).hits
    assert result.hits < result.largest_hits - 0.05, "the pools hold everything: nothing is tested"
    assert planned["device"] > 0.1 and (planned["host"] > 0.1) == bool(host_pages)
    assert all(abs(planned[tier] - measured[tier]) <= 0.01 for tier in planned), f"{planned}, measured {measured}"


# ---------------------------------------------------------------- times
LARGER = {**TINY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64,
          "max_position_embeddings": 8_192}
AGENTS = agents(Agents(sessions=6, pause_s=0.4, seed=1), scale=40)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Device pages for 16,000 tokens. Contexts of six agents grow to 40,000, and the host has room for all."""
    path = tmp_path_factory.mktemp("larger")
    (path / "config.json").write_text(json.dumps(LARGER))
    return from_options(str(path), {"load_format": "dummy", "threads": 1, "kv_cache_memory_bytes": "64M",
                                    "kv_offloading_size": "512M", "max_num_seqs": 4})


def compared(config: Config, trace: Trace, context: int, runs: int) -> dict[str, tuple[float, float]]:
    """By name: planned with the rates that this machine has now, and measured."""
    rates = parse(asyncio.run(measure(config, context, runs)), "measured")
    planned, played = World(trace, plan_engine(config, rates), rates).run(), real(config, trace)
    return {"tokens/s": (planned.output_tokens / planned.seconds, played.output_tokens / played.seconds),
            **{f"TTFT p{p}": (percentile(planned.ttft_s, p), percentile(played.ttft_s, p)) for p in (50, 95)},
            "hits": (planned.hits, sum(played.hits.values())),
            "host": (planned.host_tokens / planned.prompt_tokens, played.hits["host"])}


def test_planned_times_are_of_the_size_of_measured_ones(larger: Config) -> None:
    """Others may use this machine: the soak test below has the bars that count."""
    part = Trace("", tuple(Session(s.start_s / 10, s.turns[:8]) for s in AGENTS.sessions[:3]))
    for name, (planned, measured) in compared(larger, part, 1_000, 1).items():
        assert name == "host" or 0.4 < planned / measured < 2.5, f"{name}: {planned}, measured {measured}"


@pytest.mark.soak
def test_planned_times_of_a_trace_are_those_of_an_engine_that_runs(larger: Config) -> None:
    """Six agents at scale 40, a third of whose cached tokens come from host memory. With a host tier that is too small
    a slower machine finds less and so is slower still: no bar holds. It needs two cores for itself; a try that others
    disturb is repeated twice."""
    bars = {"tokens/s": 0.1, "TTFT p50": 0.1, "TTFT p95": 0.2, "hits": 0.01}
    for _ in range(3):
        found = compared(larger, AGENTS, 4_000, 5)
        assert found["host"][1] > 0.15, "the device holds everything: nothing is tested"
        far = {name: found[name] for name, bar in bars.items() if abs(found[name][0] / found[name][1] - 1) > bar}
        if not far:
            return
    raise AssertionError(f"planned, measured: {far}")
