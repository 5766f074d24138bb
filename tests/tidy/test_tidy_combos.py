"""The table of combinations: what it says is what the refusals say and what tests there are."""
from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import combos
import proofs
import pytest

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


def of_the_sweep(path: str, name: str) -> set[str]:
    """Words of cases that only the sweep has: of its own, and of fixtures that it or its file asks for.
    {"sweep"}: all of them."""
    tree, beside = ast.parse((ROOT / path).read_text()), (ROOT / path).parent / "conftest.py"
    body = [*tree.body, *(ast.parse(beside.read_text()).body if beside.exists() else ())]
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    asked = {arg.value for node in ast.walk(tree) if isinstance(node, ast.Call)
             and ast.unparse(node.func).endswith("usefixtures") for arg in node.args}
    marks = [mark for node in (functions[name], *(functions[arg] for arg in
             ({arg.arg for arg in functions[name].args.args} | asked) & functions.keys()))
             for mark in node.decorator_list]
    found = {"sweep"} if "pytest.mark.sweep" in map(ast.unparse, marks) else set()
    for cases in (node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.List)):
        swept = [case for case in cases.elts if "mark.sweep" in ast.unparse(case)]
        found |= {word.value for case in swept for word in ast.walk(case)
                  if isinstance(word, ast.Constant) and isinstance(word.value, str)}
    return found


def test_no_cell_of_a_gpu_is_proven_by_cases_that_make_gpu_leaves_out() -> None:
    """Its first list is without the sweep; the second names its cases, of the sweep or not."""
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu:")[2].split("\n\n")[0]
    first = recipe.partition(' -m "not sweep and not soak"')[2].partition("$(ARGS)")[0]
    left_out = [(proof.test, words) for proof in proofs.PROOFS if "gpu" in proof.device.split()
                and (path := proof.test.partition("::")[0]) in first
                and (words := of_the_sweep(path, proof.test.partition("::")[2])
                     & {"sweep", *proof.kind.split(), *proof.place.split(), *proof.across.split()})]
    assert not left_out
    assert of_the_sweep("tests/conformance/test_executor_hosted.py",
                        "test_a_prefix_found_in_either_tier_is_shared") >= {"latent"}
    assert of_the_sweep("tests/e2e/test_pipeline.py", "test_any_stages_overlap_and_tiers_say_the_same"
                        ) == {"sweep"}


def test_every_combination_has_one_answer() -> None:
    """Refused or proven, not both: `answer` asserts it. Words of proofs are words of the dimensions."""
    known = set(proofs.cells())
    for proof in proofs.PROOFS:
        assert set(proof.covers()) <= known, proof
    assert {combos.answer(cell).status for cell in known} == {"yes", "refused", "not tested"}


def test_documents_show_it() -> None:
    assert (ROOT / "docs/reference/compatibility.md").read_text() == combos.document(), "make docs"
    readme = (ROOT / "README.md").read_text()
    assert combos.view() in readme and readme == combos.put_into(readme), "make docs"
