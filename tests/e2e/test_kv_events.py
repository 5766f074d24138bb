"""`--kv-events-config`: what a router can know by events is what the engine then finds."""
from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from events_reader import Subscriber, conversations
from pair_server import Server, serving
from pipeline_engine import checkpoint

PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("events"))


def flags(folder: Path, **more: object) -> tuple[str, str]:
    return "--kv-events-config", json.dumps({
        "enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay", "topic": "kv@pod@tiny", **more})


def reader(folder: Path, rank: int = 0) -> Subscriber:
    end = f"_dp{rank}" if rank else ""
    return Subscriber(f"ipc://{folder}/events{end}", f"ipc://{folder}/replay{end}", "kv@pod@tiny")


def anew() -> list[int]:
    """A prompt that is not cached, so that there is news of it."""
    return [random.randrange(97) for _ in range(40)]


def settled(server: Server, readers: list[Subscriber]) -> None:
    """Until nothing runs or moves, and all that was published of it has come."""
    def is_so() -> bool:
        info = server.info()
        each = [e["stats"] for e in info.get("engines", [info])]
        num = [reader.next - reader.first if reader.next else 0 for reader in readers if reader.poll() or True]
        return num == [e["kv_event_batches_total"] for e in each] and not any(
            e["moves_in_flight"] + e["steps_in_flight"] + e["pages_to_store"] for e in each)
    server.until(is_so)


def follow(server: Server, readers: list[Subscriber], prompts: list[list[int]], **more: object) -> int:
    """Each prompt finds just what the events say; how many tokens, of all."""
    found = 0
    for n, prompt in enumerate(prompts):
        rank = n % len(readers)
        settled(server, readers)
        known = readers[rank].index.cached(prompt, PAGE)
        answer = server.ask(prompt, max_tokens=3, data_parallel_rank=rank, **more)
        assert answer["status"] == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known, (n, answer["usage"])
        found += known
    return found


def test_cached_tokens_are_those_that_events_tell_of(model, tmp_path):
    """With less memory than the prompts take: pages leave the device, the host, and come from storage."""
    events = reader(tmp_path)
    with serving(model, tmp_path, "--kv-cache-memory-bytes", "500K", "--kv-offloading-size", "900KB",
                 "--kv-storage", f"file://{tmp_path}/pages", "--kv-storage-policy", "wait_complete",
                 "--metrics-dialect", "vllm", "--debug-check",
                 *flags(tmp_path, media=["GPU", "CPU", "STORAGE"])) as server:
        shown = server.info()["kv_events"]
        assert (shown["block_size"], shown["dp_size"], shown["topic"]) == (PAGE, 1, "kv@pod@tiny")
        events.meet(lambda: server.ask(anew(), max_tokens=1))
        server.ask([1] * 40, max_tokens=1, cache_salt="mine")
        assert follow(server, [events], conversations(1, 60)) > 1000
        removed = {e.medium for batch in events.batches for e in batch.events if type(e).__name__ == "BlockRemoved"}
        assert removed >= {"GPU", "CPU"} and events.index.media["STORAGE"]
        assert events.index.cached([1] * 40, PAGE) == 0, "pages under a salt are found without it"
        assert server.http.post("/flush_cache").json()["success"]
        settled(server, [events])
        assert not any(events.index.media.values())
    events.close()


def test_each_engine_publishes_for_itself_and_again_after_a_kill(model, tmp_path):
    events = [reader(tmp_path, 0), reader(tmp_path, 1)]
    with serving(model, tmp_path, "--kv-cache-memory-bytes", "600K", "--dp", "2", "--tp", "2", "--router-dialect",
                 "sglang", *flags(tmp_path)) as server:
        for rank in (0, 1):
            events[rank].meet(lambda rank=rank: server.ask(anew(), max_tokens=1, data_parallel_rank=rank))
        assert follow(server, events, conversations(2, 16)) > 100
        assert [{b.data_parallel_rank for b in e.batches} for e in events] == [{0}, {1}]
        victim = server.info()["engines"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        server.until(lambda: server.info()["engines"][0]["pid"] != victim
                     and not server.info()["engines"][0]["missing"])
        events[0].first = 0
        events[0].meet(lambda: server.ask(anew(), max_tokens=1, data_parallel_rank=0))
        assert follow(server, events, conversations(3, 12)) > 100
    for one in events:
        one.close()
