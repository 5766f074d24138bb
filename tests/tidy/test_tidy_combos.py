"""The table of combinations: what it says is what the refusals say and what tests have run."""
from __future__ import annotations

import ast
import json
from pathlib import Path

import cells
import combos
import pytest

from penstock.model import registry

ROOT = Path(__file__).parents[2]
RUNS = cells.report()
TESTS = sorted({test for run in RUNS for test in run["cells"].values()})


@pytest.mark.parametrize("test", TESTS)
def test_what_ran_is_a_test_that_says_what_it_covers(test: str) -> None:
    path, _, name = test.partition("::")
    found = {node.name: node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert ".covers(" in (ROOT / path).read_text() and name in found


def test_what_a_gpu_is_said_to_do_is_run_by_make_gpu() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu:")[2].split("\n\n")[0].split()
    run = {word.partition("::")[0] for word in recipe if word.startswith("tests/")}
    tests = {test for one in RUNS for cell, test in one["cells"].items() if "gpu" in cell.split()}
    files = {test.partition("::")[0] for test in tests}
    assert files and all(file in run or str(Path(file).parent) in run for file in files), files - run


def test_no_run_is_older_than_the_release_before() -> None:
    assert not cells.older(RUNS, (ROOT / "CHANGELOG.md").read_text()), "make test, sweep and gpu; combos.py --ran"


def test_every_combination_has_one_answer() -> None:
    """Refused or shown to work, not both: `answer` asserts it."""
    known = list(cells.cells())
    assert {combos.answer(cell).status for cell in known} <= {"yes", "covered", "refused", "not tested"}
    assert {cell for run in RUNS for cell in cells.combinations(run)} <= {" ".join(cell) for cell in known}
    assert {*cells.families_ran("cpu"), *cells.families_ran("gpu")} <= registry.FAMILIES.keys()
    assert cells.REPORT.read_text() == cells.written(RUNS) and all({*run} == {
        "commit", "date", "device", "cells"} for run in json.loads(cells.REPORT.read_text()))


def test_documents_show_it() -> None:
    assert (ROOT / "docs/reference/compatibility.md").read_text() == combos.document(), "make docs"
    readme = (ROOT / "README.md").read_text()
    assert combos.view() in readme and readme == combos.put_into(readme), "make docs"
