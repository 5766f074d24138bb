"""Combinations: answers follow the refusals and the proofs, and are found by their words."""
from __future__ import annotations

from pathlib import Path

import combos
import pytest
from proofs import Cell

CODES_ON_A_GPU = Cell("ordinary", "resident", "plain", "both", "gpu", "packed")


@pytest.fixture(autouse=True)
def asked_anew():
    yield
    combos.answer.cache_clear()
    combos._proven.cache_clear()


def test_a_cell_turns_with_its_refusal_and_its_proof(monkeypatch) -> None:
    refused = combos.answer(CODES_ON_A_GPU)
    assert refused.status == "refused" and "weights stay quantised on a CPU only" in refused.why[0]
    combos.answer.cache_clear()
    monkeypatch.setattr(combos, "REFUSED", [r for r in combos.REFUSED
                                            if "weights stay quantised on a CPU" not in r.why])
    assert combos.answer(CODES_ON_A_GPU).status == "not tested"
    combos.answer.cache_clear()
    monkeypatch.setattr(combos, "_proven", lambda: {CODES_ON_A_GPU: ("tests/a.py::test_it",)})
    assert combos.answer(CODES_ON_A_GPU) == combos.Answer("yes", ("tests/a.py::test_it",))


def test_a_proof_of_what_is_refused_is_a_mistake(monkeypatch) -> None:
    combos.answer.cache_clear()
    monkeypatch.setattr(combos, "_proven", lambda: {CODES_ON_A_GPU: ("tests/a.py::test_it",)})
    with pytest.raises(AssertionError, match="which is refused"):
        combos.answer(CODES_ON_A_GPU)


def test_words_choose(capsys) -> None:
    assert combos.main([*CODES_ON_A_GPU, "latent"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert told == [f"{kind} resident plain both gpu packed: refused" for kind in ("ordinary", "latent")]
    with pytest.raises(SystemExit):
        combos.main(["tpu"])
    assert "'tpu' is no word" in capsys.readouterr().err


def test_the_view_goes_between_its_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text(f"before\n{combos._START}\nold\n{combos._END}\nafter\n")
    assert combos.main(["--into", str(file)]) == 0
    text = file.read_text()
    assert text == f"before\n{combos._START}\n{combos.view()}\n{combos._END}\nafter\n"
    with pytest.raises(SystemExit):
        combos.main(["--into", str(file), "gpu"])


def test_equal_rows_are_one_row() -> None:
    rows = [([("a",), ("x",)], ["1"]), ([("a",), ("y",)], ["1"]), ([("b",), ("x",)], ["1"]), ([("b",), ("y",)], ["2"])]
    assert combos._folded(rows, 1) == [([("a",), ("x", "y")], ["1"]), *rows[2:]]
    assert combos._folded(rows[:1] + rows[2:3], 0) == [([("a", "b"), ("x",)], ["1"])]
