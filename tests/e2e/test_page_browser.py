"""The page at `/` in a headless Chromium, over a server with host pages: tiers that fill, requests that are
followed, a chat by keyboard alone. PENSTOCK_PICTURES=FOLDER keeps two pictures."""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from browser import COMMAND, LIMIT_S, Browser

pytestmark = pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"apt install {COMMAND}")
TINY = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False}
FLAGS = {"tiny": ("--load-format", "dummy", "--kv-cache-memory-bytes", "2100000", "--dram-bytes", "2500000",
                  "--sparse-top-k", "160", "--max-num-seqs", "8"),
         "demo": ("--kv-cache-memory-bytes", "100M")}


@pytest.fixture
def url(tmp_path, request):
    name, log = request.param, tmp_path / "log"
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", str(tmp_path) if name == "tiny" else name, "--port", "0",
         "--threads", "1", "--served-model-name", name, *FLAGS[name]],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    try:
        found = re.search(r"ready on (http://\S+) ", process.stdout.readline())
        assert found, log.read_text()
        yield found[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(url, tmp_path):
    browser = Browser(tmp_path / "profile")
    browser.ask("Page.navigate", url=url + "/")
    browser.until("document.getElementById('state')?.textContent === 'live'")
    yield browser
    browser.close()


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("PENSTOCK_PICTURES"):
        page.picture(Path(folder) / name)


def share(page: Browser, tier: int, kind: str) -> float:
    return float(page.run(f"+(document.querySelectorAll('#tiers .bar')[{tier}]?.querySelector('.{kind}')"
                          "?.style.flexGrow || 0)"))


@pytest.mark.sweep
@pytest.mark.parametrize("url", ["tiny"], indirect=True)
def test_a_run_that_fills_the_device_and_the_host_is_seen(url, page):
    stop = threading.Event()

    def ask(n: int) -> None:
        with httpx.Client(base_url=url, timeout=600) as http:
            for turn in range(100):
                if stop.is_set():
                    return
                prompt = [(79 * i + 131 * n + 17 * turn) % 512 for i in range(600)]
                assert http.post("/v1/completions", json={
                    "prompt": prompt, "max_tokens": 200, "ignore_eos": True}).status_code == 200
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, n) for n in range(12)]
        try:
            followed = page.until("document.querySelector('#phases button') !== null")
            assert followed
            # By keyboard: Tab until a dot has the focus, then choose it.
            page.run("document.querySelector('#phases button[tabindex=\"0\"]').focus()")
            page.key("Enter", "\r")
            page.until("document.querySelector('#phases button[aria-pressed=true]') !== null")
            page.until("[...document.querySelectorAll('#tiers .bar')].length >= 2")
            page.until("[...document.querySelectorAll('#tiers .bar')].every(b => "
                       "+b.querySelector('.free').style.flexGrow < 0.15)", 4 * LIMIT_S)
            assert share(page, 0, "used") > 0 and share(page, 1, "cached") > 0
            trail = page.until("(t => t.split('→').length > 3 && t)("
                               "document.getElementById('request').textContent)", 4 * LIMIT_S)
            phases = {word for word in re.findall(r"[a-z]+", trail.partition(";")[2])}
            assert len(phases & {"queued", "loading", "prefill", "resident", "staging", "hosted", "promoting",
                                 "paused", "dropped", "done"}) >= 4, trail
            turns = page.run("document.getElementById('turns').textContent")
            assert "step" in turns and not re.search(r"\b1 (rows|tokens|moves)\b", turns)
            assert float(page.run("document.querySelectorAll('#ways tbody tr').length")) >= 1
            picture(page, "page-light.png")
            dark = shown_in(page, "dark")
            picture(page, "page-dark.png")
            assert shown_in(page, "light") != dark
        finally:
            stop.set()
        for one in asked:
            one.result()
    assert not page.wrongs()


def shown_in(page: Browser, scheme: str) -> str:
    """The colour behind the page."""
    page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    return page.run("getComputedStyle(document.body).backgroundColor")


@pytest.mark.sweep
@pytest.mark.parametrize("url", ["demo"], indirect=True)
def test_a_chat_by_keyboard_alone(page):
    for _ in range(40):
        if page.run("document.activeElement.id") == "text":
            break
        page.key("Tab")
    assert page.run("document.activeElement.id") == "text"
    page.type("What is the capital of France?")
    page.key("Enter", "\r")
    page.until("!document.getElementById('send').disabled && "
               "document.querySelector('#said p:nth-child(2)')?.textContent.length > 3")
    page.type("Tell me a very long story about that city.")
    page.key("Enter", "\r")
    page.until("document.querySelectorAll('#said p').length === 4 && "
               "!document.getElementById('stop').disabled")
    page.key("Escape")
    page.until("document.getElementById('stop').disabled")
    assert not page.wrongs()
