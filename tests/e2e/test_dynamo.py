"""`penstock-dynamo` behind Dynamo's own frontend and KV router, from its wheels: answers, hits, ends."""
from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import dynamo_parts
import httpx
import printable
import pytest
from dynamo_parts import KV, Fleet
from pair_server import key_file

from penstock.config.request.params import SamplingParams
from penstock.llm.llm import LLM

pytestmark = [pytest.mark.soak, pytest.mark.by_exec]
ASKED, PAGE = 40, 16
N = 5                               # of a prompt whose answer has several letters


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    dynamo_parts.needed()
    return dynamo_parts.tiny(tmp_path_factory.mktemp("dynamo") / "tiny")


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [draw.choices(range(1, 95), k=draw.randrange(20, 200)) for _ in range(ASKED)]


@pytest.fixture(scope="module")
def want(model) -> list[str]:
    """The text of the library's answers."""
    with LLM(model, kv_cache_memory_bytes="4M", threads=1) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()],
                               SamplingParams(max_tokens=16, temperature=0))
    return [output.outputs[0].text for output in outputs]


def same(fleet: Fleet, want: list[str], *, within: int = 0) -> None:
    """All answers, eight at a time; so many may be errors."""
    def one(n: int) -> str:
        answer = fleet.ask(prompts()[n])
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else f"{answer.status_code}"

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(one, range(ASKED)))
    wrong = [(n, a, b) for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert len(wrong) <= within and all(a.isdecimal() for _, a, _ in wrong), wrong


@pytest.mark.parametrize("flags", [(), ("--tp", "2", "--speculative-method", "ngram", "--kv-offloading-size", "8MB"),
                                   ("--pp", "2", "--kv-offloading-size", "8MB")], ids=" ".join)
def test_answers_are_those_of_the_library(model, want, tmp_path, flags):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV, *flags)
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        same(fleet, want)
        # What the request says beside its prompt.
        first = prompts()[N]
        fleet.ask(first)
        answer = fleet.ask(first, logprobs=2, max_tokens=4).json()
        scores, usage = answer["choices"][0]["logprobs"], answer["usage"]
        assert "".join(scores["tokens"]) == want[N][:4] and all(len(top) >= 2 for top in scores["top_logprobs"])
        assert all(top[token] == pytest.approx(own, abs=1e-4) for token, own, top in
                   zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))
        assert usage["prompt_tokens_details"]["cached_tokens"] == (len(first) - 1) // PAGE * PAGE
        assert set(fleet.text(first, max_tokens=30, guided_regex="[ab]{5}")) <= {"a", "b"}
        stop = printable.CHARACTERS.index(want[N][2])
        ended = fleet.ask(first, stop_token_ids=[stop]).json()["choices"][0]
        assert ended["finish_reason"] == "stop" and len(ended["text"]) <= 3
        cut = fleet.ask(first, stop=[want[N][3:5]]).json()["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["text"] == want[N][:want[N].index(want[N][3:5])]
        assert fleet.text(first, seed=3, temperature=1) == fleet.text(first, seed=3, temperature=1)
        for wrong, said in (({"n": 2, "temperature": 1}, "n is 2"), ({"guided_grammar": "root ::= ("}, "grammar"),
                            ({"min_tokens": 5, "guided_regex": "a+"}, "min_tokens")):
            refused = fleet.ask(first, **wrong)
            assert refused.status_code == 400 and said in refused.text, refused.text
        lines = httpx.get(f"{worker.url}/metrics").text.splitlines()
        gauge = next(line for line in lines if line.startswith("dynamo_component_total_blocks{"))
        assert float(gauge.rpartition(" ")[2]) == worker.stats()["hbm_pages"]
        worker.flushed()


@pytest.mark.parametrize("ends", [True, False])
def test_pages_of_a_session_go_first_after_its_last_turn(model, tmp_path, ends):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, "--kv-cache-memory-bytes", "1M")
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        room, draw = int(worker.stats()["hbm_pages"]) * PAGE, random.Random(7)
        third = room // 3 - 32
        assert third < 1000

        def cached(prompt: list[int], **headers: str) -> int:
            answer = fleet.ask(prompt, {name.replace("_", "-"): value for name, value in headers.items()}, max_tokens=1)
            assert answer.status_code == 200, answer.text
            return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)

        others, mine, *more = (draw.choices(range(1, 95), k=k) for k in (third, third, room // 4, room // 4))
        cached(others)
        cached(mine, x_dynamo_session_id="run/4", **({"x_dynamo_session_final": "true"} if ends else {}))
        for prompt in more:
            cached(prompt)
        assert (cached(others) > third - 20) is ends


def test_a_client_that_leaves_frees_every_page(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV)
        fleet.frontend("--router-mode", "kv")
        fleet.ready()

        def leave(n: int) -> None:
            body = {"model": "tiny", "prompt": prompts()[n], "max_tokens": 800, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
                for count, _ in enumerate(answer.iter_lines()):
                    if count == n:
                        return

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(24)))
        fleet.until(lambda: not worker.stats()["num_requests_running"])
        assert worker.stats()['request_success_total{finished_reason="abort"}'] == 24
        worker.flushed()


def conversation(fleet: Fleet, seed: int, turns: int = 5) -> tuple[int, int]:
    """Return cached tokens of its turns, and how many there would be with one endless cache."""
    draw, said, computed, found, theory = random.Random(seed), list[int](), 0, 0, 0
    for turn in range(turns):
        said += draw.choices(range(1, 95), k=draw.randrange(20, 90) + 150 * (turn == 0))
        answer = fleet.ask(said, max_tokens=12, min_tokens=12).json()
        found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        theory += computed // PAGE * PAGE
        said += map(printable.CHARACTERS.index, answer["choices"][0]["text"])
        computed = len(said) - 1                # the last token of an answer is never an input
    return found, theory


@pytest.mark.parametrize("shape", ["two workers", "two workers with host memory", "one worker of two engines"])
def test_the_kv_router_sends_conversations_to_their_pages(model, tmp_path, shape):
    with Fleet(tmp_path) as fleet:
        flags = ("--kv-cache-memory-bytes", "48M")
        if "host" in shape:
            flags = ("--kv-cache-memory-bytes", "6M", "--kv-offloading-size", "48MiB")
        if "engines" in shape:
            flags = (*flags, "--dp", "2")
        workers = [fleet.worker(model, *flags) for _ in range(1 if "engines" in shape else 2)]
        # Of prompts as short as these, the router else moves one in five to the worker that has less to do.
        fleet.frontend("--router-mode", "kv", "--router-prefill-load-scale", "20")
        fleet.ready()
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(lambda n: conversation(fleet, n), range(64)))
        found, theory = (sum(row[i] for row in rows) for i in (0, 1))
        print(f"{shape}: {found} of {theory} tokens")
        assert theory > 20_000 and found >= .95 * theory
        steps = [value for worker in workers for name, value in worker.stats().items()
                 if name.partition("{")[0] == "steps_total"]
        assert len(steps) == 2 and min(steps) > .25 * sum(steps), steps


def test_requests_of_a_killed_worker_are_answered_by_the_other(model, want, tmp_path):
    with Fleet(tmp_path) as fleet:
        workers = [fleet.worker(model, *KV) for _ in range(2)]
        fleet.frontend("--router-mode", "kv", "--migration-limit", "3")
        fleet.ready()
        same(fleet, want)
        with ThreadPoolExecutor(8) as pool:
            busy = [pool.submit(fleet.ask, prompts()[n], max_tokens=200, ignore_eos=True) for n in range(ASKED)]
            fleet.until(lambda: workers[0].stats().get("num_requests_running"))
            workers[0].kill()
            answers = [one.result() for one in busy]
        good = [n for n, answer in enumerate(answers) if answer.status_code == 200]
        assert len(good) >= ASKED // 2, [answer.text for answer in answers]
        fleet.until(lambda: fleet.ask(prompts()[0]).status_code == 200)
        same(fleet, want)
        workers[1].flushed()


def test_a_worker_whose_engine_dies_leaves_and_exits_1(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV)
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        os.kill(worker.engines()[0], signal.SIGKILL)
        assert worker.process.wait(60) == 1
        assert "the engine process was killed by signal 9" in worker.log()
        fleet.until(lambda: fleet.ask([1, 2, 3]).status_code != 200)


def test_what_the_engine_refuses_ends_the_worker_with_2(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV, "--max-model-len", "9999999")
        assert worker.process.wait(60) == 2
        assert "penstock: error: --max-model-len 9999999" in worker.log()


def test_an_engine_that_dies_while_it_loads_ends_the_worker_with_1(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV)
        fleet.until(worker.engines)
        os.kill(worker.engines()[0], signal.SIGKILL)
        assert worker.process.wait(60) == 1
        assert "was killed by signal 9" in worker.log()


def test_an_engine_of_several_that_dies_comes_back_and_its_pages_are_not_expected(model, want, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV, "--dp", "2")
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        same(fleet, want)
        before = worker.engines()
        os.kill(before[0], signal.SIGKILL)
        fleet.until(lambda: len(now := worker.engines()) == len(before) and now != before
                    and 'steps_total{engine="0"}' in worker.stats())
        fleet.until(lambda: fleet.ask(prompts()[0]).status_code == 200)
        same(fleet, want)
        assert worker.process.poll() is None


def test_sigterm_lets_open_answers_end(model, tmp_path):
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(model, *KV)
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        body = {"model": "tiny", "prompt": prompts()[1], "max_tokens": 800, "ignore_eos": True, "stream": True}
        text, finish = 0, None
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"]
                if not text:
                    worker.process.send_signal(signal.SIGTERM)
                text += sum(len(c.get("text") or "") for c in choice)
                finish = next((c["finish_reason"] for c in choice if c.get("finish_reason")), finish)
        assert finish == "length" and text > 700
        assert worker.process.wait(60) == 0
        assert "Engine cleanup complete" in worker.log()


def test_prefill_and_decode_workers_answer_as_one(model, want, tmp_path):
    """The frontend's prefill router names a room to both, whose address the prefill worker has registered."""
    with Fleet(tmp_path) as fleet:
        keys = (*KV, *key_file(tmp_path), "--disaggregation-mode")
        prefill = fleet.worker(model, *keys, "prefill", "--disaggregation-listen", "127.0.0.1:0")
        decode = fleet.worker(model, *keys, "decode", "--disaggregation-fallback", "refuse")
        fleet.frontend("--router-mode", "kv")
        fleet.ready()
        before = decode.stats()["pd_delivered_total"]
        same(fleet, want)
        fleet.until(lambda: decode.stats()["pd_delivered_total"] - before == ASKED)
        steps = [worker.stats()["steps_total"] for worker in (prefill, decode)]
        assert min(steps) > ASKED // 2, steps
        text = fleet.text(prompts()[N], seed=3, temperature=1, max_tokens=16)
        assert text == fleet.text(prompts()[N], seed=3, temperature=1, max_tokens=16)
        prefill.flushed()
        decode.flushed()
        prefill.process.send_signal(signal.SIGTERM)             # asked whether it is quiescent, it is
        assert prefill.process.wait(60) == 0
