"""Choices that only cost time if they are wrong: no token shows them, so they are looked at one by one."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.kv import claims
from penstock.core.kv.prefix_tree import Tree
from penstock.core.lifecycle import Place
from penstock.core.plan import (
    Aborted,
    Arrived,
    HotUse,
    Rates,
    RequestId,
    Spilled,
    Started,
    StepId,
    StepPlan,
    Tier,
)
from penstock.core.settings import CacheGroup


def cached(d: Driver, rid: int) -> tuple[int, int, int]:
    """Tokens that `rid` found on the device, on the host and in storage."""
    (started,) = [o for o in d.out if isinstance(o, Started) and o.rid == rid]
    return started.hbm_tokens, started.dram_tokens, started.disk_tokens


def test_what_was_used_last_is_evicted_last() -> None:
    d = Driver(hbm_pages=8)
    for rid, first in ((1, 0), (2, 100), (3, 0)):        # 3 reads what 1 has left
        d.arrive(rid, range(first, first + 9), max_new=1)
        d.run()
    assert cached(d, 3) == (8, 0, 0)
    d.arrive(4, range(200, 217), max_new=1)              # five pages, and only four are free
    d.run()
    d.arrive(5, range(9), max_new=1)
    d.run()
    assert cached(d, 5) == (8, 0, 0)
    d.arrive(6, range(100, 109), max_new=1)
    d.run()
    assert cached(d, 6)[0] < 8


def test_a_row_goes_to_the_device_if_that_has_room() -> None:
    d = Driver(dram_pages=16, hot_pages=1)
    d.arrive(1, range(9), selects=True)
    assert d.core.live[RequestId(1)].place is Place.DEVICE


def test_pages_of_a_group_are_evicted_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=4)
    d = Driver(hbm_pages=26, groups=groups)
    d.arrive(1, range(60), max_new=1)
    d.run()
    asked: list[int] = []
    real = Tree.evict
    monkeypatch.setattr(Tree, "evict", lambda tree, space, n: (asked.append(n), real(tree, space, n))[1])
    d.arrive(2, range(100, 160), max_new=1)
    assert max(asked) == 15              # windows grow page by page


def resized(plans: list[StepPlan]) -> list[int]:
    return [len(resize.pages) for plan in plans for resize in plan.resizes]


def test_a_hot_buffer_grows_by_what_its_row_misses_and_gives_way() -> None:
    d = Driver(hbm_pages=16, dram_pages=64, hot_pages=2, hot_pages_max=7, always_hosted=True)
    d.arrive(1, range(36), max_new=40, selects=True)
    assert not resized(d.retire())                     # nobody has said what it misses
    for absurd in ((RequestId(1), 0, 0), (RequestId(1), 5, 6), (RequestId(7), 5, 5)):
        d.tell(HotUse(StepId(2), (absurd,)))
    assert not resized(d.retire())
    seen = []
    for _ in range(4):                                 # two pages more each time, up to seven
        d.tell(HotUse(StepId(3), ((RequestId(1), 10, 5),)))
        seen += resized(d.retire())
    assert seen == [4, 6, 7]
    assert d.core.stats()["hot_buffer_pages_max"] == 7
    d.arrive(2, range(100, 140), max_new=4)            # eleven pages of sixteen
    seen = resized(d.retire())
    assert seen and seen[0] < 7


def test_a_hot_buffer_that_misses_nothing_does_not_grow() -> None:
    d = Driver(hbm_pages=16, dram_pages=64, hot_pages=2, hot_pages_max=7, always_hosted=True)
    d.arrive(1, range(36), max_new=40, selects=True)
    d.tell(HotUse(StepId(2), ((RequestId(1), 10, 0),)))
    assert not resized(d.retire())


@pytest.mark.parametrize(("prompt", "spills"), [(28, 1), (8, 0)])
def test_hot_buffers_that_starve_send_a_whole_row_to_the_host(prompt: int, spills: int) -> None:
    d = Driver(hbm_pages=16, dram_pages=64, hot_pages=2, hot_pages_max=7)
    d.arrive(1, range(prompt), max_new=12, selects=True)
    d.arrive(2, range(100, 160), max_new=12, selects=True)        # in device pages the two do not fit
    for step in range(8):
        d.tell(HotUse(StepId(step), ((RequestId(2), 10, 5),)))
        d.land() if d.moves else d.retire()
    assert d.core.counters["spills"] == spills and d.state(2) == "decode.host"
    assert d.state(1) == ("decode.host" if spills else "decode.device")
    assert d.core.stats()["hot_buffer_pages_max"] == 7


def test_a_short_request_takes_a_small_hot_buffer() -> None:
    d = Driver(hbm_pages=16, dram_pages=32, hot_pages=6, always_hosted=True)
    (plan,) = d.arrive(1, range(5), max_new=4, selects=True)         # two pages, ever
    assert [len(units) for units in plan.binds[0].hot] == [2]
    d.arrive(2, range(5), max_new=40, selects=True)
    (plan,) = d.retire()
    assert [len(units) for units in plan.binds[0].hot] == [6]


def test_a_promotion_is_one_move() -> None:
    d = Driver(hbm_pages=20, dram_pages=64, hot_pages=1, budget=64)
    d.arrive(1, range(33), max_new=30, selects=True)
    while d.moves or d.state(1) != "decode.device":
        d.land() if d.moves else d.retire()
    d.tell(Spilled(RequestId(1)), Arrived(RequestId(2), tuple(range(100, 156)), 7))
    up: list[int] = []
    while d.state(1) != "decode.device":            # 2 has taken what it had on loan, and ends
        plans = d.land() if d.moves else d.retire()
        up += [len(m.src_pages) for plan in plans for m in plan.moves if m.dst is Tier.HBM]
    assert len(up) == 2 and up[0] > 1 == up[1]           # what was open follows


@pytest.mark.parametrize(("max_new", "missed", "back"), [(60, 8, True), (60, 1, False), (5, 64, False)])
def test_a_row_comes_back_if_it_misses_more_than_it_loads(max_new: int, missed: int, back: bool) -> None:
    """It has some ten pages on the host alone, and a step selects two. Absurd counts are no counts."""
    d, rid = Driver(hbm_pages=30, dram_pages=64, hot_pages=2, budget=8), RequestId(1)
    d.arrive(1, range(41), max_new=max_new, selects=True)
    d.retire()
    d.tell(Spilled(rid), Arrived(RequestId(2), tuple(range(100, 202)), 5))     # takes what it has on loan
    while d.state(1) != "decode.host":
        d.land() if d.moves else d.retire()
    absurd = (rid, 1, 2), (rid, -1, -1), (rid, 0, 0), (RequestId(7), 1, 1)
    d.tell(HotUse(StepId(1), ((rid, 80, missed), *absurd)))
    assert d.core.live[rid].tables[0].device.count(None) > 8 and d.state(1) == "decode.host"
    d.tell(Aborted(RequestId(2)))
    d.retire()
    assert (d.state(1) == "decode.to_device") is back


def test_a_refused_trial_takes_nothing_from_others() -> None:
    """The device alone would hold request 4, so it is tried there first; beside request 2 it does not fit."""
    d = Driver(hbm_pages=28, dram_pages=200, hot_pages=1)
    d.arrive(1, range(16), max_new=1)
    d.run()                                                # three pages are cached
    d.arrive(2, range(100, 120), max_new=60, selects=True)
    d.arrive(3, range(200, 228), max_new=60, selects=True)
    d.retire()
    d.tell(Spilled(RequestId(3)))
    while d.state(3) != "decode.host":
        d.land() if d.moves else d.retire()
    lent = list(d.core.live[RequestId(3)].tables[0].device)
    assert len([copy for copy in lent if copy is not None]) > 4
    d.arrive(4, range(300, 384), max_new=4, selects=True)
    assert d.core.live[RequestId(4)].place is Place.HOST
    assert list(d.core.live[RequestId(3)].tables[0].device) == lent
    d.tell(Aborted(RequestId(4)))
    d.arrive(5, range(16), max_new=1)
    d.retire()
    assert cached(d, 5) == (12, 0, 0)


def test_hosted_rows_share_what_the_host_has() -> None:
    d = Driver(dram_pages=32, hot_pages=1, always_hosted=True)
    for rid in (1, 2):
        d.arrive(rid, range(17), max_new=20, selects=True)
        while d.core.live[RequestId(rid)].num_output < 2:
            d.retire()
    one, two = (d.core.live[RequestId(rid)].tables[0].host for rid in (1, 2))
    assert one[:4] == two[:4] and cached(d, 2)[1] == 16


def test_writing_to_storage_holds_at_most_a_sixteenth_of_the_host() -> None:
    d = Driver(dram_pages=64, disk_pages=64, hbm_pages=32)
    d.arrive(1, range(61), max_new=1)
    while d.plans:
        d.retire()
    for move in [m for m in d.moves if m.dst is Tier.DRAM]:
        d.moves.remove(move)
        d.moves.insert(0, move)
        d.land()
    stored = sum(len(m.src_pages) for m in d.moves if m.dst is Tier.DISK)
    assert stored == 4


def test_a_stored_prefix_is_fetched_where_that_is_faster() -> None:
    for page_us, found in ((1.0, 8), (1e9, 0)):
        d = Driver(hbm_pages=4, dram_pages=4, disk_pages=64)
        d.tell(Rates(disk_page_us=page_us, prefill_token_us=1.0))
        for rid, first in ((1, 0), (2, 100), (3, 200), (4, 0)):
            d.arrive(rid, range(first, first + 9), max_new=1)
            d.run()
        assert cached(d, 4) == (0, 0, found)


def test_what_the_host_has_of_a_row_on_its_way_there_is_not_evicted() -> None:
    d = Driver(hbm_pages=32, dram_pages=16, hot_pages=1)
    d.arrive(1, range(17), max_new=30, selects=True)
    claims.drop_mirrors(d.core.kv, d.core.live[RequestId(1)])
    while d.core.live[RequestId(1)].num_output < 6:
        d.retire()
    d.land()                                             # four pages are on the host, the next is not
    d.tell(Spilled(RequestId(1)))
    assert d.state(1) == "decode.to_host"
    assert all(copy is not None and copy.pins for copy in d.core.live[RequestId(1)].tables[0].host[:4])


def test_pages_without_a_state_behind_them_are_evicted_first_and_a_state_goes_with_its_page() -> None:
    d = Driver(hbm_pages=64, step_tokens=8, max_len=96, groups=(
        CacheGroup(name="full", page_bytes=0), CacheGroup(name="state", page_bytes=100, snapshot=True,
                                                          page_tokens=8)))
    tree, (full, state) = d.core.kv.tree, d.core.kv.device
    d.arrive(1, [*range(23)], max_new=1)
    d.run()
    d.arrive(2, [*range(100, 121)], max_new=1)
    d.run()
    ends = sorted([node for node in tree.nodes() if state in node.copies and not node.copies[state].inner],
                  key=lambda node: node.last_used)
    assert [(node.depth, node.serves) for node in ends] == [(4, True), (4, True)]
    assert [node.depth for node in tree.nodes() if not node.serves] == [5, 5]
    assert tree.evict(full, 2) == 2 and not [node for node in tree.nodes() if node.depth > 4]
    assert tree.evict(full, 1) == 1 and [state in node.copies for node in ends] == [False, True]
    assert [node.depth for node in tree.nodes() if not node.serves] == [3]        # the state before has 2
    d.arrive(3, [*range(100, 130)], max_new=1)
    d.run()
    assert cached(d, 3) == (16, 0, 0)


def test_states_that_lead_to_others_are_evicted_before_ends_and_forks() -> None:
    d = Driver(hbm_pages=64, step_tokens=8, max_len=96, groups=(
        CacheGroup(name="full", page_bytes=0), CacheGroup(name="state", page_bytes=100, snapshot=True,
                                                          page_tokens=8)))
    prefix, space = [*range(20)], d.core.kv.device[1]
    d.arrive(1, [*prefix, *range(100, 121)], max_new=1)
    d.run()
    d.arrive(2, [*prefix, *range(200, 221)], max_new=1)
    d.run()
    assert cached(d, 2) == (16, 0, 0)
    stats = d.core.stats()
    assert stats['prefix_cache_cut_total{group="state"}'] == 4            # five pages are there, of 20 tokens
    assert stats['cache_group_pages{tier="hbm",group="state"}'] == 8 == len(space.pool.held)
    assert stats['cache_group_bytes{tier="hbm",group="state"}'] == 8 * 100
    ends = {node.depth * 4: copy.inner for node in d.core.kv.tree.nodes()
            if (copy := node.copies.get(space)) is not None}
    assert ends == {8: True, 16: False, 24: True, 32: True, 40: False}           # of both ways
    assert d.core.kv.tree.evict(space, 5) == 5            # of 8 and twice 24 and 32
    d.arrive(3, [*prefix, *range(100, 121), 1], max_new=1)
    d.run()
    d.arrive(4, [*prefix, *range(300, 321)], max_new=1)
    d.run()
    assert cached(d, 3) == (40, 0, 0) and cached(d, 4) == (16, 0, 0)
