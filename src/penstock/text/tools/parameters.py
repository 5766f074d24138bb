"""A call as parameters with names, which three formats share: their arguments as JSON, by the tool's
schema."""
from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

from penstock.config.base.errors import RequestError, show
from penstock.text.tools.lark import Lark
from penstock.text.tools.source import Arguments, Source

Schemas: TypeAlias = "Mapping[str, Mapping[str, Any]]"
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),), "string": (str,)}
_PYTHON = {"True": "true", "False": "false", "None": "null"}       # templates write values as Python does


def read_parameters(source: Source, begin: str, end: str,
                    one: Callable[[Source], Generator[None, None, str]]) -> Generator[None, None, None]:
    """All of one call, whose name was emitted. `one` reads from behind `begin`: `"key": value`, or "" if it is
    cut off."""
    before = "{"
    while (mark := (yield from source.one_of(begin, end))) == begin:
        if not (found := (yield from one(source))):
            break
        source.tell(Arguments, before + found)
        before = ", "
    if mark == end or not source.final:
        source.tell(Arguments, "{}" if before == "{" else "}")
        source.end()
    else:
        source.drop_rest()


def parameter(key: str, value: str, schema: Mapping[str, Any]) -> str:
    """One of them, as JSON; `schema` is that of all arguments."""
    of = schema.get("properties")
    own = of.get(key, {}) if isinstance(of, dict) else {}
    return f"{quoted(key)}: {typed(value, kinds(own, schema))}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def typed(text: str, of: frozenset[str]) -> str:
    """The JSON of a value that was written without quotes; no types: any."""
    if of == {"string"}:
        return quoted(text)
    given = text.strip()
    if given in _PYTHON and (not of or of & {"boolean", "null"}):
        return _PYTHON[given]
    try:
        value = json.loads(given, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return quoted(text)
    wanted = tuple(t for kind in of - {"string"} for t in _TYPES.get(kind, ()))
    return quoted(text) if "string" in of and not isinstance(value, wanted) else given


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a property may have; none if it does not say."""
    schema = resolved(schema, root)
    if not depth:
        return frozenset()
    if isinstance(said := schema.get("type"), str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(k for k in said if isinstance(k, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, *(schema[k] for k in ("const",) if k in schema)]
    found_kinds = {kind for v in values for kind, types in _TYPES.items() if type(v) in types}
    for choice in _choices(schema):
        found_kinds |= kinds(choice, root, depth - 1)
    return frozenset(found_kinds)


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [c for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for c in schema[name]]


def _no_number(name: str) -> None:
    raise ValueError(name)


def properties_of(schema: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Any]]:
    """Return an object's properties, and names of those that must be. Raises RequestError."""
    of, required = schema.get("properties", {}), schema.get("required", [])
    if (schema.get("type", "object") != "object" or not isinstance(of, dict) or not isinstance(required, list)
            or not {*map(str, required)} <= {*of}):
        raise RequestError(f"the parameters of the tool {show(where)} are not an object with properties, "
                           "which a grammar of this model's calls needs", "tools")
    return of, required


def parameter_rules(lark: Lark, name: str, schema: Mapping[str, Any],
                    one: Callable[[str, bool], tuple[str, str]], between: str = "") -> str:
    """All parameters of one call in the schema's order, in a grammar. `one` tells of a key, and whether its
    value is text, the expression in front of a value and the mark behind it; `between` comes after each.
    Raises RequestError."""
    of, required = properties_of(schema, name)
    found = []
    for key, own in of.items():
        texts = texts_of(own, schema, f"{name}.{key}")
        front, mark = one(key, texts is not None)
        if texts is None:
            shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
            value = f"{lark.json({**shared, **own})} {lark.mark(mark)}"
        elif texts:
            value = f"{lark.any_of(*map(lark.text, texts))} {lark.mark(mark)}"
        else:
            value = lark.until(mark)
        found.append(f"({front} {value} {between})" + ("" if key in required else "?"))
    return " ".join(found)


_SAID = {"type", "description", "title", "default", "examples"}


def texts_of(own: Any, root: Mapping[str, Any], where: str) -> list[str] | None:
    """Return the texts that a property without quotes may be, none for any; None: it is JSON.
    Raises RequestError for what holds of a string and no grammar without quotes can say."""
    found = resolved(own, root)
    values = found.get("enum", [found[k] for k in ("const",) if k in found])
    if isinstance(values, list) and any(isinstance(v, str) for v in values):
        return [v if isinstance(v, str) else json.dumps(v) for v in values]
    of = kinds(own, root)
    if of and "string" not in of:
        return None
    for part in (found, *(resolved(p, root) for p in _choices(found))):
        extra = sorted({*part} - _SAID - ({"anyOf", "oneOf"} if part is found else set()))
        if extra and (part is found or "string" in kinds(part, root)):
            raise RequestError(f"{show(where)}: {show(extra[0])} of a string that this model writes without "
                               "quotes cannot be kept to: leave it out", "tools")
    return []


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Behind its `$ref`s into the same schema."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(ref := schema.get("$ref"), str):
            return schema
        schema = root
        for part in ref.removeprefix("#/").split("/"):
            schema = schema.get(part, {}) if isinstance(schema, dict) else {}
    return {}
