"""`penstock bench`: its arithmetic, and that no flag of the other kind of bench is ignored."""
from __future__ import annotations

import math
from pathlib import Path

import pytest

import penstock
from penstock.bench.load import Answer, _drafts
from penstock.bench.report import Spread, percentile, table
from penstock.cli.main import main


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([1.0, 2.0], 100) == 2.0
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_spread_shows_median_and_range() -> None:
    assert str(Spread.of([3.0, 1.0, 2.0])) == "2 (1 .. 3)"
    assert str(Spread.of([2500.0])) == "2500 (2500 .. 2500)"


def test_a_server_s_drafts_are_told_where_it_has_some() -> None:
    assert _drafts([Answer(output_tokens=4)]) == ""
    assert _drafts([Answer(drafted=3, accepted=1), Answer(drafted=2)]) == ", 5 drafted and 1 of them accepted"


def test_table_is_aligned_markdown() -> None:
    lines = table(("a", "long header"), [(1, 2), ("wide cell", 3)]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].startswith("|---")


@pytest.mark.parametrize(("words", "said"), [
    (["bench"], "needs a MODEL"),
    (["bench", "demo", "--base-url", "http://127.0.0.1:1"], "not both"),
    (["bench", "demo", "--num-prompts", "3"], "with --base-url"),
    (["bench", "--base-url", "http://127.0.0.1:1", "--runs", "3"], "of a MODEL"),
    (["bench", "--base-url", "http://127.0.0.1:1", "--input-len", "0"], "at least 1"),
    (["bench", "--base-url", "http://127.0.0.1:1"], "does not answer"),
    (["bench", "--base-url", "http://127.0.0.1:1", "--speculative"], "of a MODEL"),
    (["bench", "demo", "--speculative"], "add --speculative-method"),
    (["bench", "demo", "--speculative", "--speculative-method", "ngram", "--plot-hot", "x.png"], "its own"),
])
def test_wrong_use_is_one_clear_line(words: list[str], said: str,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_a_progress_bar_is_for_a_terminal_only():
    """tqdm's `None`: each bar of ours is off where stderr is a file."""
    source = Path(penstock.__file__).parent
    bars = [line for path in source.rglob("*.py") for line in path.read_text().splitlines()
            if "tqdm(" in line]
    assert len(bars) == 7 and all("None)" in line for line in bars)
