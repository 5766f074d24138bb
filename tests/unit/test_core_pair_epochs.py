"""What an engine of a pair has decided, and not said or begun, when its connection is another one."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.pair.messages import Grant
from penstock.core.plan import (
    Aborted,
    Arrived,
    Event,
    Finished,
    Outcome,
    PeerJoined,
    PeerLeft,
    Received,
    RequestId,
    Retired,
    Tier,
)
from penstock.core.settings import CoreConfig

TRANSFER = 7
READY, LONG = RequestId(1), RequestId(2)


def waiting_push() -> Core:
    """A prefill engine that may push READY, and whose pipeline is full with LONG."""
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=64, step_tokens=8, role="prefill"))
    ready = Arrived(READY, (1, 2, 3, 4), 5, transfer=TRANSFER)
    plan = core.advance([PeerJoined(), ready]).plan
    assert plan is not None
    plan = core.advance([Retired(plan.step, ((9,),)), Arrived(LONG, tuple(range(40)), 5, transfer=8)]).plan
    assert plan is not None and plan.rids == (LONG,)
    assert core.advance([Received(Grant(TRANSFER, 1, 4))]).plan is None
    assert [m.transfer for m in core.kv.moves.outbox if m.dst is Tier.PEER] == [TRANSFER]
    return core


@pytest.mark.parametrize("events", [(PeerLeft(),), (PeerLeft(), PeerJoined())])
def test_a_push_that_no_plan_has_is_not_begun_on_another_connection(events: tuple[Event, ...]) -> None:
    core = waiting_push()
    outputs = core.advance(events).outputs
    assert Finished(READY, Outcome.LOST) in outputs
    assert not core.kv.moves.outbox and not core.kv.moves.flying
    plan = core.advance([Retired(core.kv.issued, ())]).plan
    assert plan is None, "the other has ended too, and nothing is left to push"
    core.check()


def test_a_push_of_an_aborted_request_ends_all_the_same() -> None:
    core = waiting_push()
    core.advance([Aborted(READY)])
    core.advance([PeerLeft()])
    plan = core.advance([Retired(core.kv.issued, ())]).plan
    assert plan is None
    core.check()
