"""gpt-oss's channels: reasoning, calls, preambles and text of one answer, read however it is cut, over each API."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ARGUMENTS, TOOL, Scripted, events, fake, template
from tokenizers import AddedToken

from penstock.config.base.errors import ConfigError
from penstock.config.request.grammar import Grammar
from penstock.config.settings.tree import ModelConfig
from penstock.exec.sampling.grammar import Compiler
from penstock.text.chat import ChatTemplate
from penstock.text.grammar.vocabulary import of_tokenizer
from penstock.text.model_text import parsers
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.asked import AnswerForm, ToolOffer, asked_of
from penstock.text.tools.formats import harmony
from penstock.text.tools.reasoning import MARKS, THINK
from penstock.text.tools.source import AnswerReader, Arguments, CallBegun, CallEnded, Reasoning, TextItem
from penstock.text.tools.table import FORMATS

FORM, CHANNELS = FORMATS["gpt_oss"], MARKS["gpt_oss"]
AGAIN = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.{AGAIN}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me see.{AGAIN}"
FINAL = "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = [CallBegun("f"), Arguments('{"a": 1}'), CallEnded()]
WEATHER = ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
           + json.dumps(ARGUMENTS))


def read(text: str, size: int = 10**6, tools: tuple[str, ...] = ("f", "a.b"), **how) -> list:
    reader, items = AnswerReader(harmony.reading(**how), {t: {} for t in tools}), []
    for at in range(0, len(text), size):
        items += reader.take(text[at:at + size])
    found: list = []
    for item in [*items, *reader.take("", True)]:
        if found and type(item) is type(found[-1]) and not isinstance(item, CallBegun | CallEnded):
            item = type(item)(found.pop().text + item.text)
        found.append(item)
    return found


CASES = [
    (f"{THOUGHT}{FINAL}Yes.<|return|>", [Reasoning("Hm."), TextItem("Yes.")]),
    (f'{THOUGHT}{PREAMBLE}{TO_F}{{"a": 1}}<|call|>', [Reasoning("Hm."), TextItem("Let me see."), *F]),
    (f"{THOUGHT}{THOUGHT}{FINAL}a < b <| c", [Reasoning("Hm.\n\nHm."), TextItem("a < b <| c")]),
    (f"{PREAMBLE}{THOUGHT}{FINAL} x", [TextItem("Let me see."), Reasoning("Hm."), TextItem("\n\nx")]),
    # Forms of a call.
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', F),
    ('assistant to=f<|channel|>commentary <|constrain|>json<|message|> {"a": 1}\n<|call|>', F),
    ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', F),
    ('<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}', F),
    (f'{TO_F}{{"a": 1}}{AGAIN}{TO_F}{{"a": 1}}<|call|>', F + F),
    (f"{TO_F}<|call|>", [CallBegun("f"), Arguments("{}"), CallEnded()]),
    (TO_F.replace(".f", ".a.b") + '{"x": "<|end|> }"}',
     [CallBegun("a.b"), Arguments('{"x": "<|end|> }"}'), CallEnded()]),
    (f'{TO_F}{{"a": 1', [CallBegun("f"), Arguments('{"a": 1')]),
    (f'{TO_F}{{"a": {AGAIN}{FINAL}No.', [CallBegun("f"), Arguments('{"a": '), TextItem("No.")]),
    # Of no tool: text, or reasoning by its channel.
    ('<|channel|>commentary to=functions.g json<|message|>{"a": 1}<|call|>', [TextItem('{"a": 1}')]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    # Unknown channels, broken headers, no header.
    ("<|channel|>other<|message|>Yes.", [TextItem("Yes.")]), ("<|channel|><|message|>Yes.", [TextItem("Yes.")]),
    ("<|message|>Yes.<|end|>", [TextItem("Yes.")]), ("<|channel|>final Yes.<|end|>", [TextItem("final Yes.")]),
    (f"<|channel|>{'x' * 500}<|message|>Yes.", [TextItem("x" * 500 + "Yes.")]),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [Reasoning("a"), TextItem("b")]),
    ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [TextItem("abc")]),
    (f"{FINAL}a<|end|>b", [TextItem("a\n\nb")]), (f"{FINAL}a<|end|>\n", [TextItem("a")]),
    (f"{FINAL}a<|end|><|start|>user<|message|>b", [TextItem("a\n\nb")]),
    ("Hello.", [TextItem("Hello.")]), ("a", [TextItem("a")]), ("assistance", [TextItem("assistance")]),
    ("to be", [TextItem("to be")]), ("\n\nYes", [TextItem("\n\nYes")]), ("", []),
    # Cut off in a header, which is not shown.
    (f"{THOUGHT}<|channel|>fin", [Reasoning("Hm.")]), ("<|channel|>analysis", []),
    ("<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]), (f"{FINAL}a<|end|><|start|>assis", [TextItem("a")]),
]


@pytest.mark.parametrize("text, items", CASES, ids=[str(i) for i in range(len(CASES))])
def test_an_answer_is_read_alike_in_pieces_of_every_size(text, items):
    for size in range(1, len(text) + 1):
        assert read(text, size) == items, size


@pytest.mark.parametrize("text", [text for text, _ in CASES[:12]])
def test_an_answer_is_read_alike_at_every_cut(text):
    whole = read(text)
    for cut in range(len(text)):
        reader = AnswerReader(harmony.reading(), {"f": {}, "a.b": {}})
        parts = [*reader.take(text[:cut]), *reader.take(text[cut:]), *reader.take("", True)]
        for kind in (TextItem, Reasoning, Arguments):
            assert ("".join(i.text for i in parts if isinstance(i, kind))
                    == "".join(i.text for i in whole if isinstance(i, kind)))
        assert [i for i in parts if isinstance(i, CallBegun)] == [i for i in whole if isinstance(i, CallBegun)]


@given(st.lists(st.sampled_from([*harmony.MARKS, *CASES[1][0].replace("<", " <").split(), "assistant", "analysis",
                                 "commentary", "final", " to=functions.f", " to=", "functions", "json", "{", "}", '"',
                                 '{"a": 1}', "\\", "\n", " ", "x", "\0", "é"]), max_size=20).map("".join),
       st.integers(1, 9), st.booleans(), st.sampled_from(["", "assistant<|channel|>final", "assistant to=functions.f"]))
@settings(max_examples=1500, deadline=None)
def test_hostile_text_is_read_alike_and_no_mark_of_it_is_shown(text, size, separate, header):
    items = read(text, size, separate=separate, header=header)
    assert items == read(text, separate=separate, header=header)
    shown = [i.text for i in items if isinstance(i, TextItem | Reasoning)]
    assert not any(m in s for m in harmony.MARKS for s in shown)
    assert separate or not any(isinstance(i, Reasoning) for i in items)


@pytest.mark.parametrize("prompt, header, text, items", [
    ("<|start|>user<|message|>?<|end|><|start|>assistant", "", FINAL + "b", [TextItem("b")]),
    (f"<|start|>assistant{FINAL}a", "assistant<|channel|>final", "b", [TextItem("b")]),
    ("<|start|>assistant<|channel|>analysis<|message|>a", "assistant<|channel|>analysis", f"b{AGAIN}{FINAL}c",
     [Reasoning("b"), TextItem("c")]),
    (f"<|start|>assistant{FINAL}a<|end|>", "", f"<|start|>assistant{FINAL}b", [TextItem("b")]),
    ("a", "", "b", [TextItem("b")])])
def test_an_answer_goes_on_with_the_message_that_its_prompt_has_opened(prompt, header, text, items):
    assert harmony.opened(prompt) == header
    form = asked_of(FORM, ToolOffer(()), prompt, reasons=CHANNELS, separate=True)
    reader = form.reader()
    assert [*reader.take(text), *reader.take("", True)] == items


# ---------------------------------------------------------------- grammars
def tokenizer() -> Tokenizer:
    raw = fake.byte_level()
    raw.add_tokens([AddedToken(m, special=True, normalized=False) for m in harmony.MARKS])
    return Tokenizer(raw, eos_ids=(raw.token_to_id(harmony.END),), chat_template=None, template_vars={})


TOKENS = tokenizer()
COMPILER = Compiler(of_tokenizer(TOKENS))
OFFER = ToolOffer([TOOL, {"type": "function", "function": {"name": "other"}}])


def admits(form: AnswerForm, text: str, given_text: Grammar | None = None) -> bool:
    found = form.grammar(TOKENS.mark_id, given_text)
    assert found is not None
    matcher = COMPILER.compile(found)
    return all(matcher.consume_token(i) for i in TOKENS.encode(text)) and matcher.is_accepting()


def asked(offer: ToolOffer = OFFER, header: str = "") -> AnswerForm:
    return AnswerForm(FORM if offer.tools else None, offer, False, True, CHANNELS, header)


def test_an_answer_that_must_be_a_call_is_one_that_matches():
    form, named = asked(replace(OFFER, required=True)), asked(replace(OFFER, required=True, only="other"))
    turned = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "x"}'
    to, value, names = "to=functions.get_weather", f"<|message|>{json.dumps(ARGUMENTS)}", tuple(OFFER.schemas)
    for typed in (" <|constrain|>json", "<|constrain|>json", " json", ""):
        for text in (f"<|channel|>commentary {to}{typed}{value}", f" {to}<|channel|>commentary{typed}{value}"):
            assert admits(form, text) and read(text, tools=names)[0] == CallBegun("get_weather"), text
    for text in (WEATHER, turned, THOUGHT + WEATHER, THOUGHT + PREAMBLE + THOUGHT + turned):
        assert admits(form, text) and not admits(named, text)
        for old, new in (("get_weather", "get_whether"), ("city", "town"), ("}", ""), ("commentary", "final")):
            assert not admits(form, text[::-1].replace(old[::-1], new[::-1], 1)[::-1]), (text, old)
    assert admits(named, "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}")
    for text in ("", "It rains.", FINAL + "It rains.", THOUGHT, WEATHER + AGAIN + WEATHER):
        assert not admits(form, text)


def test_strict_tools_leave_text_free():
    form = asked(replace(OFFER, strict=frozenset({"get_weather"})))
    for text in (WEATHER, THOUGHT + FINAL + "It rains.", FINAL, PREAMBLE + WEATHER):
        assert admits(form, text)
    assert not admits(form, WEATHER.replace("city", "town")) and not admits(form, "It rains.")
    assert asked().grammar(TOKENS.mark_id, None) is None


@pytest.mark.parametrize("offer", [OFFER, ToolOffer(())], ids=["tools", "no tools"])
def test_a_final_text_matches_the_grammar_that_is_asked_for(offer):
    wanted, form = Grammar("regex", "a+"), asked(offer)
    for before in ("", THOUGHT, THOUGHT * 2):
        assert admits(form, before + FINAL + "aa", wanted) and not admits(form, before + FINAL + "b", wanted)
    assert not admits(form, PREAMBLE + FINAL + "aa", wanted) and not admits(form, "aa", wanted)
    assert admits(form, WEATHER, wanted) == bool(offer.tools)


def test_a_grammar_goes_on_with_an_open_message():
    wanted = Grammar("regex", "a+")
    assert admits(asked(ToolOffer(()), "assistant<|channel|>final"), "aa", wanted)
    thinks = asked(ToolOffer(()), "assistant<|channel|>analysis")
    assert admits(thinks, f"Hm.{AGAIN}{FINAL}aa", wanted) and not admits(thinks, "aa", wanted)
    call = asked(replace(OFFER, required=True), "assistant<|channel|>final")
    assert admits(call, f"It{AGAIN}{WEATHER}", None) and not admits(call, "It", None)
    free = asked(replace(OFFER, many=False), "assistant<|channel|>final")
    assert admits(free, "It") and admits(free, f"It{AGAIN}{WEATHER}")


# ---------------------------------------------------------------- what is chosen, and when an answer ends
def test_a_call_ends_an_answer_and_a_message_does_not():
    names = {TOKENS.token_text(i) for i in TOKENS.eos_ids}
    assert names == {harmony.RETURN, harmony.CALL}          # its files said: END
    assert Tokenizer(fake.byte_level(), eos_ids=(3,), chat_template=None, template_vars={}).eos_ids == (3,)


def test_channels_are_known_by_template_or_type_and_contradicting_flags_are_refused():
    auto, shown = ModelConfig(model="m"), template("gpt_oss")
    assert parsers(auto, shown, "llama") == parsers(auto, "", "gpt_oss") == (FORM, CHANNELS)
    for model_type in ("qwen3", "gpt_oss"):                 # a template says more than the type
        assert parsers(auto, template("hermes"), model_type) == (FORMATS["hermes"], THINK)
    assert parsers(auto, "", "qwen3") == (None, None)
    assert parsers(replace(auto, reasoning_parser="none"), shown, "gpt_oss") == (FORM, None)
    for wrong in ({"tool_call_parser": "hermes"}, {"reasoning_parser": "think"}):
        with pytest.raises(ConfigError, match="gpt_oss reads calls and reasoning as one"):
            parsers(replace(auto, **wrong), shown, "gpt_oss")


# ---------------------------------------------------------------- earlier turns
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}


def turns(**said) -> list:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], **said},
            {"role": "tool", "tool_call_id": "c", "content": '{"sky": "grey"}'}]


@pytest.mark.parametrize("said, analysis", [
    ({}, None), ({"reasoning_content": "Hm."}, "Hm."), ({"content": "Let me see."}, "Let me see."),
    ({"reasoning": "Hm.", "content": "Let me see."}, "Hm.\n\nLet me see.")])
def test_an_earlier_call_and_its_reasoning_are_in_the_prompt(said, analysis):
    made = ChatTemplate(template("gpt_oss"))
    try:
        text = made.render(turns(**said), tools=[TOOL])
    finally:
        made.close()
    thought = "" if analysis is None else f"<|start|>assistant<|channel|>analysis<|message|>{analysis}<|end|>"
    assert text.endswith(
        f"<|start|>user<|message|>?<|end|>{thought}<|start|>assistant to=functions.get_weather<|channel|>commentary "
        f"json<|message|>{json.dumps(ARGUMENTS)}<|call|><|start|>functions.get_weather to=assistant<|channel|>"
        'commentary<|message|>"{\\"sky\\": \\"grey\\"}"<|end|><|start|>assistant')
    assert "# Instructions\n\nBe brief." in text


def test_calls_of_one_message_are_each_followed_by_their_result():
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}} for i, n in ("xf", "yg", "zh")]
    made = ChatTemplate(template("gpt_oss"))
    try:
        text = made.render([{"role": "user", "content": "?"}, {
            "role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls}, *(
                {"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in "yxw")])
    finally:
        made.close()
    shown = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{{}}<|call|>"
    result = '<|start|>functions.{} to=assistant<|channel|>commentary<|message|>"of {}"<|end|>'
    assert text.endswith("<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>" + shown.format("f")
                         + result.format("f", "x") + shown.format("g") + result.format("g", "y")
                         + shown.format("h") + result.format("h", "w") + "<|start|>assistant")


# ---------------------------------------------------------------- over HTTP
@pytest.fixture
def server():
    made = Scripted(template("gpt_oss"))
    yield made
    made.close()


USER = [{"role": "user", "content": "Weather?"}]
SAID = THOUGHT + PREAMBLE + WEATHER


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_chat_streams_reasoning_preamble_and_call(server, size):
    server.says, server.size = SAID, size
    fields = {"messages": USER, "tools": [TOOL]}
    [choice] = server.post("/v1/chat/completions", **fields).json()["choices"]
    told = [e["choices"][0] for e in events(server.post("/v1/chat/completions", stream=True, **fields))]
    deltas = [c["delta"] for c in told]
    streamed = ["".join(d.get(k) or "" for d in deltas) for k in ("content", "reasoning_content")]
    arguments = "".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ()))
    message = choice["message"]
    assert streamed == [message["content"], message["reasoning_content"]] == ["Let me see.", "Hm."]
    assert json.loads(arguments) == json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == told[-1]["finish_reason"] == "tool_calls"
    assert server.prompt.endswith("<|start|>assistant")


def test_chat_without_tools_or_separate_reasoning_shows_no_mark(server):
    server.says = THOUGHT + FINAL + "It rains."
    for fields, shown in (({}, ["It rains.", "Hm."]), ({"separate_reasoning": False}, ["Hm.\n\nIt rains.", ""])):
        [choice] = server.post("/v1/chat/completions", messages=USER, **fields).json()["choices"]
        assert [choice["message"]["content"], choice["message"].get("reasoning_content", "")] == shown
        assert choice["finish_reason"] == "stop"


def test_responses_have_an_item_for_each_message(server):
    server.says = SAID
    tool = {"type": "function", **TOOL["function"]}
    output = server.post("/v1/responses", input="Weather?", tools=[tool]).json()["output"]
    assert [o["type"] for o in output] == ["reasoning", "message", "function_call"]
    assert output[1]["content"][0]["text"] == "Let me see." and json.loads(output[2]["arguments"]) == ARGUMENTS
    told = events(server.post("/v1/responses", input="Weather?", tools=[tool], stream=True))
    last = told[-1]["response"]["output"]
    assert [o["type"] for o in last] == [o["type"] for o in output] and "<|" not in json.dumps(told)
    server.says = PREAMBLE + THOUGHT + FINAL + "It rains."
    scored = server.post("/v1/responses", input="x", include=["message.output_text.logprobs"]).json()["output"]
    texts = [o["content"][0] for o in scored if o["type"] == "message"]
    assert ["".join(t["token"] for t in of["logprobs"]) for of in texts] == ["Let me see.", "It rains."]


def test_messages_have_a_block_for_each_message(server):
    server.says = SAID
    fields = {"model": "m", "max_tokens": 500, "messages": USER, "tools": [
        {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}]}
    whole = server.post("/v1/messages", **fields).json()
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == ARGUMENTS and whole["stop_reason"] == "tool_use"
    told = events(server.post("/v1/messages", stream=True, **fields))
    begun = [e["content_block"]["type"] for e in told if e["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"] and "<|" not in json.dumps(told)


def test_a_choice_of_a_tool_has_a_grammar_or_is_refused_by_name(server):
    server.says = THOUGHT + WEATHER
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = server.post("/v1/chat/completions", messages=USER, tools=[TOOL], tool_choice=choice)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert "get_weather" in server.params.grammar.text
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}}
    answer = server.post("/v1/chat/completions", messages=USER, tools=[{"type": "function", "function": bad}],
                         tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text


def test_what_an_answer_has_is_taken_again_by_each_api(server):
    server.says = SAID
    named = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    shown = ("<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nLet me see.<|end|><|start|>assistant "
             f"to=functions.get_weather<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|><|start|>"
             'functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant')

    def post(path: str, **fields) -> dict:
        answer = server.post(path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    fields = {"tools": [TOOL], "reasoning_effort": "high"}
    message = post("/v1/chat/completions", messages=USER, **fields)["choices"][0]["message"]
    post("/v1/chat/completions", messages=[*USER, message, {
        "role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}], **fields)
    assert server.prompt.endswith(shown) and "Reasoning: high" in server.prompt
    fields = {"tools": [{"type": "function", **TOOL["function"]}]}
    output = post("/v1/responses", input=USER, **fields)["output"]
    post("/v1/responses", input=[*USER, *output, {
        "type": "function_call_output", "call_id": output[-1]["call_id"], "output": "rain"}], **fields)
    assert server.prompt.endswith(shown)
    fields = {"model": "m", "max_tokens": 500, "tools": [named]}
    content = post("/v1/messages", messages=USER, **fields)["content"]
    post("/v1/messages", messages=[*USER, {"role": "assistant", "content": content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "rain"}]}], **fields)
    assert server.prompt.endswith(shown)
