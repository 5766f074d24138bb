"""The bugs that a simulator of engine, pair and tiers must find, and what plays each of them here.

`seeded_bugs.tsv` has a line for each: its name, what stands for it, and a remark. That is a name in
`mutants`, or `path::name` of a test.
"""
from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]
LINES = [line.split("\t") for line in (Path(__file__).parent / "seeded_bugs.tsv").read_text().splitlines()]


def is_played(what: str) -> bool:
    path, _, name = what.rpartition("::")
    if not path:
        return name in MUTANTS
    tree = ast.parse((ROOT / path).read_text()).body
    return name.startswith("test_") and any(isinstance(x, ast.FunctionDef) and x.name == name for x in tree)


@pytest.mark.parametrize("bug,played_by", [line[:2] for line in LINES])
def test_a_bug_of_the_list_is_played(bug: str, played_by: str) -> None:
    assert not [what for what in played_by.split(",") if not is_played(what)], bug


def test_the_list_is_whole() -> None:
    """29 that happened to somebody, and of ten that were found in drafts those that are not among them."""
    assert [len(line) for line in LINES] == [3] * 36
    assert len({bug for bug, _, _ in LINES}) == 36
