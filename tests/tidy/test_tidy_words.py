"""The dictionary of `tests/words.py` holds: documents use the field's words, in short sentences."""
from __future__ import annotations

import ast
import json

import pytest
import words
from words import documents, long_ones, measured


@pytest.mark.parametrize("name", sorted(measured()))
def test_documents_and_modules_have_no_more_private_words_than_before(name: str) -> None:
    wrong = words.over(name, measured()[name], json.loads(words.CEILINGS.read_text()))
    assert not wrong, "\n".join(wrong)


def test_titles_of_decisions_name_the_decision() -> None:
    """Their bodies are as they were written."""
    titles = [text.partition("\n")[0] for name, text in documents().items() if "/adr/0" in name]
    assert len(titles) > 40 and not [title for title in titles if words.riddles(title)]


@pytest.mark.parametrize(("text", "wrong"), [
    ("Two lanes are told.", 2), ("`src/penstock/exec/pipeline/lanes.py` adds", 0), ("[TP](lanes.md)", 0),
    ("`--dram-bytes` is old", 1), ("hbm and HBM", 2), ("a hostedness", 0), ("It was MENDED", 1)])
def test_the_dictionary_sees(text: str, wrong: int) -> None:
    banned = {pattern: n for pattern, n in words.found(text).items() if pattern in words.WORDS["banned"]}
    assert sum(banned.values()) == wrong


@pytest.mark.parametrize(("code", "wrong"), [
    ('raise ConfigError(f"{x} is told")', 1), ('x = "is told to whom"', 0), ('log("%s: nobody waits", x)', 1),
    ('port: Annotated[int, "as the crew does"] = 1', 1), ('HELP: dict = {"a": "the lanes of a stage"}', 1),
    ('add(help="the lanes of a stage")', 1), ('def told(): """Is told."""', 0)])
def test_the_dictionary_sees_what_code_shows_to_users(code: str, wrong: int) -> None:
    found = words.found(words.spoken(ast.parse(code)))
    assert sum(n for pattern, n in found.items() if pattern in words.WORDS["banned"]) == wrong


def test_openings_of_docstrings_are_seen() -> None:
    code = """
class A:
    'Of a row.'
    def f(self):
        'As `g`, twice.'
    def g(self):
        'Offer it, as `f` does.'
"""
    assert words.openings(ast.parse(code)) == 2


def test_long_sentences_are_seen() -> None:
    assert long_ones("word " * 26)[words.LONG_SENTENCE] == 1
    assert not long_ones("word " * 25)[words.LONG_SENTENCE]
    assert not long_ones("- " + "word " * 20 + "\n- " + "word " * 20)[words.LONG_SENTENCE]
    assert long_ones("x" * 121)[words.LONG_LINE] == 1
    assert not long_ones("| " + "x" * 121 + " |")[words.LONG_LINE]
