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


def install_hint(extra: str) -> str:
    """What to type to get the packages of one extra; the name on an index is not needed."""
    return f"pip install '.[{extra}]' in the folder that you installed penstock from"


class ConfigError(ValueError):
    """A setting or an input file is wrong: says what was given, what is allowed, what to do."""


class RankDied(RuntimeError):
    """A rank's process or its machine is gone, or hangs: the engine cannot start or go on."""


class RequestError(ValueError):
    """One request is wrong (HTTP 400): `param` names the field, `code` is OpenAI's word for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None,
                 overflow: tuple[int, int, int] | None = None) -> None:
        """overflow: tokens of a prompt, output tokens asked for with it, and the context they exceed."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.overflow = overflow

    def named(self, param: str | None) -> RequestError:
        """The same error, of a field that has another name elsewhere."""
        return RequestError(str(self), param, self.code, self.overflow)


CONTEXT_EXCEEDED = "context_length_exceeded"


def context_exceeded(tokens: int, context: int, chars: int | None = None) -> RequestError:
    """The error of a prompt, of `tokens` at least, that leaves no room for one output token.

    chars: of a text that was not tokenized, as it cannot have fewer tokens.
    Clients find out by these words that a conversation has become too long, and shorten it. The code is in
    the message too: langchain-openai looks for it in the text of the openai package's error, which is the
    message and no longer the whole body.
    """
    count = f"{tokens} tokens" if chars is None else f"{chars} characters, which are at least {tokens} tokens"
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, the prompt has {count}, "
        "which is longer than the model's context length less one token for the answer: reduce the length "
        f"of the messages or of the prompt ({CONTEXT_EXCEEDED})", "prompt", CONTEXT_EXCEEDED,
        (tokens, 0, context))


def answer_exceeds(names: str, asked: int, tokens: int, context: int, param: str) -> RequestError:
    """The error of a maximum, given by one of the fields `names`, that does not fit beside the prompt."""
    return RequestError(
        f"{names} is too large: {asked}. This model's maximum context length is {context} tokens, and the "
        f"prompt has {tokens} of them: ask for at most {context - tokens}, reduce the length of the messages "
        f"or start the server with --clip-max-tokens ({CONTEXT_EXCEEDED})", param, CONTEXT_EXCEEDED,
        (tokens, asked, context))
