"""Prompts of DeepSeek-V3.2 by our template equal the texts that its published program makes."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import SAYS, TOOL, Scripted

from penstock.config.base.errors import RequestError
from penstock.config.settings.tree import Config, ModelConfig
from penstock.model.weights.locate import locate
from penstock.text.chat import ChatTemplate, plain_message
from penstock.text.chat_render import compile_template, render
from penstock.text.model_text import open_text
from penstock.text.prompts import program_of
from penstock.text.tools.table import FORMATS

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "deepseek_v32_prompts.json").read_text())["prompts"]
SHOWN = ("name", "reasoning_content", "tool_calls", "developer")
TEMPLATE = compile_template(program_of("deepseek_v32"))


def prompt(messages: list, **variables) -> str:
    plain = [plain_message(m, i, SHOWN) for i, m in enumerate(messages)]
    return render(TEMPLATE, {"tools": None, "add_generation_prompt": True, "messages": plain, **variables})


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['name']}-{c['thinking']}")
def test_prompt_equals_the_published_programs_text(case):
    how = {k: case[k] for k in ("tools", "response_format") if case[k]}
    for switch in ("thinking", "enable_thinking"):
        assert prompt(case["messages"], **how, **{switch: case["thinking"]}) == case["text"]
    if not case["thinking"]:
        assert prompt(case["messages"], **how) == case["text"]


def test_a_developer_before_a_user_gives_instructions():
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt(said) == prompt([{**said[0], "role": "system"}, said[1]])
    tools = GOLDEN[-1]["tools"]
    assert prompt(said, tools=tools) == prompt([{**said[0], "role": "system"}, said[1]], tools=tools)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of type deepseek_v32 with the published program and no template."""
    at, recall = tmp_path_factory.mktemp("v32"), DATA / "recall"
    config = json.loads((recall / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v32"}))
    for name in ("tokenizer.json", "model.safetensors"):
        (at / name).symlink_to(recall / name)
    (at / "encoding").mkdir()
    (at / "encoding" / "encoding_dsv32.py").write_text("raise SystemExit\n")
    return at


def test_a_model_of_this_type_chats_without_a_template(folder):
    text = open_text(Config(model=ModelConfig(model=str(folder))), locate(str(folder)))
    try:
        assert text.chat(GOLDEN[0]["messages"]) == GOLDEN[0]["text"]
        assert text.calls is FORMATS["deepseek_v32"] and text.reasons
        opened = text.template.render([*GOLDEN[0]["messages"], {"role": "assistant", "content": "It is "}],
                                      continue_final=True)
        assert opened == GOLDEN[0]["text"] + "It is "
        with pytest.raises(RequestError, match="answers no call"):
            text.chat([*GOLDEN[0]["messages"], {"role": "tool", "tool_call_id": "x", "content": "b"}])
    finally:
        text.close()


def test_the_operators_template_wins_over_ours(folder, tmp_path):
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}|")
    config = Config(model=ModelConfig(model=str(folder), chat_template=str(tmp_path / "given.jinja")))
    text = open_text(config, locate(str(folder)))
    try:
        assert text.chat([{"role": "user", "content": "Hi"}]) == "Hi|"
    finally:
        text.close()


def test_a_cut_call_in_the_history_is_shown():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Pa'}}
    chat = ChatTemplate(program_of("deepseek_v32"))
    try:
        assert '{"city": "Pa' in chat.render([*GOLDEN[0]["messages"], {
            "role": "assistant", "content": "", "tool_calls": [call]}])
    finally:
        chat.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_every_api_chats_thinks_and_calls(path):
    """As the program's own text of the same conversation, and read back from DSML."""
    server = Scripted(program_of("deepseek_v32"))
    server.says = "Hm.</think>Let me see.\n\n" + SAYS["deepseek_v32"]
    function, user = TOOL["function"], [{"role": "user", "content": "Weather?"}]
    body = {
        "/v1/messages": {"messages": user, "max_tokens": 99,
                         "thinking": {"type": "enabled", "budget_tokens": 50},
                         "tools": [{"name": function["name"], "description": function["description"],
                                    "input_schema": function["parameters"]}]},
        "/v1/responses": {"input": "Weather?", "reasoning": {"effort": "high"},
                          "tools": [{"type": "function", **function}]},
        "/v1/chat/completions": {"messages": user, "reasoning_effort": "high", "tools": [TOOL]}}[path]
    try:
        answer = server.post(path, model="m", **body)
    finally:
        server.close()
    assert answer.status_code == 200, answer.text
    assert server.prompt == prompt(user, tools=[TOOL], thinking=True)
    found = json.dumps(answer.json())
    assert "get_weather" in found and "Hm." in found and "Let me see." in found and "DSML" not in found
