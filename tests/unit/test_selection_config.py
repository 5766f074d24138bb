"""The number under which pages of a selecting decode are kept apart."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity, indexer_selection, selection_of
from penstock.config.settings.tree import KVConfig
from penstock.kernels.choose.select import SelectRule

ONE = Selection(selector="bounds", version=1, unit=8, budget=512, sinks=16, window=64, dense=(0, 3))


def test_whatever_changes_what_is_computed_changes_the_identity():
    others = [replace(ONE, selector="other"), replace(ONE, version=2), replace(ONE, unit=16),
              replace(ONE, budget=504), replace(ONE, sinks=8), replace(ONE, window=72),
              replace(ONE, dense=(0,)), replace(ONE, dense=(3,)), replace(ONE, dense=()),
              replace(ONE, sinks=64, window=16)]
    numbers = {attention_identity(s) for s in (ONE, *others)}
    assert len(numbers) == 1 + len(others)
    assert all(0 < n < 2**63 for n in numbers)
    assert attention_identity(replace(ONE)) == attention_identity(ONE)


def test_another_process_has_the_same():
    code = ("from penstock.config.request.selection import *; print(attention_identity(Selection("
            "selector='bounds', version=1, unit=8, budget=512, sinks=16, window=64, dense=(0, 3))))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(said.stdout) == attention_identity(ONE)


@pytest.mark.parametrize("unit", [4, 5, 8, 16])
@pytest.mark.parametrize(("sinks", "window"), [(16, 64), (0, 1), (5, 33), (17, 7)])
def test_the_least_budget_is_what_the_rule_of_the_op_needs(unit, sinks, window):
    """Whatever the position, the budget holds all that is always kept and one unit more."""
    rule = SelectRule(unit=unit, sink=sinks, window=window)
    selection = replace(ONE, unit=unit, sinks=sinks, window=window)
    assert selection.least == rule.least_units * unit
    kept = max(position // unit + 1 - (rule.scored(position)[1] - rule.scored(position)[0])
               for position in range(200, 240))
    assert selection.least >= (kept + 1) * unit


def test_budgets_are_whole_units():
    kv = KVConfig(sparse_top_k=510, sparse_block_size=8, sparse_dense_layers=("3", "0", "3"))
    selection = selection_of(kv)
    assert selection == Selection(selector="bounds", version=2, unit=8, budget=504, sinks=16, window=64,
                                  dense=(0, 3))
    assert selection.within(100).budget == 96 and selection.least == 96
    assert selection_of(KVConfig()) is None


def test_what_an_indexer_chooses_is_not_the_requests_to_say():
    """Short and long ones select, pages are shared by all, and another budget is refused with both."""
    native = indexer_selection(2048)
    for asked in (None, 2048):
        assert native.of(SamplingParams(sparse_top_k=asked), 5, 3) is native
    for asked in (0, 512, 4096):
        with pytest.raises(RequestError, match=f"sparse_top_k is {asked}: this model's indexer selects 2048") as e:
            native.of(SamplingParams(sparse_top_k=asked), 5, 3)
        assert e.value.param == "sparse_top_k"
    assert attention_identity(native) == 0 and native.least == native.budget == 2048
