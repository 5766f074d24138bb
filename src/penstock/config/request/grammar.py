"""What an answer must match, as text: a JSON schema, a regular expression, a grammar or a list of choices."""
from __future__ import annotations

from typing import Literal

import msgspec

from penstock.config.base.errors import RequestError

TEXT_BYTES_MAX = 64 << 10

Kind = Literal["json_schema", "regex", "grammar", "choice", "lark"]


# JSON's own white space between values, but not for ever: a model that likes blanks would fill its context.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text` by kind: a JSON schema; a regular expression of Rust's crate `regex`, for the whole answer; Lark
    as llguidance reads it, or GBNF (with `::=`), or Lark only; a JSON list of strings. `before`: Lark for
    the whole answer, which has this grammar as @answer."""

    kind: Kind
    text: str
    before: str = ""

    def checked(self) -> Grammar:
        """This, or RequestError. Whether the text means something is for whoever compiles it."""
        size = len((self.text + self.before).encode("utf-8", "surrogatepass"))
        if not 0 < size <= TEXT_BYTES_MAX:
            raise RequestError(f"grammar has {size} bytes: 1 to {TEXT_BYTES_MAX}", "grammar")
        return self


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
