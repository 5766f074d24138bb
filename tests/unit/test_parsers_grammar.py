"""Grammars of calls: they admit what the format's reader takes for calls that match, and nothing broken."""
from __future__ import annotations

import functools
import json
import random
import re

import pytest
from scripted import ARGUMENTS, SAYS, TOOL, Scripted, template

from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import Grammar
from penstock.exec.sampling.grammar import Compiler
from penstock.text.grammar.vocabulary import of_tokenizer
from penstock.text.tools.asked import NO_PARAMETERS, AnswerForm, ToolOffer
from penstock.text.tools.table import FORMATS, calls_grammar, grammar_behind_reasoning

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


CELLS = pytest.mark.parametrize("name, marks", [(n, m) for n, f in FORMATS.items() if not f.channels
                                               for m in (False, True)])


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
           "kimi_k2": right.replace("<|tool_calls_section_end|>", "") + right.partition("section_begin|>")[2],
           "deepseek_v3": right.replace("<｜tool▁calls▁end｜>", "\n") + right.partition("calls▁begin｜>")[2],
           "deepseek_v31": right.replace("<｜tool▁calls▁end｜>", "") + right.partition("calls▁begin｜>")[2],
           "minimax_m2": right.replace("</minimax:tool_call>", "") + right.partition("\n")[2],
           "minimax_m3": right.replace("]<]minimax[>[</tool_call>", "") + right.partition("\n")[2],
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
    offer = ToolOffer([{"type": "function", "function": {"name": "f", "parameters": parameters}}], required=True)
    for name in ("glm", "qwen3_coder", "deepseek_v32", "minimax_m2", "seed_oss"):
        with pytest.raises(RequestError, match=fault) as e:
            AnswerForm(FORMATS[name], offer).grammar(lambda _: None, None)
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


# ---------------------------------------------------------------- beside xgrammar's
# Of mistral and seed_oss it has none. It begins deepseek_v32 behind two line ends, which are text before the
# calls here.
MODELS = {"hermes": "qwen_3", "qwen3_coder": "qwen_3_coder", "llama3_json": "llama",
          "deepseek_v32": "deepseek_v3_2", "glm": "glm_4_7", "kimi_k2": "kimi", "deepseek_v3": "deepseek_r1",
          "deepseek_v31": "deepseek_v3_1", "minimax_m2": "minimax"}
BEFORE = {"deepseek_v32": "\n\n", "minimax_m2": "\n</think>\n\n\n\n\n"}     # that prompt opens reasoning


def as_templates_write(name: str, text: str) -> str:
    """xgrammar admits parameters of qwen3_coder on one line, a value of minimax_m2 on two, and a number of
    kimi_k2's calls in any length, which no model of them is shown."""
    text = text.removeprefix(BEFORE.get(name, ""))
    if name == "qwen3_coder":
        text = re.sub(r"\n+", "\n", re.sub(r"\s*(</?(?:parameter|function)[^>]*>)\s*", r"\n\1\n", text))
    if name == "minimax_m2":
        text = re.sub(r"\n+</parameter>", "</parameter>", text).replace("</parameter><", "</parameter>\n<")
    if name == "kimi_k2":
        text = re.sub(r":(\d{1,4})\d*<", r":\1<", text)
    return text


# What may end a text that could be longer.
ENDS = ("\n</parameter>\n", "</arg_value>", "</｜DSML｜parameter>\n", '"', "}")
END = 256


class Oracle:
    """xgrammar's structural tag of a format, over bytes: what it admits, ours do."""

    def __init__(self, name: str, many: bool) -> None:
        xgrammar = pytest.importorskip("xgrammar")
        tools = [{"type": "function", "function": {"name": n, "parameters": s, "strict": True}}
                 for n, s in TOOLS.items()]
        tag = xgrammar.get_model_structural_tag(MODELS[name], tools=tools, tool_choice="required",
                                                reasoning="disabled", parallel_tool_calls=many,
                                                max_whitespace_cnt=1)
        info = xgrammar.TokenizerInfo([*(bytes([i]) for i in range(256)), b"<end>"], stop_token_ids=[END])
        self._grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
        self._mask = xgrammar.allocate_token_bitmask(1, END + 1)
        self._new = xgrammar.GrammarMatcher

    def admits(self, text: str) -> bool:
        matcher = self._new(self._grammar)
        return bool(matcher.accept_string(text) and matcher.accept_token(END))

    def drawn(self, seed: int) -> str | None:
        """Something that it admits, white space only where it must be; None: it did not end."""
        rng, matcher, said = random.Random(seed), self._new(self._grammar), bytearray()
        while len(said) < 900:
            matcher.fill_next_token_bitmask(self._mask)
            words = self._mask[0].tolist()
            may = [i for i in range(END + 1) if words[i // 32] >> i % 32 & 1]
            if END in may:
                return said.decode()
            end = next((e for e in ENDS if rng.random() < 0.2 and matcher.accept_string(e)), "")
            if end:
                said += end.encode()
                continue
            dark = [i for i in may if 32 < i < 127 and (i not in b"\\<" or len(may) < 20)]
            byte = rng.choice(dark or may)
            assert matcher.accept_token(byte)
            said.append(byte)
        return None


@pytest.mark.parametrize("name", MODELS)
def test_what_xgrammar_admits_is_admitted_and_what_is_broken_is_not(name: str) -> None:
    ended = 0
    for many in (False, True):
        oracle = Oracle(name, many)
        ours = [grammar(name, marks, many=many) for marks in (False, True)]
        assert oracle.admits(BEFORE.get(name, "") + said(name, False))
        for seed in range(40):
            text = oracle.drawn(seed)
            if text is not None:
                ended += 1
                for marks, form in zip((False, True), ours, strict=True):
                    assert admitted(name, marks, form, as_templates_write(name, text)), text
        for old, new in BROKEN:
            head, _, tail = said(name, False).partition(old)
            broken = head + new + tail
            assert not any(admitted(name, marks, form, broken)
                           for marks, form in zip((False, True), ours, strict=True)), broken
    assert ended > 40, "this tests nothing"
