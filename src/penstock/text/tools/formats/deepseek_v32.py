"""DeepSeek-V3.2: `<｜DSML｜function_calls>`, and in it for each call `<｜DSML｜invoke name="NAME">` with
`<｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>`."""
from __future__ import annotations

from collections.abc import Generator

from penstock.text.tools.formats.parameters import Schemas, parameter_rules, quoted, read_parameters, typed
from penstock.text.tools.lark import Lark
from penstock.text.tools.source import Reading, Source

OPEN, CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
INVOKE, INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
PARAMETER, PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"


def read(source: Source) -> Reading:
    called = False
    while (yield from source.until(OPEN, behind_call=called)):
        called = False
        while (yield from source.one_of(INVOKE, CLOSE, closing=called)) == INVOKE:
            name, _ = yield from source.take('">')
            if not source.begin(name):
                break
            called = True
            yield from read_parameters(source, PARAMETER, INVOKE_END, _one)
            source.mark()
        if not called:
            source.no_call()


def _one(source: Source) -> Generator[None, None, str]:
    key, _ = yield from source.take('" string="')
    is_string, _ = yield from source.take('">')
    value, mark = yield from source.take(PARAMETER_END)
    written = quoted(value) if is_string == "true" else typed(value, frozenset())
    return f"{quoted(key)}: {written}" if mark else ""


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """What follows OPEN, in a grammar."""
    def one(key: str, text: bool) -> tuple[str, str]:
        return lark.text(f'{PARAMETER}{key}" string="{"true" if text else "false"}">'), f"{PARAMETER_END}\n"

    call = lark.any_of(*(
        f"""{lark.text(f'{INVOKE}{name}">{chr(10)}')} {parameter_rules(lark, name, schema, one)} """
        f"{lark.text(INVOKE_END + chr(10))}" for name, schema in tools.items()))
    return f"{lark.text(chr(10))} {call}{'+' if many else ''} {lark.text(CLOSE)}"
