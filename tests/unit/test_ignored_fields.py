"""Fields without effect: one table for every API and each place in a request."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import TOOL, Scripted, template

from penstock.config.request import ignored

USER = [{"role": "user", "content": "Weather?"}]
FUNCTION = TOOL["function"]
CLAUDE_TOOL = {"name": FUNCTION["name"], "description": "Now.", "input_schema": FUNCTION["parameters"]}
ASKS = {
    "/v1/chat/completions": {"messages": USER, "tools": [TOOL]},
    "/v1/responses": {"input": USER, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"max_tokens": 50, "messages": USER, "tools": [CLAUDE_TOOL]},
    "/v1/messages/count_tokens": {"messages": USER, "tools": [CLAUDE_TOOL]},
    "/v1/completions": {"prompt": "Weather?"},
}
CHATS = pytest.mark.parametrize("path", list(ASKS)[:3])
# Some of each kind, as clients send them.
VALUES = (None, True, "x", 3, [], [{"a": 1}], {"type": "ephemeral", "ttl": "1h"})


@pytest.fixture(scope="module")
def server():
    made = Scripted(template("hermes"))
    made.says = "Rain."
    yield made
    made.close()


def prompt_of(server: Scripted, path: str, **fields) -> str:
    answer = server.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return server.prompt


@pytest.mark.parametrize("path", ASKS)
def test_a_field_of_the_table_changes_no_prompt(server, path):
    bare = prompt_of(server, path, **ASKS[path])
    for at, value in enumerate(VALUES):
        body = dict.fromkeys(ignored.OfBody.__struct_fields__, value)
        assert prompt_of(server, path, **ASKS[path], **body) == bare, at


@CHATS
def test_a_field_of_a_tool_changes_no_prompt(server, path):
    bare, [tool] = prompt_of(server, path, **ASKS[path]), ASKS[path]["tools"]
    for value in VALUES:
        marked = {**tool, **dict.fromkeys(ignored.OfTool.__struct_fields__, value)}
        if "function" in tool:
            marked["function"] = {**FUNCTION, **dict.fromkeys(ignored.OfTool.__struct_fields__, value)}
        assert prompt_of(server, path, **{**ASKS[path], "tools": [marked]}) == bare


@CHATS
def test_a_field_of_a_part_changes_no_prompt(server, path):
    kind, name = ("input_text", "input") if path == "/v1/responses" else ("text", "messages")
    part = {"type": kind, "text": "Weather?"}
    bare = prompt_of(server, path, **ASKS[path])
    for value in VALUES:
        marked = {**part, **dict.fromkeys(ignored.OfPart.__struct_fields__, value)}
        messages = [{"role": "user", "content": [marked]}]
        assert prompt_of(server, path, **{**ASKS[path], name: messages}) == bare


@CHATS
def test_a_field_of_a_message_is_a_note_unless_others_obey_it(server, path):
    name = "input" if path == "/v1/responses" else "messages"
    bare = prompt_of(server, path, **ASKS[path])
    noted = {**USER[0], "extra_field": "0", "name": "eve", "id": "m",
             "reasoning_details": [{}], "audio": None}
    assert prompt_of(server, path, **{**ASKS[path], name: [noted]}) == bare
    if name == "messages":
        for field in ignored.OBEYED_ELSEWHERE:
            answer = server.post(path, **{**ASKS[path], name: [{**USER[0], field: {"id": "x"}}]})
            assert answer.status_code == 400 and f"messages[0].{field}" in answer.text


@pytest.mark.parametrize("path, field, value", [
    ("/v1/chat/completions", "audio", {}), ("/v1/chat/completions", "chat_template", "x"),
    ("/v1/chat/completions", "nonsense", None), ("/v1/messages", "container", "x"),
    ("/v1/messages", "mcp_servers", [{}]), ("/v1/messages", "nonsense", None),
    ("/v1/responses", "truncation", "auto"), ("/v1/responses", "background", True),
    ("/v1/responses", "include", ["nonsense"])])
def test_a_field_that_changes_the_answer_is_refused_by_name(server, path, field, value):
    answer = server.post(path, **ASKS[path], **{field: value})
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]


def test_an_unknown_field_of_a_part_or_a_tool_is_refused_by_name(server):
    part = {"type": "text", "text": "x", "nonsense": 1}
    for fields, named in (({"messages": [{"role": "user", "content": [part]}]}, "content[0].nonsense"),
                          ({"messages": USER, "tools": [{**TOOL, "nonsense": 1}]}, "nonsense")):
        answer = server.post("/v1/chat/completions", **fields)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]


@pytest.mark.parametrize("thinks", [True, False])
def test_what_claude_code_sends_is_taken(thinks):
    """With a model that thinks and with one that does not: it asks for thinking either way."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    made = Scripted(template("hermes") if thinks else source)
    made.says = "Done."
    cached = {"cache_control": {"type": "ephemeral"}}
    try:
        answer = made.post(
            "/v1/messages", headers={"anthropic-beta": "interleaved-thinking-2025-05-14", "x-api-key": "k",
                                     "anthropic-version": "2023-06-01"},
            model="m", max_tokens=32_000 // 4, stream=True, temperature=1,
            metadata={"user_id": "user_1_account__session_2"},
            system=[{"type": "text", "text": "You are Claude Code."},
                    {"type": "text", "text": "Be brief.", **cached}],
            thinking={"type": "adaptive"}, output_config={"effort": "high"}, speed="standard",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            container=None, mcp_servers=[],
            messages=[{"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}]}],
            **({"tools": [{**CLAUDE_TOOL, "eager_input_streaming": True, "defer_loading": False, **cached}]}
               if thinks else {}))
        assert answer.status_code == 200 and "message_stop" in answer.text, answer.text
        assert "Be brief." in made.prompt and "clear_thinking" not in made.prompt
        cleared = made.post("/v1/messages", model="m", max_tokens=5, messages=USER, context_management=None)
        assert cleared.status_code == 200
    finally:
        made.close()


def test_the_documents_have_the_table():
    text = (Path(__file__).parents[2] / "docs/reference/http-api.md").read_text()
    assert ignored.table() in text


def test_a_response_shows_its_tools_without_what_has_no_effect(server):
    [tool] = ASKS["/v1/responses"]["tools"]
    told = server.post("/v1/responses", input="x", tools=[{**tool, "cache_control": {"type": "ephemeral"}}])
    [shown] = told.json()["tools"]
    assert "cache_control" not in json.dumps(shown) and shown["name"] == tool["name"]
