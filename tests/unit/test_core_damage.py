"""KV that nobody may start from: of a damaged request, and pages that are still being loaded."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.kv import allocate, prefetch
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.pages import NONE_LEFT
from penstock.core.kv.prefix_tree import Copy, Node, pack
from penstock.core.lifecycle import Place
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Event,
    Finished,
    Flushed,
    Moved,
    MoveId,
    Outcome,
    RequestId,
    Retired,
    Started,
    Tier,
)
from penstock.core.request import Request
from penstock.core.settings import CoreConfig

PROMPT = tuple(range(9))


@pytest.mark.parametrize("dropped", [False, True])
def test_a_request_that_is_found_to_be_damaged_after_its_drop_serves_nobody(dropped: bool) -> None:
    """Its pages were cached when it gave them up: the result of its last step shows what they are."""
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=20, overlap=True))
    first = core.advance([Arrived(RequestId(0), tuple(range(9)), 5)]).plan
    assert first is not None
    second = core.advance(()).plan
    assert second is not None
    core.advance([Retired(first.step, ((7,),)), *([Dropped(RequestId(0))] if dropped else [])])
    assert core.kv.tainted_by(core.live[RequestId(0)]), "nothing of it is cached: this tests nothing"
    core.advance([Retired(second.step, ((),)), Aborted(RequestId(0), damaged=True)])
    again = core.advance([Arrived(RequestId(1), tuple(range(9)), 5)]).plan
    assert again is not None and again.start == (0,), "it starts from damaged pages"


def test_who_never_gave_up_its_kv_damages_no_page_that_it_does_not_name() -> None:
    """Somebody else was the first to compute the same tokens, and forks wait for that (sim seed 2393)."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=40, overlap=True))
    first = core.advance([Arrived(RequestId(0), PROMPT, 9)]).plan
    assert first is not None and core.advance([Arrived(RequestId(1), PROMPT, 9)]).plan is not None
    core.advance([Retired(first.step, ((5,),))])           # the other is still computing these pages
    assert len(core.live[RequestId(0)].path) == 4 and not core.live[RequestId(1)].path
    core.advance([Aborted(RequestId(1), damaged=True), Arrived(RequestId(2), PROMPT, 9)])
    assert not any(node.banished for node in core.kv.tree.nodes())
    assert core.live[RequestId(2)].path == core.live[RequestId(0)].path


def test_a_request_that_names_damaged_pages_is_computed_again_and_serves_others() -> None:
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=60))
    events, starts, ended = list[Event](), dict[int, int](), dict[int, Outcome]()
    damaged, again = list[Node](), list[int]()
    asked: dict[int, list[Event]] = {
        0: [Arrived(RequestId(0), PROMPT, 9)], 2: [Arrived(RequestId(1), PROMPT, 9)],
        4: [Aborted(RequestId(0), damaged=True)], 5: [Arrived(RequestId(2), PROMPT, 9)],
        7: [Dropped(RequestId(1))], 9: [Arrived(RequestId(3), PROMPT, 9)]}
    for turn in range(40):
        advance = core.advance([*events, *asked.get(turn, ())])
        core.check()
        ended |= {o.rid: o.outcome for o in advance.outputs if isinstance(o, Finished)}
        starts |= {o.rid: o.hbm_tokens for o in advance.outputs if isinstance(o, Started)}
        plan = advance.plan
        if turn == 3:
            damaged = list(core.live[RequestId(1)].path)
        elif turn > 4 and plan is not None:
            again += [start for rid, start in zip(plan.rids, plan.start, strict=True) if rid == 1]
            assert not any(node in r.path for r in core.live.values() for node in damaged)
        elif turn == 4:
            assert plan is not None and (plan.rids, plan.start) == ((1,), (0,)), "it goes on with them"
        events = [] if plan is None else [Retired(plan.step, ((5,),) * sum(plan.samples))]
    assert starts == {0: 0, 1: 8, 2: 8, 3: 8} and damaged and again
    assert ended == {0: Outcome.ABORT, **dict.fromkeys((1, 2, 3), Outcome.LENGTH)}
    assert core.counters["computed_again"] == 1
    core.advance([Flushed()])
    assert not core.kv.tree.roots and core.kv.device[0].pool.free == 60


def test_a_request_that_fails_before_the_one_whose_pages_it_reads_is_computed_again_once() -> None:
    """The bad token is another's, whose fault is not known yet."""
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=40, step_tokens=6))
    first = core.advance([Arrived(RequestId(0), PROMPT, 9)]).plan
    assert first is not None
    second = core.advance([Retired(first.step, ()), Arrived(RequestId(1), PROMPT[:7], 9)]).plan
    r = core.live[RequestId(1)]
    assert second is not None and second.rids == (0, 1) and second.samples == (True, True)
    assert r.origin.shares_pages and r.path
    shown = r.path[0]
    fourth = core.advance([Retired(second.step, ((5,), ())), Aborted(RequestId(1), True)])
    assert not [o for o in fourth.outputs if isinstance(o, Finished)]
    assert core.live[RequestId(1)] is r and r.origin.retried and not r.tokens[7:]
    assert core.live[RequestId(0)].kv_epoch == 0 and not shown.banished, "they may be sound"
    assert fourth.plan is not None and fourth.plan.start[1] == 0
    core.check()
    events = [] if fourth.plan is None else [Retired(fourth.plan.step, ((6,),) * sum(fourth.plan.samples))]
    for _ in range(30):
        plan = core.advance(events).plan
        if plan is None:
            break
        events = [Retired(plan.step, ((6,),) * sum(plan.samples))]
    assert not core.live and not r.origin.shares_pages and r.tokens[7:] == [6] * 9
    assert shown.banished, "it was sound without them"


def test_a_request_that_fails_with_pages_of_its_own_ends() -> None:
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=40))
    plan = core.advance([Arrived(RequestId(0), PROMPT, 9)]).plan
    assert plan is not None
    out = core.advance([Retired(plan.step, ((),)), Aborted(RequestId(0), damaged=True)]).outputs
    assert Finished(RequestId(0), Outcome.ABORT) in out


def test_a_request_that_is_computed_again_gets_no_page_of_the_one_that_damaged_them() -> None:
    """Its next page has the same tokens, and the other's is still on its way to the host (sim seed 147,
    hot_pages=1,hot_pages_max=6)."""
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=40, dram_pages=40, step_tokens=5))
    first = core.advance([Arrived(RequestId(0), PROMPT, 9)]).plan
    assert first is not None
    second = core.advance([Retired(first.step, ()), Arrived(RequestId(1), PROMPT, 9)]).plan
    assert second is not None and (second.start, second.count) == ((5, 4), (4, 1))
    third = core.advance([Retired(second.step, ((5,),))]).plan
    damaged, other = core.live[RequestId(0)].path[2:], core.live[RequestId(1)]
    assert third is not None and len(damaged) == 2 and len(other.path) == 2
    assert all(node.copies[core.kv.host[0]].moves for node in damaged)
    fourth = core.advance([Aborted(RequestId(0), damaged=True), Retired(third.step, ((6,), (5,)))]).plan
    assert fourth is not None and fourth.start == (0,) and not other.path
    core.advance([Retired(fourth.step, ())])
    assert len(other.path) == 2
    assert not {*map(id, damaged)} & {*map(id, other.path)}, "it reads what was found to be damaged"
    core.check()


def test_a_page_that_is_still_being_loaded_is_not_copied_on_to_the_host() -> None:
    """Its load and that copy would fly beside each other: the host would get what was there before."""
    kv = KVCache(CoreConfig(page_size=2, rows=2, hbm_pages=8, dram_pages=8, hot_pages=1))
    node = kv.tree.child(kv.tree.root(0), pack((11, 12)))
    copy = Copy(kv.device[0].pool.acquire(1)[0], ready=False, moves=1, filled_by=MoveId(99))
    kv.tree.attach(node, kv.device[0], copy)
    a = Arrived(RequestId(0), (11, 12, 13), 9, selects=True)
    r = Request(a, 0, 9, [], 3, kv.tables(), 100)
    assert not allocate.enter(kv, r, Place.HOST, NONE_LEFT)
    assert not (r.path or copy.pins or node.refs or kv.moves.outbox) and kv.rows.free == 2
    copy.ready, copy.moves = True, 0
    assert allocate.enter(kv, r, Place.HOST, NONE_LEFT)
    assert [(m.src, m.dst) for m in kv.moves.outbox] == [(Tier.HBM, Tier.DRAM)]


def test_a_page_whose_copy_on_the_host_is_suspect_is_not_fetched_into_a_second() -> None:
    """It is still being read by somebody, so it cannot go yet."""
    kv = KVCache(CoreConfig(page_size=2, rows=2, hbm_pages=8, dram_pages=8, disk_pages=8))
    node = kv.tree.child(kv.tree.root(0), pack((11, 12)))
    kv.tree.attach(node, kv.disk[0], Copy(kv.disk[0].pool.acquire(1)[0]))
    a = Arrived(RequestId(0), (11, 12, 13), 9)
    r = Request(a, 0, 9, [], 3, kv.tables(), 100)
    assert kv.match(r, stored=True)[0] == [node]
    suspect = Copy(kv.host[0].pool.acquire(1)[0], ready=False, moves=1)
    suspect.bad = True
    kv.tree.attach(node, kv.host[0], suspect)
    assert kv.match(r, stored=True)[0] == []
    assert prefetch.reserve(kv, r) and not (r.path or kv.moves.has_planned)


def test_damaged_pages_are_not_stored() -> None:
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=20, dram_pages=40, disk_pages=40))
    tree, disk = core.kv.tree, core.kv.disk[0]
    events, damaged = list[Event](), list[Node]()
    asked: dict[int, list[Event]] = {
        0: [Arrived(RequestId(0), PROMPT, 9)], 2: [Arrived(RequestId(1), PROMPT, 9)],
        4: [Aborted(RequestId(0), damaged=True)], 8: [Arrived(RequestId(2), PROMPT, 2)]}
    for turn in range(40):
        advance = core.advance([*events, *asked.get(turn, ())])
        core.check()
        if turn == 3:
            damaged = list(core.live[RequestId(1)].path)
        plan = advance.plan
        # Nothing has come to the host before the damage is known.
        events = [] if plan is None else [
            *(Moved(m.id, turn > 4) for m in plan.moves), Retired(plan.step, ((5,),) * sum(plan.samples))]
    assert damaged and not core.live and core.kv.moves.flying == {}
    good = [n for n in tree.nodes() if not n.banished]
    assert all(n.banished and disk not in n.copies for n in damaged), "they wait for the next prefix hit"
    assert good and all(n.ready(disk) for n in good)
