"""sglang-router and smg, unchanged, in front of several engines: each answer is what one engine says."""
from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import printable
import pytest
from clients import free_port
from pair_server import SERVED, Server, key_file, serving
from pipeline_engine import checkpoint

ROUTERS = {"sglang-router": "sglang-router==0.3.2", "smg": "smg==1.13.0"}      # commands: what has them
ASKED = 40
LIMIT_S = 90.0
FLAGS = (*SERVED["resident"], "--router-dialect", "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = checkpoint(tmp_path_factory.mktemp("routers"))
    Path(folder, "tokenizer.json").write_text(printable.vocabulary().tokenizer)
    Path(folder, "tokenizer_config.json").write_text("{}")
    return folder


@contextmanager
def routing(name: str, log: Path, *flags: str):
    """Its URL. It may still look for its workers."""
    command = shutil.which(name)
    if command is None:
        pytest.skip(f"pipx install {ROUTERS[name]}")
    port, metrics = free_port(), free_port()
    with log.open("w") as into:
        process = subprocess.Popen([command, "launch", "--host", "127.0.0.1", "--port", str(port),
                                    "--prometheus-port", str(metrics), *flags], stdout=into, stderr=into)
    try:
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
            began = time.monotonic()
            while True:
                try:
                    answer(client, "ready?", stream=False)
                    break
                except openai.APIError as e:
                    late = time.monotonic() - began > LIMIT_S
                    assert process.poll() is None and not late, (str(e), log.read_text()[-2000:])
                    time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def prompts(count: int) -> list[str]:
    draw = random.Random(5)
    return ["".join(draw.choices(printable.CHARACTERS[1:], k=draw.randrange(20, 200))) for _ in range(count)]


def answer(client: openai.OpenAI, prompt: str, *, stream: bool) -> str:
    """By the official client."""
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0,
                                      stream=stream)
    return "".join(choice.text for chunk in (found if stream else [found]) for choice in chunk.choices)


def same(url: str, want: list[str]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S) as client:
        with ThreadPoolExecutor(8) as pool:
            got = pool.map(lambda n: answer(client, prompts(ASKED)[n], stream=n % 2 == 0), range(ASKED))
            assert list(got) == want


@pytest.fixture(scope="module")
def want(model, tmp_path_factory) -> list[str]:
    """What one engine says."""
    with serving(model, tmp_path_factory.mktemp("one"), *SERVED["resident"]) as one:
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none") as client:
            return [answer(client, prompt, stream=False) for prompt in prompts(ASKED)]


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
def test_in_front_of_two_workers_of_which_one_is_killed(model, tmp_path, want, router):
    with ExitStack() as stack:
        workers = [Server(model, tmp_path / f"log{n}", *FLAGS) for n in range(2)]
        for worker in workers:
            stack.callback(worker.close)
        url = stack.enter_context(routing(router, tmp_path / "router", "--worker-urls",
                                          *(worker.url for worker in workers)))
        same(url, want)
        assert all(worker.stats()["steps"] > 0 for worker in workers)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S) as client, \
                ThreadPoolExecutor(8) as pool:
            busy = [pool.submit(answer, client, prompt, stream=False) for prompt in prompts(ASKED)]
            os.kill(workers[0].process.pid, signal.SIGKILL)
            for one, text in zip(busy, want, strict=True):
                if one.exception() is None:             # who was there with it may hear an error
                    assert one.result() == text
            assert sum(one.exception() is None for one in busy) >= ASKED // 2
        same(url, want)


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
def test_in_front_of_two_engines_at_one_address(model, tmp_path, want, router):
    with serving(model, tmp_path, *FLAGS, "--dp", "2") as both, \
            routing(router, tmp_path / "router", "--worker-urls", both.url, "--dp-aware", "--policy",
                    "round_robin") as url:
        same(url, want)
        steps = [engine["stats"]["steps"] for engine in both.info()["engines"]]
        assert min(steps) > 0.3 * sum(steps), "ranks are obeyed"


@pytest.mark.soak
@pytest.mark.parametrize(("router", "dialect"), [
    ("sglang-router", "sglang"), ("smg", "sglang"), ("smg", "vllm")])
def test_in_front_of_a_prefill_end_and_two_decode_ends_of_which_one_is_killed(model, tmp_path, want, router,
                                                                              dialect):
    """bootstrap_room or kv_transfer_params come with each prompt, by which decode instances find the other end."""
    flags = (*SERVED["resident"], *key_file(tmp_path), "--router-dialect", dialect, "--disaggregation-mode")
    with ExitStack() as stack:
        prefill = Server(model, tmp_path / "prefill", *flags, "prefill", "--disaggregation-listen", "127.0.0.1:0")
        stack.callback(prefill.close)
        decode = [Server(model, tmp_path / f"decode{n}", *flags, "decode") for n in range(2)]
        for end in decode:
            stack.callback(end.close)
        port = prefill.info()["pair_address"].rpartition(":")[2]
        url = stack.enter_context(routing(
            router, tmp_path / "router", "--pd-disaggregation", "--prefill-replicas", prefill.url, port,
            "--decode-replicas", decode[0].url, "--decode-replicas", decode[1].url))
        same(url, want)
        delivered = [end.stats()["pair_delivered_total"] for end in decode]
        assert sum(delivered) >= ASKED and min(delivered) > 0, "the prefill instance has computed them"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client, \
                ThreadPoolExecutor(8) as pool:
            busy = [pool.submit(answer, client, prompt, stream=False) for prompt in prompts(ASKED)]
            os.kill(decode[0].process.pid, signal.SIGKILL)
            for one, text in zip(busy, want, strict=True):
                if one.exception() is None:             # who was there with it may hear an error
                    assert one.result() == text
        same(url, want)                                 # by the other one
        for end in (prefill, decode[1]):
            end.flushed()
