"""Grammars of calls: they admit what the format's reader takes for calls that match, and nothing broken."""
from __future__ import annotations

import functools
import json

import pytest
from scripted import ARGUMENTS, SAYS, TOOL, Scripted, template

from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import Grammar
from penstock.exec.sampling.grammar import Compiler
from penstock.serve.grammars.vocabulary import of_tokenizer
from penstock.serve.parsers.asked import NO_PARAMETERS, Asked, Offer
from penstock.serve.parsers.table import FORMATS, calls_grammar, grammar_behind_reasoning

SCHEMA = {**TOOL["function"]["parameters"], "properties": {
    **TOOL["function"]["parameters"]["properties"], "unit": {"enum": ["C", "F"]}}}
TOOLS = {"get_weather": SCHEMA, "nothing": NO_PARAMETERS}
# What is wrong with a call that is right but for this: (what is replaced, by what).
BROKEN = [
    ("get_weather", "get_whether"), ("get_weather", "Get_weather"), ("get_weather", ""),
    ("get_weather", "nothing"), ("get_weather", "get_weather "), ("city", "town"), ("city", ""),
    ("city", "City"), ("city", "unit"), ("days", "city"),
    ("days", "hours"), ("days", "unit"), ("days", "days2"), ("2", "two"),
    ("2", "2.5"), ("2", '"2"'), ("2", "[2]"), ("2", "null"), ("2", ""), ("2", "2 3"),
]


@functools.cache
def vocabulary(name: str, marks: bool):
    """Tokenizer and compiler of a model of this format."""
    made = Scripted(template(name), marks=marks)
    made.close()
    return made.tokenizer, Compiler(of_tokenizer(made.tokenizer))


def admitted(name: str, marks: bool, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    tokenizer, compiler = vocabulary(name, marks)
    matcher = compiler.compile(grammar)
    return all(matcher.consume_token(i) for i in tokenizer.encode(text)) and matcher.is_accepting()


def grammar(name: str, marks: bool, **how) -> Grammar:
    how = {"required": True, "many": True, "reasoning": None, **how}
    return calls_grammar(FORMATS[name], TOOLS, vocabulary(name, marks)[0].mark_id, **how)


def said(name: str, marks: bool) -> str:
    if name == "mistral" and not marks:
        return f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}]'
    return SAYS[name]


CELLS = pytest.mark.parametrize("name, marks", [(n, m) for n in FORMATS for m in (False, True)])


@CELLS
def test_a_call_is_admitted_and_twenty_broken_ones_are_not(name, marks):
    required, right = grammar(name, marks), said(name, marks)
    assert admitted(name, marks, required, right)
    for old, new in BROKEN:
        head, found, tail = right.partition(old)
        assert found
        assert not admitted(name, marks, required, head + new + tail), (old, new)
    for cut in range(len(right)):
        assert not admitted(name, marks, required, right[:cut]), right[:cut]
    assert not admitted(name, marks, required, "It rains.")


@CELLS
def test_text_may_be_instead_but_no_broken_call(name, marks):
    free, right = grammar(name, marks, required=False), said(name, marks)
    for text in ("", "It rains.", "a\n\nb < c", right):
        assert admitted(name, marks, free, text), text
    assert name == "llama3_json" or admitted(name, marks, free, "First.\n" + right)
    assert not admitted(name, marks, free, right.replace("city", "town"))


@CELLS
def test_calls_come_behind_reasoning(name, marks):
    right = said(name, marks)
    within, maybe = (grammar(name, marks, reasoning=r) for r in (True, False))
    assert admitted(name, marks, within, "Hm.\n</think>\n\n" + right)
    assert not admitted(name, marks, within, right)
    assert admitted(name, marks, maybe, "<think>\nHm.\n</think>\n\n" + right)
    assert admitted(name, marks, maybe, right)
    assert not admitted(name, marks, maybe, "<think>\nHm.\n" + right)


@CELLS
def test_one_call_or_many(name, marks):
    right = said(name, marks)
    two = {"mistral": right + right if marks else right[:-1] + ", " + right.removeprefix("[TOOL_CALLS] ["),
           "llama3_json": f"{right}; {right}",
           "deepseek_v32": right.replace("</｜DSML｜function_calls>", "") + right.partition("\n")[2],
           }.get(name, f"{right}\n{right}")
    assert admitted(name, marks, grammar(name, marks), two)
    assert not admitted(name, marks, grammar(name, marks, many=False), two)


@pytest.mark.parametrize("given, text, other", [
    (Grammar("json_schema", '{"type": "boolean"}'), "true", "1"), (Grammar("regex", "a+"), "aa", "b"),
    (Grammar("choice", '["a", "b"]'), "b", "c"), (Grammar("grammar", 'start: "a"'), "a", "b"),
    (Grammar("grammar", 'root ::= "a"'), "a", "b"), (Grammar("lark", 'start: "::="'), "::=", "b")])
def test_any_grammar_may_come_behind_reasoning_or_beside_calls(given, text, other):
    mark_id = vocabulary("hermes", True)[0].mark_id
    behind = grammar_behind_reasoning(given, mark_id, True)
    beside = grammar("hermes", True, required=False, text=given)
    for form, before in ((behind, "Hm</think>"), (beside, ""), (given, "")):
        assert admitted("hermes", True, form, before + text)
        assert not admitted("hermes", True, form, before + other)
    assert admitted("hermes", True, beside, SAYS["hermes"])


@pytest.mark.parametrize("parameters, fault", [
    ({"type": "array"}, "not an object"), ({"properties": []}, "not an object"),
    ({"properties": {"a": {"type": "string"}}, "required": ["b"]}, "not an object"),
    ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "pattern"),
    ({"properties": {"a": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}}}, "minLength")])
def test_what_a_format_without_quotes_cannot_keep_to_is_named(parameters, fault):
    offer = Offer([{"type": "function", "function": {"name": "f", "parameters": parameters}}], required=True)
    for name in ("glm", "qwen3_coder", "deepseek_v32"):
        with pytest.raises(RequestError, match=fault) as e:
            Asked(FORMATS[name], offer).grammar(lambda _: None, None)
        assert e.value.param == "tools"


def test_texts_without_quotes_are_of_their_schema():
    values = {"word": {"enum": ["a b", "c", 1]}, "any": {}, "both": {"type": ["string", "null"]},
              "same": {"$ref": "#/$defs/x"}, "many": {"type": "array", "items": {"$ref": "#/$defs/x"}}}
    tools = {"f": {"type": "object", "properties": values, "$defs": {"x": {"type": "string"}}}}
    tokenizer, _ = vocabulary("glm", True)
    form = calls_grammar(FORMATS["glm"], tools, tokenizer.mark_id, required=True, many=False, reasoning=None)

    def call(**texts: str) -> str:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items())
        return f"<tool_call>f\n{pairs}</tool_call>"
    for right in ({}, {"word": "a b"}, {"word": "1"}, {"any": 'x "y"'}, {"both": "null", "same": "b\nc"},
                  {"many": '["a"]'}):
        assert admitted("glm", True, form, call(**right)), right
    for wrong in ({"word": "b"}, {"many": "a"}, {"many": "[1]"}, {"same": "a", "any": "b"}):
        assert not admitted("glm", True, form, call(**wrong)), wrong
