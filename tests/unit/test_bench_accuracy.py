"""`bench/device/accuracy.py`: differences by problem, and when an arm is worse than the one it is compared with."""
from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_programs
import pytest

from penstock.engine.client.metrics import RENAMED
from penstock.engine.pd import remote
from penstock.exec.sparse import rows as hot_rows
from penstock.memory import storage


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    return bench_programs.program("device/accuracy.py")


def test_a_pair_of_answers_is_one_measurement(accuracy: ModuleType) -> None:
    """By problem: the shares differ by a quarter in both, and only where problems agree is that more than chance."""
    mean, error = accuracy.paired([1, 1, 0, 0], [1, 1, 1, 0])
    assert mean == -0.25 and error == pytest.approx(0.25)
    mean, error = accuracy.paired([0, 1, 1, 0], [1, 0, 1, 1])
    assert mean == -0.25 and error == pytest.approx(math.sqrt(11 / 12) / 2)
    assert accuracy.paired([1.0], [0.0]) == (1.0, math.inf)


def test_verdicts(accuracy: ModuleType) -> None:
    gate, fault = accuracy.ARMS["hosted, pp 2"], accuracy.ARMS["fault: delivered row not admitted"]
    right, worse = [1.0] * 100, [0.0] * 25 + [1.0] * 75
    assert accuracy.verdict(gate, right, right) == "" and accuracy.verdict(gate, worse, right) == "below"
    assert accuracy.verdict(gate, right, worse) == "above"
    assert accuracy.verdict(gate, [0.0, *right[1:]], right) == ""       # one of a hundred: within two standard errors
    assert accuracy.verdict(fault, worse, right) == "found"
    assert accuracy.verdict(fault, right, right) == accuracy.verdict(fault, [0.0, *right[1:]], right) == "NOT FOUND"


def test_what_a_step_reads(accuracy: ModuleType) -> None:
    assert [accuracy.budget_of(share, context) for share, context in (
        (0.0, 4096), (1 / 8, 4096), (1 / 4, 0), (1 / 16, 1024))] == [0, 512, 256, 128]


def test_an_arm_that_never_did_what_it_is_for_says_so(accuracy: ModuleType) -> None:
    arms, did = accuracy.ARMS, {"misses": 3.0, "pauses": 0.0}
    assert accuracy.idle(arms["hosted"], did) == accuracy.idle(arms["1/8"], {}) == ""
    assert accuracy.idle(arms["hosted, preempted"], did) == "no pauses"
    assert accuracy.idle(arms["hosted, pair"], {}) == "no misses, no deliveries"


def test_what_arms_are_for_is_counted_under_names_that_engines_have(accuracy: ModuleType) -> None:
    """One that no engine has would say of every such arm that it did nothing."""
    told = {*RENAMED, *(f"storage_{name}_total" for name in storage.COUNTED)}
    source = inspect.getsource(hot_rows) + inspect.getsource(remote)
    assert [name for names in accuracy.COUNTED.values() for name in names
            if name not in told and f'"{name}' not in source] == []


def asked(accuracy: ModuleType, **more: object) -> Any:
    given = {"model": "m", "tasks": ["needles"], "contexts": [4096, 32000], "gate_contexts": [4096], "gsm8k": "file",
             "seconds": None, "limit": 300, "rows": 64, "threads": 0, "device": "cuda", "dtype": "bfloat16", "hot": 0,
             "device_kv": "8G", "hosted_kv": "4G", "host_kv": "6G", "tight_kv": "256M",
             "base": None}
    return accuracy.Asked(Namespace(**given | more))


def test_what_arms_are_asked(accuracy: ModuleType) -> None:
    """Short problems alone, where requests must outgrow the device; none whose share would be another arm's."""
    arms, (one, two, short) = accuracy.ARMS, (("needles", 4096), ("needles", 32000), ("gsm8k", 0))
    of = asked(accuracy).problems
    assert of(arms["dense"]) == of(arms["hosted"]) == [short, one, two] and of(arms["1/16"]) == [one, two]
    assert of(arms["hosted, pp 2"]) == [short, one] and of(arms["hosted, preempted"]) == [short]
    assert asked(accuracy, gsm8k=None).problems(arms["hosted, preempted"]) == [one]


def test_flags_of_arms(accuracy: ModuleType) -> None:
    def of(name: str) -> str:
        return " ".join(asked(accuracy).flags(accuracy.ARMS[name]))

    assert "--kv-cache-memory-bytes 4G --kv-offloading-size 6G --host-decode always --sparse-top-k 4000" in of("hosted")
    assert "--kv-cache-memory-bytes 256M --kv-offloading-size 6G --host-decode auto --sparse-top-k 128" in of(
        "hosted, preempted")
    assert "--kv-cache-memory-bytes 8G" in of("dense") and "--kv-offloading-size" not in of("dense")


def test_an_arm_that_the_time_is_over_for_is_given_up(accuracy: ModuleType) -> None:
    row = asked(accuracy, seconds=1e-9).arm("dense")
    assert "seconds are over" in row["error"] and "answers" not in row
    assert accuracy.compared([row])[0][-1] == "FAILED" and "seconds are over" in accuracy.shown(row)


def test_only_what_ranks_or_the_engine_found_is_refused(accuracy: ModuleType) -> None:
    row = {"arm": "fault: delivered row not admitted", "against": "hosted", "error": "no memory", "refused": []}
    assert accuracy.compared([row])[0][-1] == "FAILED"
    assert accuracy.compared([row | {"refused": ["AssertionError: row 0"]}])[0][-1] == "refused"
    assert accuracy.REFUSED.findall("INFO penstock: AssertionError: row 0\n") == ["AssertionError: row 0"]


def test_what_arms_are_compared_with_runs_too(accuracy: ModuleType) -> None:
    assert accuracy.with_bases(["hosted, pp 2", "dense"], None) == ["dense", "1/8", "hosted", "hosted, pp 2"]
    assert accuracy.with_bases(["1/8", "hosted"], "cpu") == ["cpu", "1/8", "hosted"]
    assert accuracy.with_bases(["cpu"], None) == ["cpu"]


def test_an_arm_whose_base_gave_nothing_says_so(accuracy: ModuleType) -> None:
    row = {"arm": "1/8", "against": "dense", "told": {}, "answers": {"recall": [{"score": 1.0, "given": "x"}]}}
    failed = {"arm": "dense", "against": "dense", "error": "no memory"}
    for rows in ([row], [failed, row]):
        assert accuracy.compared(rows)[-1] == ("1/8", "recall", "1 of 1", "", "", "NO BASE")


def test_results_are_written_after_each_arm(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Path) -> None:
    written, tables = list[list[str]](), list[int]()
    monkeypatch.setattr(accuracy.Asked, "arm", lambda self, name: {"arm": name, "against": "dense", "error": "none"})
    monkeypatch.setattr(accuracy, "write", lambda name, out, rows, shown: written.append([r["arm"] for r in rows]))
    monkeypatch.setattr(Path, "write_text", lambda path, text: tables.append(text.count("FAILED")))
    monkeypatch.setattr(sys, "argv", ["accuracy.py", str(tmp_path), "m", "--arms", "1/8", "--at-once", "1"])
    accuracy.main()
    assert [len(rows) for rows in written] == tables == [1, 2] and written[-1] == ["dense", "1/8"]


def test_lines_compare_with_the_arm_that_is_named(accuracy: ModuleType) -> None:
    def row(arm: str, *scores: float) -> dict[str, object]:
        answers = [{"score": score, "given": str(score)} for score in scores]
        return {"arm": arm, "against": accuracy.ARMS[arm].base, "told": {"misses": 1},
                "answers": {"needles, 4096": answers}}

    lines = accuracy.compared([row("dense", 1, 1), row("1/8", 1, 0), row("hosted", 1, 0),
                               {"arm": "fault: delivered row not admitted", "against": "hosted", "error": "died",
                                "refused": ["AssertionError"]}])
    assert lines[0][2:] == ("2 of 2", "", "", "")
    assert lines[1][2:5] == ("1 of 2", "-0.500 (1.000)", "1 of 2") and lines[2][3] == "+0.000 (0.000)"
    assert lines[3] == ("fault: delivered row not admitted", "all", "-", "-", "-", "refused")
