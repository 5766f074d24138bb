"""A decode engine with storage: what is stored shortens the grant, and the rest is still sent."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Grant
from penstock.core.plan import Arrived, Event, Moved, Output, PeerJoined, RequestId, Retired, Say, Tier
from penstock.core.settings import CoreConfig


def play(core: Core, events: list[Event]) -> list[Output]:
    """Until nothing happens without the peer."""
    out = list[Output]()
    while events:
        advance = core.advance(events)
        core.check()
        out += advance.outputs
        events, plan = [], advance.plan
        if plan is not None:
            events = [Moved(m.id, True) for m in plan.moves if m.src is not Tier.PEER]
            events.append(Retired(plan.step, tuple((9,) for s in plan.samples if s)))
    return out


@pytest.mark.parametrize("hosted", [False, True])
def test_a_page_in_storage_does_not_part_a_request_from_its_pair(hosted: bool) -> None:
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=60, dram_pages=60, disk_pages=99, role="decode",
                           hot_pages=int(hosted), always_hosted=hosted))
    play(core, [PeerJoined(), Arrived(RequestId(0), (1, 2, 3), 2, selects=hosted)])
    for space in (*core.kv.device, *core.kv.host):
        core.kv.tree.evict(space, 99)
    prompt = (1, 2, *range(100, 138))
    out = play(core, [Arrived(RequestId(1), prompt, 3, transfer=7, selects=hosted)])
    assert core.live[RequestId(1)].phase is Phase.RECEIVING
    (grant,) = [o.what for o in out if isinstance(o, Say) and isinstance(o.what, Grant)]
    assert (grant.start, grant.tokens) == (2, 40)
