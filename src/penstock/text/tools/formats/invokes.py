"""MiniMax M2: `<minimax:tool_call>`, and in it for each call `<invoke name="NAME">` with
`<parameter name="KEY">VALUE</parameter>`, each on lines of its own. DeepSeek-V3.2: the same between
`<｜DSML｜function_calls>` marks, where each tag has that prefix and a parameter says `string="true|false"`."""
from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import (
    Schemas,
    parameter,
    parameter_rules,
    quoted,
    read_parameters,
    typed,
)
from penstock.text.tools.source import Reading, Source


@dataclass(frozen=True, slots=True)
class Invokes:
    """One of the two. prefix: of its tags. says_string: whether a parameter does."""

    open: str
    close: str
    prefix: str = ""
    says_string: bool = False

    def read(self, source: Source) -> Reading:
        invoke, ended = f'<{self.prefix}invoke name="', f"</{self.prefix}invoke>"
        called = False
        while (yield from source.until(self.open, behind_call=called)):
            called = False
            while (yield from source.one_of(invoke, self.close, closing=called)) == invoke:
                name, _ = yield from source.take('">')
                if not source.begin(name):
                    break
                called = True

                def one(source: Source, name: str = name) -> Generator[None, None, str]:
                    return (yield from self._parameter(source, name))
                yield from read_parameters(source, f'<{self.prefix}parameter name="', ended, one)
                source.mark()
            if not called:
                source.no_call()

    def _parameter(self, source: Source, name: str) -> Generator[None, None, str]:
        key, _ = yield from source.take('" string="' if self.says_string else '">')
        is_string = (yield from source.take('">'))[0] == "true" if self.says_string else None
        value, mark = yield from source.take(f"</{self.prefix}parameter>")
        if not mark:
            return ""
        if is_string is None:
            return parameter(key, value, source.tools[name])
        return f"{quoted(key)}: {quoted(value) if is_string else typed(value, frozenset())}"

    def body(self, lark: Lark, tools: Schemas, many: bool) -> str:
        """What follows `open`, in a grammar."""
        def one(key: str, text: bool) -> tuple[str, str]:
            string = f' string="{"true" if text else "false"}"' if self.says_string else ""
            return lark.text(f'<{self.prefix}parameter name="{key}"{string}>'), f"</{self.prefix}parameter>\n"

        call = lark.any_of(*(
            f"""{lark.text(f'<{self.prefix}invoke name="{name}">{chr(10)}')} """
            f"""{parameter_rules(lark, name, schema, one)} {lark.text(f"</{self.prefix}invoke>{chr(10)}")}"""
            for name, schema in tools.items()))
        return f"{lark.text(chr(10))} {call}{'+' if many else ''} {lark.mark(self.close)}"


MINIMAX = Invokes("<minimax:tool_call>", "</minimax:tool_call>")
DEEPSEEK = Invokes("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", says_string=True)
