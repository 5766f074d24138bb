"""Whatever an answer has is accepted in the next request, as the official clients send it back."""
from __future__ import annotations

import asyncio
import itertools

import anthropic
import httpx
import httpx2
import openai
import pytest
from scripted import DATA, SAYS, TOOL, Scripted

from penstock.text.tools.table import FORMATS

USER = [{"role": "user", "content": "Weather?"}]
FUNCTION = TOOL["function"]
CLAUDE_TOOL = {"name": FUNCTION["name"], "description": "Now.", "input_schema": FUNCTION["parameters"]}
# Command-R's is for requests with tools only, and its calls are in no format that is read.
TEMPLATES = sorted(t for t in (DATA / "templates").glob("*.jinja") if t.stem != "command_r")
FORMS = pytest.mark.parametrize("form", TEMPLATES, ids=[t.stem for t in TEMPLATES])


@pytest.fixture
def server(form):
    made = Scripted(form.read_text())
    yield made
    made.close()


def sayings(server: Scripted):
    """What a model may say under this template, and its end: text, calls, reasoning, each also cut off."""
    form = server.text.calls
    calls = next((said for name, said in SAYS.items() if form is not None and FORMATS[name] is form), "")
    marks = server.text.reasons
    thoughts = ("",) if marks is None else ("", f"{marks.open}\nHm.\n{marks.close}\n\n")
    texts = ("Rain.", calls, f"So. {calls}") if calls else ("Rain.",)
    for thought, said in itertools.product(thoughts, texts):
        yield thought + said, "stop"
        yield (thought + said)[:-7 if said == calls else -1], "length"
    if marks is not None:
        yield f"{marks.open}\nHm", "length"


def clients(server: Scripted, work):
    async def go() -> None:
        http = httpx.AsyncClient(transport=server.transport())
        async with (openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http,
                                       max_retries=0) as client,
                    anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", max_retries=0,
                                             http_client=httpx2.AsyncClient(
                                                 transport=httpx2.ASGITransport(server.app))) as claude):
            for said, finish in sayings(server):
                server.says, server.finish = said, finish
                await work(client, claude)
    asyncio.run(go())


@FORMS
def test_a_message_of_chat_is_taken_again(server):
    async def work(client, _):
        messages: list = [*USER]
        offered = {"tools": [TOOL]} if server.text.calls is not None else {}
        for _ in range(2):
            answer = await client.chat.completions.create(model="m", messages=messages, **offered)
            message = answer.choices[0].message
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": c.id, "name": c.function.name, "content": "rain"}
                         for c in message.tool_calls or ()]
            messages.append({"role": "user", "name": "eve", "content": [{"type": "text", "text": "And?"}]})
        await client.chat.completions.create(model="m", messages=messages, **offered)
        both = {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."}
        await client.chat.completions.create(model="m", messages=[*USER, both, *USER], **offered)
    clients(server, work)


@FORMS
def test_output_of_responses_is_taken_again(server):
    async def work(client, _):
        given: list = [*USER]
        offered = {"tools": [{"type": "function", **FUNCTION}]} if server.text.calls is not None else {}
        for _ in range(2):
            answer = await client.responses.create(model="m", input=given, **offered)
            given += answer.output
            given += [{"type": "function_call_output", "call_id": c.call_id, "output": "rain"}
                      for c in answer.output if c.type == "function_call"]
            given.append({"role": "user", "content": "And?"})
        await client.responses.create(model="m", input=given, **offered)
    clients(server, work)


@FORMS
def test_content_of_a_message_is_taken_again(server):
    async def work(_, claude):
        messages: list = [*USER]
        offered = {"tools": [CLAUDE_TOOL]} if server.text.calls is not None else {}
        for _ in range(2):
            answer = await claude.messages.create(model="m", max_tokens=900, messages=messages, **offered)
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": [
                *({"type": "tool_result", "tool_use_id": c.id, "content": "rain", "is_error": False}
                  for c in answer.content if c.type == "tool_use"), {"type": "text", "text": "And?"}]})
        await claude.messages.create(model="m", max_tokens=900, messages=messages, **offered)
    clients(server, work)


@FORMS
def test_an_assistant_without_content_is_taken(server):
    for empty in ({}, {"content": None}, {"content": ""}, {"content": []}):
        answer = server.post("/v1/chat/completions", messages=[*USER, {"role": "assistant", **empty}, *USER])
        assert answer.status_code == 200, answer.text


@FORMS
def test_calls_and_results_of_other_frameworks_are_taken(server):
    """Arguments as an object or left out, a result that is null: as the peers take them."""
    if server.text.calls is None:
        return
    prompts = []
    for function in ({"arguments": "{}"}, {"arguments": {}}, {"arguments": None}, {"arguments": ""}, {}):
        call = {"id": "abcdef123", "type": "function", "function": {"name": FUNCTION["name"], **function}}
        for content in ("", None, []):
            answer = server.post("/v1/chat/completions", tools=[TOOL], messages=[
                *USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdef123", "content": content}])
            assert answer.status_code == 200, answer.text
            prompts.append(server.prompt)
    assert len({*prompts}) == 1
    wrong = server.post("/v1/chat/completions", messages=[*USER, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": [1]}}]}])
    assert wrong.status_code == 400 and "tool_calls[0]" in wrong.text


@FORMS
def test_a_refusal_that_another_server_made_is_text(server):
    parts = [{"type": "refusal", "refusal": "I will not."}]
    said = {"role": "assistant", "content": parts}
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = server.post(path, **{name: [*USER, said, *USER]})
        assert answer.status_code == 200 and "I will not." in server.prompt
    wrong = {"role": "assistant", "content": [{"type": "refusal"}]}
    assert server.post("/v1/chat/completions", messages=[*USER, wrong]).status_code == 400
