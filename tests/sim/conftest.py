"""The long sweep, run once for all that look at it."""
from __future__ import annotations

import pytest

from penstock.sim import jobs
from penstock.sim.programs import Report


@pytest.fixture(scope="session")
def long_sweep() -> Report:
    """All modes, and as many pairs again: what is rare in both is met there."""
    report = jobs.spread(range(10_000, 13_000), jobs.cores(), ())
    report.merge(jobs.spread(range(20_000, 22_000), jobs.cores(), ("--mode", "pair=1")))
    return report
