"""Schemas that generators write by themselves, and white space between JSON's tokens."""
from __future__ import annotations

import json
import random

import pytest
from scripted import fake

from penstock.config.request.grammar import ANY_OBJECT, Grammar
from penstock.config.request.schemas import DECIMAL, FORMATS, ascii_classes
from penstock.exec.sampling.grammar import BadGrammar, Compiler, Vocabulary
from penstock.text.tools.lark import Lark

RAW = fake.byte_level()
COMPILER = Compiler(Vocabulary(RAW.to_str(), (RAW.token_to_id(fake.EOS),)))
VALUE = {"a": [1, {"b": "x"}], "c": {"d": {"e": [True, None]}}}


def takes(grammar: Grammar, text: str) -> bool:
    found = COMPILER.compile(grammar)
    ids = RAW.encode(text, add_special_tokens=False).ids
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def schema(**fields) -> Grammar:
    return Grammar("json_schema", json.dumps(fields))


@pytest.mark.parametrize("form", [{}, {"indent": 1}, {"indent": 2}, {"indent": 4}, {"indent": "\t"},
                                  {"separators": (",", ":")}, {"separators": (" , ", " : ")}])
def test_json_in_the_usual_forms_is_admitted(form):
    text = json.dumps(VALUE, **form)
    assert takes(ANY_OBJECT, text)
    assert takes(Grammar("lark", (lark := Lark(lambda _: None)).source(lark.json({"type": "object"}))), text)


@pytest.mark.parametrize("blank", ["\n\n", "  ", "\t", " \n", "\n \n", "\n" * 60])
def test_more_white_space_than_that_is_not(blank):
    lark = Lark(lambda _: None)
    call = Grammar("lark", lark.source(lark.json({"type": "object"})))
    for grammar in (ANY_OBJECT, call):
        assert not takes(grammar, f'{{{blank}"a": 1}}')
        assert not takes(grammar, f'{{"a":{blank}1}}')


def test_a_model_that_likes_line_breaks_comes_to_an_end():
    """White space wherever the grammar admits it: never more than a line break and its indentation."""
    at, some = COMPILER.compile(schema(type="object", properties={"a": {"type": "integer", "maximum": 9}},
                                       required=["a"], additionalProperties=False)), random.Random(1)
    [newline] = RAW.encode("\n", add_special_tokens=False).ids
    text, breaks = "", 0
    for _ in range(200):
        mask = memoryview(at.compute_bitmask()).cast("I")
        admitted = [32 * n + bit for n, word in enumerate(mask) for bit in range(32) if word >> bit & 1]
        if not admitted or at.is_accepting():
            break
        token = newline if newline in admitted else some.choice(
            [t for t in admitted if RAW.decode([t]).strip()] or admitted)
        breaks += token == newline
        text += RAW.decode([token])
        at.consume_token(token)
    assert json.loads(text)["a"] <= 9 and "\n\n" not in text and breaks <= 5


@pytest.mark.parametrize("fields, text", [
    ({"type": "array", "uniqueItems": False}, "[1,1]"),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
     '{"a":1}'),
    ({"type": "object", "propertyNames": {}, "dependentRequired": {}}, "{}"),
    *(({"type": "string", "format": name}, '"x y"') for name in (
        "path", "file-path", "password", "binary", "byte", "url", "regex", "json-string", "color")),
    ({"type": "object", "properties": {"uniqueItems": {"type": "string", "format": "path"}},
      "required": ["uniqueItems"]}, '{"uniqueItems":"x"}'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, '"1.5"'),
    ({"type": "string", "pattern": DECIMAL}, '"-.5"'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?=1)1$"}]}, "1.5"),
    ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, "7"),
    ({"type": "string", "format": None, "pattern": None, "description": None, "maxLength": 2**63 - 1}, '"x"'),
    ({"type": "array", "items": {"const": None}, "maxItems": 2**63 - 1, "unevaluatedItems": {}}, "[null]"),
    ({"type": "object", "required": None, "properties": {"format": {"type": "null"}}, "maxProperties": 2**31,
      "unevaluatedProperties": True}, '{"format":null}')])
def test_what_generators_write_is_taken(fields, text):
    assert takes(schema(**fields), text)


@pytest.mark.parametrize("low, high", [
    (-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**53) - 1, 2**53 + 1), (-9.223372036854776e18, 1.8e308)])
@pytest.mark.parametrize("kind, names", [
    ("integer", ("minimum", "maximum")), ("number", ("exclusiveMinimum", "exclusiveMaximum"))])
def test_bounds_past_the_exact_integers_are_taken_and_kept(low, high, kind, names):
    """Every answer is within them; numbers past 2^53 are not made."""
    bounded = schema(**{"type": kind, names[0]: low, names[1]: high})
    assert takes(bounded, "7") and takes(bounded, str(2**53 - 1))
    assert takes(bounded, str(1 - 2**53)) is (low < 0)
    for past in (2**64, -(2**63) - 1, 2**53 + 3):
        assert not takes(bounded, str(past))


@pytest.mark.parametrize("value", [2**53, -(2**60), 1.5, "9007199254740993"])
def test_a_value_that_is_exact_is_taken(value):
    assert takes(schema(enum=[value, None]), json.dumps(value)) and not takes(schema(const=value), "1")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_is_enforced(name):
    assert not takes(schema(type="string", format=name), '"x y"')


@pytest.mark.parametrize("text", ['"-"', '"."', '""', '"1.2.3"'])
def test_a_decimal_has_a_digit(text):
    assert not takes(schema(type="string", pattern=DECIMAL), text)


@pytest.mark.parametrize("fields, word", [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum"),
    ({"type": "integer", "maximum": -(2**63)}, "maximum"), ({"multipleOf": 2**60}, "multipleOf"),
    ({"const": 2**53 + 1}, "const"), ({"enum": ["a", {"b": [-(2**64) - 1]}]}, "enum"),
    ({"type": "array", "items": {"exclusiveMaximum": -(2**60)}}, "exclusiveMaximum"),
    ({"type": "object", "properties": {"ab": {"type": "integer", "multipleOf": 3}},
      "patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]}, "multipleOf"),
    ({"type": "object", "properties": {"x": {
        "type": "object", "properties": {"ab": {"type": "integer"}},
        "patternProperties": {"^a": {"multipleOf": 5}}}}}, "multipleOf")])
def test_what_cannot_be_kept_is_refused_at_the_check(fields, word):
    with pytest.raises(BadGrammar, match=word):
        COMPILER.compile(schema(**fields))


@pytest.mark.parametrize("regex, plain", [
    (r"\d{2,4}", "[0-9]{2,4}"), (r"[\d.]+", "[0-9.]+"), (r"\w\W", "[A-Za-z0-9_][^A-Za-z0-9_]"),
    (r"\\d", r"\\d"), (r"[^\w-]", "[^A-Za-z0-9_-]"), (r"\[\d", r"\[[0-9]"), (r"[\D]", "[[^0-9]]"),
    ("\\", "\\")])
def test_classes_of_a_regular_expression_are_ascii(regex, plain):
    assert ascii_classes(regex) == plain


def test_a_digit_is_an_ascii_digit():
    assert takes(Grammar("regex", r"\d{2}"), "42") and not takes(Grammar("regex", r"[a\D]"), "4")
    assert takes(Grammar("regex", r"[a\D]"), "b")
