"""MiniMax M2: `<minimax:tool_call>`, and in it for each call `<invoke name="NAME">` with
`<parameter name="KEY">VALUE</parameter>`, each on lines of its own."""
from __future__ import annotations

from collections.abc import Generator

from penstock.text.tools.formats.parameters import Schemas, parameter, parameter_rules, read_parameters
from penstock.text.tools.lark import Lark
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = False
        while (yield from source.one_of(INVOKE, CLOSE, closing=called)) == INVOKE:
            name, _ = yield from source.take('">')
            if not source.begin(name):
                break
            called = True

            def one(source: Source, name: str = name) -> Generator[None, None, str]:
                key, _ = yield from source.take('">')
                value, mark = yield from source.take(PARAMETER_END)
                return parameter(key, value, source.tools[name]) if mark else ""
            yield from read_parameters(source, PARAMETER, INVOKE_END, one)
            source.mark()
        if not called:
            source.no_call()


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    def one(key: str, _: bool) -> tuple[str, str]:
        return lark.text(f'{PARAMETER}{key}">'), f"{PARAMETER_END}\n"

    call = lark.any_of(*(
        f"""{lark.text(f'{INVOKE}{name}">{chr(10)}')} {parameter_rules(lark, name, schema, one)} """
        f"{lark.text(INVOKE_END + chr(10))}" for name, schema in tools.items()))
    return f"{lark.text(chr(10))} {call}{'+' if many else ''} {lark.mark(CLOSE)}"
