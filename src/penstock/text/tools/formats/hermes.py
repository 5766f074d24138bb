"""Hermes, Qwen2.5, Qwen3: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`."""
from __future__ import annotations

from penstock.text.tools.formats.json_calls import object_rule, read_call
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = yield from read_call(source, end=CLOSE)
        if called:
            yield from source.one_of(CLOSE, closing=True)


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    call = lark.any_of(*(f'{lark.text(chr(10))} {object_rule(lark, name, schema)} {lark.text(chr(10))} '
                         f'{lark.mark(CLOSE)}' for name, schema in tools.items()))
    return f"{call} ({lark.text(chr(10))} {lark.mark(OPEN)} {call})*" if many else call
