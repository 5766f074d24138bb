"""What an engine of a pair has decided, and not said or begun, when its connection is another one."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Grant, Hello, Message
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.plan import (
    Aborted,
    Arrived,
    Event,
    Finished,
    Outcome,
    Received,
    Renewed,
    RequestId,
    Retired,
    Say,
    Tier,
)
from penstock.core.settings import CoreConfig

OURS, THEIRS, TRANSFER = 1, 5, 7
READY, LONG = RequestId(1), RequestId(2)


def waiting_push() -> Core:
    """A prefill engine that may push READY, and whose pipeline is full with LONG."""
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=64, step_tokens=8, role="prefill", epoch=OURS))
    ready = Arrived(READY, (1, 2, 3, 4), 5, transfer=TRANSFER)
    plan = core.advance([Received(Hello(THEIRS, OURS)), ready]).plan
    assert plan is not None
    plan = core.advance([Retired(plan.step, ((9,),)), Arrived(LONG, tuple(range(40)), 5, transfer=8)]).plan
    assert plan is not None and plan.rids == (LONG,)
    assert core.advance([Received(Grant(THEIRS, OURS, TRANSFER, 1, 4))]).plan is None
    assert [m.transfer for m in core.kv.moves.outbox if m.dst is Tier.PEER] == [TRANSFER]
    return core


@pytest.mark.parametrize("event", [Renewed(OURS + 1), Received(Hello(THEIRS + 1, OURS))])
def test_a_push_that_no_plan_has_is_not_begun_on_another_connection(event: Event) -> None:
    core = waiting_push()
    outputs = core.advance([event]).outputs
    assert Finished(READY, Outcome.LOST) in outputs
    assert not core.kv.moves.outbox and not core.kv.moves.flying
    plan = core.advance([Retired(core.kv.issued, ())]).plan
    assert plan is not None and not plan.moves
    core.check()


def test_a_push_of_an_aborted_request_ends_all_the_same() -> None:
    core = waiting_push()
    core.advance([Aborted(READY)])
    core.advance([Renewed(OURS + 1)])
    plan = core.advance([Retired(core.kv.issued, ())]).plan
    assert plan is not None and not [m for m in plan.moves if m.dst is Tier.PEER]
    core.check()


@pytest.mark.parametrize("theirs", [3, 4, 0])
def test_engines_of_different_models_do_not_pair(theirs: int) -> None:
    """Another revision, dtype or layout: its KV would be read as something that it is not."""
    ends = DecodeSide(OURS, 3), PrefillSide(THEIRS, theirs)
    decode, prefill = ends
    decode.open(TRANSFER, 64)
    prefill.expect(TRANSFER)
    said: list[Message] = []
    for _ in range(9):                         # a connection that loses nothing
        for end, other in (ends, ends[::-1]):
            new = [m for m in end.outbox if isinstance(m, Message)]
            end.outbox.clear()
            for message in new:
                other.received(message)
            said += new
    assert (prefill.table[TRANSFER].sending is not None) == bool(decode.peer) == (theirs == 3)
    assert any(isinstance(m, Grant) for m in said) == (theirs == 3)
    assert bool(decode.counters.get("identity")) == bool(prefill.counters.get("identity")) == (theirs != 3)


def test_a_hello_says_what_the_kv_is() -> None:
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=64, role="decode", epoch=OURS, identity=3))
    assert [o.what for o in core.advance(()).outputs if isinstance(o, Say)] == [Hello(OURS, 0, 0, 3)]
