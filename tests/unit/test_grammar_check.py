"""Fields that ask for structured output, and the process that says whether a grammar can be compiled."""
from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import printable
import pytest
from tokenizers import Tokenizer as Raw

from penstock.api.completions import as_api_error
from penstock.api.protocol.openai import ChatRequest, CompletionRequest, parse
from penstock.config.base.child import helper_environment
from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import ANY_OBJECT, Grammar
from penstock.text import helper
from penstock.text.chat import ChatTemplate
from penstock.text.grammar import check as grammars
from penstock.text.grammar.check import GrammarCheck
from penstock.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def asked(kind: type = CompletionRequest, **fields) -> Grammar | None:
    base = {"prompt": "a"} if kind is CompletionRequest else {"messages": []}
    return parse(json.dumps({**base, **fields}).encode(), kind).params().grammar


@pytest.mark.parametrize("fields, grammar", [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA,
                                                                 "strict": True}}},
     Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "text"}}, None), ({"response_format": None}, None),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
    ({"structured_outputs": {"grammar": "root ::= 'a'"}}, Grammar("grammar", "root ::= 'a'")),
    ({"structured_outputs": {}}, None),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)), ({"guided_regex": "a"}, Grammar("regex", "a")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": "start: A"}, Grammar("grammar", "start: A")),
    ({"json_schema": TEXT}, Grammar("json_schema", TEXT)), ({"regex": "a"}, Grammar("regex", "a")),
    ({"ebnf": "root ::= 'a'"}, Grammar("grammar", "root ::= 'a'")),
])
def test_every_way_to_ask_is_one_grammar(fields, grammar):
    for kind in (ChatRequest, CompletionRequest):
        assert asked(kind, **fields) == grammar


@pytest.mark.parametrize("fields, param", [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_choice": []}, "guided_choice"), ({"regex": ""}, "regex"), ({"ebnf": "x" * 70_000}, "ebnf"),
    ({"regex": "a", "min_tokens": 1}, "min_tokens"), ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
])
def test_what_cannot_be_asked_names_its_field(fields, param):
    with pytest.raises(RequestError) as e:
        asked(**fields)
    assert e.value.param == param


# ---------------------------------------------------------------- the process
def tokenizer() -> Tokenizer:
    found = printable.vocabulary()
    return Tokenizer(Raw.from_str(found.tokenizer), eos_ids=found.eos_ids, chat_template=None,
                     template_vars={})


@pytest.fixture
def check():
    made = GrammarCheck(tokenizer())
    yield made
    made.close()


def test_what_can_be_compiled_passes_once_and_what_cannot_says_where(check):
    async def go() -> None:
        good = Grammar("json_schema", TEXT)
        await check.check(good)
        check._aside.close()                    # the answer is known: nobody is asked
        await check.check(good)
        assert check._aside._process is None
        for bad, word in ((Grammar("json_schema", '{"not": {}}'), '"not"'),
                          (Grammar("regex", "a("), "unclosed"),
                          (Grammar("grammar", "start: b"), "b"), (Grammar("choice", "[]"), "list")):
            for _ in range(2):
                with pytest.raises(RequestError) as e:
                    await check.check(bad)
                assert word in str(e.value) and e.value.param == "grammar"
    asyncio.run(go())


def test_a_process_that_was_begun_is_the_one_that_checks(check):
    check.begin()
    begun = check._aside._process.pid
    asyncio.run(check.check(Grammar("regex", "a")))
    assert check._aside._process.pid == begun


def test_a_process_that_cannot_begin_is_reported_by_the_first_check(check):
    check._aside._module = "penstock.no_such_module"
    check.begin()
    with pytest.raises(RequestError, match="no structured output"):
        asyncio.run(check.check(Grammar("regex", "a")))


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(check, monkeypatch):
    asyncio.run(check.check(Grammar("regex", "a")))
    os.kill(check._aside._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(grammars, "WAIT_S_MAX", 0.1)
    with pytest.raises(RequestError, match="to compile"):
        asyncio.run(check.check(Grammar("regex", "[ab]{3}")))
    monkeypatch.setattr(grammars, "WAIT_S_MAX", 60.0)
    monkeypatch.setattr(grammars, "CPU_S_MAX", 0.0)
    with pytest.raises(RequestError, match="to compile"):
        asyncio.run(check.check(Grammar("regex", "[ab]{3}")))
    monkeypatch.setattr(grammars, "CPU_S_MAX", 60.0)
    asyncio.run(check.check(Grammar("regex", "[ab]{3}")))


def test_a_killed_process_is_started_again(check):
    asyncio.run(check.check(Grammar("regex", "a")))
    os.kill(check._aside._process.pid, signal.SIGKILL)
    asyncio.run(check.check(Grammar("regex", "b")))


@pytest.fixture
def kills(monkeypatch):
    """How many of the next helper processes are killed as they start."""
    left, real = [0], helper.subprocess.Popen

    def start(*args, **kwargs):
        process = real(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            process.kill()
        return process

    monkeypatch.setattr(helper.subprocess, "Popen", start)
    return left


def test_a_helper_imports_the_package_of_its_server():
    first = helper_environment()["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(first, "penstock", "text", "helper.py").samefile(helper.__file__)


def test_a_helper_killed_while_it_starts_is_started_again_and_then_a_503(check, kills):
    template = ChatTemplate("{{ messages[0].content }}", {})

    async def grammar():
        await check.check(Grammar("regex", "a"))

    async def chat():
        await template.take([{"role": "user", "content": "a" * 100}], tenant=b"", context=1000)

    try:
        for ask in (grammar, chat):
            kills[0] = 2
            with pytest.raises(helper.HelperDied) as e:
                asyncio.run(ask())
            error = as_api_error(e.value)
            assert (error.status, error.body["error"]["code"]) == (503, "helper_died")
            kills[0] = 1
            asyncio.run(ask())
    finally:
        template.close()


def test_a_helper_that_cannot_begin_says_with_which_exit_code_it_ended():
    aside = helper.Aside("penstock.text.no_such_module", {}, wrong="no grammars", advice="leave them out")
    with pytest.raises(helper.ConfigError, match="no grammars: its process did not start: it ended with exit code 1, "):
        aside.check()
