"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, which three formats share."""
from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from penstock.text.tools.lark import Lark
from penstock.text.tools.source import Arguments, Source

ARGUMENTS = ('"arguments"', '"parameters"')


def read_call(source: Source, *, end: str = "") -> Generator[None, None, bool]:
    """One object. Its arguments are emitted as they come if the name is first; in another order once `end`
    shows that the object is whole. Returns whether it was a call; if not, what was marked is text."""
    at = source.at
    name = yield from _head(source)
    if name is not None:
        if not source.begin(name):
            return False
        if (yield from source.json_value(as_arguments=True)):
            source.end()
            if (yield from source.one_of("}", ",")) == ",":
                yield from source.json_value(as_arguments=False, depth=1)
        return True
    source.at = at
    if not end:
        return source.no_call()
    text, _ = yield from source.take(end)
    source.at -= len(end) if text else 0
    whole = _whole(text)
    if whole is None or not source.begin(whole[0]):
        return source.no_call()
    source.tell(Arguments, whole[1])
    source.end()
    return True


def read_arguments(source: Source, *ends: str, stop: str = "") -> Generator[None, None, None]:
    """Take the object of a begun call, and the first of `ends` that follows. Without one it is {}. stop: see
    `json_value`."""
    while not (text := source.rest.lstrip()) and not source.final:
        yield
    if text.startswith("{"):
        yield from source.blanks()
        if (yield from source.json_value(as_arguments=True, stop=stop)):
            source.end()
            yield from source.one_of(*ends, closing=True)
    elif (yield from source.one_of(*ends, closing=True)) or source.rest:    # else it is cut off
        source.tell(Arguments, "{}")
        source.end()


def _head(source: Source) -> Generator[None, None, str | None]:
    """Up to the brace of the arguments, which is not taken; the name."""
    for key in ("{", '"name"', ":"):
        if not (yield from source.one_of(key)):
            return None
    name = yield from source.string()
    if name is None or not (yield from source.one_of(",")):
        return None
    for keys in (ARGUMENTS, (":",), ("{",)):
        if not (yield from source.one_of(*keys)):
            return None
    source.at -= 1
    return name


def _whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object that has come to its end."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get("arguments", found.get("parameters", {}))
    if isinstance(given, str):
        return found["name"], given
    return found["name"], json.dumps({} if given is None else given, ensure_ascii=False)


def object_rule(lark: Lark, name: str, schema: Mapping[str, Any], arguments: str = "arguments") -> str:
    """One call as an object, in a grammar."""
    head = json.dumps({"name": name, arguments: 0}, ensure_ascii=False).removesuffix("0}")
    return f"{lark.text(head)} {lark.json(schema)} {lark.text('}')}"
