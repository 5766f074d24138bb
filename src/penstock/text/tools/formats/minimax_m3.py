"""MiniMax-M3: `<tool_call>`, and in it for each call `<invoke name="NAME">` with a tag for each parameter,
`<KEY>VALUE</KEY>`. Each tag has the mark `]<]minimax[>[` before it, so values are text as it is. An object has a tag
for each property, a list a tag `item` for each element."""
from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from penstock.config.base.errors import RequestError, show
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas, kinds, properties_of, quoted, resolved, texts_of, typed
from penstock.text.tools.source import Arguments, Reading, Source

MARK = "]<]minimax[>["
OPEN, CLOSE, INVOKE, TAG = f"{MARK}<tool_call>", f"{MARK}</tool_call>", f'{MARK}<invoke name="', f"{MARK}<"
ENDED, CLOSED, NEXT, ITEM = "/invoke", "/tool_call", 'invoke name="', "item"
DEPTH_MAX = 64          # of lists and objects in each other, in an answer and in a schema


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called, tag = False, ENDED
        while tag.startswith(NEXT) or (tag == ENDED and (
                yield from source.one_of(INVOKE, CLOSE, closing=called)) == INVOKE):
            name = tag[len(NEXT):-1] if tag != ENDED else (yield from source.take('">'))[0]
            if not source.begin(name):
                break
            called = True
            tag = yield from _arguments(source, source.tools[name])
            source.mark()
        if not called:
            source.no_call()


class _Broken(Exception):
    """No value is there, or not all of one. `tag`: the one that came in its place and is taken, or ""."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag


def _arguments(source: Source, schema: Mapping[str, Any]) -> Generator[None, None, str]:
    """All of one call. What is broken ends it, and is dropped up to the end of the call, of all calls, or to the
    next call. Return the tag that ended it; "": the answer was cut off."""
    before, had = "{", set[str]()
    try:
        while (key := (yield from _tag(source))) != ENDED:
            if key.startswith("/"):
                raise _Broken(key)
            value = yield from _value(source, key, _property(schema, key, schema), schema, 0)
            if key not in had:          # the first has been sent: it stays
                source.tell(Arguments, f"{before}{quoted(key)}: {value}")
            before = ", "
            had.add(key)
    except _Broken as broken:
        key = broken.tag
        if key not in (ENDED, CLOSED) and not key.startswith(NEXT):
            _, mark = yield from source.take(f"{TAG}{ENDED}>", CLOSE, INVOKE)
            if not mark:
                source.drop_rest()
                return ""
            source.at -= len(mark) * (mark == INVOKE)
            key = CLOSED if mark == CLOSE else ENDED
    source.tell(Arguments, "{}" if before == "{" else "}")
    source.end()
    return key


def _tag(source: Source) -> Generator[None, None, str]:
    """The next tag inside a call, which nothing but white space is before. Raises _Broken."""
    if not (yield from source.one_of(TAG)):
        raise _Broken
    tag, mark = yield from source.take(">")
    if not tag or "<" in tag:           # its end is in the next mark
        source.at -= len(tag) + len(mark)
        raise _Broken
    if tag.startswith(NEXT):
        raise _Broken(tag)
    return tag


def _value(source: Source, key: str, own: Any, root: Mapping[str, Any], depth: int) -> Generator[None, None, str]:
    """What is between a tag and its end, as JSON. Raises _Broken."""
    text, mark = yield from source.take(TAG)
    if not mark or depth > DEPTH_MAX:
        raise _Broken
    source.at -= len(mark)
    of, parts, items = kinds(own, root), list[tuple[str, str]](), True
    while (tag := (yield from _tag(source))) != f"/{key}":
        if tag.startswith("/") or text.strip():
            raise _Broken(tag)
        items = items and tag == ITEM and of != {"object"}
        inner = resolved(own, root).get("items") if items else _property(own, tag, root)
        parts.append((tag, (yield from _value(source, tag, inner, root, depth + 1))))
    if not parts:
        empty = {frozenset({"array"}): "[]", frozenset({"object"}): "{}"}.get(of, "")
        return empty if empty and not text.strip() else typed(text, of)
    if items:
        return f"[{', '.join(value for _, value in parts)}]"
    named = dict[str, str]()
    for tag, value in parts:
        named.setdefault(tag, value)
    return f"{{{', '.join(f'{quoted(tag)}: {value}' for tag, value in named.items())}}}"


def _property(own: Any, key: str, root: Mapping[str, Any]) -> Any:
    """The schema of a property of an object; None: it says nothing of that one."""
    of = resolved(own, root).get("properties")
    return of.get(key) if isinstance(of, dict) else None


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows the mark of `<tool_call>`, in a grammar."""
    call = lark.any_of(*(
        f"""{lark.text(f'<invoke name="{name}">')} {_tags(lark, schema, schema, name, 0)} """
        f"""{lark.text(f'<{ENDED}>{chr(10)}')} {lark.mark(MARK)}""" for name, schema in tools.items()))
    opened, closed = lark.text(f"<tool_call>{chr(10)}"), lark.text("</tool_call>")
    return f"{opened} {lark.mark(MARK)} {call}{'+' if many else ''} {closed}"


def _tags(lark: Lark, own: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int) -> str:
    """Properties in the schema's order, and the mark of what comes behind them. Raises RequestError."""
    of, required = properties_of(own, where)
    found = []
    for key, value in of.items():
        inner = _inner(lark, value, root, f"{where}.{key}", depth + 1)
        found.append(f"({lark.mark(MARK)} {lark.text(f'<{key}>')} {inner} {lark.text(f'</{key}>')})"
                     + ("" if key in required else "?"))
    return f"{' '.join(found)} {lark.mark(MARK)}"


def _inner(lark: Lark, own: Any, root: Mapping[str, Any], where: str, depth: int) -> str:
    """A value of this schema, and the mark of its end. Raises RequestError for what holds of a string and cannot be
    kept to."""
    found, mark = resolved(own, root), lark.mark(MARK)
    if depth > DEPTH_MAX:
        raise RequestError(f"{show(where)} is of a schema that has itself inside, or more than {DEPTH_MAX} others",
                           "tools")
    if (texts := texts_of(own, root, where)) is not None:
        return f"{lark.any_of(*map(lark.text, texts))} {mark}" if texts else lark.until(MARK)
    if isinstance(found.get("properties"), dict):
        return lark.rule(_tags(lark, found, root, where, depth))
    if isinstance(found.get("items"), dict):
        one = lark.rule(_inner(lark, found["items"], root, where, depth + 1))
        return f"({mark} {lark.text(f'<{ITEM}>')} {one} {lark.text(f'</{ITEM}>')})* {mark}"
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return f"{lark.json({**shared, **found})} {mark}"
