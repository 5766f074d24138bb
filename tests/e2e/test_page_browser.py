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
            # One that ends between two events of the stream has a short trail: then another is followed.
            trail = page.until("(t => t.split('→').length > 3 ? t : t.endsWith('done') && void "
                               "document.querySelector('#phases button')?.click())("
                               "document.getElementById('request').textContent)", 4 * LIMIT_S)
            phases = {word for word in re.findall(r"[a-z._]+", trail.partition(";")[2])}
            assert len(phases & {"queued", "loading", "prefill", "decode.device", "decode.to_host", "decode.host",
                                 "decode.to_device", "paused", "dropped", "done"}) >= 4, trail
            turns = page.run("document.getElementById('turns').textContent")
            assert "step" in turns and not re.search(r"\b1 (requests|tokens|transfers)\b", turns)
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
    page.run("(() => { document.getElementById('temperature').value = '0'; return ''; })()")
    for _ in range(40):
        if page.run("document.activeElement.id") == "text":
            break
        page.key("Tab")
    assert page.run("document.activeElement.id") == "text"
    page.type("What is the capital of France?")
    page.key("Enter", "\r")
    page.until("!document.getElementById('send').disabled && "
               "document.querySelector('#said > div:nth-child(2) p')?.textContent.length > 3")
    page.type("Tell me a very long story about that city.")
    page.key("Enter", "\r")
    page.until("document.querySelectorAll('#said > div').length === 4 && "
               "!document.getElementById('stop').disabled")
    page.key("Escape")
    page.until("document.getElementById('stop').disabled")
    assert not page.wrongs()


@pytest.mark.sweep
@pytest.mark.parametrize("url", ["demo"], indirect=True)
def test_chat_comes_first_and_its_text_box_stays_in_place(page):
    """With a system prompt and a temperature; panels of what is off are hidden; on a phone arrows point down."""
    assert page.run("document.querySelector('main > section').id") == "talk"
    assert page.run("getComputedStyle(document.getElementById('hot')).display") == "none"
    assert page.run("getComputedStyle(document.getElementById('copies')).display") == "none"
    phases = page.run("[...document.querySelectorAll('#phases li')].map(box => box.dataset.phase).join()")
    assert phases == "queued,loading,prefill,decode.device,dropped"
    assert page.run("document.getElementById('rates').textContent.includes('preempted: recompute')")
    top = page.run("JSON.stringify(document.getElementById('text').getBoundingClientRect())")
    page.run("(() => { window.sent = []; const real = fetch; window.fetch = (url, options) => "
             "{ if (options.body) sent.push(JSON.parse(options.body)); return real(url, options); }; return ''; })()")
    page.run("(() => { document.getElementById('system').value = 'Answer in one word.'; "
             "document.getElementById('temperature').value = '0'; document.getElementById('text').focus(); "
             "return ''; })()")
    for turn in (1, 2):
        page.type("What is the capital of France?")
        page.key("Enter", "\r")
        page.until(f"document.querySelectorAll('#said > div').length === {2 * turn} && "
                   "!document.getElementById('send').disabled")
        assert page.run("JSON.stringify(document.getElementById('text').getBoundingClientRect())") == top
    sent = json.loads(page.run("JSON.stringify(sent)"))
    assert [body["temperature"] for body in sent] == [0, 0] and all(
        body["messages"][0] == {"role": "system", "content": "Answer in one word."} for body in sent)
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    arrow = "getComputedStyle(document.querySelector('#phases li + li:not(.aside)'), '::before').content"
    assert page.run(arrow) == '"→"'
    page.ask("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    assert page.run(arrow) == '"↓"'
    assert page.run("document.documentElement.scrollWidth <= 360 ? 'fits' : 'wide'") == "fits"
    assert not page.wrongs()


MARKDOWN = """# A *title*

One **bold** `a*b*c` [link](https://example.com/a_b) [no](javascript:alert(1)) <b>x</b>
goes on, 2 * 3 * 4 and snake_case_name.

3. three
   more
4. four

- a

> quoted

| x | y |
|---|--:|
| 1 | 2 |

---
```py
<i>- no list</i>
"""
ELEMENTS = ("<h3>A <em>title</em></h3><p>One <strong>bold</strong> <code>a*b*c</code> "
            '<a href="https://example.com/a_b" target="_blank" rel="noopener noreferrer">link</a> '
            "[no](javascript:alert(1)) &lt;b&gt;x&lt;/b&gt;\ngoes on, 2 * 3 * 4 and snake_case_name.</p>"
            '<ol start="3"><li>three more</li><li>four</li></ol><ul><li>a</li></ul>'
            "<blockquote><p>quoted</p></blockquote><table><thead><tr><th>x</th><th>y</th></tr></thead>"
            "<tbody><tr><td>1</td><td>2</td></tr></tbody></table><hr>"
            "<pre><code>&lt;i&gt;- no list&lt;/i&gt;\n</code></pre>")


@pytest.mark.sweep
@pytest.mark.parametrize("url", ["demo"], indirect=True)
def test_an_answer_is_rendered_as_markdown_and_never_as_html(page):
    """Every beginning of it too, as it comes in."""
    for end in range(len(MARKDOWN)):
        assert int(page.run(f"markdown({json.dumps(MARKDOWN[:end])}).length")) >= 0
    assert page.run(f"element('div', markdown({json.dumps(MARKDOWN)})).innerHTML") == ELEMENTS
    assert not page.wrongs()
