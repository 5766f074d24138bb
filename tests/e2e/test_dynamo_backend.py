"""The worker of Dynamo over real engines, driven as Dynamo's Worker does, also where Dynamo is not installed."""
from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import dynamo_fake
import dynamo_parts
import pytest
from dynamo_fake import Context
from events_reader import Subscriber
from pair_server import key_file

from penstock.cli.main import parsed
from penstock.config.base.errors import ConfigError
from penstock.engine.client.namespaces import session_number

backend = dynamo_fake.backend()
PROMPT = [(i * i * 7 + 3 * i) % 95 for i in range(100)]
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return dynamo_parts.tiny(tmp_path_factory.mktemp("dynamo") / "tiny")


def made(model: str, *flags: str) -> tuple[Any, Any]:
    found = parsed("dynamo", [model, "--served-model-name", "tiny,other", "--threads", "1", "--discovery-backend",
                              "mem", "--kv-cache-memory-bytes", "2M", *flags])
    assert found is not None and found[0] is not None
    return backend.worker(*found)


def request(prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    return {"token_ids": list(prompt), "sampling_options": {"temperature": 0.0},
            "stop_conditions": {"max_tokens": 12, "stop_token_ids_hidden": [95], "ignore_eos": True}, **more}


async def answer(engine: Any, asked: dict[str, Any], number: str = "a") -> tuple[list[int], list[dict[str, Any]]]:
    """Return all tokens, and all chunks."""
    async with aclosing(engine.generate(asked, Context(number))) as chunks:
        found = [c async for c in chunks]
    return [token for c in found for token in c["token_ids"]], found


class Numbers(list):
    def publish(self, rank: int, snapshot: Any) -> None:
        self.append((rank, snapshot))


def test_a_worker_registers_answers_reports_and_ends(model) -> None:
    async def run() -> None:
        engine, settings = made(model, "--dp", "2", "--max-num-seqs", "4", "--max-num-batched-tokens", "48")
        assert (settings.served_model_name, settings.endpoint_types, settings.component) == (
            "tiny", "completions", "backend")
        assert engine.component_metrics_dp_ranks() == [0, 1]
        numbers = Numbers()
        engine.attach_snapshot_publisher(numbers)
        said = await engine.start(7)
        assert (said.model, said.served_model_name, said.model_aliases) == (model, "tiny", ["other"])
        llm, pages = said.llm, engine._stats[0]["hbm_pages"]
        assert (llm.context_length, llm.kv_cache_block_size, llm.total_kv_blocks, llm.max_num_seqs,
                llm.max_num_batched_tokens, llm.data_parallel_size, llm.bootstrap_host) == (
                    1024, PAGE, pages, 4, 48, 2, None)
        sources = await engine.kv_event_sources()
        assert [source.dp_rank for source in sources] == [0, 1] and sources[0].endpoint != sources[1].endpoint
        events = Subscriber(sources[1].endpoint)
        events.connected()
        tokens, chunks = await answer(engine, request(routing={"dp_rank": 1}))
        assert len(tokens) == 12 and chunks[-1]["finish_reason"] == "length"
        assert all("finish_reason" not in c for c in chunks[:-1])
        again, chunks = await answer(engine, request(routing={"dp_rank": 1}))
        details = chunks[-1]["completion_usage"]["prompt_tokens_details"]
        assert again == tokens and details["cached_tokens"] == details["cached_tokens_details"]["device"] == 96
        _, chunks = await answer(engine, request(routing={"dp_rank": 0}))
        assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "ranks are obeyed"
        _, chunks = await answer(engine, request(routing={"dp_rank": 0, "cache_salt": "mine"}))
        assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a salt is a cache"
        with pytest.raises(backend.InvalidArgument, match="n is 2"):
            await answer(engine, request(sampling_options={"n": 2}))
        with pytest.raises(backend.InvalidArgument, match="data_parallel_rank is 5"):
            await answer(engine, request(routing={"dp_rank": 5}))
        await asyncio.sleep(2 * backend.EVERY_S)
        assert {rank for rank, _ in numbers} == {0, 1}
        _, snapshot = [pair for pair in numbers if pair[0] == 1][-1]
        assert (snapshot.dp_rank, snapshot.kv_total_blocks, snapshot.kv_used_blocks) == (1, pages, 0)
        assert 0 < snapshot.kv_cache_hit_rate < 1
        callbacks: list[Any] = []
        await engine.register_prometheus(type("Metrics", (), {
            "register_prometheus_expfmt_callback": lambda self, c: callbacks.append(c)})())
        text = callbacks[0]()
        assert 'penstock:request_success_total{finished_reason="length"} 4.0' in text and 'engine="1"' in text
        assert await engine.engine_control("flush", {}) == {"status": "ok"}
        assert (await engine.engine_control("sleep", {}))["status"] == "error"
        _, chunks = await answer(engine, request(routing={"dp_rank": 1}))
        assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        events.until(lambda: events.index.cached(PROMPT, PAGE) == 96)
        assert {batch.data_parallel_rank for batch in events.batches} == {1}
        events.close()
        await engine.cleanup()
        await engine.cleanup()
        with pytest.raises(backend.EngineShutdown):
            await answer(engine, request())

    asyncio.run(run())


def test_an_abort_ends_the_answer_and_frees_its_pages(model) -> None:
    async def run() -> None:
        engine, _ = made(model)
        await engine.start(1)
        long = request(stop_conditions={"max_tokens": 800, "ignore_eos": True})

        async def reading() -> list[dict[str, Any]]:
            return (await answer(engine, long, "long"))[1]

        task = asyncio.create_task(reading())
        while not engine._engines.num_running:
            await asyncio.sleep(0.01)
        assert not await engine.is_quiescent()
        await engine.abort(Context("another"))
        assert not task.done()
        await engine.abort(Context("long"))
        chunks = await asyncio.wait_for(task, 10)
        assert chunks[-1]["finish_reason"] == "cancelled"
        while not await engine.is_quiescent():
            await asyncio.sleep(0.01)
        # Its reader leaves, as the Worker does once it has called abort.
        async with aclosing(engine.generate(long, Context("left"))) as chunks_of:
            async for _ in chunks_of:
                break
        while not await engine.is_quiescent():
            await asyncio.sleep(0.01)
        assert (await answer(engine, request(), "stopped"))[1][-1]["finish_reason"] == "length"
        stopped = [c async for c in engine.generate(request(), Context("stopped", True))]
        assert [c["finish_reason"] for c in stopped] == ["cancelled"]
        await engine.cleanup()

    asyncio.run(run())


def test_a_session_of_dynamo_is_known_until_its_last_turn(model) -> None:
    async def run() -> None:
        engine, _ = made(model)
        await engine.start(1)
        number = session_number(b"", b"", "run-4")

        async def known(**agent: Any) -> bool:
            await answer(engine, request(agent_context=agent))
            return bool(engine._engines._sessions.of(number, ends=False))

        assert not await known(session_id="another")
        assert await known(session_id="run-4") and await known()
        assert not await known(session_id="run-4", session_final=True)
        usage = (await answer(engine, request()))[1][-1]["completion_usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "what has ended is found until it is evicted"
        await engine.cleanup()

    asyncio.run(run())


def test_cleanup_waits_for_open_answers(model) -> None:
    async def run() -> None:
        engine, _ = made(model)
        await engine.start(1)
        task = asyncio.create_task(answer(engine, request(stop_conditions={"max_tokens": 400, "ignore_eos": True})))
        while not engine._engines.num_running:
            await asyncio.sleep(0.01)
        await engine.cleanup()
        tokens, chunks = await task
        assert len(tokens) == 400 and chunks[-1]["finish_reason"] == "length"

    asyncio.run(run())


class Worker:
    """As Dynamo's: what `start` raises comes back as a bare exception."""

    def __init__(self, engine: Any, settings: Any) -> None:
        self.engine = engine

    async def run(self) -> None:
        try:
            await self.engine.start(1)
        except backend.EngineShutdown as e:
            await self.engine.cleanup()
            raise Exception(f"Unavailable: {e}") from None


def test_what_the_engine_refuses_is_one_clear_error(model, monkeypatch) -> None:
    monkeypatch.setattr(backend, "Worker", Worker)
    found = parsed("dynamo", [model, "--max-model-len", "9999999", "--discovery-backend", "mem"])
    assert found is not None
    with pytest.raises(ConfigError, match="--max-model-len 9999999"):
        backend.serve(*found)


@pytest.mark.parametrize("way", ["the router's room", "a room of the prefill worker"])
def test_prefill_and_decode_workers_answer_as_one(model, tmp_path, way) -> None:
    async def run() -> None:
        alone, _ = made(model)
        await alone.start(1)
        want, _ = await answer(alone, request())
        await alone.cleanup()
        keys = key_file(tmp_path)
        prefill, settings = made(model, *keys, "--disaggregation-mode", "prefill", "--disaggregation-listen",
                                 "127.0.0.1:0")
        decode, _ = made(model, *keys, "--disaggregation-mode", "decode", "--disaggregation-fallback", "refuse")
        said, _ = await asyncio.gather(prefill.start(1), decode.start(2))
        assert settings.component == "prefill" and said.llm.bootstrap_host == "127.0.0.1"
        info = {"bootstrap_host": said.llm.bootstrap_host, "bootstrap_port": said.llm.bootstrap_port,
                "bootstrap_room": 4711}
        short = request(stop_conditions={"max_tokens": 1, "ignore_eos": True})
        if way == "the router's room":
            first, second = await asyncio.gather(answer(prefill, short | {"bootstrap_info": info}),
                                                 answer(decode, request(bootstrap_info=info)))
            assert first[1][0]["disaggregated_params"] == info
        else:
            first = await answer(prefill, short)
            params = first[1][-1]["disaggregated_params"]
            second = await answer(decode, request(prefill_result={"disaggregated_params": params}))
        tokens, chunks = second
        assert tokens == want
        assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["remote_tokens"] > 0
        assert await prefill.health_check_payload() is None and await decode.health_check_payload()
        while not await prefill.is_quiescent():
            await asyncio.sleep(0.01)
        await asyncio.gather(prefill.cleanup(), decode.cleanup())

    asyncio.run(run())
