"""A prefill engine of a pair whose prompts wait for somebody to ask for them, driven by hand."""
from __future__ import annotations

import driver

from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Drained, End, Grant, Reason, Refused
from penstock.core.plan import (
    Aborted,
    Claimed,
    Dropped,
    Flushed,
    Moved,
    PeerId,
    PeerJoined,
    PeerLeft,
    Received,
    RequestId,
    Say,
    Tier,
)


class Driver(driver.Driver):
    """A prefill engine whose peer has said hello."""

    def __init__(self, role: str, **settings: object) -> None:
        super().__init__(**dict(role=role, hbm_base=1_000, dram_base=2_000) | settings)
        self.tell(PeerJoined())
        self.said()

    def run(self) -> None:
        while self.plans:
            self.retire()

    def said(self) -> list[object]:
        """Messages to the peer since the last call."""
        said = [o.what for o in self.out if isinstance(o, Say) and o.peer == PEER]
        self.out = [o for o in self.out if not isinstance(o, Say)]
        return said

    def free(self) -> int:
        return self.core.kv.arenas[Tier.HBM].pools[0].free

    def grant(self, transfer: int, tokens: int) -> None:
        self.tell(Received(Grant(transfer, 1, tokens, 0)))


PEER, NOBODY = PeerId(0), PeerId(1)


def held(rid: int = 1) -> Driver:
    """A prefill engine with a prompt of 10 that nobody has asked for yet."""
    d = Driver("prefill", peers=2)
    d.arrive(rid, range(10), transfer=77, peer=NOBODY)
    return d


def pushed_to(d: Driver, transfer: int) -> None:
    """The peer has asked for it as `transfer`: it is granted, sent, and said to be."""
    d.tell(Claimed(RequestId(1), transfer, PEER))
    d.grant(transfer, 10)
    d.run()
    assert {(m.peer, m.transfer) for m in d.moves} == {(PEER, transfer)}
    for move in d.moves:
        d.tell(Moved(move.id, True))
    assert d.said() == [End(transfer, 1, 10, (100,))] and not d.core.live


def test_a_prompt_that_waits_is_sent_to_who_asks_for_it_before_or_after_it_was_computed() -> None:
    for computed in (False, True):
        d = held()
        if computed:
            d.run()
            assert d.phase(1) is Phase.SENDING and d.said() == []
        pushed_to(d, 5)


def test_a_prompt_that_has_ended_when_it_is_asked_for_is_refused() -> None:
    d = held()
    d.run()
    d.tell(Aborted(RequestId(1)), Claimed(RequestId(1), 5, PEER))
    assert d.said() == [Refused(5, 0, Reason.REFUSED)]
    d.grant(5, 10)                              # it has crossed the answer
    assert [type(m) for m in d.said()] == [Drained]
    d.tell(Flushed())
    assert d.free() == Driver("prefill", peers=2).free() and not d.core.live


def test_a_prompt_that_waits_and_lost_its_pages_is_computed_again_for_who_asks() -> None:
    d = held()
    d.run()
    d.tell(Dropped(RequestId(1)))
    assert d.phase(1) is Phase.DROPPED
    pushed_to(d, 5)


def test_nobody_has_asked_for_it_and_its_pages_are_free() -> None:
    d, free = held(), Driver("prefill", peers=2).free()
    d.run()
    assert d.free() < free
    d.tell(Aborted(RequestId(1)))
    d.tell(Claimed(RequestId(1), 5, PEER))              # too late
    d.tell(Flushed())
    assert d.free() == free and not d.core.live
    d.grant(5, 10)
    assert Drained(5, 1, Reason.UNKNOWN) in d.said()


def test_who_asked_leaves_and_the_prompt_with_him() -> None:
    d = held()
    d.run()
    d.tell(Claimed(RequestId(1), 5, PEER))
    d.tell(PeerLeft(PEER))
    assert not d.core.live
