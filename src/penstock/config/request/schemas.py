"""A client's JSON schema or regular expression as the grammar library takes it, with the same meaning.

Words that ask for nothing are left out; what the library would answer wrongly, or give up at in the middle of
an answer, is refused. Knows no library.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.base.errors import RequestError, cut, show

INTEGER_MAX = 1 << 53               # the library counts with doubles
LENGTH_MAX = 1 << 31                # no answer is so long
# Of a bound further out than that, what is left: every answer still matches, and numbers beyond are not made.
BOUNDS = {"minimum": -INTEGER_MAX, "exclusiveMinimum": -INTEGER_MAX,
          "maximum": INTEGER_MAX, "exclusiveMaximum": INTEGER_MAX, "multipleOf": None}
# That are enforced; every other format is a note, as JSON Schema says.
FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
                     "uri"})
_LITERAL = ("enum", "const", "default", "examples", "example")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LOOKS = re.compile(r"\(\?<?[=!]")
# Pydantic's Decimal: its look-ahead says that there is a digit.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
_DECIMAL_PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)$"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}


def prepared(schema: Any) -> Any:
    """The schema to compile. Raises RequestError that names the keyword."""
    return _Schema(schema).of(schema)


class _Schema:
    def __init__(self, whole: Any) -> None:
        self._multiples = _mentions(whole, "multipleOf")

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(s) for s in schema]
        if not isinstance(schema, dict):
            return schema
        self._check_patterns(schema)
        found: dict[str, Any] = {}
        for name, value in schema.items():
            if _neutral(name, value):
                continue
            if name in BOUNDS:
                found[name] = _bound(name, value)
            elif name in _LITERAL:
                if name in ("enum", "const"):
                    _check_literal(name, value)
                found[name] = value
            elif name in _NAMED and isinstance(value, dict):
                found[name] = {key: self.of(one) for key, one in value.items()}
            elif name == "pattern" and value == DECIMAL:
                found[name] = _DECIMAL_PLAIN
            elif name == "anyOf" and isinstance(value, list):
                # Of alternatives those are enough that can be enforced.
                found[name] = self.of([one for one in value if not _looks(one)] or value)
            else:
                found[name] = self.of(value)
        return found

    def _check_patterns(self, schema: Mapping[str, Any]) -> None:
        """A multiple that two keywords ask for has no end in the library."""
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        if not self._multiples or not isinstance(named, dict) or not isinstance(patterns, dict):
            return
        for name, own in named.items():
            for pattern, other in patterns.items():
                if _matches(pattern, name) and any(
                        _mentions(s, "multipleOf") or _mentions(s, "$ref") for s in (own, other)):
                    raise RequestError(f"multipleOf of the property {show(name)}, which the pattern "
                                       f"{cut(pattern)} matches as well, is not supported: leave one of them "
                                       "out", "grammar")


def ascii_classes(regex: str) -> str:
    r"""With \d, \w, \D and \W of ASCII, as the `pattern` of a schema has them."""
    found, inside, at = [], False, 0
    while at < len(regex):
        char = regex[at]
        if char == "\\" and at + 1 < len(regex):
            kind = regex[at + 1]
            members = _CLASSES.get(kind.lower())
            if members is None:
                found.append(char + kind)
            elif kind.isupper():
                found.append(f"[^{members}]")           # in brackets too: classes may have classes in them
            else:
                found.append(members if inside else f"[{members}]")
            at += 2
            continue
        if char == "[":
            inside = True
        elif char == "]":
            inside = False
        found.append(char)
        at += 1
    return "".join(found)


def _neutral(name: str, value: Any) -> bool:
    """Whether a keyword asks for nothing at this value. Serializers write null for one that is not set."""
    if value is None:
        return name not in _LITERAL
    match name:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return bool(value is True or value in ({}, {"type": "string"}))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
        case "maxLength" | "maxItems" | "maxProperties":
            return type(value) is int and value >= LENGTH_MAX
        case "format":
            return isinstance(value, str) and value not in FORMATS
    return False


def _bound(name: str, value: Any) -> Any:
    """A bound that the library keeps exactly. Generators write those of int64 and of floats by themselves.

    Raises RequestError: only numbers past the exact ones are within the bound."""
    if type(value) not in (int, float) or abs(value) <= INTEGER_MAX:
        return value
    most = BOUNDS[name]
    if most is None or (value < 0) is not (most < 0):
        raise _inexact(name, value)
    return most


def _check_literal(name: str, value: Any) -> None:
    """Raises RequestError: an integer in it would be answered as its neighbour."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_literal(name, one)
    elif type(value) is int and (abs(value) > 1 << 63 or int(float(value)) != value):
        raise _inexact(name, value)


def _inexact(name: str, value: float) -> RequestError:
    return RequestError(f"{name} is {show(value)}: integers are exact up to {INTEGER_MAX}, leave it out or "
                        "give a smaller one", "grammar")


def _looks(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return isinstance(pattern, str) and pattern != DECIMAL and _LOOKS.search(pattern) is not None


def _mentions(schema: Any, name: str) -> bool:
    if isinstance(schema, dict):
        return name in schema or any(_mentions(s, name) for s in schema.values())
    return isinstance(schema, list) and any(_mentions(s, name) for s in schema)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True                     # another dialect's: it may
