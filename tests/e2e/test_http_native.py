"""What clients send beside plain calls, and the routes of vLLM and SGLang, against an echoing engine."""
from __future__ import annotations

import signal

import pytest
from http_server import Server, error, events

from penstock.serve.http.native import UNBUILT_PATHS


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
