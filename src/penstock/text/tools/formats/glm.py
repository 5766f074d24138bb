"""GLM: `<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>`; since 4.7
without the line ends."""
from __future__ import annotations

from collections.abc import Generator

from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas, parameter, parameter_rules, read_parameters
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        name, mark = yield from source.take("\n", KEY, CLOSE)
        source.at -= len(mark)
        called = source.begin(name.strip())
        if called:
            def one(source: Source, name: str = name.strip()) -> Generator[None, None, str]:
                key, _ = yield from source.take(KEY_END)
                yield from source.one_of(VALUE)
                value, mark = yield from source.take(VALUE_END)
                return parameter(key.strip(), value, source.tools[name]) if mark else ""
            yield from read_parameters(source, KEY, CLOSE, one)


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    def one(key: str, _: bool) -> tuple[str, str]:
        front = f"{lark.mark(KEY)} {lark.text(key)} {lark.mark(KEY_END)} {newline}? {lark.mark(VALUE)}"
        return front, VALUE_END

    newline = lark.text("\n")
    call = lark.any_of(*(
        f"{lark.text(name)} {newline}? {parameter_rules(lark, name, schema, one, newline + '?')} "
        f"{lark.mark(CLOSE)}"
        for name, schema in tools.items()))
    return f"{call} ({newline}? {lark.mark(OPEN)} {call})*" if many else call
