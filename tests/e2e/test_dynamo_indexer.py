"""Dynamo's own indexer, from its wheel, reads our KV events: what it answers is what the engine then finds."""
from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import dynamo_parts
import httpx
import pytest
from clients import free_port
from dynamo_parts import Fleet
from events_reader import conversations
from pair_server import LIMIT_S, Server

pytestmark = pytest.mark.soak
PAGE, CHUNK = 16, 48
QUIET_S = 0.3           # without a batch, until the indexer has applied the last one
POOLS = ("--kv-cache-memory-bytes", "500K", "--kv-offloading-size", "900KB")
ROOM = ("--kv-cache-memory-bytes", "8M", "--kv-offloading-size", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    dynamo_parts.needed()
    return dynamo_parts.tiny(tmp_path_factory.mktemp("dynamo") / "tiny")


class Indexer:
    """It reads the events of the engines that listen at `ports` and those after."""

    def __init__(self, fleet: Fleet, ranks: int = 1) -> None:
        self.events, self.replay = self._two(ranks)
        port = free_port()
        fleet.start("indexer", "dynamo.indexer", "--port", str(port))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S)
        fleet.until(self._is_up)
        for rank in range(ranks):
            self._http.post("/register", json={
                "instance_id": 1, "dp_rank": rank, "model_name": "tiny", "block_size": PAGE,
                "endpoint": f"tcp://127.0.0.1:{self.events + rank}",
                "replay_endpoint": f"tcp://127.0.0.1:{self.replay + rank}"}).raise_for_status()

    def _two(self, ranks: int) -> tuple[int, int]:
        found = free_port()
        return (found, found - 100) if found > 60_000 else (found, found + 100)

    def _is_up(self) -> bool:
        try:
            return self._http.get("/workers").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def flags(self) -> tuple[str, str]:
        return "--kv-events-config", json.dumps({
            "enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}"})

    def cached(self, prompt: list[int], rank: int | None = None) -> tuple[int, int]:
        """Return the tokens of a prompt that are on the device, and those on the device or in host memory. The last
        token of a prompt is always computed. rank: all that this one has."""
        most = (len(prompt) - 1) // PAGE * PAGE
        found = self._http.post("/query", json={"token_ids": prompt, "model_name": "tiny"}).json()
        one = found["instances"].get("1", {})
        if rank is not None:
            return (min(most, one.get("dp", {}).get(str(rank), 0)),) * 2
        return min(most, one.get("gpu", 0)), min(most, one.get("cpu", 0))


@contextmanager
def serving(model: str, folder: Path, *flags: str):
    server = Server(model, folder / f"log{random.random()}", *flags)
    try:
        yield server
    finally:
        server.close()


def settled(server: Server) -> None:
    """Until nothing runs or moves, and no batch has gone out for a while."""
    before, since = -1.0, time.monotonic()

    def is_so() -> bool:
        nonlocal before, since
        info = server.info()
        each = [e["stats"] for e in info.get("engines", [info])]
        now = sum(e["kv_event_batches_total"] for e in each)
        busy = any(e["moves_in_flight"] + e["steps_in_flight"] for e in each)
        if busy or now != before:
            before, since = now, time.monotonic()
        return time.monotonic() - since > QUIET_S

    server.until(is_so)


def met(server: Server, indexer: Indexer, ranks: int = 1) -> None:
    """Until a batch of each engine has reached the indexer, which tries to connect every now and then."""
    for rank in range(ranks):
        def is_so(rank: int = rank) -> bool:
            prompt = random.choices(range(97), k=40)
            server.ask(prompt, max_tokens=1, data_parallel_rank=rank)
            settled(server)
            return indexer.cached(prompt, rank)[1] == 32
        server.until(is_so)


def follow(server: Server, indexer: Indexer, prompts: list[list[int]]) -> tuple[int, int]:
    """Each prompt finds what the indexer says, tier by tier; tokens on the device, and in host memory."""
    device = host = 0
    for n, prompt in enumerate(prompts):
        settled(server)
        gpu, both = indexer.cached(prompt)
        usage = server.ask(prompt, max_tokens=3)["usage"]["prompt_tokens_details"]
        found = usage["cached_tokens_details"]
        assert (found["device"], usage["cached_tokens"]) == (gpu, both), (n, usage)
        device, host = device + gpu, host + both - gpu
    return device, host


def leave(server: Server, prompt: list[int], lines: int) -> None:
    """Read a part of a long answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        for n, _ in enumerate(answer.iter_lines()):
            if n >= lines:
                return


def test_what_the_indexer_answers_is_what_an_idle_engine_finds(model, tmp_path):
    """With less memory than the prompts take, and after requests that were aborted and paused."""
    with Fleet(tmp_path) as fleet:
        indexer = Indexer(fleet)
        with serving(model, tmp_path, *POOLS, *indexer.flags) as server:
            met(server, indexer)
            device, host = follow(server, indexer, conversations(1, 80))
            assert device > 3000 and host > 500, (device, host)
            with ThreadPoolExecutor(8) as pool:
                for n, prompt in enumerate(conversations(2, 60)):
                    if n % 3:
                        pool.submit(server.ask, prompt[:150], max_tokens=60)
                    else:
                        pool.submit(leave, server, prompt[:150], n)
            stats = server.stats()
            assert stats["pauses"] + stats["drops"] > 0, "some had to wait for others' pages"
            assert sum(follow(server, indexer, conversations(2, 60))) > 1000


def test_under_load_the_indexer_is_at_most_one_chunk_ahead(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        indexer, ahead, found = Indexer(fleet), [], []
        with serving(model, tmp_path, *ROOM, *indexer.flags) as server:
            met(server, indexer)

            def one(prompt: list[int]) -> None:
                _, known = indexer.cached(prompt)
                usage = server.ask(prompt, max_tokens=8)["usage"]["prompt_tokens_details"]
                found.append(usage["cached_tokens"])
                ahead.append(known - usage["cached_tokens"])

            with ThreadPoolExecutor(6) as pool:
                list(pool.map(one, conversations(3, 200)))
            assert len(ahead) == 200 and sum(found) > 5000
            assert max(ahead) <= CHUNK, sorted(ahead)[-5:]
            assert sum(follow(server, indexer, conversations(3, 30))) > 1000


def test_after_a_kill_and_a_restart_it_forgets_the_old_engine_by_the_first_batch(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        indexer, old = Indexer(fleet), conversations(4, 16)
        with serving(model, tmp_path, *POOLS, *indexer.flags) as server:
            met(server, indexer)
            assert sum(follow(server, indexer, old)) > 500
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
        assert any(indexer.cached(prompt)[1] for prompt in old), "it cannot know yet"
        with serving(model, tmp_path, *POOLS, *indexer.flags) as server:
            met(server, indexer)
            assert not any(indexer.cached(prompt)[1] for prompt in old)
            assert sum(follow(server, indexer, conversations(5, 20))) > 500


def test_each_engine_of_several_has_scores_of_its_own(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        indexer, found = Indexer(fleet, ranks=2), 0
        with serving(model, tmp_path, *ROOM, "--dp", "2", *indexer.flags) as server:
            met(server, indexer, 2)
            for n, prompt in enumerate(conversations(6, 24)):
                settled(server)
                _, known = indexer.cached(prompt, rank=n % 2)
                usage = server.ask(prompt, max_tokens=3, data_parallel_rank=n % 2)["usage"]["prompt_tokens_details"]
                assert usage["cached_tokens"] == known, n
                found += known
        assert found > 500
