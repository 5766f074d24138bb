"""Kimi K2: `<|tool_calls_section_begin|>`, and in it for each call
`<|tool_call_begin|>functions.NAME:I<|tool_call_argument_begin|>{...}<|tool_call_end|>`. `functions.NAME:I` is
the call's id, which the model expects to see again."""
from __future__ import annotations

import re

from penstock.text.tools.formats.json_calls import read_arguments
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def read(source: Source) -> Reading:
    called, seen = False, set[str]()
    while (yield from source.until(OPEN, behind_call=called)):
        called = False
        while (yield from source.one_of(CALL, CLOSE, closing=called)) == CALL:
            given, _ = yield from source.take(ARGS)
            given = given.strip()
            found = _ID.fullmatch(given)
            # A second call with the same id gets one of ours: results name their call by it.
            own = given if ":" in given and given not in seen else ""
            if found is None or not source.begin(found[1], own):
                source.no_call()
                break
            called = True
            seen.add(given)
            yield from read_arguments(source, END)
            source.mark()
        if not called:
            source.no_call()


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    call = lark.any_of(*(
        f"{lark.mark(CALL)} {lark.text(f'functions.{name}:')} {lark.number()} {lark.mark(ARGS)} "
        f"{lark.json(schema)} {lark.mark(END)}" for name, schema in tools.items()))
    return f"{call}{'+' if many else ''} {lark.mark(CLOSE)}"
