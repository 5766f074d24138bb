"""A store that does not answer: those who run go on, with less."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Event,
    Finished,
    Moved,
    Output,
    RequestId,
    Retired,
    Started,
    Tier,
)
from penstock.core.settings import CacheGroup, CoreConfig


def play(core: Core, events: list[Event], hangs: bool = True, saves: bool = True) -> set[int]:
    """Who ends before nothing happens any more. If it `hangs`, what touches storage is never answered; copies
    from the device to the host are answered only with `saves`."""
    ended = set[int]()
    while events:
        advance = core.advance(events)
        core.check()
        ended |= {o.rid for o in advance.outputs if isinstance(o, Finished)}
        events, plan = [], advance.plan
        if plan is not None:
            events = [Moved(m.id, True) for m in plan.moves if (saves or m.src is not Tier.HBM)
                      and (not hangs or Tier.DISK not in (m.src, m.dst))]
            events.append(Retired(plan.step, tuple((9,) for s in plan.samples if s)))
    return ended


@pytest.mark.parametrize("disk", [0, 64])
@pytest.mark.parametrize("host", [2, 3, 4, 6, 8])
def test_growth_does_not_wait_for_a_store_that_hangs(host: int, disk: int) -> None:
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=12, dram_pages=host, disk_pages=disk))
    assert play(core, [Arrived(RequestId(0), tuple(range(5)), 2)]) == {0}
    assert bool(core.kv.moves.flying) == bool(disk), "nothing hangs"
    assert play(core, [Arrived(RequestId(k), tuple(range(100 * k, 100 * k + 5)), 12)
                       for k in (1, 2, 3)]) == {1, 2, 3}


def stored(pages: int, **settings: object) -> Core:
    """A core whose storage alone knows a prefix of so many pages, of two tokens each."""
    base: dict[str, object] = dict(page_size=2, rows=4, hbm_pages=64, dram_pages=64, disk_pages=256)
    core = Core(CoreConfig(**(base | settings)))  # type: ignore[arg-type]
    play(core, [Arrived(RequestId(0), tuple(range(2 * pages + 1)), 1)], hangs=False)
    core.kv.tree.evict_all((*core.kv.device, *core.kv.host))
    core.advance(())
    assert len([n for n in core.kv.tree.nodes() if n.ready(core.kv.disk[0])]) == pages
    return core


def test_a_long_prefix_is_read_in_turns() -> None:
    core = stored(30)
    assert core.cfg.store_pages == 8
    events: list[Event] = [Arrived(RequestId(1), tuple(range(61)), 1)]
    reads: list[int] = []
    started: list[Started] = []
    while events:
        advance = core.advance(events)
        core.check()
        events = []
        started += [o for o in advance.outputs if isinstance(o, Started)]
        if advance.plan is not None:
            reads += [len(m.src_pages) for m in advance.plan.moves if m.src is Tier.DISK]
            events = [Moved(m.id, True) for m in advance.plan.moves]
            events.append(Retired(advance.plan.step, tuple((9,) for s in advance.plan.samples if s)))
    assert reads == [8, 8, 8, 6]
    assert [s.disk_tokens for s in started] == [60]


def test_a_request_whose_read_hangs_starts_once_the_device_has_its_pages() -> None:
    """Another request computes the same prefix meanwhile."""
    core = stored(4)
    assert play(core, [Arrived(RequestId(1), tuple(range(9)), 1)]) == set()
    assert core.live[RequestId(1)].phase is Phase.FETCHING, "nothing hangs"
    assert play(core, [Arrived(RequestId(2), tuple(range(9)), 1, cached_max=0)]) == {1, 2}


def test_a_request_that_fetches_does_not_wait_for_host_copies_of_pages_on_the_device() -> None:
    """Half of its prefix was just computed and is on its way to the host, the rest is in storage."""
    core = stored(4)
    assert play(core, [Arrived(RequestId(1), tuple(range(5)), 1, cached_max=0)], saves=False) == {1}
    assert {f.dst.tier for f in core.kv.moves.flying.values()} == {Tier.DRAM}, "nothing hangs"
    advance = core.advance([Arrived(RequestId(2), tuple(range(9)), 1)])
    assert core.live[RequestId(2)].phase is Phase.FETCHING and advance.plan is not None
    landed: list[Event] = [Moved(m.id, True) for m in advance.plan.moves]
    assert play(core, [Retired(advance.plan.step, ()), *landed], hangs=False, saves=False) == {2}


def test_a_prefix_that_stops_coming_serves_as_far_as_it_came() -> None:
    core = stored(30)
    plan = core.advance([Arrived(RequestId(1), tuple(range(61)), 1)]).plan
    assert plan is not None
    first = core.advance([Moved(plan.moves[0].id, True), Retired(plan.step, ())]).plan
    assert first is not None and core.live[RequestId(1)].phase is Phase.FETCHING
    out = core.advance([Moved(first.moves[0].id, False), Retired(first.step, ())])
    core.check()
    assert [o.disk_tokens for o in play_on(core, out) if isinstance(o, Started)] == [16]
    assert not core.live


def play_on(core: Core, advance: Advance) -> list[Output]:
    """What comes of an `advance`, to the end."""
    out = list(advance.outputs)
    while advance.plan is not None:
        plan = advance.plan
        advance = core.advance([*(Moved(m.id, True) for m in plan.moves),
                                Retired(plan.step, tuple((9,) for s in plan.samples if s))])
        core.check()
        out += advance.outputs
    return out


@pytest.mark.parametrize("groups", [1, 3])
def test_hosted_rows_do_not_wait_for_a_store_that_hangs(groups: int) -> None:
    """Reads and writes hang together: the longest row that is not refused still comes to its end."""
    kinds = (CacheGroup(name="full", page_bytes=1, slab_pages=2), CacheGroup(
        name="window", page_bytes=1, window=3, slab_pages=2), CacheGroup(
        name="index", page_bytes=1, selector=True, slab_pages=4))
    core = stored(30, hbm_pages=64 * groups, dram_pages=64 * groups, hot_pages=2, always_hosted=True,
                  **({"groups": kinds} if groups > 1 else {}))
    assert play(core, [Arrived(RequestId(k), tuple(range(1000 * k, 1000 * k + 20)), 4) for k in (7, 8)]
                ) == {7, 8}, "writes"
    assert play(core, [Arrived(RequestId(1), tuple(range(61)), 4)]) == set(), "it waits for its prefix"
    hung = sum(len(f.pairs) for f in core.kv.moves.flying.values())
    assert hung == core.cfg.store_pages, "reads and writes"
    long = Arrived(RequestId(3), tuple(range(5000, 5040)), 1000, selects=True)
    assert play(core, [long]) == {3} and core.counters["drops"] == 0
    if groups == 1:
        assert core.kv.issued > core.cfg.page_size * (64 - hung) - 40, "as long as was promised"


@pytest.mark.parametrize("waits", [True, False])
def test_who_waits_for_storage_goes_on_when_a_row_is_free_where_that_is_wanted(waits: bool) -> None:
    """A busy engine reads ahead all the same."""
    core = stored(12, rows=1, fetch_waits=waits)
    [plan] = [core.advance([Arrived(RequestId(1), tuple(range(500, 509)), 9)]).plan]
    assert plan is not None
    core.advance([Arrived(RequestId(2), tuple(range(25)), 1)])
    assert core.live[RequestId(2)].phase is Phase.FETCHING, "no row is free"
    advance = core.advance([Aborted(RequestId(1)), Retired(plan.step, ((9,),))])
    core.check()
    started = [o for o in advance.outputs if isinstance(o, Started)]
    assert [o.rid for o in started] == ([] if waits else [2])
