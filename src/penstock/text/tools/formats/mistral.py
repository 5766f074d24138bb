"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, since its version 11
`[TOOL_CALLS]name[ARGS]{...}` for each call, where version 11 itself has `[CALL_ID]id` before `[ARGS]`."""
from __future__ import annotations

import secrets
import string
from collections.abc import Generator

from penstock.text.tools.formats.json_calls import object_rule, read_call
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Reading, Source

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        listed = yield from source.one_of("[")
        called = yield from (_list(source) if listed else _named(source))


def _list(source: Source) -> Generator[None, None, bool]:
    called = False
    while (yield from read_call(source)):
        called = True
        if (yield from source.one_of(",", "]")) != ",":
            break
        source.mark()
    return called


def _named(source: Source) -> Generator[None, None, bool]:
    name, mark = yield from source.take(ARGS, CALL_ID, "{")
    given = ""
    if mark == CALL_ID:
        given, mark = yield from source.take(ARGS, "{")
    if not mark:
        return source.no_call()
    if mark == ARGS and not (yield from source.one_of("{")):
        return source.no_call()
    back = source.at - 1
    if not source.begin(name.strip(), given.strip()):
        return False
    source.at = back
    if (yield from source.json_value(as_arguments=True)):
        source.end()
    return True


def call_id() -> str:
    """Templates of this family refuse another length."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar: with ARGS where that is a token."""
    if lark.is_token(ARGS):
        given = f"({lark.mark(CALL_ID)} {lark.call_id()})?" if lark.is_token(CALL_ID) else ""
        call = lark.any_of(*(f"{lark.text(name)} {given} {lark.mark(ARGS)} {lark.json(schema)}"
                             for name, schema in tools.items()))
        return f"{call} ({lark.mark(OPEN)} {call})*" if many else call
    call = lark.any_of(*(object_rule(lark, *tool) for tool in tools.items()))
    more = f"({lark.text(', ')} {call})*" if many else ""
    return f"{lark.blanks()} {lark.text('[')} {call} {more} {lark.text(']')}"
