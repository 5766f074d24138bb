"""The table of combinations: what it says is what the refusals say and what tests there are."""
from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from penstock.serve.cli import combos, proofs

ROOT = Path(__file__).parents[2]
TESTS = sorted({proof.test for proof in proofs.PROOFS})


@cache
def functions(path: str) -> dict[str, str]:
    """Tests of a file, with their decorators."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("test", TESTS)
def test_a_proof_is_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert "soak" not in functions(path)[name], "make test and make sweep do not run it"


def test_what_a_gpu_is_said_to_do_is_run_by_make_gpu() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu:")[2].split("\n\n")[0]
    run = set(re.findall(r"tests/\S+\.py", recipe))
    files = {proof.test.partition("::")[0] for proof in proofs.PROOFS if "gpu" in proof.device.split()}
    assert files and files <= run


def test_every_combination_has_one_answer() -> None:
    """Refused or proven, not both: `answer` asserts it. Words of proofs are words of the dimensions."""
    known = set(proofs.cells())
    for proof in proofs.PROOFS:
        assert set(proof.covers()) <= known, proof
    assert {combos.answer(cell).status for cell in known} == {"yes", "refused", "untried"}


def test_documents_show_it() -> None:
    assert (ROOT / "docs" / "combinations.md").read_text() == combos.document(), "make docs"
    readme = (ROOT / "README.md").read_text()
    assert combos.view() in readme and readme == combos.put_into(readme), "make docs"
