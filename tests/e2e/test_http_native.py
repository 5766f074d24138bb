"""What clients send beside plain calls, and the routes of vLLM and SGLang, against an echoing engine."""
from __future__ import annotations

import signal
import socket
import time

import pytest
from http_server import WAIT_S, Server, error, events

from penstock.api.native import UNBUILT_PATHS


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("shared"))
    yield server
    assert server.end(signal.SIGTERM) == 0


def test_what_clients_ask_of_a_stream_besides_text(shared):
    asked = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    got = shared.post(prompt="hello", max_tokens=5, stream=True, stream_options=asked, metadata={"a": "b"})
    chunks = events(got)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and chunks[-1]["choices"] == []
    lengths = [len(part) + 2 for part in got.text.split("\n\n") if '"obfuscation"' in part]
    assert len(lengths) == len(chunks) - 1 and all(n % 64 == 0 for n in lengths)
    assert shared.post(prompt="hello", max_tokens=1, store=True).json()["store"] is False
    assert "store" not in shared.post(prompt="hello", max_tokens=1).json()


def test_an_echo_has_logprobs(shared):
    """The engine says of a prompt's token i that it has the logprob -i, and the same of tokens 0, 1, ..."""
    ask = {"prompt": ["héllo", "abc"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = shared.post(**ask).json()["choices"]
    assert whole[0]["text"].startswith("héllohé"[:6]) and whole[2]["text"] == "abcabc"
    for choice in whole:
        columns = choice["logprobs"]
        assert len({len(c) for c in columns.values()}) == 1
        prompt = len(columns["tokens"]) - 3
        assert columns["token_logprobs"] == [None, *(-float(i) for i in range(1, prompt)), *[-0.5] * 3]
        assert columns["top_logprobs"][0] is None and columns["text_offset"][0] == 0
        for i in range(1, prompt):
            assert columns["tokens"][i] in columns["top_logprobs"][i]
            assert len(columns["top_logprobs"][i]) in (2, 3)
        assert columns["text_offset"] == sorted(columns["text_offset"])
        if "h" not in choice["text"]:
            assert [choice["text"][o:][:1] for o in columns["text_offset"]] == columns["tokens"]
    told: dict[int, dict] = {}
    for event in events(shared.post(**ask, stream=True)):
        [choice] = event["choices"]
        kept = told.setdefault(choice["index"], {"text": "", "columns": {}})
        kept["text"] += choice["text"]
        for name, column in choice["logprobs"].items():
            kept["columns"].setdefault(name, []).extend(column)
    assert [told[i] for i in range(4)] == [{"text": c["text"], "columns": c["logprobs"]} for c in whole]


def test_only_a_prompt_is_asked_about(shared):
    ask = {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 0, "max_tokens": 0}
    got = shared.post(**ask).json()
    assert [c["logprobs"]["token_logprobs"] for c in got["choices"]] == [[None, -1.0, -2.0], [None]]
    assert [c["finish_reason"] for c in got["choices"]] == ["length"] * 2
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (4, 0)
    chunks = events(shared.post(**ask, stream=True))
    assert sum(len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks) == 4
    assert shared.post(prompt="abc", echo=True, max_tokens=0).json()["choices"][0]["text"] == "abc"
    assert error(shared.post(prompt="abc", max_tokens=0), 400)["param"] == "max_tokens"


def test_logprobs_of_a_prompt_in_vllms_form(shared):
    ask = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 2}
    got = shared.post(**ask).json()["choices"][0]["prompt_logprobs"]
    assert got[0] is None and (got[1]["6"]["logprob"], got[2]["7"]["logprob"]) == (-1, -2)
    assert got[1]["0"] == {"logprob": -1.0, "rank": 1, "decoded_token": got[1]["0"]["decoded_token"]}
    later = shared.post(**ask, prompt_logprobs_start=2).json()["choices"][0]["prompt_logprobs"]
    assert later[:2] == [None, None] and later[2] == got[2]
    assert shared.post(**ask, prompt_logprobs_start=9).json()["choices"][0]["prompt_logprobs"] == [None] * 3
    streamed = [c["choices"][0] for c in events(shared.post(**ask, stream=True))]
    assert [c["prompt_logprobs"] for c in streamed if "prompt_logprobs" in c] == [got]
    chat = {"messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 0, "max_tokens": 2}
    whole = shared.post("chat/completions", **chat).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    first = [c["prompt_logprobs"] for c in events(shared.post("chat/completions", **chat, stream=True))
             if "prompt_logprobs" in c]
    assert first == [whole["prompt_logprobs"]]
    many = error(shared.post(prompt=[[5] * 15_000] * 2, prompt_logprobs=20), 400)
    assert many["param"] == "prompt_logprobs"


def test_logprobs_in_sglangs_form(shared):
    def generate(**fields):
        ask = {"input_ids": [5, 6, 7], "return_logprob": True}
        return shared.http.post("/generate", json={**ask, **fields})

    def told(**fields):
        return generate(**fields).json()["meta_info"]
    two = {"max_new_tokens": 2}
    got = told(logprob_start_len=0, top_logprobs_num=1, sampling_params=two, return_text_in_logprobs=True)
    assert [e[:2] for e in got["input_token_logprobs"]] == [[None, 5], [-1.0, 6], [-2.0, 7]]
    assert got["input_top_logprobs"][0] is None and got["input_top_logprobs"][2][0][:2] == [-2.0, 0]
    assert [e[:2] for e in got["output_token_logprobs"]] == [[-0.5, 5], [-0.5, 6]]
    assert all(isinstance(e[2], str) for e in got["output_token_logprobs"])
    assert len(got["output_top_logprobs"]) == 2
    assert told(logprob_start_len=1, sampling_params=two)["input_token_logprobs"] == [
        [None, 6, None], [-2.0, 7, None]]
    for start in (-1, 2, 9):
        assert told(logprob_start_len=start, sampling_params=two)["input_token_logprobs"] == [[None, 7, None]]
    assert told(logprob_start_len=0, sampling_params={"max_new_tokens": 0})["output_token_logprobs"] == []
    last = events(generate(logprob_start_len=0, stream=True, sampling_params=two))[-1]["meta_info"]
    assert len(last["input_token_logprobs"]) == 3 and len(last["output_token_logprobs"]) == 2
    several = generate(input_ids=[[5, 6], [7]], logprob_start_len=0, sampling_params=two).json()
    assert [len(a["meta_info"]["input_token_logprobs"]) for a in several] == [2, 1]
    for fields, param in (({"top_logprobs_num": 21}, "top_logprobs_num"),
                          ({"logprob_start_len": -2}, "logprob_start_len"),
                          ({"return_logprob": False, "top_logprobs_num": 1}, "top_logprobs_num")):
        assert error(generate(**fields), 400)["param"] == param


def test_text_to_tokens_and_back(shared):
    http = shared.http
    got = http.post("/tokenize", json={"prompt": "é ok", "return_token_strs": True}).json()
    assert got["count"] == len(got["tokens"]) and got["max_model_len"] == 20_000
    assert "".join(got["token_strs"][-2:]) == "ok"
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "é ok"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "é"}]}).json()
    asked = shared.post("chat/completions", messages=[{"role": "user", "content": "é"}], max_tokens=1).json()
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    for path, body in (("tokenize", {}), ("tokenize", {"prompt": "a", "messages": []}),
                       ("tokenize", {"prompt": "a", "x": 1}), ("detokenize", {"tokens": [2**70]}),
                       ("detokenize", {"tokens": [-1]}), ("tokenize", {"prompt": "x" * 30_000})):
        error(http.post("/" + path, json=body), 400)
    error(http.post("/tokenize", json={"prompt": "a", "model": "other"}), 404)


def test_others_can_end_a_request_by_its_name(shared):
    with shared.started(rid="mine") as one, shared.started(rid="yours"):
        assert shared.http.post("/abort_request", json={"rid": "nobody"}).json()["aborted"] == 0
        assert shared.http.post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 1
        seen = b""
        while part := one.recv(65536):
            seen += part
            if b'"code":"aborted"' in seen:
                break
        assert b'"code":"aborted"' in seen and b"[DONE]" not in seen
        load = shared.until(lambda: (got := shared.http.get("/get_load").json()[0])["num_reqs"] == 1 and got)
        assert load["num_waiting_reqs"] == 0
        assert shared.http.post("/abort_request", json={"abort_all": True}).json()["aborted"] == 1
        shared.until(lambda: shared.http.get("/v1/loads").json()["aggregate"]["total_reqs"] == 0)
    assert shared.http.get("/v1/loads").json()["loads"][0]["max_running_requests"] == 100
    error(shared.http.post("/abort_request", json={}), 400)


def test_a_token_is_made_to_tell_that_one_can_be(shared):
    assert shared.http.get("/health_generate").json() == {"status": "ok"}


def test_a_path_that_is_not_built_is_refused_by_name(shared):
    for path in ("/v1/embeddings", "/v1/images/generations", "/api/chat"):
        told = error(shared.http.post(path, json={}), 404)
        assert told["code"] == "not_built" and "is not built" in told["message"]
        assert "/openapi.json" in told["message"]
    for path in ("/v1/nothing", "/apis", "/v1/embeddingss"):
        told = error(shared.http.get(path), 404)
        assert told["code"] == "not_found" and "/openapi.json" in told["message"]
    assert not set(UNBUILT_PATHS) & set(shared.http.get("/openapi.json").json()["paths"])


def test_an_idle_connection_stays_open_for_so_many_seconds(tmp_path):
    server = Server(tmp_path, "--timeout-keep-alive", "1")
    try:
        base = server.http.base_url
        with socket.create_connection((base.host, base.port), timeout=WAIT_S) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            while idle.recv(1 << 16):
                pass
            assert 0.5 < time.monotonic() - began < 30
    finally:
        assert server.end(signal.SIGTERM) == 0
