"""Qwen3-Coder:
`<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>`."""
from __future__ import annotations

from collections.abc import Generator

from penstock.serve.parsers.formats.parameters import Schemas, parameter, parameter_rules, read_parameters
from penstock.serve.parsers.lark import Lark
from penstock.serve.parsers.source import Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = bool((yield from source.one_of(FUNCTION)))
        name = (yield from source.take(">"))[0] if called else ""
        called = source.begin(name)
        if called:
            def one(source: Source, name: str = name) -> Generator[None, None, str]:
                key, _ = yield from source.take(">")
                value, mark = yield from source.take(PARAMETER_END)
                value = value.removeprefix("\n").removesuffix("\n")
                return parameter(key, value, source.tools[name]) if mark else ""
            yield from read_parameters(source, PARAMETER, FUNCTION_END, one)
            yield from source.one_of(CLOSE, closing=True)


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    def one(key: str, _: bool) -> tuple[str, str]:
        return lark.text(f"{PARAMETER}{key}>\n"), f"\n{PARAMETER_END}\n"

    call = lark.any_of(*(
        f"{lark.text(f'{chr(10)}{FUNCTION}{name}>{chr(10)}')} {parameter_rules(lark, name, schema, one)} "
        f"{lark.text(FUNCTION_END + chr(10))} {lark.mark(CLOSE)}" for name, schema in tools.items()))
    return f"{call} ({lark.text(chr(10))} {lark.mark(OPEN)} {call})*" if many else call
