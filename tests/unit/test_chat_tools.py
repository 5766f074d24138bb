"""Chat with tools and reasoning over HTTP: what is offered, called and streamed, what is refused by name."""
from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from scripted import ARGUMENTS, SAYS, TOOL, Scripted, events, template

from penstock.text.tools.table import FORMATS

USER = [{"role": "user", "content": "Weather in Paris?"}]


@pytest.fixture
def scripted():
    made = []

    def make(name: str, **how) -> Scripted:
        made.append(Scripted(template(name) if name in FORMATS else name, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(server: Scripted, **fields):
    return server.post("/v1/chat/completions", **{"messages": USER, **fields})


def whole(server: Scripted, **fields) -> dict:
    answer = ask(server, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: Scripted, **fields) -> dict:
    """The message that the deltas make, with its finish_reason."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for event in events(ask(server, stream=True, **fields)):
        [choice] = event["choices"]
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]) and call["function"]["arguments"] == ""
                message["tool_calls"].append({k: call[k] for k in ("id", "type")} | {
                    "function": dict(call["function"])})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def refused(server: Scripted, **fields) -> dict:
    answer = ask(server, **fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("required", [False, True])
def test_a_call_is_told_whole_and_streamed(scripted, name, marks, required):
    """Also where a grammar is asked for: it can be compiled."""
    server = scripted(name, marks=marks)
    # Their prompts open the reasoning.
    server.says = ("</think>" if name in ("deepseek_v3", "minimax_m2") else "") + SAYS[name]
    how = {"tool_choice": "required"} if required else {}
    for choice in (whole(server, tools=[TOOL], **how), streamed(server, tools=[TOOL], **how)):
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather" and call["type"] == "function"
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        assert not choice["message"]["content"]
        if name == "mistral":
            assert len(call["id"]) == 9
        else:
            assert call["id"].startswith("functions.get_weather:0" if name == "kimi_k2" else "call_")
    assert "get_weather" in server.prompt and "strict" not in server.prompt
    assert (server.params.grammar is not None) == required


def test_the_official_client_takes_tools_and_gives_back_what_they_said(scripted):
    server = scripted("hermes")

    async def go() -> None:
        http = httpx.AsyncClient(transport=server.transport())
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x",
                                      http_client=http) as client:
            server.says = "Let me see.\n" + SAYS["hermes"]
            first = await client.chat.completions.create(model="m", messages=USER, tools=[TOOL])
            said = first.choices[0].message
            assert said.content == "Let me see."
            server.says = "Rain."
            answer = await client.chat.completions.create(model="m", tools=[TOOL], messages=[
                *USER, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}])
            assert answer.choices[0].message.content == "Rain." and answer.choices[0].finish_reason == "stop"
    asyncio.run(go())
    assert SAYS["hermes"] in server.prompt and "<tool_response>\nrain\n</tool_response>" in server.prompt


def test_a_call_that_is_cut_off_ends_by_length(scripted):
    server = scripted("hermes")
    server.says, server.finish = SAYS["hermes"][:60], "length"
    for choice in (whole(server, tools=[TOOL]), streamed(server, tools=[TOOL])):
        assert choice["finish_reason"] == "length"
        assert json.dumps(ARGUMENTS).startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("says", [
    "<tool_call>nonsense</tool_call>",
    'I would <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
    "a < b </tool_call>", "half <tool_"])
def test_what_is_no_call_is_the_text_that_it_came_as(scripted, says):
    server = scripted("hermes")
    server.says = says
    for choice in (whole(server, tools=[TOOL]), streamed(server, tools=[TOOL])):
        assert choice["message"]["content"] == says and choice["finish_reason"] == "stop"


def test_a_choice_of_none_hides_the_tools_and_reads_no_calls(scripted):
    server = scripted("hermes", marks=False)
    server.says = SAYS["hermes"]
    choice = whole(server, tools=[TOOL], tool_choice="none")
    assert choice["message"]["content"] == SAYS["hermes"] and "get_weather" not in server.prompt


def test_a_named_tool_is_the_only_one_in_the_grammar(scripted):
    server = scripted("hermes")
    other = {"type": "function", "function": {"name": "other"}}
    server.says = SAYS["hermes"]
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole(server, tools=[TOOL, other], tool_choice=named)
    assert "get_weather" in server.params.grammar.text and "other" not in server.params.grammar.text
    assert "other" in server.prompt
    whole(server, tools=[other, {**TOOL, "function": {**TOOL["function"], "strict": True}}])
    assert "other" in server.params.grammar.text and "strict" not in server.prompt


def test_calls_or_an_answer_that_matches(scripted):
    server = scripted("hermes")
    server.says = '{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    choice = whole(server, tools=[TOOL], response_format=form)
    assert choice["message"]["content"] == server.says
    assert server.params.grammar.kind == "json_schema" and "@answer" in server.params.grammar.before


@pytest.mark.parametrize("fields, param", [
    ({"tools": {}}, "tools"), ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"), ({"tools": [TOOL, TOOL], "tool_choice": "none"},
                                                          "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
      "tool_choice": "required"}, "tools"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [*USER, {"role": "tool", "tool_call_id": 1, "content": "x"}]}, "messages[1].tool_call_id"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"), ({"separate_reasoning": 1}, "separate_reasoning"),
])
def test_wrong_offers_are_refused_by_name(scripted, fields, param):
    assert refused(scripted("hermes"), **fields)["param"] == param


def test_128_tools_are_offered(scripted):
    server = scripted("hermes")
    tools = [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(128)]
    server.says = '<tool_call>\n{"name": "tool_127", "arguments": {}}\n</tool_call>'
    assert whole(server, tools=tools, tool_choice="required")["finish_reason"] == "tool_calls"


def test_a_template_that_shows_no_tools_refuses_them_and_their_messages(scripted):
    server = scripted("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert refused(server, tools=[TOOL])["param"] == "tools"
    for message in ({"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}):
        assert refused(server, messages=[*USER, message])["param"].startswith("messages[1].")
    unknown = scripted("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "--tool-call-parser" in refused(unknown, tools=[TOOL])["message"]


# ---------------------------------------------------------------- reasoning
@pytest.mark.parametrize("marks", [False, True])
def test_reasoning_is_apart_from_the_content(scripted, marks):
    server = scripted("hermes", marks=marks)
    server.says = "<think>\nHm, rain.\n</think>\n\nIt rains.\n" + SAYS["hermes"]
    for choice in (whole(server, tools=[TOOL]), streamed(server, tools=[TOOL])):
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, rain.", "It rains.")
        assert len(message["tool_calls"]) == 1
    server.says = "<think>\nHm\n</think>\n\nIt rains."
    for choice in (whole(server, separate_reasoning=False), streamed(server, separate_reasoning=False)):
        if not marks:       # special tokens are not text
            assert choice["message"]["content"] == server.says
        assert not choice["message"].get("reasoning_content")


def test_an_effort_is_what_the_template_reads(scripted):
    server = scripted("hermes")
    server.says = "It rains."
    whole(server, reasoning_effort="none")
    assert server.prompt.endswith("<think>\n\n</think>\n\n")
    whole(server, reasoning_effort="high")
    assert server.prompt.endswith("assistant\n")
    whole(server, chat_template_kwargs={"enable_thinking": False})
    assert server.prompt.endswith("</think>\n\n")
    own = scripted("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}")
    whole(own, reasoning_effort="low")
    assert own.prompt.startswith("low")
    user = [{"role": "user", "content": "Weather?"}]
    for path, body in (("/v1/chat/completions", {"messages": user, "reasoning_effort": "max"}),
                       ("/v1/responses", {"input": user, "reasoning": {"effort": "max"}}),
                       ("/v1/messages", {"messages": user, "output_config": {"effort": "max"},
                                         "max_tokens": 9})):
        assert own.post(path, **body).status_code == 200 and own.prompt.startswith("max"), path


def test_an_effort_is_without_effect_where_the_template_cannot_be_told(scripted):
    """Clients send one to every model: as in the peers, each API takes it."""
    server, user = scripted("{% for m in messages %}{{ m.content }}{% endfor %}"), [
        {"role": "user", "content": "Weather?"}]
    for effort in ("low", "max"):
        for path, body in (("/v1/chat/completions", {"messages": user, "reasoning_effort": effort}),
                           ("/v1/responses", {"input": user, "reasoning": {"effort": effort}}),
                           ("/v1/messages", {"messages": user, "max_tokens": 9, "thinking": {
                               "type": "enabled", "budget_tokens": 9}, "output_config": {"effort": effort}})):
            assert server.post(path, **body).status_code == 200 and server.prompt == "Weather?", path
    assert refused(server, reasoning_effort="enormous")["param"] == "reasoning_effort"


def test_a_prompt_that_opens_the_reasoning(scripted):
    server = scripted("deepseek_v32")
    server.says = "Hm.</think>It rains."
    message = whole(server, reasoning_effort="high")["message"]
    assert server.prompt.endswith("<think>")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It rains.")
    server.says = "It rains."
    assert whole(server)["message"]["content"] == "It rains." and server.prompt.endswith("</think>")


def test_a_grammar_begins_behind_the_reasoning(scripted):
    server = scripted("hermes")
    server.says = "<think>a</think>yes"
    choice = whole(server, structured_outputs={"choice": ["yes", "no"]})
    assert choice["message"] == {
        "role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "a"}
    assert "@answer" in server.params.grammar.before
    whole(server, structured_outputs={"choice": ["yes"]}, chat_template_kwargs={"enable_thinking": False})
    assert server.params.grammar.before == ""


def test_a_response_format_is_shown_where_the_template_reads_it(scripted):
    server = scripted("deepseek_v32")
    server.says = '{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    whole(server, response_format=form)
    assert "## Response Format:" in server.prompt and '"schema": {"type": "object"}' in server.prompt
    whole(server, response_format={"type": "text"})
    assert "Response Format" not in server.prompt
