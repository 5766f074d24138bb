"""A grammar of calls, in Lark as llguidance reads it: text, marks that may be one token, JSON by a schema."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from penstock.config.request.grammar import WHITE_SPACE
from penstock.config.request.schemas import prepared

TokenId: TypeAlias = "Callable[[str], int | None]"
_ESCAPED = frozenset("\\.+*?()|[]{}^$#&-~/\"")


class Lark:
    """Rules, and expressions over them. `token_id`: of text that is one special token, which then is written
    in no other way; else None."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules: list[str] = []
        self._names: dict[str, str] = {}

    def text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def mark(self, text: str) -> str:
        token = self._token_id(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def is_token(self, text: str) -> bool:
        return self._token_id(text) is not None

    def json(self, schema: Mapping[str, Any]) -> str:
        return self._rule("json", "%json " + json.dumps({
            **prepared(_bare(schema)), "x-guidance": {"lenient": False, "whitespace_pattern": WHITE_SPACE}}))

    def until(self, mark: str) -> str:
        """Any text, and `mark`."""
        if self._token_id(mark) is not None:
            return f"{self._any()}? {self.mark(mark)}"
        return self._rule("until", f"/(?s:.*){_escaped(mark)}/", "[lazy]")

    def without(self, mark: str) -> str:
        """Any text in which there is no `mark`, or none."""
        if self._token_id(mark) is not None:
            return f"{self._any()}?"
        return self._rule("PLAIN", f"/(?s:.+)/ & ~/(?s:.*){_escaped(mark)}(?s:.*)/") + "?"

    def no_object(self) -> str:
        """Any text that does not begin as an object, or none."""
        return self._rule("PLAIN", r"/[^{\s](?s:.*)/") + "?"

    def blanks(self) -> str:
        return self._rule("BLANKS", r"/[ \n]{1,4}/") + "?"

    def number(self) -> str:
        """A whole number from 0 on, of a call."""
        return self._rule("NUMBER", "/[0-9]{1,4}/")

    def call_id(self) -> str:
        """An id of nine letters and digits."""
        return self._rule("ID", "/[a-zA-Z0-9]{9}/")

    def rule(self, body: str) -> str:
        return self._rule("rule", body)

    def any_of(self, *bodies: str) -> str:
        return self.rule(" | ".join(self.rule(b) for b in bodies))

    def source(self, start: str) -> str:
        """The grammar of the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def _any(self) -> str:
        return self._rule("ANY", "/(?s:.+)/")

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        if body not in self._names:
            self._names[body] = f"{kind}{'' if kind.islower() else '_'}{len(self._names)}"
            self._rules.append(f"{self._names[body]}{options}: {body}")
        return self._names[body]


def _bare(schema: Any) -> Any:
    """Without the words that only a reader needs."""
    if isinstance(schema, list):
        return [_bare(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: v if k in ("enum", "const") else _bare(v) for k, v in schema.items()
            if not (k in ("description", "title", "$comment") and isinstance(v, str))}


def _escaped(text: str) -> str:
    return "".join("\\n" if c == "\n" else "\\" + c if c in _ESCAPED else c for c in text)
