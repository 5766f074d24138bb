"""Forty calls of OpenAI's own client."""
from __future__ import annotations

import asyncio
import json

import openai
from calls import FRANCE, KEY, MODEL, PERSON, TOOL, V1, WEATHER, call, main
from pydantic import BaseModel

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=600)
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
TWO = {"city": "Paris"}


class Person(BaseModel):
    name: str
    age: int


def chat(messages=FRANCE, **more):
    return client.chat.completions.create(messages=messages, **{**GREEDY, **more})


def text(prompt="The capital of France is", **more):
    return client.completions.create(prompt=prompt, **{**GREEDY, **more})


def content(**more) -> str:
    return chat(**more).choices[0].message.content


@call
def models_list():
    assert MODEL in [m.id for m in client.models.list()]


@call
def models_retrieve():
    assert client.models.retrieve(MODEL).id == MODEL


@call
def chat_whole():
    assert "Paris" in content()


@call
def chat_stream():
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chat(stream=True))


@call
def chat_stream_usage():
    last = list(chat(stream=True, stream_options={"include_usage": True}))[-1]
    assert last.usage.completion_tokens > 0 and not last.choices


@call
def chat_stream_obfuscated():
    assert list(chat(stream=True, stream_options={"include_obfuscation": True}))


@call
def chat_stream_helper():
    with client.chat.completions.stream(messages=FRANCE, **GREEDY) as stream:
        assert [e for e in stream if e.type == "content.delta"]
        assert "Paris" in stream.get_final_completion().choices[0].message.content


@call
def chat_async():
    async def go():
        async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as other:
            some = [other.chat.completions.create(messages=FRANCE, **GREEDY) for _ in range(3)]
            return await asyncio.gather(*some)
    assert all("Paris" in r.choices[0].message.content for r in asyncio.run(go()))


@call
def chat_logprobs():
    entries = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(e.top_logprobs) == 3 for e in entries)


@call
def chat_sixteen_choices():
    assert len(chat(n=16, temperature=1, max_tokens=2).choices) == 16


@call
def chat_eight_stop_strings():
    assert "Paris" not in content(stop=["Paris", *"abcdefg"[:7].upper()])


@call
def chat_penalties_bias_seed():
    asked = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"100": -5}, "seed": 3,
             "temperature": 0.8, "top_p": 0.9}
    assert content(**asked) == content(**asked)


@call
def chat_max_completion_tokens():
    got = client.chat.completions.create(model=MODEL, messages=FRANCE, max_completion_tokens=3)
    assert got.usage.completion_tokens <= 3


@call
def chat_metadata_and_store():
    assert chat(metadata={"a": "b"}, store=True, user="u", service_tier="auto").store is False


@call
def chat_verbosity():
    assert content(verbosity="low")


@call
def chat_reasoning_effort():
    assert chat(reasoning_effort="none").choices


@call
def chat_system_and_developer():
    assert chat(messages=[{"role": "developer", "content": "Be brief."}, *FRANCE]).choices


@call
def chat_text_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    assert "Paris" in content(messages=parts)


@call
def chat_json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert set(json.loads(content(response_format=form, max_tokens=100))) == {"name", "age"}


@call
def chat_json_object():
    said = content(response_format={"type": "json_object"}, max_tokens=200)
    assert said.startswith("{")


@call
def chat_parse():
    got = client.chat.completions.parse(messages=FRANCE, response_format=Person, model=MODEL, temperature=1,
                                        seed=1, max_tokens=400)
    assert got.choices[0].message.parsed is not None


@call
def chat_structured_outputs():
    assert content(extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}}) in ("Paris", "Rome")


@call
def chat_guided_regex():
    assert content(extra_body={"guided_regex": "[0-9]{3}"}).isdigit()


@call
def chat_tools_required():
    choice = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    assert choice.finish_reason == "tool_calls"


@call
def chat_tool_named_and_strict():
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert chat(tools=[tool], tool_choice=named, max_tokens=60).choices[0].message.tool_calls


@call
def chat_tools_auto_and_none():
    for choice in ("auto", "none"):
        assert chat(tools=[TOOL], tool_choice=choice).choices[0].finish_reason


@call
def chat_tool_streamed():
    names, arguments = [], ""
    for chunk in chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60,
                      stream=True):
        for made in chunk.choices[0].delta.tool_calls or []:
            names += [made.function.name] if made.function.name else []
            arguments += made.function.arguments or ""
    assert names == ["get_weather"] and json.loads(arguments)


@call
def chat_tool_messages():
    function = {"name": "get_weather", "arguments": json.dumps(TWO)}
    assert chat(messages=[
        *FRANCE, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"}], tools=[TOOL]).choices


@call
def completion_whole():
    assert "Paris" in text().choices[0].text


@call
def completion_stream():
    assert "Paris" in "".join(c.choices[0].text for c in text(stream=True))


@call
def completion_lists_and_ids():
    assert len(text(prompt=["a", "b"]).choices) == 2
    assert text(prompt=[[1, 2], [3]]).choices[1].text is not None


@call
def completion_logprobs():
    assert len(text(logprobs=2).choices[0].logprobs.top_logprobs[0]) >= 2


@call
def completion_echo_with_logprobs():
    got = text(echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert got.token_logprobs[0] is None and all(p <= 0 for p in got.token_logprobs[1:])


@call
def completion_of_nothing():
    got = text(echo=True, logprobs=0, max_tokens=0)
    assert got.usage.completion_tokens == 0 and got.choices[0].text == "The capital of France is"


@call
def completion_prompt_logprobs():
    assert text(extra_body={"prompt_logprobs": 1}).choices[0].model_extra["prompt_logprobs"][0] is None


@call
def completion_neutral_suffix_and_best_of():
    assert text(suffix="", best_of=1).choices


@call
def responses_whole():
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    got = client.responses.create(input=FRANCE[0]["content"], **asked)
    assert "Paris" in got.output_text and got.store is False


@call
def responses_stream():
    with client.responses.stream(model=MODEL, input=FRANCE, temperature=0, max_output_tokens=12) as stream:
        kinds = [e.type for e in stream]
        assert "Paris" in stream.get_final_response().output_text
    assert "response.output_text.delta" in kinds


@call
def responses_tool_and_schema():
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    got = client.responses.create(model=MODEL, input="Weather?", tools=[tool], tool_choice="required")
    assert got.output[-1].type == "function_call"
    form = {"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}}
    got = client.responses.create(input="Who?", text=form, reasoning={"effort": "none"},
                                  model=MODEL, temperature=0, max_output_tokens=100)
    assert set(json.loads(got.output_text)) == {"name", "age"}


@call
def a_wrong_model_is_refused():
    try:
        chat(model="other")
    except openai.NotFoundError as e:
        assert e.code == "model_not_found"
    else:
        raise AssertionError("it was not")


main()
