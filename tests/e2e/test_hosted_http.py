"""Requests over HTTP that together, or each, are longer than the device: decode through host pages.

With a tiny random model always, with the demo model and Python's own help texts in the sweep, and with
prompts of 3,000 and 8,000 tokens in `make soak`: ten minutes of one core.
"""
from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import where

WAIT_S = 1500
TEXT = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
TINY = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False}
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16            # k and v, layers, KV heads, head dim, float32, page
DEMO_PAGE_BYTES = 2 * 30 * 3 * 64 * 4 * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """tokens of each of twelve prompts, and of the long one; page_bytes: of a page of KV; budgets: of a
    server, and a smaller one."""

    page_bytes: int
    budgets: tuple[int, int]
    tokens: int
    long: int
    new: int
    prompt: Callable[[int, int], list[int] | str]
    flags: tuple[str, ...] = ()

    def device(self, tokens: int) -> int:
        """Bytes in which as many tokens, and bounds of their units, are resident; tables beside them."""
        return -(-tokens * 9 // 8 // 16) * self.page_bytes


def ids(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(TINY["vocab_size"]), k=tokens)


def text(seed: int, tokens: int) -> str:
    return TEXT[seed * 30_000:][:tokens * 39 // 10]


SCENES = [
    pytest.param(Scene(page_bytes=PAGE_BYTES, budgets=(160, 96), tokens=600, long=1600, new=200, prompt=ids,
                       flags=("--load-format", "dummy")), id="tiny"),
    pytest.param(Scene(page_bytes=DEMO_PAGE_BYTES, budgets=(192, 128), tokens=800, long=2400, new=40,
                       prompt=text), id="demo", marks=pytest.mark.sweep),
    pytest.param(Scene(page_bytes=DEMO_PAGE_BYTES, budgets=(512, 256), tokens=3000, long=8000, new=100,
                       prompt=text), id="demo, long", marks=pytest.mark.soak)]


@pytest.fixture
def serve(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    @contextmanager
    def started(scene: Scene, device: int, host: int, *flags: str):
        model = "demo" if scene.page_bytes == DEMO_PAGE_BYTES else str(tmp_path)
        log = tmp_path / "log"
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", "--threads", "1",
             "--kv-cache-memory-bytes", str(device), "--dram-bytes", str(host), "--sparse-top-k", str(scene.budgets[0]),
             "--debug-event-log", str(tmp_path / "events"), *where.flags(), *scene.flags, *flags],
            stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
        try:
            found = re.search(r"ready on (http://\S+) ", process.stdout.readline())
            assert found, log.read_text()
            with httpx.Client(base_url=found.group(1), timeout=WAIT_S) as http:
                yield http
        finally:
            process.kill()
            process.wait()
    return started


def ask(http: httpx.Client, scene: Scene, prompt: list[int] | str, **more):
    """(tokens of the answer, usage)"""
    reply = http.post("/v1/completions", json={
        "prompt": prompt, "max_tokens": scene.new, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["token_ids"], found["usage"]


@pytest.mark.parametrize("scene", SCENES)
def test_twelve_requests_run_on_a_device_that_holds_five(serve, scene, tmp_path):
    prompts = [scene.prompt(seed, scene.tokens) for seed in range(12)]
    device = scene.device(5 * (scene.tokens + scene.new))
    host = 16 * scene.device(scene.tokens + scene.new)
    with serve(scene, device, host, "--max-num-seqs", "16") as http:
        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(lambda prompt: ask(http, scene, prompt), prompts))
        steps = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
        assert max(len(e["rids"]) for e in steps if e["kind"] == "StepPlan") == 12
        alone = [ask(http, scene, prompt) for prompt in prompts]
        dense = ask(http, scene, prompts[-1], sparse_top_k=0)
        info = http.get("/server_info").text
        metrics = http.get("/metrics").text
    for (tokens, usage), (own, _) in zip(together, alone, strict=True):
        assert tokens == own and len(own) == scene.new
        assert 0.8 * scene.tokens < usage["prompt_tokens"] < 1.2 * scene.tokens
    reads = [usage["completion_tokens_details"]["kv_reads"] for _, usage in together]
    assert sum(r["hot_misses"] > 0 and r["hot_evictions"] > 0 for r in reads) >= 6
    assert "completion_tokens_details" not in dense[1] and dense[0] != together[-1][0]
    for name in ("hot_hits", "hot_misses", "hot_evictions", "host_rows_read"):
        [layer, *_] = re.findall(rf'^penstock:\S*{name}\S*layer="0"\S* (\S+)$', metrics, re.MULTILINE)
        assert float(layer) > 0
    assert "hot_buffer_bytes" in info
    assert not missing_on_the_board(metrics)


def missing_on_the_board(metrics: str) -> set[str]:
    """Numbers that the Grafana board draws, or labels it sorts them by, which no line of `metrics` has."""
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    known = {line.partition("{")[0].partition(" ")[0] for line in lines}
    labels = {*re.findall(r'(\w+)="', "\n".join(lines)), "instance"}      # the last is Prometheus's own
    board = json.loads((Path(__file__).parents[2] / "docs/guides/grafana.json").read_text())
    drawn = " ".join(t["expr"] for p in board["panels"] for t in p["targets"])
    assert len(board["panels"]) == 20
    by = {name for some in re.findall(r"by \(([^)]*)\)", drawn) for name in some.split(", ")}
    return {*re.findall(r"penstock:\w+", drawn)} - known | by - labels


@pytest.mark.parametrize("scene", SCENES)
def test_a_prompt_four_times_the_device_answers_as_on_a_large_one(serve, scene):
    prompt, need = scene.prompt(1, scene.long), scene.device(scene.long + scene.new)
    rows = "--max-num-seqs", "2"
    with serve(scene, scene.device(scene.long // 4), 2 * need, *rows) as http:
        small = [ask(http, scene, prompt, sparse_top_k=budget) for budget in scene.budgets]
        refused = [http.post("/v1/completions", json={
            "prompt": prompt[:n], "sparse_top_k": 0, "max_tokens": new})
            for n, new in ((scene.long * 4, 1), (50, scene.long // 2))]
    with serve(scene, 2 * need, 0, *rows, "--host-decode", "off") as http:
        large = [ask(http, scene, prompt, sparse_top_k=budget) for budget in scene.budgets]
    for (tokens, usage), (expected, resident) in zip(small, large, strict=True):
        assert tokens == expected
        assert usage["completion_tokens_details"]["kv_reads"]["hot_misses"] > 0
        assert not resident["completion_tokens_details"]["kv_reads"]["hot_misses"]
    assert small[0][0] != small[1][0]
    for reply in refused:
        assert reply.status_code == 400 and "device pool holds" in reply.json()["error"]["message"]
