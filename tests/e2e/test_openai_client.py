"""The official openai client, unchanged, against `penstock serve demo`: a real model, real text."""
from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from typing import Annotated, Literal

import openai
import pydantic
import pytest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"model": "demo", "temperature": 0.0, "max_tokens": 24}
KEY = "a-test-key"
END_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """base_url and the event log of a server that must drain and exit 0 at the end."""
    folder = tmp_path_factory.mktemp("serve")
    log, events = folder / "log", folder / "events"
    (folder / "keys").write_text(KEY)
    (folder / "keys").chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "serve", "demo", "--port", "0", "--threads",
         "1", "--kv-cache-memory-bytes", "200M", "--api-key-file", str(folder / "keys"),
         "--debug-event-log", str(events), "--debug-check"],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    try:
        found = re.search(
            r"ready on (http://\S+) \(model \S+, KV of [\d,]+ tokens in 0\.\d\d GiB, started in",
            process.stdout.readline())
        assert found, log.read_text()
        yield found.group(1) + "/v1", events
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[0], api_key=KEY, max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(messages=FRANCE, **GREEDY)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(
        messages=FRANCE, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop" and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    # The second time all whole pages of the 37 prompt tokens come from the cache.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens_details["device"] == 32


def test_the_clients_own_stream_helper_puts_the_answer_together(client):
    with client.chat.completions.stream(messages=FRANCE, **GREEDY) as stream:
        deltas = [e.delta for e in stream if e.type == "content.delta"]
        assert "".join(deltas) == ANSWER
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_async_requests_side_by_side(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=server[0], api_key=KEY, max_retries=0) as client:
            async def streamed():
                stream = await client.chat.completions.create(messages=FRANCE, stream=True, **GREEDY)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            async def whole():
                got = await client.chat.completions.create(messages=FRANCE, **GREEDY)
                return got.choices[0].message.content

            return await asyncio.gather(*(f() for f in (streamed, whole) * 3))

    assert asyncio.run(go()) == [ANSWER] * 6


def test_logprobs_of_chat_are_of_the_tokens_shown(client):
    got = client.chat.completions.create(messages=FRANCE, logprobs=True, top_logprobs=3, **GREEDY)
    entries = got.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == ANSWER + "<|im_end|>"
    for entry in entries:
        best = [t.logprob for t in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert entry.logprob == best[0] <= 0 and entry.top_logprobs[0].token == entry.token


def test_logprobs_of_completions_have_offsets(client):
    got = client.completions.create(prompt="The capital of France is", logprobs=2, **GREEDY)
    logprobs, text = got.choices[0].logprobs, got.choices[0].text
    assert len(logprobs.tokens) == 24 and "".join(logprobs.tokens) == text
    assert [text[o:][:len(t)] for o, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)
            ] == logprobs.tokens
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_an_echo_has_the_logprobs_that_the_answer_had(client):
    """What lm-eval asks for: a prompt's tokens with the logprobs that they had as the model's own words."""
    answer = client.completions.create(prompt="The capital of France is", logprobs=1, **GREEDY).choices[0]
    whole = "The capital of France is" + answer.text
    for most in (0, 1):
        got = client.completions.create(model="demo", prompt=whole, echo=True, logprobs=1, max_tokens=most,
                                        temperature=0.0)
        echoed = got.choices[0].logprobs
        assert got.choices[0].text.startswith(whole) and got.usage.completion_tokens == most
        assert echoed.token_logprobs[0] is None and "".join(echoed.tokens).startswith(whole)
        tail = slice(5, 5 + len(answer.logprobs.tokens))
        assert echoed.tokens[tail] == answer.logprobs.tokens
        assert echoed.token_logprobs[tail] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-3)
        assert [whole[o:][:len(t)] for o, t in zip(echoed.text_offset[tail], echoed.tokens[tail], strict=True)
                ] == echoed.tokens[tail]
        assert all(max(top, key=top.get) == t for t, top in
                   zip(echoed.tokens[tail], echoed.top_logprobs[tail], strict=True))


def test_choices_share_their_prompt_and_a_seed_repeats_them(client):
    ask = {"model": "demo", "prompt": "Once upon a time, there was a", "n": 3, "seed": 7,
           "max_tokens": 8, "temperature": 1.0}
    one, two = client.completions.create(**ask), client.completions.create(**ask)
    texts = [c.text for c in one.choices]
    assert texts == [c.text for c in two.choices] and len(set(texts)) == 3
    assert one.usage.prompt_tokens == 8 and one.usage.completion_tokens == 24


class City(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=40)]
    capital: bool
    rivers: Annotated[list[Literal["Seine", "Rhine"]], pydantic.Field(max_length=2)]


def test_answers_match_what_was_asked_for(client):
    """The client's own parser of pydantic models, any object, and a regular expression; also streamed."""
    asked = [{"role": "user", "content": "Describe Paris in JSON."}]
    sampled = {"model": "demo", "temperature": 1.0, "seed": 3, "max_tokens": 200}
    got = client.chat.completions.parse(messages=asked, response_format=City, **sampled)
    assert got.choices[0].finish_reason == "stop" and isinstance(got.choices[0].message.parsed, City)
    with client.chat.completions.stream(messages=asked, response_format=City, **sampled) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
    got = client.chat.completions.create(messages=asked, response_format={"type": "json_object"}, **sampled)
    assert got.choices[0].finish_reason == "length" or isinstance(
        json.loads(got.choices[0].message.content), dict)
    got = client.completions.create(prompt="The year is", n=2, extra_body={
        "structured_outputs": {"regex": " (19|20)[0-9]{2}"}}, **sampled)
    assert all(re.fullmatch(" (19|20)[0-9]{2}", c.text) for c in got.choices)
    got = client.completions.create(prompt="Yes or no?", extra_body={"guided_choice": ["maybe", "never"]},
                                    logprobs=1, **sampled)
    assert got.choices[0].text in ("maybe", "never")


def test_stop_strings_end_the_text(client):
    got = client.completions.create(prompt="The capital of France is", stop=["ris", "zzz"], **GREEDY)
    assert got.choices[0].text == " Pa" and got.choices[0].finish_reason == "stop"


def test_a_message_can_be_continued(client):
    got = client.chat.completions.create(
        messages=[*FRANCE, {"role": "assistant", "content": "The capital of France"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False}, **GREEDY)
    assert got.choices[0].message.content == " is Paris."


def test_salts_do_not_share_pages(client):
    def cached(salt):
        got = client.chat.completions.create(
            messages=[{"role": "user", "content": "Say a word. " * 8}], model="demo", max_tokens=1,
            extra_body={"cache_salt": salt})
        return got.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0 and cached("a") > 0
    assert cached("b") == 0 and cached("b") > 0


def test_errors_are_the_clients_own(client, server):
    def create(**fields):
        client.chat.completions.create(**{"messages": FRANCE, **GREEDY, **fields})

    for fields, param in (({"temperature": 101}, "temperature"), ({"messages": []}, "messages"),
                          ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
                          ({"response_format": {"type": "json_schema", "json_schema": {
                              "name": "n", "schema": {"not": {}}}}}, "response_format"),
                          ({"extra_body": {"nonsense": 1}}, "nonsense")):
        with pytest.raises(openai.BadRequestError) as e:
            create(**fields)
        assert e.value.param == param and e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as e:
        create(messages=[{"role": "user", "content": "word " * 9000}])
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as e:
        create(model="gpt-4")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server[0], api_key="wrong", max_retries=0).models.list()
    assert [m.id for m in client.models.list()] == ["SmolLM2-135M-Instruct"]


def entries(events):
    # The last line may be half written.
    return [json.loads(line) for line in events.read_text().split("\n")[:-1]]


def test_a_client_that_leaves_frees_its_memory_within_one_step(client, server):
    stream = client.completions.create(prompt="Count: 1 2 3", stream=True, model="demo",
                                       max_tokens=4000, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(iter(stream))
    stream.close()
    before, end = 0, time.monotonic() + END_S
    while not before and time.monotonic() < end:
        log = entries(server[1])
        before = next((i for i, e in enumerate(log) if e["kind"] == "Aborted"), 0)
        time.sleep(0.02)
    assert before, "the engine never heard of it"
    (rid,) = {e["rid"] for e in log if e["kind"] == "Aborted"}
    after = [e for e in log[before:] if e["kind"] == "Finished" and e["rid"] == rid]
    assert after and after[0]["outcome"] == "abort"
    # Its pages wait for the steps that were in flight, and for no other.
    assert after[0]["retired"] == log[before]["retired"]
    free = [e for e in log[before:] if e["kind"] == "pools" and not e["hbm_pages_in_use"]
            and not e["hbm_pages_fenced"]]
    while not free and time.monotonic() < end:
        free = [e for e in entries(server[1])[before:] if e["kind"] == "pools"
                and not e["hbm_pages_in_use"] and not e["hbm_pages_fenced"]]
        time.sleep(0.02)
    assert free[0]["retired"] <= log[before]["issued"], "freed later than the steps in flight"
