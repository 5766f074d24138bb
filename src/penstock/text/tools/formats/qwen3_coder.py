"""Qwen3-Coder:
`<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>`.
Seed-OSS: the same between `<seed:tool_call>` marks, with values on the line of their parameter."""
from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas, parameter, parameter_rules, read_parameters
from penstock.text.tools.source import Reading, Source

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class Functions:
    """One of the two. around_value: what a value has before and after it."""

    open: str
    close: str
    around_value: str

    def read(self, source: Source) -> Reading:
        called = False
        while (yield from source.until(self.open, behind_call=called)):
            called = bool((yield from source.one_of(FUNCTION)))
            name = (yield from source.take(">"))[0] if called else ""
            called = source.begin(name)
            if called:
                def one(source: Source, name: str = name) -> Generator[None, None, str]:
                    key, _ = yield from source.take(">")
                    value, mark = yield from source.take(PARAMETER_END)
                    value = value.removeprefix(self.around_value).removesuffix(self.around_value)
                    return parameter(key, value, source.tools[name]) if mark else ""
                yield from read_parameters(source, PARAMETER, FUNCTION_END, one)
                yield from source.one_of(self.close, closing=True)

    def body(self, lark: Lark, tools: Schemas, many: bool) -> str:
        """What follows `open`, in a grammar."""
        def one(key: str, _: bool) -> tuple[str, str]:
            return (lark.text(f"{PARAMETER}{key}>{self.around_value}"),
                    f"{self.around_value}{PARAMETER_END}\n")

        call = lark.any_of(*(
            f"{lark.text(f'{chr(10)}{FUNCTION}{name}>{chr(10)}')} "
            f"{parameter_rules(lark, name, schema, one)} "
            f"{lark.text(FUNCTION_END + chr(10))} {lark.mark(self.close)}" for name, schema in tools.items()))
        return f"{call} ({lark.text(chr(10))} {lark.mark(self.open)} {call})*" if many else call


QWEN = Functions("<tool_call>", "</tool_call>", "\n")
SEED = Functions("<seed:tool_call>", "</seed:tool_call>", "")
