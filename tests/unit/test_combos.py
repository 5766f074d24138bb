"""Combinations: answers follow the refusals and the report of runs, and are found by their words."""
from __future__ import annotations

import json
from pathlib import Path

import cells
import combos
import pytest
from cells import Cell

from penstock.config.settings.refuse import Refusal

CODES_ON_A_GPU = Cell("ordinary", "resident", "plain", "both", "gpu", "packed")


@pytest.fixture(autouse=True)
def asked_anew():
    yield
    combos.answer.cache_clear()
    combos._proven.cache_clear()
    combos._together.cache_clear()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combos, "REFUSED", [*combos.REFUSED, Refusal(
        lambda c, _: c.model.dtype == "gguf" and c.device.device == "cuda", ("model.dtype", "device.device"),
        "refused by this test")])


def test_a_cell_turns_with_its_refusal_and_its_run(monkeypatch) -> None:
    combos.answer.cache_clear()
    combos._together.cache_clear()
    monkeypatch.setattr(combos, "_proven", dict)
    assert combos.answer(CODES_ON_A_GPU).status == "not tested"
    combos.answer.cache_clear()
    monkeypatch.setattr(combos, "_proven", lambda: {CODES_ON_A_GPU: "tests/a.py::test_it"})
    assert combos.answer(CODES_ON_A_GPU) == combos.Answer("yes", ("tests/a.py::test_it",))


def test_a_cell_is_covered_if_each_two_of_its_words_ran_together_on_its_device(monkeypatch) -> None:
    asked = Cell("latent", "hosted", "tier", "pp", "gpu", "fp8")
    others = {asked._replace(**{name: word}): "tests/a.py::test_it" for name, word in (
        ("kind", "states"), ("place", "resident"), ("feature", "cache"), ("across", "one"), ("weights", "int4"))}
    for given, status in ((others, "covered"), (dict(list(others.items())[:2]), "not tested"), (
            {cell._replace(device="cpu"): test for cell, test in others.items()}, "not tested")):
        combos.answer.cache_clear()
        combos._together.cache_clear()
        monkeypatch.setattr(combos, "_proven", lambda given=given: given)
        found = combos.answer(asked)
        assert found.status == status and set(found.why) <= {" ".join(cell) for cell in given}
        assert (len(found.why) >= 2) == (status == "covered")


def test_a_cover_has_each_pair_that_is_allowed_in_few_cells() -> None:
    allowed = [cell for cell in cells.cells() if cell.device == "cpu" and not (
        cell.kind == "latent" and cell.weights == "gguf")]
    found, want = cells.cover(allowed), {pair for cell in allowed for pair in cells.pairs(cell)}
    assert {pair for cell in found for pair in cells.pairs(cell)} == want and set(found) <= set(allowed)
    widest = sorted(map(len, cells.DIMENSIONS.values()))[-2:]
    assert widest[0] * widest[1] <= len(found) < 1.4 * widest[0] * widest[1]
    assert not cells.cover(allowed, found)


def test_a_refused_cell_has_the_reason(refused: None) -> None:
    found = combos.answer(CODES_ON_A_GPU)
    assert found.status == "refused" and "refused by this test" in found.why[0]


def test_a_run_of_what_is_refused_is_a_mistake(refused: None, monkeypatch) -> None:
    monkeypatch.setattr(combos, "_proven", lambda: {CODES_ON_A_GPU: "tests/a.py::test_it"})
    with pytest.raises(AssertionError, match="which is refused"):
        combos.answer(CODES_ON_A_GPU)


def test_words_choose(refused: None, capsys) -> None:
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


def run(date: str, passed: dict[str, str], failed: tuple[str, ...] = (), device: str = "a CPU") -> dict:
    return {"commit": "abc", "date": date, "device": device, "cells": passed, "failed": list(failed)}


def test_a_run_takes_the_place_of_those_before_it() -> None:
    one, two, three = ("ordinary resident plain one cpu float32", "ordinary resident tier one cpu float32",
                       "ordinary resident plain one gpu float32")
    runs = cells.merged([], run("2026-01-01", {one: "a", two: "b"}))
    runs = cells.merged(runs, run("2026-01-02", {three: "c"}, device="a GPU"))
    runs = cells.merged(runs, run("2026-01-03", {one: "d"}))
    assert [(r["date"], r["cells"]) for r in runs] == [
        ("2026-01-03", {one: "d"}), ("2026-01-02", {three: "c"}), ("2026-01-01", {two: "b"})]
    assert cells.ran(runs)[Cell(*one.split())] == "d (abc, 2026-01-03, a CPU)"
    runs = cells.merged(runs, run("2026-01-03", {two: "e"}, failed=(three,)))
    assert [(r["date"], r["cells"]) for r in runs] == [("2026-01-03", {one: "d", two: "e"})], "a failure is no yes"
    assert cells.report(cells.written(runs)) == runs


def test_a_run_says_of_which_families_models_ran_on_a_device() -> None:
    cell, family = "windows resident plain tp gpu float32", cells.families_of([{"family": "gemma4_text"}, {}], "gpu")
    assert [" ".join(one) for one in cells.of_marks([{
        "kind": "windows", "across": "tp", "family": "gemma4_text"}], {}, "gpu")] == [cell]
    runs = cells.merged([], run("2026-01-01", dict.fromkeys((cell, *family), "a"), device="a GPU"))
    assert cells.families_ran("gpu", runs) == {"gemma4_text"} and not cells.families_ran("cpu", runs)
    assert [*map(" ".join, cells.ran(runs))] == cells.combinations(runs[0]) == [cell]
    assert not cells.families_ran("gpu", cells.merged(runs, run("2026-01-02", {}, failed=tuple(family))))


def test_a_run_is_older_than_the_newest_release() -> None:
    runs = [run("2026-01-01", {}), run("2026-02-01", {})]
    log = "# Changes\n\n## Not released yet (0.3.0)\n\n## 0.2.0 (2026-01-15)\n\n## 0.1.0 (2025-12-01)\n"
    assert cells.older(runs, log) == runs[:1]
    assert not cells.older(runs, "## Not released yet (0.1.0)\n")


def test_marks_and_parameters_say_what_a_case_covers() -> None:
    marks = [{"kind": {"bounds": "selecting latent"}, "place": "hosted"}, {"feature": "tier cache"}]
    params = {"kinds": "bounds", "weights": "fp8", "place": "resident"}
    assert [" ".join(cell) for cell in cells.of_marks(marks, params, "gpu")] == [
        "selecting hosted plain one gpu fp8", "latent hosted plain one gpu fp8",
        "ordinary resident tier one gpu fp8", "ordinary resident cache one gpu fp8"]
    assert not cells.of_marks(marks[:1], {"kinds": "windowed"}, "cpu")
    with pytest.raises(AssertionError, match="no words"):
        cells.of_marks([{"kind": "dense"}], {}, "cpu")


def test_what_tests_have_run_goes_into_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, new = tmp_path / "cells.json", tmp_path / "new.json"
    file.write_text("[]")
    new.write_text(json.dumps(run("2026-01-01", {" ".join(CODES_ON_A_GPU): "a"})))
    monkeypatch.setattr(cells, "REPORT", file)
    monkeypatch.setattr(combos, "REPORT", file)
    assert combos.main(["--ran", str(new)]) == 0
    assert cells.ran()[CODES_ON_A_GPU] == "a (abc, 2026-01-01, a CPU)"
