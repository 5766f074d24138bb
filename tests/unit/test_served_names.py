"""Several names of one model, and bodies that are compressed."""
from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest
from scripted import Scripted

USER = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def server():
    made = Scripted("{% for m in messages %}{{ m.content }}{% endfor %}", also=("gpt-4o", "org/model"),
                    unlisted=("/a/folder",))
    made.says = "Rain."
    yield made
    made.close()


def sent(server, method, path, **how):
    async def go():
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://localhost") as http:
            return await http.request(method, path, **how)
    return asyncio.run(go())


def test_every_name_is_listed_and_answers_have_the_one_asked_for(server):
    listed = sent(server, "GET", "/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["m", "gpt-4o", "org/model"]
    assert sent(server, "GET", "/v1/models/org/model").json()["id"] == "org/model"
    assert sent(server, "GET", "/v1/models//a/folder").json()["id"] == "/a/folder"
    for asked, shown in (("/a/folder", "/a/folder"), ("gpt-4o", "gpt-4o"), ("org/model", "org/model"),
                         ("unknown", "m"), (None, "m")):
        for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x"}),
                           ("/v1/responses", {"input": "x"}),
                           ("/v1/messages", {"messages": USER, "max_tokens": 5})):
            assert server.post(path, model=asked, **body).json()["model"] == shown
    for answer in (server.post("/v1/completions", model="other", prompt="x"),
                   sent(server, "GET", "/v1/models/other")):
        assert answer.status_code == 404
        assert "this server has 'm' and 'gpt-4o' and 'org/model'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding, status", [("gzip", 415), ("br", 415), ("identity", 200), (None, 200)])
def test_a_compressed_body_is_refused_as_such(server, encoding, status):
    body = json.dumps({"prompt": "x"}).encode()
    headers = {"content-type": "application/json", **({"content-encoding": encoding} if encoding else {})}
    answer = sent(server, "POST", "/v1/completions", headers=headers,
                  content=gzip.compress(body) if encoding == "gzip" else body)
    assert answer.status_code == status
    if status == 415:
        assert "Content-Encoding" in answer.json()["error"]["message"]


def test_special_tokens_may_be_added_to_a_conversation(server):
    """As vLLM's /tokenize takes it; a template writes its own unless that is asked for."""
    for path, body in (("/tokenize", {"messages": USER}), ("/v1/chat/completions", {"messages": USER})):
        for add in (None, False, True):
            assert server.post(path, **body, add_special_tokens=add).status_code == 200


def test_a_stop_string_is_shown_as_it_was_sent(server):
    told = server.post("/v1/completions", prompt="x", stop=["a", ""]).json()["error"]["message"]
    assert "['a', '']" in told and "(" not in told
