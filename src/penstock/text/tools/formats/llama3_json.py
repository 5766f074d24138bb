"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, or several with `; ` between them."""
from __future__ import annotations

from penstock.text.tools.formats.json_calls import object_rule, read_call
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Reading, Source

TAG = "<|python_tag|>"


def read(source: Source) -> Reading:
    source.mark()
    yield from source.one_of(TAG)
    called = yield from read_call(source)
    while called:
        source.mark()
        called = bool((yield from source.one_of(";"))) and (yield from read_call(source))
        if not called:
            source.no_call()
            yield from source.until(behind_call=True)
    yield from source.until()


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """The calls, in a grammar."""
    call = lark.any_of(*(object_rule(lark, *tool, arguments="parameters") for tool in tools.items()))
    return f"{call} ({lark.text('; ')} {call})*" if many else call
