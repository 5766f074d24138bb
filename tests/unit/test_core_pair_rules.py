"""Rules 6 and 7 of a pair (RELIABILITY.md), on whole engines: they speak of more than the protocol. The
others are in `test_core_pair.py`."""
from __future__ import annotations

import driver
import pytest

from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Cancel, Drained, Grant, Message, Reason
from penstock.core.plan import (
    Aborted,
    Event,
    Expired,
    Moved,
    Outcome,
    PeerJoined,
    PeerLeft,
    Received,
    RequestId,
    Say,
    StepPlan,
    Tier,
)
from penstock.core.settings import CacheGroup

ONE, TWO = RequestId(1), RequestId(2)


class Driver(driver.Driver):
    """A core whose peer has said hello."""

    def __init__(self, role: str, **settings: object) -> None:
        super().__init__(**dict(role=role, hbm_base=1_000, dram_base=2_000) | settings)
        self.tell(PeerJoined())
        self.said()

    def hear(self, message: Message) -> list[StepPlan]:
        return self.tell(Received(message))

    def drained(self, transfer: int) -> None:
        self.hear(Drained(transfer, 1, Reason.CANCELLED))

    def finish(self) -> None:
        """All steps that can be had; copies do not land."""
        while self.plans:
            self.retire()

    def said(self) -> list[object]:
        """Messages since the last call."""
        said = [o.what for o in self.out if isinstance(o, Say)]
        self.out = [o for o in self.out if not isinstance(o, Say)]
        return list(said)

    def free(self) -> int:
        return self.core.kv.arenas[Tier.HBM].pools[0].free


# ---------------------------------------------------------------- rule 6
def busy(role: str) -> tuple[Driver, StepPlan]:
    """An engine that waits for its peer with request 1, and whose only step, of request 2, hangs."""
    d = Driver(role, rows=1)
    if role == "prefill":
        d.arrive(2, range(50, 70), transfer=6)
        d.arrive(1, range(10), transfer=5)
    else:
        d.arrive(1, range(10), transfer=5)
        d.arrive(2, range(50, 70))
    (hangs,) = d.plans
    assert hangs.rids == (TWO,)
    d.said()
    return d, hangs


def told(d: Driver, event: Event) -> list[object]:
    """What is said to `event` while no step can be planned."""
    assert d.tell(event) == []
    return d.said()


def test_rule_6_a_decode_engine_cleans_up_while_no_step_is_planned() -> None:
    d, hangs = busy("decode")
    visit = d.core.live[ONE].visit
    assert told(d, Expired(ONE, Phase.RECEIVING.value, visit)) == [Cancel(5, 1)]
    assert d.phase(1) is Phase.DROPPED and d.free() == 16 - 5 - 3
    d.drained(5)
    assert d.free() == 16 - 5 and d.plans == [hangs]


@pytest.mark.parametrize("proof", ["drained", "left"])
def test_rule_6_an_abort_is_said_and_its_pages_come_back_while_no_step_is_planned(proof: str) -> None:
    d, hangs = busy("decode")
    assert told(d, Aborted(ONE)) == [Cancel(5, 1)] and d.finished() == {1: Outcome.ABORT}
    if proof == "drained":
        d.drained(5)
    else:
        d.tell(PeerLeft())
    assert d.free() == 16 - 5 and d.plans == [hangs]


def test_rule_6_a_prefill_engine_answers_while_no_step_is_planned() -> None:
    d, hangs = busy("prefill")
    d.hear(Cancel(6, 0))                                      # of the very request that hangs
    d.hear(Grant(6, 2, 20))                                   # it had crossed an answer
    assert d.said() == [Drained(6, 2, Reason.UNKNOWN)] and d.plans == [hangs]
    assert d.finished() == {2: Outcome.LOST} and d.free() == 16 - 5


# ---------------------------------------------------------------- rule 7
def evicted(d: Driver, tier: Tier) -> int:
    """Pages of one tier that go when all go that may."""
    kv = d.core.kv
    return kv.tree.evict({Tier.HBM: kv.device, Tier.DRAM: kv.host}[tier][0], 1 << 30)


def test_rule_7_a_page_that_the_peer_writes_is_not_read_and_not_evicted() -> None:
    d = Driver("decode")
    d.arrive(1, range(10), transfer=5)
    assert evicted(d, Tier.HBM) == 0
    (reader,) = d.arrive(2, range(10))
    assert reader.start == (0,), "it read what is being written"
    d.tell(Aborted(TWO))
    d.tell(Aborted(ONE))
    d.finish()
    evicted(d, Tier.HBM)
    d.tell()
    assert d.free() == 13, "a page went that may still be written"


def test_rule_7_a_page_that_is_pushed_is_not_evicted_before_the_push_has_ended() -> None:
    d = Driver("prefill")
    d.arrive(1, range(10), transfer=5)
    d.retire()
    d.hear(Grant(5, 1, 10))
    (push,) = d.moves
    d.tell(Aborted(ONE))
    assert d.finished() == {1: Outcome.ABORT} and evicted(d, Tier.HBM) == 0
    d.tell(Moved(push.id, True))
    assert evicted(d, Tier.HBM) == 2, "its sealed pages"


def cached_below() -> Driver:
    """An engine whose host alone has two pages of a prompt, and that loads them for request 2."""
    d = Driver("decode", dram_pages=8)
    d.arrive(1, range(10), max_new=1)
    d.finish()
    down = [move for move in d.moves if move.dst is Tier.DRAM]
    assert len(down) == 1 and evicted(d, Tier.HBM) == 0, "copied, hence not evicted"
    d.tell(Moved(down[0].id, True))
    assert evicted(d, Tier.HBM) == 2
    d.moves.clear()
    d.tell()
    d.arrive(2, range(10))
    return d


def test_rule_7_who_lacks_pages_that_a_hung_push_reads_does_not_go_round() -> None:
    """The push is of a request that has ended, and its pages are sealed. Request 2 can begin beside them, as
    it takes the pages of its window one by one, and cannot end; request 3 can."""
    groups = CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=8)
    d = Driver("prefill", page_size=2, hbm_pages=20, groups=groups)
    d.arrive(1, range(8), max_new=2, transfer=1)
    d.finish()
    d.hear(Grant(1, 1, 8))
    d.finish()
    d.hear(Cancel(1, 1))
    assert list(d.finished()) == [1] and len(d.core.kv.moves.flying) == 2
    d.arrive(2, range(100, 120), max_new=2, transfer=2)
    d.finish()
    assert d.core.live[TWO].setbacks.preemptions == 2
    d.arrive(3, range(3), max_new=2, transfer=3)
    d.finish()
    assert d.core.live[RequestId(3)].num_output == 1 and d.core.live[TWO].num_output == 0
    d.tell(*[Moved(id, True) for id in d.core.kv.moves.flying])
    d.finish()
    assert d.core.live[TWO].num_output == 1


def test_rule_7_a_page_that_is_loaded_is_not_read_and_not_evicted() -> None:
    d = cached_below()
    (load,) = d.moves
    assert (load.src, load.dst) == (Tier.DRAM, Tier.HBM)
    assert d.phase(2) is Phase.LOADING and not d.plans, "it read what is being loaded"
    d.tell(Aborted(TWO))                                      # nobody pins its pages any more
    assert evicted(d, Tier.HBM) == 0 and evicted(d, Tier.DRAM) == 0
    d.tell(Moved(load.id, True))
    assert evicted(d, Tier.HBM) == 2 and evicted(d, Tier.DRAM) == 2


def test_rule_7_a_page_that_a_request_counts_on_is_not_evicted() -> None:
    d = cached_below()
    (load,) = d.moves
    (step,) = d.tell(Moved(load.id, True))
    assert step.start == (8,) and step.rids == (TWO,)
    assert evicted(d, Tier.HBM) == 0
    d.moves.clear()
    d.run()
    assert evicted(d, Tier.HBM) > 0
