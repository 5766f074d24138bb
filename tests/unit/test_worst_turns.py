"""No turn of the planner is much longer than its median: `bench/planning.py --worst` at small sizes.

Turns are counted in bytecode instructions, which a busy machine does not change.
"""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _load():
    spec = importlib.util.spec_from_file_location("worst", ROOT / "bench" / "worst.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module            # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


worst = _load()
SCENE = worst.Scene(rows=64, calm=8, after=8, choices=16, meter=worst.instructions)
GROWTH = 1.2                 # times what one takes where there are few, it may take where there are many


def not_yet(case, size, reason, rows=64):
    return pytest.param(case, size, rows, marks=pytest.mark.xfail(reason=reason))


@pytest.mark.parametrize(("case", "size", "rows"), [
    ("admission", 16_384, 64), ("abort", 32_768, 64), ("decoding", 64, 64), ("short-no-host", 64, 64),
    ("queue", 500, 64), ("pause", 16_384, 64), ("hits", 32_768, 64), ("forks", 2_048, 64), ("drop", 32_768, 64),
    ("resume", 32_768, 64),
    ("hits-host", 16_384, 64), ("pause-short", 81_920, 64),
    ("spill", 16_384, 64), ("promote", 16_384, 16),
    ("short-line", 3_000, 16),
    ("flush", 2_048, 64),
])
def test_no_turn_is_longer_than_twenty_of_its_median(case, size, rows):
    result = worst.CASES[case].measure(replace(SCENE, rows=rows), size)
    assert not result.stopped and result.turns >= SCENE.after
    assert not result.fails, f"{result.longest:,.0f} instructions are {result.multiple:.1f} times the median"


def test_one_admission_of_a_large_burst_takes_what_one_of_a_small_burst_does():
    few, many = (worst.CASES["burst"].measure(SCENE, n) for n in (32, 256))
    assert many.longest / 256 <= GROWTH * few.longest / 32


def test_turns_that_use_as_many_cached_pages_take_as_long():
    result = worst.CASES["eviction"].measure(SCENE, 1_024)
    assert result.turns > 96 and result.multiple < 3


def test_metrics_take_as_long_however_many_wait():
    few, many = (worst.CASES["stats"].measure(SCENE, n) for n in (100, 1_000))
    assert many.longest <= GROWTH * few.longest


def test_the_program_prints_a_line_for_each_case_that_it_was_asked_for():
    program = ROOT / "bench" / "planning.py"
    run = subprocess.run([sys.executable, program, "--worst", "ends", "burst", "--size", "8", "--rows", "1",
                          "--count"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.count("8 rows, 1 rows: longest turn") == 2, run.stderr
    assert run.stdout.endswith("all within their bars\n")


def test_a_result_fails_at_its_bar_and_not_below_it():
    def result(longest, **bar):
        return worst.Result(case="x", size=1, longest=longest, median=2.0, turns=9, pause=0.0, **bar)

    assert not result(40.0).fails and result(40.5).fails
    assert not result(99.0, bar_ms=100.0).fails and result(101.0, bar_ms=100.0).fails
