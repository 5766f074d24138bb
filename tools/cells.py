"""Combinations of features, and the runs of tests that have shown them to work.

A test says what it covers by a mark, `covers(kind="ordinary", place="resident hosted", ...)`: of each dimension a
word, several, or a dict from a value of its parameters to words. What is left out is the first of its dimension, or
the parameter of that name. `pytest --cells FILE` writes which of them passed; `python tools/combos.py --ran FILE` takes
that into REPORT, from which the tables are written: a combination works because a test of it ran.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

REPORT = Path(__file__).parents[1] / "tests/data/cells.json"
DIMENSIONS: dict[str, dict[str, str]] = {
    "kind": {"ordinary": "full attention", "selecting": "sparse decode (`--sparse-top-k`)",
             "fp8kv": "fp8 KV (`--kv-cache-dtype fp8`; with `--sparse-top-k` from host memory)",
             "latent": "MLA with an indexer (DSA)", "experts": "MoE",
             "windows": "layers with a window, and sinks (gpt-oss)", "states": "hybrid with recurrent states",
             "minimax-m3": "full attention, each KV head's indexer selects blocks (MiniMax-M3)"},
    "place": {"resident": "device", "hosted": "host memory"},          # where decode reads KV from
    "feature": {"plain": "-", "tier": "host tier", "cache": "prefix cache", "paused": "preemption by swap",
                "stored": "storage in files"},
    "across": {"one": "one process", "pp": "`--pp`", "tp": "`--tp`", "nodes": "`--nnodes`", "pair": "prefill/decode",
               "both": "prefill/decode, `--pp` to `--tp`"},
    "device": {"cpu": "CPU", "gpu": "GPU"},
    "weights": {"float32": "float32", "bfloat16": "bfloat16", "fp8": "fp8 in blocks", "channel": "fp8 per channel",
                "int4": "int4", "nvfp4": "NVFP4", "gguf": "GGUF", "packed": "GGUF, `--dtype gguf`"},
}
FIRST = {name: next(iter(words)) for name, words in DIMENSIONS.items()}


class Cell(NamedTuple):
    """One combination, a word of each dimension."""

    kind: str
    place: str
    feature: str
    across: str
    device: str
    weights: str


def cells() -> Iterator[Cell]:
    """All of them, in the order of `DIMENSIONS`."""
    return map(Cell._make, itertools.product(*DIMENSIONS.values()))


def covered(**words: str) -> list[Cell]:
    """Every combination of these words, several of a dimension with blanks between them."""
    given = {**FIRST, **words}
    found = [Cell._make(cell) for cell in itertools.product(*(given[name].split() for name in DIMENSIONS))]
    odd = [word for cell in found for name, word in zip(DIMENSIONS, cell, strict=True) if word not in DIMENSIONS[name]]
    assert given.keys() == DIMENSIONS.keys() and not odd, f"no words of a combination: {odd or words}"
    return found


def of_marks(marks: Iterable[Mapping[str, object]], params: Mapping[str, object], device: str) -> list[Cell]:
    """What a case of a test covers, by the arguments of its marks and its parameters."""
    found: list[Cell] = []
    for mark in ({name: given for name, given in mark.items() if name != "family"} for mark in marks):
        words = {name: str(params[name]) for name in DIMENSIONS
                 if isinstance(params.get(name), str) and params[name] in DIMENSIONS[name]}
        for name, given in mark.items():
            if isinstance(given, Mapping):
                given = " ".join(words for value, words in given.items() if value in params.values())
            words[name] = str(given)
        found += covered(**{**words, "device": device})
    return found


def families_of(marks: Iterable[Mapping[str, object]], device: str) -> list[str]:
    """As the report has them: the `model_type` of a mark's argument `family`, whose models the case runs, there."""
    return [f"{mark['family']} {device}" for mark in marks if "family" in mark]


def report(text: str | None = None) -> list[dict]:
    """Runs, the newest first: `commit`, `date`, `device` and `cells`, of each its test; these are combinations, and
    what `families_of` returns."""
    return json.loads(REPORT.read_text() if text is None else text)


def merged(runs: list[dict], new: dict) -> list[dict]:
    """With another run, whose cells are gone from those before it, as are those that failed in it."""
    gone = {*new["cells"], *new.get("failed", ())}
    kept = [{**run, "cells": {cell: test for cell, test in run["cells"].items() if cell not in gone}} for run in runs]
    same = [run for run in kept if all(run[name] == new[name] for name in ("commit", "date", "device"))]
    cells = {cell: test for run in (*same, new) for cell, test in run["cells"].items()}
    first = {**{name: new[name] for name in ("commit", "date", "device")}, "cells": dict(sorted(cells.items()))}
    return [run for run in (first, *(run for run in kept if run not in same)) if run["cells"]]


def written(runs: list[dict]) -> str:
    """The file's text, a line for each cell."""
    return json.dumps(runs, indent=0) + "\n"


def older(runs: Iterable[Mapping[str, str]], changes: str) -> list[Mapping[str, str]]:
    """Runs before the day of the newest release of a change log, headings as `## 0.2.0 (2027-01-31)`."""
    days = [line.rpartition("(")[2].rstrip(")") for line in changes.splitlines()
            if line.startswith("## ") and not line.startswith("## Not released")]
    return [run for run in runs if days and run["date"] < days[0]]


Pair = tuple[str, str, str, str]


def pairs(cell: Cell) -> Iterator[Pair]:
    """Each two of its words, and where it ran, which is one of all."""
    words = [(name, word) for name, word in zip(DIMENSIONS, cell, strict=True) if name != "device"]
    return ((*one, *other) for one, other in itertools.combinations(words, 2))


def cover(allowed: Iterable[Cell], done: Iterable[Cell] = ()) -> list[Cell]:
    """Few of these that have, with those done, each pair of words that any of them has."""
    left = {cell: {*pairs(cell)} for cell in allowed}
    had = {pair for cell in done for pair in pairs(cell)}
    found = []
    while left:
        left = {cell: more for cell, own in left.items() if (more := own - had)}
        if left:
            best = max(left, key=lambda cell: len(left[cell]))
            found.append(best)
            had |= left[best]
    return found


def combinations(run: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Of a run's cells those that are no families."""
    return [cell for cell in run["cells"] if len(cell.split()) == len(DIMENSIONS)]


def ran(runs: list[dict] | None = None) -> dict[Cell, str]:
    """Of each cell that works, its test and its run."""
    return {Cell._make(cell.split()): f"{run['cells'][cell]} ({run['commit']}, {run['date']}, {run['device']})"
            for run in reversed(report() if runs is None else runs) for cell in combinations(run)}


def families_ran(device: str, runs: list[dict] | None = None) -> set[str]:
    """Families of which a test has run models there, of those that a mark names."""
    cells = [cell.split() for run in (report() if runs is None else runs) for cell in run["cells"]]
    return {family for family, *where in cells if where == [device]}
