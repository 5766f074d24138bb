"""`--otlp-traces-endpoint`: what a collector gets of requests."""
from __future__ import annotations

import itertools
import json
import subprocess
import time

import httpx
import pytest
from otlp import Sent, collecting
from pair_server import LONG, PAIR, SERVED, Server, key_file, serving
from pipeline_engine import checkpoint

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xylophone"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def collector():
    with pytest.MonkeyPatch.context() as patch, collecting(patch) as found:
        yield found


@pytest.fixture(scope="module")
def demo(collector, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with serving("demo", folder, "--otlp-traces-endpoint", f"{collector.url}/v1/traces", "--kv-offloading-size", "8M",
                 "--kv-cache-memory-bytes", "8M", "--kv-storage", f"file://{folder}/pages") as server:
        yield server


def in_order(spans: list[Sent], root: Sent) -> list[str]:
    """Names of the phases of one choice on one engine. Each begins where the one before it ends."""
    assert all(s.trace == root.trace and s.begin < s.end for s in spans)
    assert all(a.end == b.begin for a, b in itertools.pairwise(spans))
    # The clocks of both processes are one; what the steady one and that of the day differ by is read at the end.
    assert spans[0].begin > root.begin - 10**6 and spans[-1].end < root.end + 10**9
    return [s.name for s in spans]


def chat(server: Server, **more) -> dict:
    headers = more.pop("headers", {})
    body = {"messages": [{"role": "user", "content": f"Say {SECRET} twice"}], "max_tokens": 8, **more}
    return server.http.post("/v1/chat/completions", json=body, headers=headers).json()


def test_a_chat_is_a_span_with_phases_and_without_its_text(demo, collector):
    answer = chat(demo, temperature=.5, seed=7, stop=[f"not{SECRET}"])
    root, spans = collector.trace(answer["id"], "decode")
    assert in_order(spans, root)[0] == "queued" and in_order(spans, root)[-2:] == ["prefill", "decode"]
    assert (root.name, root.kind, root.parent, root.failed) == ("chat tiny", 2, "", False)
    usage = answer["usage"]
    assert root.told | {"gen_ai.response.time_to_first_chunk": 0} == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "penstock", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.response.id": answer["id"], "gen_ai.request.stream": False,
        "gen_ai.request.temperature": .5, "gen_ai.request.top_p": 1.0, "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7, "gen_ai.request.max_tokens": 8,
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0, "penstock.cached_tokens.device": 0,
        "penstock.cached_tokens.host": 0, "gen_ai.response.time_to_first_chunk": 0, "http.response.status_code": 200}
    first = root.told["gen_ai.response.time_to_first_chunk"]
    prefill = spans[-2]
    assert 0 < first < (root.end - root.begin) / 1e9
    assert abs((prefill.end - root.begin) / 1e9 - first) < .5, "prefill lasts to the first token"
    assert root.resource["service.name"] == "penstock" and root.resource["service.version"]
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_stream_with_several_choices_belongs_to_the_trace_of_its_caller(demo, collector):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": [f"Once {SECRET} upon", "Two"], "n": 2, "max_tokens": 6, "stream": True, "ignore_eos": True,
            "logprobs": 1}
    with demo.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    root, spans = collector.trace(events[0]["id"], "decode", 4)
    assert (root.trace, root.parent, root.name) == (TRACE, PARENT, "text_completion tiny")
    assert root.told["gen_ai.request.choice.count"] == 2 and root.told["gen_ai.request.stream"] is True
    assert root.told["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert root.told["gen_ai.usage.output_tokens"] == 24
    assert sorted(s.told["penstock.choice"] for s in spans if s.name == "decode") == [0, 0, 1, 1]
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_prompt_from_storage_was_fetched_and_loaded(demo, collector):
    prompt = "a story of many words, " * 8
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    assert demo.http.post("/v1/completions", json=body).status_code == 200
    demo.until(lambda: demo.stats()["pages_to_store"] == 0 and demo.stats()["moves_in_flight"] == 0)
    assert demo.http.post("/flush_cache").json()["success"]
    answer = demo.http.post("/v1/completions", json=body).json()
    root, spans = collector.trace(answer["id"], "decode")
    # A load of so few pages is a part of prefill: its step waits for it.
    assert in_order(spans, root) == ["queued", "fetching", "prefill", "decode"]
    assert root.told["penstock.cached_tokens.storage"] == root.told["gen_ai.usage.cache_read.input_tokens"] > 0


def test_what_is_not_sampled_by_its_caller_leaves_nothing(demo, collector):
    other = "5" * 32
    answer = chat(demo, headers={"traceparent": f"00-{other}-{PARENT}-00"})
    wrong = chat(demo, headers={"traceparent": f"00-{other}-nothing-01", "x-dynamo-session-id": "run-4"})
    root, _ = collector.trace(wrong["id"], "decode")
    assert root.told["gen_ai.conversation.id"] == "run-4"
    assert root.parent == "" and root.trace != other
    assert not [s for s in collector.spans if s.trace == other or answer["id"] in s.told.values()]


def test_an_error_is_named_by_its_code(demo, collector):
    assert chat(demo, model=SECRET)["error"]["code"] == "model_not_found"
    [span] = collector.until(lambda s: s.told.get("error.type") == "model_not_found")
    assert (span.name, span.told["http.response.status_code"], span.failed) == ("chat", 404, False)
    assert chat(demo, max_tokens="many")["error"]
    [span] = collector.until(lambda s: s.told.get("http.response.status_code") == 400)
    assert span.told["error.type"] == "400" and not collector.below(span)
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_client_that_leaves_ends_its_span(demo, collector):
    body = {"prompt": "go on", "max_tokens": demo.info()["max_model_len"] - 20, "stream": True, "ignore_eos": True}
    with demo.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200 and next(answer.iter_lines())
    [span] = collector.until(lambda s: s.told.get("error.type") == "client_disconnected")
    assert span.told["gen_ai.response.finish_reasons"] == ["abort"] and not span.failed
    collector.until(lambda s: s.parent == span.id and s.name == "decode")
    assert in_order(collector.below(span), span)[-1] == "decode"


def test_both_engines_of_a_pair_are_in_one_trace(model, collector, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"], *PAIR, "--otlp-traces-endpoint", collector.url) as pair:
        answer = pair.ask(LONG)
        root, _ = collector.trace(answer["id"], "decode")
        collector.until(lambda s: s.parent == root.id and s.name == "sending")
        spans = collector.below(root)
        there = [s for s in spans if s.told.get("penstock.engine") == "prefill"]
        assert in_order(there, root)[-2:] == ["prefill", "sending"]
        here = [s for s in spans if s not in there]
        assert next(n for n in in_order(here, root) if n != "queued") == "receiving" and here[-1].name == "decode"
        assert root.told["penstock.remote_tokens"] > 800


@pytest.mark.sweep
def test_two_ends_of_their_own_and_two_engines_add_to_one_trace(model, collector, tmp_path):
    flags = (*SERVED["hosted"], *key_file(tmp_path), "--otlp-traces-endpoint", collector.url)
    with serving(model, tmp_path, *flags, "--disaggregation-mode", "prefill", "--disaggregation-listen",
                 "127.0.0.1:0", "--cluster-insecure") as prefill:
        with serving(model, tmp_path, *flags, "--dp", "2", "--disaggregation-mode", "decode",
                     "--disaggregation-connect", prefill.info()["pair_address"], "--cluster-insecure") as decode:
            decode.until(lambda: not decode.info()["prefill"]["missing"])
            for rank in (0, 1):
                answer = decode.ask([rank, *LONG], data_parallel_rank=rank, n=2, temperature=1, seed=5)
                root, _ = collector.trace(answer["id"], "decode", 2)
                collector.until(lambda s, root=root: s.parent == root.id and s.name == "sending")
                spans = collector.below(root)
                roles = {(s.name, s.told["penstock.role"]) for s in spans}
                assert {("sending", "prefill"), ("receiving", "decode"), ("decode", "decode")} <= roles
                assert {s.told.get("penstock.engine") for s in spans} == {None, f"engine {rank}"}
                assert all(s.told["penstock.role"] == "prefill" for s in spans if "penstock.engine" not in s.told)


@pytest.mark.by_exec
def test_a_collector_that_is_away_keeps_nobody_waiting(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"], "--otlp-traces-endpoint", "http://127.0.0.1:9") as server:
        for _ in range(3):
            assert server.ask(LONG[:40])["status"] == 200
        began = time.monotonic()
        server.process.terminate()
        try:
            assert server.process.wait(30) == 0
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{time.monotonic() - began} s") from None
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")
