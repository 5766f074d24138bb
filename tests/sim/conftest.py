"""The long sweep, run once for all that look at it."""
from __future__ import annotations

import pytest

from penstock.sim import jobs
from penstock.sim.programs.sweeps import Report


@pytest.fixture(scope="session", params=[pytest.param(2_000, marks=pytest.mark.sweep),
                                         pytest.param(10_000, marks=pytest.mark.soak)], ids="{} seeds".format)
def long_sweep(request: pytest.FixtureRequest) -> Report:
    """All modes; other seeds than a quick look starts with."""
    return jobs.spread(range(10_000, 10_000 + request.param), jobs.cores(), ())
