"""Agents in virtual time: what more host memory and decode from host memory change (`bench/agents.py`)."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from penstock.bench.report import percentile


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agents_table", Path(__file__).parents[2] / "bench" / "agents.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agents_whose_contexts_do_not_fit_compute_them_again(table: ModuleType) -> None:
    """Their contexts grow to 3.2 million tokens. A session that holds its device pages for longer makes others wait,
    and then all return in the order in which their pages were evicted."""
    slow, fast = table.machine(10, 15_000), table.machine(1, 60_000)

    def found(host_tokens: int, hosted: bool, rates: object) -> tuple[float, float]:
        r = table.row(host_tokens, 0, hosted, scale=24, seed=0, rates=rates)
        return r.hits / r.largest_hits, percentile(r.ttft_s, 50)

    small, large = found(2_000_000, False, slow), found(3_000_000, False, slow)
    assert 0.55 < small[0] < 0.75 and large[0] > 0.99
    assert found(2_000_000, False, fast)[0] > 0.87, "the machine decides, not only the memory"
    hosted = found(2_000_000, True, slow)
    assert hosted[0] > small[0] and hosted[1] < small[1] / 4, "requests wait for device pages"
