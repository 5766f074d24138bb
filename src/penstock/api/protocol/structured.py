"""The fields by which clients ask for structured output: OpenAI's, vLLM's and SGLang's, as one grammar.

Owns those fields' types. Whether a grammar can be compiled is for others.
"""
from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.api.protocol.body import SamplingBody
from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import ANY_OBJECT, Grammar, Kind


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    schema: dict[str, Any] | None = None        # None: any object
    strict: bool | None = None                  # either way the answer matches
    description: str | None = None              # no chat template reads it


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Structured(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """What the answer must match: one of these, or of SGLang's three."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def grammar_of(r: Structured) -> tuple[str, Grammar] | None:
    """The one field that asks for a grammar, and that. Raises RequestError: there are several."""
    outputs, form = r.structured_outputs or StructuredOutputs(), r.response_format
    asked: list[tuple[str, Kind, dict[str, Any] | list[str] | str | None]] = [
        ("structured_outputs.json", "json_schema", outputs.json),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "choice", outputs.choice),
        ("structured_outputs.grammar", "grammar", outputs.grammar),
        ("guided_json", "json_schema", r.guided_json), ("guided_regex", "regex", r.guided_regex),
        ("guided_choice", "choice", r.guided_choice), ("guided_grammar", "grammar", r.guided_grammar),
        ("json_schema", "json_schema", r.json_schema), ("regex", "regex", r.regex),
        ("ebnf", "grammar", r.ebnf)]
    found = [(name, _made(name, kind, value)) for name, kind, value in asked if value is not None]
    if outputs.json_object:
        found.append(("structured_outputs.json_object", ANY_OBJECT))
    if form is not None and form.type != "text":
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise RequestError("response_format.json_schema goes with the type json_schema",
                               "response_format")
        schema = None if form.json_schema is None else form.json_schema.schema
        found.append(("response_format", ANY_OBJECT if schema is None else
                      _made("response_format", "json_schema", schema)))
    if len(found) > 1:
        raise RequestError(f"{found[0][0]} and {found[1][0]} both say what the answer must match: give one",
                           found[1][0])
    return found[0] if found else None


def _made(name: str, kind: Kind, value: dict[str, Any] | list[str] | str) -> Grammar:
    if kind == "choice" and not value:
        raise RequestError(f"{name} is empty: give at least one choice", name)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    try:
        return Grammar(kind, text).checked()
    except RequestError as e:
        raise RequestError(f"{name}: {e}", name) from None
