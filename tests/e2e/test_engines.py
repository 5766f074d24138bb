"""`penstock serve MODEL --dp N`: one address, N engines in processes of their own."""
from __future__ import annotations

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pair_server import SERVED, prompts, said, serving
from pipeline_engine import checkpoint

DP = ("--dp", "2")
CHATS, TURNS = 64, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.sweep)])
def test_two_engines_say_what_one_says_and_each_tells_of_itself(model, tmp_path, ranks):
    flags = (*SERVED["hosted"], "--kv-storage", f"file://{tmp_path}/pages")
    with serving(model, tmp_path, *SERVED["hosted"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *flags, *DP, "--tp", ranks, "--pp", ranks, "--debug-event-log",
                 str(tmp_path / "events"), "--metrics-dialect", "vllm") as both:
        for rank in (0, 1, 0):
            assert [said(both.ask(p, data_parallel_rank=rank))[0] for p in prompts()] == want
        asked = both.ask(prompts()[0], data_parallel_rank=2)
        assert (asked["status"], asked["error"]["param"]) == (400, "data_parallel_rank")
        info = both.info()
        assert info["dp_size"] == 2 and len({e["pid"] for e in info["engines"]} | {both.process.pid}) == 3
        steps = [e["stats"]["steps"] for e in info["engines"]]
        assert min(steps) > 0 and info["stats"]["steps"] == sum(steps)
        text = both.http.get("/metrics").text
        labelled = dict(re.findall(r'^penstock:steps_total\{engine="(\d)"\} (\S+)$', text, re.MULTILINE))
        assert [float(labelled[n]) for n in "01"] == steps
        assert re.search(r'^penstock:kv_cache_usage_perc\{engine="1",tier="dram"\}', text, re.MULTILINE)
        # Decode reads from host memory here: as a router of vLLM reads it, that is room too.
        [(tokens, pages)] = re.findall(r'^vllm:cache_config_info\{block_size="(\d+)",engine="1",model_name="[^"]+",'
                                       r'num_gpu_blocks="(\d+)"\} 1.0$', text, re.MULTILINE)
        stats = info["engines"][1]["stats"]
        assert (int(tokens), int(pages)) == (info["page_size"], stats["hbm_pages"] + stats["dram_pages"])
        assert [load["dp_rank"] for load in both.http.get("/get_load").json()] == [0, 1]
        loads = both.http.get("/v1/loads").json()
        assert loads["dp_rank_count"] == 2 == len(loads["loads"])
        assert both.http.get("/health_generate").status_code == 200
        with both.http.stream("GET", "/live") as live:
            event = next(line for line in live.iter_lines() if line.startswith("data: "))
        assert '"hbm_pages"' in event
        assert both.http.post("/flush_cache").json()["success"]
        for n in (0, 1):
            assert "Arrived" in (tmp_path / f"events.{n}").read_text()


@pytest.mark.skipif("config.getoption('--device') != 'cuda'", reason="on GPUs")
def test_engines_have_gpus_of_their_own_where_there_are_as_many(model, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with serving(model, tmp_path, *SERVED["resident"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *DP, "--gpu-memory-utilization", ".5") as both:
        assert [said(both.ask(p, data_parallel_rank=n % 2))[0] for n, p in enumerate(prompts())] == want
        seen = [re.search(rb"\0CUDA_VISIBLE_DEVICES=([^\0]*)", Path(f"/proc/{e['pid']}/environ").read_bytes())
                for e in both.info()["engines"]]
        assert len({one[1] for one in seen}) == 2


def test_an_engine_that_is_killed_is_started_again_and_the_other_goes_on(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"], *DP) as both:
        want = said(both.ask(prompts()[0], data_parallel_rank=1))[0]
        victim = both.info()["engines"][0]["pid"]
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(both.ask, prompts()[0], max_tokens=400, data_parallel_rank=rank)
                       for rank in (0, 1, 0, 1)]
            both.until(lambda: both.info()["stats"]["requests_running"] == 4)
            os.kill(victim, signal.SIGKILL)
            answers = [w.result() for w in waiting]
        assert [a["status"] for a in answers] == [503, 200, 503, 200]
        assert answers[0]["error"]["code"] == "engine_died"
        assert said(both.ask(prompts()[0]))[0] == want         # wherever it went
        health = both.http.get("/health")
        assert health.status_code == 200
        both.until(lambda: "missing" not in both.http.get("/health").json())
        assert said(both.ask(prompts()[0], data_parallel_rank=0))[0] == want
        engines = both.info()["engines"]
        assert [e["restarts"] for e in engines] == [1, 0] and engines[0]["pid"] != victim
        assert re.search(r"engine 0: the engine process was killed by signal 9: it is started again",
                         both.log.read_text())


def hits(model, tmp_path, *flags: str) -> float:
    """Prompt tokens found in caches, of 64 conversations of four turns, 16 of them at a time."""
    draw = random.Random(7)
    system = draw.choices(range(97), k=40)
    with serving(model, tmp_path, *flags, "--max-num-seqs", "16", "--max-num-batched-tokens", "512") as server, \
            ThreadPoolExecutor(16) as pool:
        def chat(who: int) -> int:
            mine, found = random.Random(who), 0
            prompt = [*system, *mine.choices(range(97), k=60)]
            for _ in range(TURNS):
                answer = server.ask(prompt, max_tokens=8, logprobs=None)
                assert answer["status"] == 200, answer
                found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompt = [*prompt, *answer["choices"][0]["token_ids"], *mine.choices(range(97), k=30)]
            return found
        return sum(pool.map(chat, range(CHATS)))


def test_two_engines_find_what_one_of_twice_the_memory_finds(model, tmp_path):
    one = hits(model, tmp_path, "--kv-cache-memory-bytes", "24M")
    assert hits(model, tmp_path, "--kv-cache-memory-bytes", "12M", *DP) >= 0.95 * one
