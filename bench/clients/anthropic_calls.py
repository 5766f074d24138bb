"""Twelve calls of Anthropic's own client."""
from __future__ import annotations

import asyncio

import anthropic
from calls import FRANCE, KEY, MODEL, TOOL, URL, WEATHER, call, main

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=600)
GREEDY = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}}     # it has no field for it
TOOLS = [{"name": "get_weather", "description": TOOL["function"]["description"], "input_schema": WEATHER}]


def message(messages=FRANCE, **more):
    return client.messages.create(messages=messages, **{**GREEDY, **more})


@call
def whole():
    got = message()
    assert "Paris" in got.content[0].text and got.stop_reason in ("end_turn", "max_tokens")


@call
def streamed_events():
    assert [e.type for e in message(stream=True)][-1] == "message_stop"


@call
def stream_helper():
    with client.messages.stream(messages=FRANCE, **GREEDY) as stream:
        assert "Paris" in "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0


@call
def asynchronous():
    async def go():
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as other:
            return await other.messages.create(messages=FRANCE, **GREEDY)
    assert "Paris" in asyncio.run(go()).content[0].text


@call
def system_and_blocks():
    content = [{"type": "text", "text": FRANCE[0]["content"], "cache_control": {"type": "ephemeral"}}]
    assert message([{"role": "user", "content": content}], system="Be brief.").content


@call
def stop_sequence():
    got = message(stop_sequences=["Paris"])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "Paris")


@call
def count_tokens():
    assert client.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens > 5


@call
def tool_any():
    got = message(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=60)
    assert got.stop_reason == "tool_use" and got.content[-1].input["city"] in ("Paris", "Rome")


@call
def tool_streamed():
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=FRANCE, tools=TOOLS, tool_choice=choice,
                                **{**GREEDY, "max_tokens": 60}) as stream:
        assert stream.get_final_message().content[-1].input["city"] in ("Paris", "Rome")


@call
def tool_results():
    assert message([
        *FRANCE, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]}],
        tools=TOOLS).content


@call
def cached_tokens():
    long = [{"role": "user", "content": "Paris is a city. " * 30}]
    message(long)
    assert message(long).usage.cache_read_input_tokens > 100


@call
def a_wrong_model_is_refused():
    try:
        message(model="other")
    except anthropic.NotFoundError:
        return
    raise AssertionError("it was not")


main()
