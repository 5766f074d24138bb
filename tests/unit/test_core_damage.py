"""KV that nobody may start from: of a damaged request, and pages that are still being loaded."""
from __future__ import annotations

import pytest

from penstock.core import entering
from penstock.core.core import Core
from penstock.core.holdings import Holdings
from penstock.core.lifecycle import Place
from penstock.core.plan import Aborted, Arrived, Dropped, MoveId, RequestId, Retired, Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.tree import Copy


@pytest.mark.parametrize("dropped", [False, True])
def test_a_request_that_is_found_to_be_damaged_after_its_drop_serves_nobody(dropped: bool) -> None:
    """Its pages were cached when it gave them up: the result of its last step shows what they are."""
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=20, overlap=True))
    first = core.advance([Arrived(RequestId(0), tuple(range(9)), 5)]).plan
    assert first is not None
    second = core.advance(()).plan
    assert second is not None
    core.advance([Retired(first.step, ((7,),)), *([Dropped(RequestId(0))] if dropped else [])])
    assert core.have.named(core.live[RequestId(0)]), "nothing of it is cached: this tests nothing"
    core.advance([Retired(second.step, ((),)), Aborted(RequestId(0), damaged=True)])
    again = core.advance([Arrived(RequestId(1), tuple(range(9)), 5)]).plan
    assert again is not None and again.start == (0,), "it starts from damaged pages"


def test_a_page_that_is_still_being_loaded_is_not_copied_on_to_the_host() -> None:
    """Its load and that copy would fly beside each other: the host would get what was there before."""
    have = Holdings(CoreConfig(page_size=2, rows=2, hbm_pages=8, dram_pages=8, hot_pages=1))
    node = have.tree.child(have.tree.root(0), (11, 12))
    copy = Copy(have.device[0].pool.acquire(1)[0], ready=False, moves=1, filling=MoveId(99))
    have.tree.attach(node, have.device[0], copy)
    a = Arrived(RequestId(0), (11, 12, 13), 9, selects=True)
    r = Request(a, 0, 9, list(a.prompt), 3, have.tables(), 100)
    assert not entering.enter(have, r, Place.HOST, 0)
    assert not (r.path or copy.pins or node.refs or have.copies.outbox) and have.rows.free == 2
    copy.ready, copy.moves = True, 0
    assert entering.enter(have, r, Place.HOST, 0)
    assert [(m.src, m.dst) for m in have.copies.outbox] == [(Tier.HBM, Tier.DRAM)]


def test_a_damaged_page_that_is_being_loaded_from_a_twin_does_not_come_back() -> None:
    """The source belongs to a row on its way back to the device, so nothing marks it."""
    have = Holdings(CoreConfig(page_size=2, rows=2, hbm_pages=8, dram_pages=8, hot_pages=1))
    a = Arrived(RequestId(0), (11, 12, 13), 9, selects=True)
    r = Request(a, 0, 9, list(a.prompt), 3, have.tables(), 100)
    node, space = have.tree.child(have.tree.root(0), (11, 12)), have.device[0]
    twin, target = (Copy(s.pool.acquire(1)[0]) for s in (have.host[0], space))
    have.tree.attach(node, space, target)
    have.copies.move_private(r, have.host[0], twin, space, target, 2, node)
    have.copies.distrust([node])
    flight, lost = have.copies.landed(MoveId(1), ok=True)
    assert lost == [target] and not node.ready(space)
    have.copies.settle(flight)
    assert not node.copies and not list(have.tree.nodes())
