"""smg or sglang-router in front of the server: chat, stream, and SGLang's /generate.

    python router_calls.py URL FOLDER NAME
"""
from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
from calls import FRANCE, KEY, MODEL, URL, call, main

NAME = sys.argv[3]
LIMIT_S = 180


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


PORT = free_port()
log = tempfile.TemporaryFile()
router = subprocess.Popen(
    [str(Path(sys.executable).parent / NAME), "launch", "--host", "127.0.0.1", "--port", str(PORT),
     "--prometheus-port", str(free_port()), "--worker-urls", URL], stdout=log, stderr=log)
client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S)
GREEDY = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12}


def generate(**more) -> bytes:
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0},
            **more}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/generate", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as e:
        raise AssertionError(e.read().decode()) from None


@call
def chat():
    began = time.monotonic()
    while True:
        try:
            assert "Paris" in client.chat.completions.create(**GREEDY).choices[0].message.content
            return
        except openai.APIError:
            if time.monotonic() - began > LIMIT_S or router.poll() is not None:
                raise
            time.sleep(0.5)


@call
def chat_stream():
    chunks = client.chat.completions.create(stream=True, **GREEDY)
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@call
def generate_whole():
    assert "Paris" in json.loads(generate())["text"]


@call
def generate_stream():
    lines = [line for line in generate(stream=True).decode().split("\n") if line.startswith("data: {")]
    assert "Paris" in json.loads(lines[-1][6:])["text"]


@call
def generate_logprobs():
    got = json.loads(generate(return_logprob=True, logprob_start_len=0))["meta_info"]
    assert got["input_token_logprobs"][0][0] is None and got["input_token_logprobs"][1][0] <= 0


try:
    main()
finally:
    router.kill()
    router.wait()
