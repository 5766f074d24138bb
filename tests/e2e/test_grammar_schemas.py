"""300 drawn schemas and 40 regular expressions: what the demo says under them is valid, as others see it."""
from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock import LLM, SamplingParams
from penstock.config.request.grammar import Grammar
from penstock.exec.sampling.grammar import BadGrammar, Compiler
from penstock.model.weights.locate import locate
from penstock.text.grammar.vocabulary import of_tokenizer
from penstock.text.tokenizer import open_tokenizer

pytestmark = pytest.mark.soak
NUM_SCHEMAS, NEW, AT_ONCE = 300, 48, 16
NAMES = st.sampled_from(["a", "name", "é", "a b", "x-y", '"q"', "$id", "0"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000),
                    st.sampled_from(["", "a", "é\n", "\\", "☃"]))


def _range(draw, low: str, high: str, least: int, most: int) -> dict[str, int]:
    a, b = sorted((draw(st.integers(least, most)), draw(st.integers(least, most))))
    return {**({low: a} if draw(st.booleans()) else {}), **({high: b} if draw(st.booleans()) else {})}


@st.composite
def leaves(draw) -> dict:
    match draw(st.sampled_from(["string", "pattern", "format", "integer", "number", "boolean", "null", "enum",
                                "const"])):
        case "string":
            return {"type": "string", **_range(draw, "minLength", "maxLength", 0, 9)}
        case "pattern":
            return {"type": "string", "pattern": draw(st.sampled_from(
                ["^[a-c]{2,4}$", "^\\d+$", "x", "^(ab|c)*$", "[^a]$"])), "maxLength": 12}
        case "format":
            return {"type": "string", "format": draw(st.sampled_from(["date", "time", "uuid", "ipv4"]))}
        case "integer":
            return {"type": "integer", **_range(draw, "minimum", "maximum", -50, 5000)}
        case "number":
            return {"type": "number", **_range(draw, "exclusiveMinimum", "maximum", -5, 500)}
        case "enum":
            return {"enum": draw(st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr))}
        case "const":
            return {"const": draw(SCALARS)}
        case kind:
            return {"type": kind}


@st.composite
def objects(draw, inner) -> dict:
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    return {"type": "object", "properties": properties,
            "required": [n for n in properties if draw(st.booleans())],
            "additionalProperties": draw(st.one_of(st.just(False), st.just(False), inner))}


@st.composite
def arrays(draw, inner) -> dict:
    first = draw(st.lists(inner, max_size=2))
    return {"type": "array", "items": draw(inner), **({"prefixItems": first} if first else {}),
            **_range(draw, "minItems", "maxItems", 0, 4)}


# A reference is looked up from the root, so what has definitions is the outermost.
SCHEMAS = st.recursive(leaves(), lambda inner: st.one_of(
    objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda it: {"anyOf": it}),
), max_leaves=6).flatmap(lambda found: st.sampled_from([found, found, {
    "$defs": {"it": found}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 3}]))

REGEXES = [
    "[0-9]{3}-[0-9]{4}", "(yes|no|maybe)", "[A-Z][a-z]{2,8}", "a*b+c?", "(ab){2,5}", "[^x]{3}y",
    "\\d{1,3}(\\.\\d{1,3}){3}", "#[0-9a-f]{6}", "[a-z]+@[a-z]+\\.(com|org)", "(\\+|-)?[0-9]+(\\.[0-9]+)?",
    "\\w{1,5} \\w{1,5}", "[01]{8}", "(Mon|Tue|Wed|Thu|Fri)day", "[a-c]{0,3}[x-z]{1,3}", "\\(\\d{3}\\)",
    "\\[(a|b)(,(a|b)){0,4}\\]", "é{1,3}", "[α-ω]{2}", "☃|☂", "\"[^\"]{0,5}\"", "[ \\t]x", "a.b",
    "(a|b|c|d){4}", "(one|two)( (three|four)){1,2}", "v[0-9]+\\.[0-9]+", "0x[0-9A-F]{2,4}",
    "([a-z]{2}-){2}[a-z]{2}", "[1-9][0-9]{0,2}(,[0-9]{3}){0,2}", "(true|false|null)", "\\$[0-9]{1,4}",
    "[A-Z]{3}[0-9]{3}", "x{3}|y{5}", "(((a)))", "[^\\n]{1,4}!", "\\d\\d:\\d\\d", "(foo|bar|baz){1,3}",
    "q(u[aeiou])?", "[!-/]{3}", "-?[0-9]", "(a?b?c?d?)e",
]


def drawn() -> list[str]:
    found: dict[str, None] = {}

    @settings(max_examples=4 * NUM_SCHEMAS, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(SCHEMAS)
    def collect(schema) -> None:
        if len(found) < NUM_SCHEMAS:
            found[json.dumps(schema)] = None
    collect()
    return list(found)


def test_answers_that_end_are_valid() -> None:
    schemas = drawn()
    assert len(schemas) == NUM_SCHEMAS and len(REGEXES) == 40
    llm = LLM("demo")
    try:
        tokenizer = open_tokenizer(locate("demo"), None)
        assert tokenizer is not None
        compiler = Compiler(of_tokenizer(tokenizer))
        refused: dict[str, int] = {}
        work: list[Grammar] = []
        for kind, text in [*(("json_schema", s) for s in schemas), *(("regex", r) for r in REGEXES)]:
            grammar = Grammar(kind, text)
            try:
                compiler.compile(grammar)
                work.append(grammar)
            except BadGrammar as e:             # by name, and never a token under it
                refused[str(e)[:60]] = refused.get(str(e)[:60], 0) + 1
        ended = {"json_schema": 0, "regex": 0}
        for at in range(0, len(work), AT_ONCE):
            mine = work[at:at + AT_ONCE]
            outputs = llm.generate(["Here is an example:\n"] * len(mine), [
                SamplingParams(grammar=g, temperature=1.0, seed=at + n, max_tokens=NEW)
                for n, g in enumerate(mine)], use_tqdm=False)
            for grammar, output in zip(mine, outputs, strict=True):
                [answer] = output.outputs
                if answer.finish_reason == "length":
                    continue
                ended[grammar.kind] += 1
                if grammar.kind == "regex":
                    assert re.fullmatch(grammar.text, answer.text), (grammar.text, answer.text)
                else:
                    jsonschema_rs.validator_for(json.loads(grammar.text), validate_formats=True).validate(
                        json.loads(answer.text))
        print(ended, refused)
        assert ended["json_schema"] > 150 and ended["regex"] > 25 and sum(refused.values()) < 30
    finally:
        llm.close()
