"""A context that overflows: in the words by which clients find it out, or clipped where that is asked for."""
from __future__ import annotations

import re

import pytest
from scripted import Scripted

# Lower-case phrases by which clients tell an overflow: of LiteLLM, of SGLang's and vLLM's tests, of agents.
OPENAI = ("this model's maximum context length is", "is longer than the model's context length",
          "reduce the length of the messages", "maximum context length", "context length",
          "context_length_exceeded")    # langchain-openai looks for this one in the openai package's message
CODE = "context_length_exceeded"
ANTHROPIC = re.compile(r"^prompt is too long: (\d+) tokens > (\d+) maximum$")
ANTHROPIC_BOTH = re.compile(r"^input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
CONTEXT = 100
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG, SHORT = "x" * 120, "x" * 20


@pytest.fixture(scope="module")
def made():
    servers = [Scripted(PLAIN, context=CONTEXT), Scripted(PLAIN, context=CONTEXT, clips=True)]
    for server in servers:
        server.says = "Rain."
    yield servers
    for server in servers:
        server.close()


def asks(text: str, most: int | None = None):
    user = [{"role": "user", "content": text}]
    yield "/v1/chat/completions", {"messages": user, "max_tokens": most}
    yield "/v1/completions", {"prompt": text, "max_tokens": most or 16}
    yield "/v1/responses", {"input": text, "max_output_tokens": most}
    yield "/generate", {"text": text, "sampling_params": {"max_new_tokens": most or 16}}
    yield "/v1/messages", {"messages": user, "max_tokens": most or 16}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("text", [LONG, "x" * 100_000, "x" * CONTEXT])
def test_a_prompt_that_is_too_long_is_told_in_clients_words(made, clips, text):
    for path, body in asks(text):
        answer = made[clips].post(path, **body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        if path == "/v1/messages":
            tokens, most = map(int, ANTHROPIC.match(error["message"]).groups())
            assert tokens > most and most in (CONTEXT, CONTEXT - 1)
            assert error["type"] == "invalid_request_error"
        else:
            assert all(p in error["message"].lower() for p in OPENAI) and error["code"] == CODE
            assert f"maximum context length is {CONTEXT} tokens" in error["message"]
            assert error["param"] == {"/v1/chat/completions": "messages", "/v1/completions": "prompt",
                                      "/v1/responses": "input", "/generate": "text"}[path]


def test_more_messages_than_tokens_overflow_too(made):
    many = [{"role": "user", "content": "x"}] * 101
    error = made[0].post("/v1/chat/completions", messages=many).json()["error"]
    assert "maximum context length is 100 tokens" in error["message"] and error["code"] == CODE
    assert CODE in error["message"]
    error = made[0].post("/v1/messages", messages=many, max_tokens=1).json()["error"]
    assert ANTHROPIC.match(error["message"])


def test_a_maximum_that_does_not_fit_is_refused(made):
    for path, body in asks(SHORT, 1200):
        answer = made[0].post(path, **body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        if path == "/v1/messages":
            assert ANTHROPIC_BOTH.match(error["message"]).groups() == ("20", "1200", "100")
        else:
            assert "is too large: 1200. This model's maximum context length is 100 tokens" in error["message"]
            assert error["code"] == CODE and CODE in error["message"]
            if path == "/v1/chat/completions":      # either name, as SGLang's tests read it
                assert "max_completion_tokens is too large" in error["message"]


def test_a_maximum_is_clipped_where_that_is_asked_for_and_the_usage_says_so(made):
    for path, body in asks(SHORT, 1200):
        answer = made[1].post(path, **body)
        assert answer.status_code == 200, answer.text
        if path != "/generate":
            assert answer.json()["usage"]["clipped_max_tokens"] == CONTEXT - len(SHORT)
    for path, body in asks(SHORT, 80):              # just fits
        assert "clipped" not in made[1].post(path, **body).text
