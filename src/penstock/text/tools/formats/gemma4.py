"""Gemma 4: each call is `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:5,list:[true,{k:1}]}<tool_call|>`. Keys have no
quotes; strings stand between marks, as they are; the rest is as in JSON."""
from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from penstock.config.base.errors import RequestError, show
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas, properties_of, quoted, resolved, texts_of, typed
from penstock.text.tools.source import Arguments, Reading, Source

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
DEPTH_MAX = 64          # of lists and objects in each other, in an answer and in a schema


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = False
        if (yield from source.one_of("call:")):
            name, _ = yield from source.take("{")
            called = source.begin(name.strip())
        if called:
            yield from _arguments(source)
            yield from source.one_of(CLOSE, closing=True)
        else:
            source.no_call()


class _Broken(Exception):
    """No value is there, or not all of one."""


def _arguments(source: Source) -> Reading:
    """All of one call, from behind the first brace. What is broken ends it, and is dropped up to CLOSE."""
    before = "{"
    try:
        while not (yield from source.one_of("}")):
            pair = yield from _pair(source, 0)
            source.tell(Arguments, before + pair)
            before = ", "
            yield from source.one_of(",")
    except _Broken:
        _, mark = yield from source.take(CLOSE)
        if not mark:                    # it is cut off
            source.drop_rest()
            return
        source.at -= len(mark)
    source.tell(Arguments, "{}" if before == "{" else "}")
    source.end()


def _pair(source: Source, depth: int) -> Generator[None, None, str]:
    """`"key": value` as JSON. Raises _Broken."""
    if begun := (yield from source.one_of(QUOTE, '"')):
        key = yield from _string(source, begun)
        mark = yield from source.one_of(":")
    else:
        key, mark = yield from source.take(":", ",", "}", CLOSE)
        source.at -= len(mark) * (mark != ":")
    if mark != ":":
        raise _Broken
    value = yield from _value(source, depth)
    return f"{key if begun else quoted(key.strip())}: {value}"


def _string(source: Source, begun: str) -> Generator[None, None, str]:
    """The rest of a string that has begun with this mark, as JSON. Raises _Broken."""
    if begun == QUOTE:
        found, mark = yield from source.take(QUOTE)
        if not mark:
            raise _Broken
        return quoted(found)
    source.at -= 1                      # as JSON has it
    if (said := (yield from source.string())) is None:
        raise _Broken
    return quoted(said)


def _value(source: Source, depth: int) -> Generator[None, None, str]:
    """A value as JSON. Raises _Broken."""
    begun = yield from source.one_of(QUOTE, "{", "[", '"')
    if begun in (QUOTE, '"'):
        return (yield from _string(source, begun))
    if not begun:
        text, mark = yield from source.take(",", "}", "]", CLOSE)
        source.at -= len(mark)
        if mark in ("", CLOSE) or not text.strip():
            raise _Broken
        return typed(text, frozenset())
    if depth >= DEPTH_MAX:
        raise _Broken
    end, found = {"{": "}", "[": "]"}[begun], list[str]()
    while not (yield from source.one_of(end)):
        one = yield from (_pair if begun == "{" else _value)(source, depth + 1)
        found.append(one)
        yield from source.one_of(",")
    return f"{begun}{', '.join(found)}{end}"


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    call = lark.any_of(*(f"{lark.text(f'call:{name}')} {_object(lark, schema, schema, name, 0)} {lark.mark(CLOSE)}"
                         for name, schema in tools.items()))
    return f"{call} ({lark.blanks()} {lark.mark(OPEN)} {call})*" if many else call


def _object(lark: Lark, own: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> str:
    """Properties in the schema's order, with commas between them. Raises RequestError."""
    of, required = properties_of(own, where)
    first = rest = ""               # what may come from here on: of nothing so far, and behind another
    for key, value in reversed(of.items()):
        pair = f"{lark.text(f'{key}:')} {_any(lark, value, root, f'{where}.{key}', depth + 1)}"
        begun, more = f"{pair} {rest}", f"{lark.text(',')} {pair} {rest}"
        if key not in required:
            begun, more = (f"({one} | {other})" if other else f"({one})?"
                           for one, other in ((begun, first), (more, rest)))
        first, rest = lark.rule(begun), lark.rule(more)
    return f"{lark.text('{')} {first} {lark.text('}')}"


def _any(lark: Lark, own: Any, root: Mapping[str, Any], where: str, depth: int) -> str:
    """A value of this schema. Raises RequestError for what holds of a string and cannot be kept to."""
    found, quote = resolved(own, root), lark.mark(QUOTE)
    if depth > DEPTH_MAX:
        raise RequestError(f"{show(where)} is of a schema that has itself inside, or more than {DEPTH_MAX} others",
                           "tools")
    if (texts := texts_of(own, root, where)) is not None:
        return f"{quote} {lark.any_of(*map(lark.text, texts)) + ' ' + quote if texts else lark.until(QUOTE)}"
    if isinstance(found.get("properties"), dict):
        return lark.rule(_object(lark, found, root, where, depth))
    if isinstance(found.get("items"), dict):
        one = lark.rule(_any(lark, found["items"], root, where, depth + 1))
        return f"{lark.text('[')} ({one} ({lark.text(',')} {one})*)? {lark.text(']')}"
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return lark.json({**shared, **found})
