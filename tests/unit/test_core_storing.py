"""Which sealed pages go on to storage: all that the host has, however they came there."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Moved, RequestId, Retired, Tier
from penstock.core.settings import CoreConfig


@pytest.mark.parametrize("hot, always", [(0, False), (1, False), (1, True)],
                         ids=["written through", "twins", "computed in host pages"])
def test_what_the_host_has_is_stored(hot: int, always: bool) -> None:
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=40, dram_pages=40, disk_pages=64, hot_pages=hot,
                           always_hosted=always))
    events: list[Event] = [Arrived(RequestId(0), tuple(range(9)), 12, selects=True)]
    while events:
        advance = core.advance(events)
        core.check()
        events = []
        if advance.plan is not None:
            events = [Moved(m.id, True) for m in advance.plan.moves]
            events.append(Retired(advance.plan.step, tuple((100,) for s in advance.plan.samples if s)))
    sealed = list(core.have.tree.nodes())
    assert len(sealed) == 10 and not core.live
    assert all(node.ready(core.have.host[0]) and node.ready(core.have.disk[0]) for node in sealed)
    assert not [f for f in core.have.copies.flights.values() if f.dst.tier is Tier.DISK]
