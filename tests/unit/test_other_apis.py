"""Messages of Anthropic, Responses of OpenAI, /generate of SGLang, by an engine that says what it is told."""
from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from scripted import ARGUMENTS, SAYS, TOOL, Scripted, events, template

from penstock.api.limits import Keys

FUNCTION = TOOL["function"]
USER = [{"role": "user", "content": "Weather?"}]
THINKS = "<think>\nHm.\n</think>\n\nLet me see.\n"
CLAUDE_TOOL = {"name": FUNCTION["name"], "description": "Now.", "input_schema": FUNCTION["parameters"]}
OPENAI_TOOL = {"type": "function", **FUNCTION}


@pytest.fixture
def server():
    made = Scripted(template("hermes"))
    made.says = THINKS + SAYS["hermes"]
    yield made
    made.close()


def said(server: Scripted, path: str, **fields) -> dict:
    answer = server.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---------------------------------------------------------------- Anthropic
def claude(server: Scripted, **fields) -> dict:
    return said(server, "/v1/messages", **{"model": "m", "max_tokens": 500, "messages": USER, **fields})


def test_a_message_has_blocks_of_thinking_text_and_calls(server):
    whole = claude(server, tools=[CLAUDE_TOOL], system="Be brief.", stop_sequences=["STOP"])
    thinking, text, call = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", ARGUMENTS)
    assert whole["stop_reason"] == "tool_use" and whole["role"] == "assistant" and whole["type"] == "message"
    assert whole["usage"]["cache_read_input_tokens"] == 2 and whole["usage"]["output_tokens"] > 20
    assert "<|im_start|>system\nBe brief." in server.prompt and "get_weather" in server.prompt


def test_a_streamed_message_is_the_same(server):
    told = events(server.post("/v1/messages", model="m", max_tokens=500, messages=USER, tools=[CLAUDE_TOOL],
                              stream=True))
    kinds = [e["type"] for e in told]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict] = []
    for event in told:
        match event:
            case {"type": "content_block_start"}:
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                blocks[event["index"]]["text"] += text
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": text}}:
                blocks[event["index"]]["thinking"] += text
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[event["index"]]["json"] += text
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(blocks) == 3
    assert blocks[0]["thinking"] == "Hm." and blocks[1]["text"] == "Let me see."
    assert json.loads(blocks[2]["json"]) == ARGUMENTS and blocks[2]["input"] == {}
    assert told[-2]["delta"]["stop_reason"] == "tool_use" and told[-2]["usage"]["output_tokens"] > 20


def test_a_conversation_with_results_and_thinking_goes_into_the_template(server):
    server.says = "Rain."
    whole = claude(server, messages=[
        *USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]}])
    assert whole["content"] == [{"type": "text", "text": "Rain."}] and whole["stop_reason"] == "end_turn"
    for part in ("<think>\nHm.\n</think>", '"arguments": {"city": "Paris"}', "<tool_response>\nrain", "So?"):
        assert part in server.prompt
    claude(server, messages=[*USER, {"role": "assistant", "content": "It is"}])
    assert server.prompt.endswith("It is")


def test_ends_and_choices_in_anthropics_words(server):
    server.says, server.finish = "It rains", "length"
    assert claude(server)["stop_reason"] == "max_tokens"
    server.finish = "stop"
    stopped = claude(server, stop_sequences=["rain"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "rain")
    assert stopped["content"][0]["text"] == "It "
    server.says = SAYS["hermes"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        claude(server, tools=[CLAUDE_TOOL], tool_choice=choice)
        assert "get_weather" in server.params.grammar.text
    claude(server, thinking={"type": "disabled"})
    assert server.prompt.endswith("</think>\n\n")
    server.says = '{"a": 1}'
    claude(server, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert server.params.grammar.kind == "json_schema"


def test_tokens_are_counted_as_they_are_asked(server):
    counted = said(server, "/v1/messages/count_tokens", model="m", messages=USER, tools=[CLAUDE_TOOL])
    usage = claude(server, tools=[CLAUDE_TOOL])["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("fields, named", [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"nonsense": 1}, "nonsense"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"model": "other"}, "other")])
def test_what_is_wrong_is_told_in_anthropics_shape(server, fields, named):
    answer = server.post("/v1/messages", **{"model": "m", "max_tokens": 5, "messages": USER, **fields})
    body = answer.json()
    assert answer.status_code == (404 if "model" in fields else 400) and body["type"] == "error"
    assert named in body["error"]["message"]
    assert body["error"]["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")


def test_a_key_may_come_as_anthropics_clients_send_it():
    server = Scripted(template("hermes"), keys=Keys(["one"]))
    server.says = "Rain."
    ask = {"path": "/v1/messages", "model": "m", "max_tokens": 5, "messages": USER}
    try:
        status = [server.post(**ask, headers=h).status_code for h in (
            {"x-api-key": "one"}, {"authorization": "Bearer one"}, {"x-api-key": "two"}, {},
            {"x-api-key": "one", "authorization": "Bearer one"},
            {"x-api-key": "one", "authorization": "Bearer two"})]
    finally:
        server.close()
    assert status == [200, 200, 401, 401, 200, 401]


# ---------------------------------------------------------------- Responses
def with_client(server: Scripted, work):
    async def go():
        http = httpx.AsyncClient(transport=server.transport())
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x",
                                      http_client=http) as client:
            return await work(client)
    return asyncio.run(go())


def test_a_response_has_items_of_reasoning_text_and_calls(server):
    whole = with_client(server, lambda c: c.responses.create(
        model="m", input="Weather?", tools=[OPENAI_TOOL], instructions="Be brief."))
    reasoning, message, call = whole.output
    assert reasoning.content[0].text == "Hm." and whole.output_text == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", ARGUMENTS)
    assert whole.status == "completed" and whole.store is False and message.role == "assistant"
    assert whole.usage.input_tokens_details.cached_tokens == 2
    assert "Be brief." in server.prompt and "get_weather" in server.prompt


def test_a_streamed_response_is_accumulated_by_the_official_client(server):
    async def work(client):
        async with client.responses.stream(model="m", input=USER, tools=[OPENAI_TOOL]) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_response()
    kinds, final = with_client(server, work)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.delta",
            "response.reasoning_text.delta", "response.content_part.done"} <= {*kinds}
    assert final.output_text == "Let me see." and json.loads(final.output[2].arguments) == ARGUMENTS
    told = events(server.post("/v1/responses", input="x", stream=True))
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    assert told[-1]["response"]["status"] == "completed"


def test_items_of_former_turns_go_into_the_template(server):
    server.says = "Rain."
    first = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
             {"type": "reasoning", "id": "r", "summary": [],
              "content": [{"type": "reasoning_text", "text": "Hm."}]},
             {"type": "message", "role": "assistant", "id": "m", "status": "completed",
              "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
             {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "a", "output": "rain"}]
    assert said(server, "/v1/responses", input=first)["output"][0]["content"][0]["text"] == "Rain."
    assert ('<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_weather"' in server.prompt
            and "<tool_response>\nrain\n" in server.prompt)


def test_a_response_that_is_cut_off_or_must_match(server):
    server.says, server.finish = "It rains", "length"
    cut = said(server, "/v1/responses", input="x", max_output_tokens=5)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    server.says, server.finish = '{"a": 1}', "stop"
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert said(server, "/v1/responses", input="x", text={"format": form})["text"]["format"]["name"] == "n"
    assert server.params.grammar.kind == "json_schema"
    said(server, "/v1/responses", input="x", tools=[OPENAI_TOOL], tool_choice="required")
    assert "get_weather" in server.params.grammar.text


@pytest.mark.parametrize("fields, param", [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"), ({"include": ["x"]}, "include[0]"), ({"nonsense": 1}, "nonsense"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"), ({"input": [1]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format")])
def test_what_responses_do_not_take_is_named(server, fields, param):
    answer = server.post("/v1/responses", **{"input": "x", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# ---------------------------------------------------------------- SGLang
def test_generate_answers_as_sglang_does(server):
    server.says = "It rains."
    whole = said(server, "/generate", text="x", sampling_params={"max_new_tokens": 40, "temperature": 0})
    assert whole["text"] == "It rains." and whole["meta_info"]["finish_reason"]["type"] == "stop"
    assert whole["meta_info"]["completion_tokens"] == len(whole["output_ids"]) == 10
    assert whole["meta_info"]["prompt_tokens"] == 1 and whole["meta_info"]["cached_tokens"] == 2
    assert server.params.max_tokens == 40
    several = said(server, "/generate", input_ids=[[1], [2, 3]])
    assert [a["text"] for a in several] == ["It rains."] * 2
    told = events(server.post("/generate", text="x", stream=True, rid="mine"))
    assert told[-1]["text"] == "It rains." and told[-1]["meta_info"]["id"] == "mine"
    assert all("It rains.".startswith(e["text"]) for e in told) and len(told) > 2


def test_what_clients_and_routers_fill_in_is_taken(server):
    """As seen: inspect-ai, smg and sglang-router."""
    server.says = "Rain."
    filled = {"background": False, "return_hidden_states": False, "bootstrap_host": None, "image_data": None}
    assert said(server, "/generate", text="x", **filled)["text"] == "Rain."
    said(server, "/v1/responses", input="x", include=["reasoning.encrypted_content"], store=False)
    told = server.post("/generate", text="x", background=True).json()["error"]
    assert told["param"] == "background"


@pytest.mark.parametrize("fields, param", [
    ({}, "text"), ({"text": "x", "input_ids": [1]}, "text"),
    ({"text": "x", "top_logprobs_num": 1}, "top_logprobs_num"),
    ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"text": ""}, "text"), ({"text": "x", "image_data": "y"}, "image_data")])
def test_what_generate_does_not_take_is_named(server, fields, param):
    answer = server.post("/generate", **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# ---------------------------------------------------------------- choices of tools, logprobs
OTHER = {"type": "function", "function": {"name": "mcp:server.other-" + "x" * 100}}
NAMES = [{"type": "function", "function": {"name": OTHER["function"]["name"]}}]


@pytest.mark.parametrize("choice, required, told", [
    ({"type": "auto"}, False, True), ({"type": "required"}, True, True), ({"type": "none"}, False, False),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": NAMES}}, True, True),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMES}}, False, True),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", **NAMES[0]["function"]}]},
     True, True)])
def test_a_choice_of_tools_may_be_an_object(server, choice, required, told):
    server.says = "Rain."
    flat = [{"type": "function", **t["function"]} for t in (TOOL, OTHER)]
    for path, body in (("/v1/chat/completions", {"messages": USER, "tools": [TOOL, OTHER]}),
                       ("/v1/responses", {"input": USER, "tools": flat})):
        said(server, path, **body, tool_choice=choice)
        allowed = "mode" in choice or "allowed_tools" in choice
        assert (OTHER["function"]["name"] in server.prompt) is told
        assert ("get_weather" in server.prompt) is (told and not allowed)
        assert (server.params.grammar is not None) is required
        if required and allowed:
            assert "get_weather" not in server.params.grammar.text


@pytest.mark.parametrize("choice, param", [
    ({"type": "function"}, "tool_choice.function"), ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "no"}]}, "tool_choice"),
    ({"type": "sometimes"}, "tool_choice.type")])
def test_a_wrong_choice_of_tools_is_refused_by_name(server, choice, param):
    answer = server.post("/v1/chat/completions", messages=USER, tools=[TOOL], tool_choice=choice)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("size", [1, 3, 500])
def test_logprobs_of_a_response_are_those_of_its_texts_tokens(server, size):
    """Not of reasoning, marks or calls; streamed they are the same."""
    server.size = size
    asks = {"input": USER, "tools": [OPENAI_TOOL], "top_logprobs": 0,
            "include": ["message.output_text.logprobs"]}
    _, message, _ = said(server, "/v1/responses", **asks)["output"]
    told = message["content"][0]["logprobs"]
    spelt = b"".join(bytes(t["bytes"]) for t in told).decode()
    assert spelt == message["content"][0]["text"] == "Let me see."
    assert all(t["logprob"] == -1.0 and t["top_logprobs"] == [] for t in told)
    events_ = events(server.post("/v1/responses", **asks, stream=True))
    deltas = [t for e in events_ if e["type"] == "response.output_text.delta" for t in e["logprobs"]]
    [done] = [e["logprobs"] for e in events_ if e["type"] == "response.output_text.done"]
    assert deltas == done == told
    assert said(server, "/v1/responses", input=USER)["output"][1]["content"][0]["logprobs"] == []
    assert server.params.logprobs is None
    said(server, "/v1/responses", input=USER, top_logprobs=5)
    assert server.params.logprobs == 5


# ---------------------------------------------------------------- media
@pytest.mark.parametrize("path, body, param", [
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "x"}}]}]}, "messages[0].content[0].type"),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]},
     "messages[0].content[0].content[0].type"),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[1].type"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type")])
def test_an_image_is_refused_with_the_name_of_the_text_model_by_each_api(server, path, body, param):
    server.text.template.only = "this server runs the text of vl: only text parts are supported"
    answer = server.post(path, model="m", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (error.get("param") or error["message"]) and "runs the text of vl" in error["message"]
