"""DeepSeek V3, R1: `<｜tool▁calls▁begin｜>`, and in it for each call
`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line end, the arguments in a block of JSON and
`<｜tool▁call▁end｜>`. V3.1 writes `NAME<｜tool▁sep｜>{...}` alone. Both are read alike."""
from __future__ import annotations

from collections.abc import Generator

from penstock.text.tools.formats.json_calls import read_arguments
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = False
        while (yield from source.one_of(CALL, CLOSE, closing=called)) == CALL:
            if not source.begin((yield from _name(source))):
                break
            called = True
            yield from source.one_of(FENCE, closing=True)
            yield from read_arguments(source, FENCE_END, END)
            yield from source.one_of(END, closing=True)
            source.mark()
        if not called:
            source.no_call()


def _name(source: Source) -> Generator[None, None, str]:
    """Return the name before the arguments; "" if it is cut off."""
    head, _ = yield from source.take(SEP)
    if head.strip() == "function" and "function" not in source.tools:
        head, _ = yield from source.take("\n")
    return head.strip()


def body_v3(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    function, end = lark.text("function"), lark.text("\n" + FENCE_END)
    return _body(lark, [
        f"{function} {lark.mark(SEP)} {lark.text(name + chr(10) + FENCE + chr(10))} {lark.json(schema)} {end}"
        for name, schema in tools.items()], many)


def body_v31(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    return _body(lark, [f"{lark.text(name)} {lark.mark(SEP)} {lark.json(schema)}"
                        for name, schema in tools.items()], many)


def _body(lark: Lark, calls: list[str], many: bool) -> str:
    call = lark.any_of(*(f"{lark.mark(CALL)} {of} {lark.mark(END)}" for of in calls))
    more = f"({lark.text(chr(10))}? {call})*" if many else ""
    return f"{call} {more} {lark.mark(CLOSE)}"
