"""A store that does not answer: those who run go on, with less."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Finished, Moved, RequestId, Retired, Tier
from penstock.core.settings import CoreConfig


def play(core: Core, events: list[Event]) -> set[int]:
    """Who ends before nothing happens any more. What touches storage is never answered."""
    ended = set[int]()
    while events:
        advance = core.advance(events)
        core.check()
        ended |= {o.rid for o in advance.outputs if isinstance(o, Finished)}
        events, plan = [], advance.plan
        if plan is not None:
            events = [Moved(m.id, True) for m in plan.moves if Tier.DISK not in (m.src, m.dst)]
            events.append(Retired(plan.step, tuple((9,) for s in plan.samples if s)))
    return ended


@pytest.mark.parametrize("disk", [0, 64])
@pytest.mark.parametrize("host", [2, 3, 4, 6, 8])
def test_growth_does_not_wait_for_a_store_that_hangs(host: int, disk: int) -> None:
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=12, dram_pages=host, disk_pages=disk))
    assert play(core, [Arrived(RequestId(0), tuple(range(5)), 2)]) == {0}
    assert bool(core.have.copies.flights) == bool(disk), "nothing hangs"
    assert play(core, [Arrived(RequestId(k), tuple(range(100 * k, 100 * k + 5)), 12)
                       for k in (1, 2, 3)]) == {1, 2, 3}
