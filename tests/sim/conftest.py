"""The long sweep, run once for all that look at it."""
from __future__ import annotations

import pytest

from penstock.sim import jobs
from penstock.sim.programs import Report


@pytest.fixture(scope="session")
def long_sweep() -> Report:
    """All modes; other seeds than a quick look starts with."""
    return jobs.spread(range(10_000, 20_000), jobs.cores(), ())
