"""Twelve calls of litellm."""
from __future__ import annotations

import asyncio
import json

import litellm
from calls import FRANCE, KEY, MODEL, PERSON, TOOL, URL, V1, call, main

litellm.telemetry = False
LONG = [{"role": "user", "content": "hello " * 9000}]   # 9000 tokens; the demo's context is 8192


def ask(model="hosted_vllm/" + MODEL, **more):
    return litellm.completion(model=model, api_base=V1, api_key=KEY,
                              **{"messages": FRANCE, "temperature": 0, "max_tokens": 12, **more})


@call
def openai_provider():
    assert "Paris" in ask("openai/" + MODEL).choices[0].message.content


@call
def vllm_provider():
    assert "Paris" in ask().choices[0].message.content


@call
def stream():
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in ask(stream=True))


@call
def stream_usage():
    assert [c for c in ask(stream=True, stream_options={"include_usage": True}) if getattr(c, "usage", None)]


@call
def asynchronous():
    got = asyncio.run(litellm.acompletion(model="hosted_vllm/" + MODEL, api_base=V1, api_key=KEY,
                                          messages=FRANCE, temperature=0, max_tokens=12))
    assert "Paris" in got.choices[0].message.content


@call
def text_completion():
    got = litellm.text_completion(model="text-completion-openai/" + MODEL, api_base=V1, api_key=KEY,
                                  prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in got.choices[0].text


@call
def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    said = ask(response_format=form, max_tokens=100).choices[0].message.content
    assert set(json.loads(said)) == {"name", "age"}


@call
def tools():
    got = ask(tools=[TOOL], tool_choice="required", max_tokens=60).choices[0].message
    assert json.loads(got.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")


@call
def responses():
    got = litellm.responses(model="openai/" + MODEL, api_base=V1, api_key=KEY, input=FRANCE[0]["content"],
                            temperature=0, max_output_tokens=12)
    assert "Paris" in got.output[-1].content[0].text


@call
def anthropic_messages():
    got = asyncio.run(litellm.anthropic.messages.acreate(
        model="anthropic/" + MODEL, api_base=URL, api_key=KEY, messages=FRANCE, max_tokens=12, temperature=0))
    assert "Paris" in got["content"][0]["text"]


def is_overflow(send, *args, **more) -> None:
    """`send` must raise what litellm.Router's context_window_fallbacks look for."""
    try:
        send(*args, **more)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@call
def overflow_of_a_prompt():
    for provider in ("openai/", "hosted_vllm/"):
        for more in ({"messages": LONG}, {"messages": LONG, "stream": True}, {"max_tokens": 8192}):
            is_overflow(ask, provider + MODEL, **more)
    is_overflow(litellm.responses, model="openai/" + MODEL, api_base=V1, api_key=KEY,
                input=LONG[0]["content"])


@call
def overflow_of_an_anthropic_prompt():
    is_overflow(asyncio.run, litellm.anthropic.messages.acreate(
        model="anthropic/" + MODEL, api_base=URL, api_key=KEY, messages=LONG, max_tokens=12))


main()
