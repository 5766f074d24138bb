"""The eviction order has one entry a page at any size, and a flush goes in portions."""
from __future__ import annotations

from penstock.core.kv.page_table import pin, unpin
from penstock.core.kv.pages import PARTS
from penstock.core.kv.pool import Pool
from penstock.core.kv.prefix_tree import Copy, TierGroup, Tree
from penstock.core.lifecycle import Phase
from penstock.core.plan import Aborted, Finished, Flushed, Group, RequestId, Started, Tier
from tests.doubles.driver import Driver


def test_hits_and_evictions_of_a_large_pool_leave_one_entry_a_page() -> None:
    pages, per = 2000, 20
    space = TierGroup(Tier.HBM, Group(0), Pool("hbm", pages))
    tree, paths = Tree([space]), []
    for i in range(pages // per):
        node, path = tree.root(0), []
        for k in range(per):
            node = tree.child(node, (i, k))
            tree.ref(node)
            tree.attach(node, space, Copy(space.pool.acquire(1)[0]))
            path.append(node)
        tree.unref(path)
        paths.append(path)
    for path in paths[::2] * 4:
        for node in path:
            tree.ref(node)
            pin(node.copies[space])
        assert len(space.order) == pages - per
        for node in path:
            unpin(node.copies[space])
            tree.update_evictable(node)
        tree.unref(path)
        assert len(space.order) == pages
    half = [node for path in paths[1::2] for node in reversed(path)]
    assert [copy.node for copy in space.order[:len(half)]] == half        # what was not hit, deepest first
    assert tree.evict(space, len(half)) == len(half)
    assert all(space not in node.copies for node in half)


def _begins_with(d: Driver, rid: int) -> int:
    [started] = [out for out in d.out if isinstance(out, Started) and out.rid == rid]
    return started.hbm_tokens + started.dram_tokens


def test_a_flush_hides_all_at_once_and_evicts_a_portion_a_turn() -> None:
    d = Driver(rows=2, hbm_pages=200, page_size=4, take_pages=8, step_tokens=400)
    d.arrive(1, range(400), max_new=1)
    d.run()
    d.arrive(2, range(1000, 1010), max_new=60)
    d.retire()
    space = d.core.kv.device[0]
    cached = space.evicted
    d.tell(Flushed())
    assert space.evicted - cached == 8 and d.core.kv.tree.to_flush
    d.arrive(3, range(300), max_new=1)
    while not any(isinstance(out, Finished) and out.rid == 3 for out in d.out):
        before = space.evicted
        d.retire()
        assert space.evicted - before <= 8
    assert _begins_with(d, 3) == 0
    for _ in range(30):
        d.retire()
    assert 25 <= space.evicted - cached <= 100 and not d.core.kv.tree.to_flush
    d.arrive(4, range(300), max_new=1)         # what 3 has computed anew stays
    d.run()
    assert _begins_with(d, 4) == 296


def test_a_flush_of_an_idle_engine_goes_on_without_events() -> None:
    d = Driver(hbm_pages=200, page_size=4, take_pages=8, step_tokens=400)
    d.arrive(1, range(400), max_new=1)
    d.run()
    advances = []
    d.core.advance((Flushed(),))
    while d.core.flushing:
        before = len(d.core.kv.device[0].pool.held)
        d.core.advance(())
        advances.append(before - len(d.core.kv.device[0].pool.held))
    assert max(advances) == 8 and len(advances) == 12 and not d.core.kv.device[0].pool.held


def test_a_blocked_head_takes_a_few_portions_a_turn_of_a_long_request_that_has_ended() -> None:
    d = Driver(rows=3, hbm_pages=420, page_size=4, take_pages=8, step_tokens=2_000)
    d.arrive(1, range(10), max_new=200)        # a row that goes on
    d.arrive(2, range(5_000, 6_400), max_new=200)
    d.retire()
    d.retire()
    d.arrive(3, range(9_000, 10_400), max_new=1)
    d.retire()
    assert d.phase(3) is Phase.QUEUED
    d.tell(Aborted(RequestId(2)))
    pool, turns = d.core.kv.device[0].pool, 0
    while d.phase(3) is Phase.QUEUED:
        before = len(pool.held) - pool.num_evictable
        d.retire()
        turns += 1
        assert before - (len(pool.held) - pool.num_evictable) <= (PARTS + 1) * 4  # one portion goes in any turn
    assert turns > 5
    d.run()
    assert 3 in d.finished()
