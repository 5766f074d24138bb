"""What an answer must match, as text: a JSON schema, a regular expression, a grammar or a list of choices."""
from __future__ import annotations

from typing import Literal

import msgspec

from penstock.config.base.errors import RequestError

TEXT_BYTES_MAX = 64 << 10

# Why a request ends whose grammar the library can no longer follow: the client's fault, not the model's.
TOO_COMPLEX = "its grammar became too complex"

Kind = Literal["json_schema", "regex", "grammar", "choice", "lark"]


# White space between JSON's tokens: a blank, or a line break and its indentation. Small models write line
# breaks until their context is full, where a grammar admits them.
WHITE_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,64}"


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text` by kind: a JSON schema; a regular expression of Rust's crate `regex`, for the whole answer; Lark
    as llguidance reads it, or GBNF (with `::=`), or Lark only; a JSON list of strings. `before`: Lark for
    the whole answer, which has this grammar as @answer."""

    kind: Kind
    text: str
    before: str = ""

    def checked(self) -> Grammar:
        """This, or RequestError. The compiler decides whether the text means something."""
        size = len((self.text + self.before).encode("utf-8", "surrogatepass"))
        if not 0 < size <= TEXT_BYTES_MAX:
            raise RequestError(f"grammar has {size} bytes: 1 to {TEXT_BYTES_MAX}", "grammar")
        return self


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
