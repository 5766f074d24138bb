"""Errors for users. Everything else that goes wrong is either our bug (assert) or an event."""
from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 40


def show(value: object) -> str:
    """`value` for a message: one line, printable, at most 80 characters, however large it is."""
    text = _SHORT.repr(value).encode("ascii", "backslashreplace").decode()
    return cut(text)


def cut(text: str, most: int = 80) -> str:
    """`text`, or its beginning, of at most `most` characters."""
    return text if len(text) <= most else text[:most - 3] + "..."


class ConfigError(ValueError):
    """A setting or an input file is wrong: says what was given, what is allowed, what to do."""


class RequestError(ValueError):
    """One request is wrong (HTTP 400): `param` names the field, `code` is OpenAI's word for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


CONTEXT_EXCEEDED = "context_length_exceeded"


def context_exceeded(tokens: int, context: int) -> RequestError:
    """The error of a prompt that leaves no room for one output token."""
    return RequestError(f"the prompt has {tokens} tokens and the context is {context}: at most {context - 1} "
                        "leave room for an answer", "prompt", CONTEXT_EXCEEDED)
