"""Rows in host pages beside a store that hangs: the device has what the store does not bring."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.kv import claims
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Aborted,
    Arrived,
    Event,
    Expired,
    Finished,
    Moved,
    Promoted,
    RequestId,
    Retired,
    Spilled,
    Tier,
)
from penstock.core.settings import CoreConfig


def play(core: Core, events: list[Event], hangs: bool = True, steps: int = 1_000
         ) -> tuple[set[int], list[Event]]:
    """Who ends; what reads storage is never answered if it `hangs`."""
    ended, again = set[int](), True
    while again and steps:
        advance = core.advance(events)
        core.check()
        ended |= {o.rid for o in advance.outputs if isinstance(o, Finished)}
        again, events = advance.plan is not None, []
        if advance.plan is not None:
            steps -= 1
            events = [Moved(m.id, True) for m in advance.plan.moves if not hangs or m.src is not Tier.DISK]
            events.append(Retired(advance.plan.step, tuple((9,) for s in advance.plan.samples if s)))
    return ended, events


def hung(always: bool, pages: int = 40, selects: bool = False) -> Core:
    """The host's copies of a prefix are being read for a request that gave up, and has computed it: on the
    device, or, if it `selects`, maybe in host pages."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=pages, dram_pages=80, disk_pages=200, hot_pages=1,
                           always_hosted=always))
    play(core, [Arrived(RequestId(0), tuple(range(9)), 1)], hangs=False)
    core.kv.tree.evict_all((*core.kv.device, *core.kv.host))
    play(core, [Arrived(RequestId(1), tuple(range(9)), 1, selects=selects)])
    r = core.live[RequestId(1)]
    assert r.phase is Phase.FETCHING
    ended, _ = play(core, [Expired(r.rid, r.phase.value, r.visit)])
    assert ended == {1} and len(core.kv.moves.flying) == 1
    return core


def test_a_hosted_row_does_not_load_from_a_store_that_hangs() -> None:
    core = hung(always=True)
    ended, _ = play(core, [Arrived(RequestId(2), tuple(range(9)), 3, selects=True)])
    assert ended == {2}, core.live[RequestId(2)].phase


def test_a_spill_does_not_wait_for_a_store_that_hangs() -> None:
    core = hung(always=False)
    _, events = play(core, [Arrived(RequestId(2), tuple(range(9)), 20, selects=True)], steps=4)
    assert core.live[RequestId(2)].state.name == "decode.device"
    ended, _ = play(core, [*events, Spilled(RequestId(2))])
    assert ended == {2}, core.live[RequestId(2)].phase


def test_growth_does_not_wait_for_a_pause_that_waits_for_a_store_that_hangs() -> None:
    """The younger gives way. Its pages are on the device, and the host's copies never come."""
    core = hung(always=False, pages=12)
    ended, _ = play(core, [Arrived(RequestId(2), (1, 2, 3), 19), Arrived(RequestId(3), tuple(range(9)), 8)])
    assert ended == {2, 3}, [r.phase for r in core.live.values()]


def test_a_hosted_row_does_not_load_what_is_on_its_way_to_the_device() -> None:
    """Request 2 decodes from host pages of its own, equal to those of request 1, which only storage has kept.
    Request 4 reads them there, and starts while request 2 is promoted: they are not on the device yet."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=22, dram_pages=120, disk_pages=200, hot_pages=1))
    one, two, four = map(RequestId, (1, 2, 4))
    new: list[Event] = [Arrived(rid, tuple(range(5)), n, selects=True) for rid, n in ((one, 14), (two, 60))]
    _, events = play(core, new, hangs=False, steps=1)
    while one in core.live:
        _, events = play(core, [*events, Spilled(one), Spilled(two)], hangs=False, steps=1)
    _, events = play(core, events, hangs=False, steps=2)
    core.kv.tree.evict_all((*core.kv.device, *core.kv.host))
    long = (*range(5), *(9,) * 13, *range(500, 550))       # longer than the device pool
    _, events = play(core, [*events, Arrived(four, long, 3, selects=True)], steps=1)
    assert (core.live[two].state.name, core.live[four].phase) == ("decode.host", Phase.FETCHING)
    plan = core.advance([*events, Promoted(two)]).plan
    assert plan is not None and core.live[two].state.name == "decode.to_device"
    events = [Retired(plan.step, tuple((9,) for s in plan.samples if s))]
    plan = core.advance(events).plan           # request 4 is in line, and nothing has been loaded
    assert plan is not None
    flying = core.kv.moves.flying.items()
    loads: list[Event] = [Moved(id, True) for id, f in flying if f.src.tier is Tier.DRAM]
    ended, _ = play(core, [*loads, Retired(plan.step, tuple((9,) for s in plan.samples if s))])
    assert ended == {two, four}, core.live[four].phase


def test_a_private_host_page_is_not_given_out_while_its_load_flies() -> None:
    """Request 2 decodes from host pages of its own, equal to those that the tree has from request 1. It ends
    while it is promoted: the load still reads its pages, and fills pages that the tree has by now."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=30, dram_pages=120, hot_pages=1))
    one, two = map(RequestId, (1, 2))
    new: list[Event] = [Arrived(rid, tuple(range(5)), n, selects=True) for rid, n in ((one, 14), (two, 60))]
    _, events = play(core, new, steps=1)
    while one in core.live:
        _, events = play(core, [*events, Spilled(one), Spilled(two)], steps=1)
    _, events = play(core, events, steps=2)
    core.kv.tree.evict_all(core.kv.device)
    plan = core.advance([*events, Promoted(two)]).plan
    assert plan is not None and core.live[two].state.name == "decode.to_device"
    flights = [f for f in core.kv.moves.flying.values() if f.src.tier is Tier.DRAM]
    read = [source.page for f in flights for source, target in f.pairs
            if source.node is None and target.node is not None]
    assert read, "no load of a private page into a page of the tree"
    events = [Retired(plan.step, tuple((9,) for s in plan.samples if s))]
    pool = core.kv.host[0].pool
    for _ in range(4):                          # the load has not been answered
        plan = core.advance([*events, Aborted(two)]).plan
        events = [] if plan is None else [Retired(plan.step, tuple((9,) for s in plan.samples if s))]
        kept = pool.held.union(*(units for _, units in pool.limbo))
        assert kept.issuperset(read), "a page that a load reads is free"
    assert two not in core.live


@pytest.mark.parametrize("always", [False, True], ids=["written through", "computed in host pages"])
def test_what_was_computed_beside_a_read_that_hangs_is_cached(always: bool) -> None:
    """Or as long as a store hangs, nobody starts from a prefix that it was to bring."""
    core = hung(always, selects=True)
    core.kv.tree.evict_all(core.kv.device)
    ended, _ = play(core, [Arrived(RequestId(2), tuple(range(9)), 1, selects=True)])
    assert ended == {2}, "it waits for the store"
    assert len(core.kv.moves.flying) == 1 and core.counters["prefix_dram_hits"] == 8


def test_a_spill_waits_for_pages_that_are_behind_a_fence() -> None:
    """The hot buffer needs two pages more than the row has for itself, and a request that has just ended had
    three: its last step may still touch them."""
    one, two, ended = map(RequestId, (0, 1, 2))
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=15, dram_pages=80, hot_pages=4, wait_pages=0))
    prompt = tuple(range(9))
    _, events = play(core, [Arrived(one, prompt, 30, selects=True)], steps=1)
    others = [Arrived(two, prompt, 30, selects=True), Arrived(ended, (50, 51, 52), 30)]
    _, events = play(core, [*events, *others], steps=5)
    [last] = [e for e in events if isinstance(e, Retired)]
    assert claims.drop_mirrors(core.kv, core.live[two])
    core.advance([Spilled(two)])
    plan = core.advance(events).plan           # the open page goes to the host, and nothing else is missing
    assert plan is not None and plan.step == last.step + 1 and core.live[two].state.name == "decode.to_host"
    pool = core.kv.arenas[Tier.HBM].pools[0]
    assert pool.free == 0
    core.advance([*(Moved(m.id, True) for m in plan.moves), Aborted(ended)])
    assert pool.in_limbo and core.live[two].state.name == "decode.to_host", "it gives way to pages on their way"
    core.advance([Retired(plan.step, tuple((9,) for s in plan.samples if s))])
    assert core.live[two].state.name == "decode.host"
