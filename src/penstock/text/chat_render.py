"""The chat template's own process: messages in, text out, over the socket it was started with.

A template comes from the operator or from a model folder. Jinja's sandbox keeps it from objects and
modules, but nothing inside Python bounds its time and memory: `'a' * 10**10` is one instruction. So
it runs here, under rlimits, and `chat.py` kills this process when it is late. Imports little more than
Jinja; knows no request, no token and no file.
"""
from __future__ import annotations

import datetime
import json
import resource
import socket
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from penstock.text.frames import receive, send, serve, within_hard

OUTPUT_CHARS_MAX = 8 << 20
MEMORY_BYTES_MAX = 1 << 30
CPU_S_MAX = 30
STRFTIME_CHARS_MAX = 100


class _Raised(Exception):
    """The template called raise_exception: its text is for the user."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """The template in the sandbox, with the helpers that published templates use.

    Raises jinja2.TemplateSyntaxError.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text. Raises _Raised, or whatever the template's expressions raise."""
    parts: list[str] = []
    room = OUTPUT_CHARS_MAX
    for part in template.generate(variables):
        room -= len(part)
        if room < 0:
            raise _Raised(f"the rendered chat is over {OUTPUT_CHARS_MAX} characters")
        parts.append(part)
    return "".join(parts)


def _raise(message: object) -> NoReturn:
    raise _Raised(str(message))


def _tojson(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes HTML and non-ASCII, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if len(form) > STRFTIME_CHARS_MAX:
        raise _Raised("strftime_now: the format is too long")
    return datetime.datetime.now().strftime(form)


def _limit_next() -> None:
    """End this process (SIGXCPU) when the next rendering computes too long: also when the parent,
    which would have killed it sooner, is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (within_hard(resource.RLIMIT_CPU, soft),
                                             resource.getrlimit(resource.RLIMIT_CPU)[1]))


def answers(link: socket.socket) -> None:
    """Answer the two sources with {} or {"error"}, then every set of variables with {"text"} or {"error"}."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    plain: jinja2.Template | None = None
    while True:
        value = receive(link)
        _limit_next()
        try:
            if plain is None:
                with_tools = compile_template(value["with_tools"])
                plain = compile_template(value["source"])
                send(link, {})
            else:
                send(link, {"text": render(with_tools if value["tools"] else plain, value)})
        except _Raised as e:
            send(link, {"error": str(e)[:1000]})
        # The template's code may raise anything at all, and none of it is ours.
        except Exception as e:
            send(link, {"error": f"{type(e).__name__}: {e}"[:1000]})


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES_MAX)
