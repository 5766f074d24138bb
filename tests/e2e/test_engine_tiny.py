"""The engine process with a real executor and a tiny random model: lifecycle, seen from outside."""
from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.engine.client.client import EngineClient

pytestmark = pytest.mark.by_exec
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32"}
PAGE_BYTES = 2 * 2 * 2 * 8 * 4 * 16      # k and v, layers, KV heads, head dim, float32, page
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine is no reason to kill an engine that is about to exit."""
    monkeypatch.setattr("penstock.engine.client.client.EXIT_GRACE_S", 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


def with_engine(folder, test, **options):
    async def whole():
        raw = from_options(str(folder), {"load_format": "dummy", "threads": 1, "check": True,
                                         "hbm_bytes": 200 * PAGE_BYTES, **options})
        client = EngineClient(resolve(raw, probe()))
        await client.start()
        try:
            return await test(client)
        finally:
            await client.close()
            assert client._process.returncode == 0
    return asyncio.run(asyncio.wait_for(whole(), 200))


async def tokens_of(stream):
    out, finish = [], None
    async for chunk in stream:
        out += chunk.tokens
        finish = chunk.finish
    return out, finish


async def settled(client):
    """Stats once nothing runs and nothing moves."""
    while True:
        stats = await client.stats()
        if not (stats["requests_running"] or stats["requests_waiting"] or stats["steps_in_flight"]
                or stats["moves_in_flight"]):
            return stats
        await asyncio.sleep(0.001)


def log_lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_disconnect_frees_its_memory_within_one_step(folder, tmp_path, overlap):
    path = tmp_path / "events.jsonl"

    async def go(client):
        [stays] = client.submit(PROMPT, LONG)
        [leaves] = client.submit(PROMPT[::-1] * 5, LONG)
        read = 0
        async for chunk in leaves:
            read += len(chunk.tokens)
            if read >= 5:
                break
        await leaves.aclose()
        while (stats := await client.stats())["requests_running"] == 2:
            await asyncio.sleep(0.001)
        while (await client.stats())["steps"] <= stats["steps"] + 5:
            await asyncio.sleep(0.001)         # the other goes on, however late this process is
        await stays.aclose()
        stats = await settled(client)
        assert stats["hbm_pages_free"] == stats["hbm_pages"] == 200
        assert stats["executor_requests"] == 0
        return leaves.rid

    rid = with_engine(folder, go, event_log=str(path), overlap=overlap, prefix_cache=False)
    lines = log_lines(path)
    [at] = [i for i, e in enumerate(lines) if e["kind"] == "Aborted" and e["rid"] == rid]
    pools = [e for e in lines if e["kind"] == "pools"]
    last_before = [e for e in lines[:at] if e["kind"] == "pools"][-1]
    after = [e for e in lines[at:] if e["kind"] == "pools"]
    # Its pages leave its hands with the event, and the fence with the last step that named it.
    assert last_before["hbm_pages_in_use"] >= after[0]["hbm_pages_in_use"] + 6     # of 7; `stays` may grow
    issued = lines[at]["issued"]
    freed = next(e for e in after if e["hbm_pages_fenced"] == 0)
    assert freed["retired"] <= issued + 1 and freed["issued"] > issued    # `stays` went on
    assert freed["hbm_pages_free"] == 200 - freed["hbm_pages_in_use"]
    assert all(rid not in e["rids"] for e in lines[at:] if e["kind"] == "StepPlan")
    assert pools[-1]["hbm_pages_free"] == 200 and pools[-1]["requests_running"] == 0


def test_outputs_do_not_depend_on_what_runs_beside_or_before(folder):
    others = [[*PROMPT[:n], 77] for n in range(1, 12)]

    async def alone(client):
        return [await tokens_of(client.submit(p, GREEDY)[0]) for p in [PROMPT, *others]]

    async def together(client):
        streams = [client.submit(p, GREEDY)[0] for p in [PROMPT, *others]]
        first = await asyncio.gather(*map(tokens_of, streams))
        client.flush()
        again = [client.submit(p, GREEDY)[0] for p in [PROMPT * 2, PROMPT, *others]]
        second = await asyncio.gather(*map(tokens_of, again))
        stats = await settled(client)
        assert stats["pauses"] > 0 or stats["drops"] > 0
        return first, second[1:]

    expected = with_engine(folder, alone, overlap=False, prefix_cache=False)
    assert all(len(tokens) == 24 and end == "length" for tokens, end in expected)
    # 12 requests of 3 pages in 14 pages: some must give way.
    first, second = with_engine(folder, together, hbm_bytes=14 * PAGE_BYTES, step_tokens=16,
                                dram_bytes=100 * PAGE_BYTES, max_model_len=100)
    assert first == expected and second == expected


def test_choices_share_the_pages_of_their_prompt(folder):
    async def go(client):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=4)
        chunks = [[c async for c in s] for s in client.submit(PROMPT * 4, params)]
        alone = [[c async for c in s] for s in client.submit(PROMPT * 4, params)]
        outputs = [[t for c in choice for t in c.tokens] for choice in chunks]
        assert outputs == [[t for c in choice for t in c.tokens] for choice in alone]
        assert len({tuple(o) for o in outputs}) == 4, "each choice draws for itself"
        return [next(c.cached_tokens for c in choice if c.cached_tokens is not None)
                for choice in chunks]

    cached = with_engine(folder, go)
    assert cached[0] == 0 and cached[1:] == [64] * 3       # 80 tokens: the sealed pages before


def test_what_the_engine_cannot_do_is_a_config_error_with_the_numbers(folder):
    for options, message in [({"hbm_bytes": 100}, "less than one page"),
                             ({"max_model_len": 4096}, "context is 2048")]:
        with pytest.raises(ConfigError, match=message):
            with_engine(folder, None, **options)


def test_a_prompt_over_the_pool_is_refused_and_the_next_one_runs(folder):
    async def go(client):
        # The context is clipped to what the pool holds, so that both sides say the same.
        assert client.ready.max_model_len == 5 * 16
        [stream] = client.submit([7] * 79, LONG)
        tokens, finish = await tokens_of(stream)
        assert len(tokens) == 1 and finish == "length"

    with_engine(folder, go, hbm_bytes=5 * PAGE_BYTES)
