"""One engine of a prefill/decode pair, driven by hand: its plans, its pages, and what it says."""
from __future__ import annotations

import driver

from penstock.core.lifecycle import Phase, Place
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Reason, Refused
from penstock.core.plan import (
    Aborted,
    Dropped,
    Expired,
    Flushed,
    Moved,
    Outcome,
    PeerId,
    PeerJoined,
    PeerLeft,
    Received,
    RequestId,
    Say,
    Started,
    StepPlan,
    Tier,
    Token,
)


class Driver(driver.Driver):
    """A core whose peer has said hello."""

    def __init__(self, role: str, **settings: object) -> None:
        super().__init__(**dict(role=role, hbm_base=1_000, dram_base=2_000) | settings)
        self.tell(PeerJoined())
        self.said()

    def run(self) -> None:
        while self.plans:
            self.retire()

    def hear(self, message: Message) -> list[StepPlan]:
        return self.tell(Received(message))

    def said(self) -> list[object]:
        """Messages since the last call."""
        said = [o.what for o in self.out if isinstance(o, Say)]
        self.out = [o for o in self.out if not isinstance(o, Say)]
        return list(said)

    def tokens(self) -> list[tuple[int, int]]:
        return [(o.index, o.token) for o in self.out if isinstance(o, Token)]

    def free(self, tier: Tier = Tier.HBM) -> int:
        return self.core.kv.arenas[tier].pools[0].free

    def grant(self, transfer: int, tokens: int, generation: int = 1, start: int = 0) -> list[StepPlan]:
        return self.hear(Grant(transfer, generation, tokens, start))

    def end(self, transfer: int, tokens: int, *first: int, generation: int = 1) -> list[StepPlan]:
        return self.hear(End(transfer, generation, tokens, first))

    def drained(self, transfer: int, generation: int = 1) -> list[StepPlan]:
        return self.hear(Drained(transfer, generation, Reason.CANCELLED))


def prefilled(rid: int = 1, transfer: int = 5, **settings: object) -> Driver:
    """A prefill engine that has computed a prompt of 10 and knows its first token, 100."""
    d = Driver("prefill", **settings)
    d.arrive(rid, range(10), transfer=transfer)
    d.retire()
    assert d.phase(rid) is Phase.SENDING
    return d


# ---------------------------------------------------------------- prefill role
def test_prefill_pushes_what_was_granted_and_the_end_follows_the_last_push() -> None:
    d = prefilled()
    assert d.said() == [] and d.core.kv.rows.free == 4      # no row, but its pages
    d.grant(5, 10)
    (push,) = d.moves
    assert (push.src, push.dst, push.first, push.tokens, push.transfer, push.generation) == (
        Tier.HBM, Tier.PEER, 0, 10, 5, 1)
    assert len(push.src_pages) == 3 and push.dst_pages == () and d.said() == []
    d.tell(Moved(push.id, True))
    assert d.said() == [End(5, 1, 10, (100,))]
    assert d.finished() == {1: Outcome.SENT} and d.tokens() == []
    d.tell(Flushed())
    assert d.free() == 16


def test_the_last_push_waits_for_the_last_step() -> None:
    d = Driver("prefill")
    d.arrive(1, range(10), transfer=5)
    d.grant(5, 10, start=4)
    assert d.moves == []
    d.retire()
    (push,) = d.moves
    assert (push.first, push.tokens, len(push.src_pages)) == (4, 6, 2)


def test_sealed_pages_leave_while_the_prompt_is_computed() -> None:
    d = Driver("prefill", step_tokens=6)
    d.arrive(1, range(18), transfer=5)
    d.grant(5, 18)
    d.run()
    assert [(m.first, m.tokens, len(m.src_pages)) for m in d.moves] == [(0, 4, 1), (4, 8, 2), (12, 6, 2)]
    assert d.said() == [] and d.phase(1) is Phase.SENDING
    for move in d.moves:
        d.tell(Moved(move.id, True))
    assert d.said() == [End(5, 1, 18, (100,))]


def test_a_grant_inside_a_page_of_ours_begins_there_and_goes_on_with_whole_pages() -> None:
    d = Driver("prefill", step_tokens=6)
    d.arrive(1, range(18), transfer=5)
    d.grant(5, 18, start=2)
    d.run()
    assert [(m.first, m.tokens) for m in d.moves] == [(2, 2), (4, 8), (12, 6)]


def test_what_was_pushed_early_is_not_sent_again_after_a_drop() -> None:
    d = Driver("prefill", step_tokens=6, prefix_cache=False)
    d.arrive(1, range(18), transfer=5)
    d.grant(5, 18)
    d.retire()
    d.tell(Dropped(RequestId(1)))
    for move in d.moves:
        d.tell(Moved(move.id, True))
    d.run()
    assert [(m.first, m.tokens) for m in d.moves] == [(0, 4), (4, 8), (12, 6)]


def test_a_partial_grant_may_begin_inside_a_page_of_ours() -> None:
    d = prefilled()
    d.grant(5, 10, start=6)
    (push,) = d.moves
    assert (push.first, push.tokens, len(push.src_pages)) == (6, 4, 2)


def test_cancel_while_pushes_fly_is_acked_when_they_have_ended() -> None:
    d = prefilled()
    d.grant(5, 10)
    d.hear(Cancel(5, 1))
    assert d.said() == [] and d.finished() == {1: Outcome.LOST}
    d.hear(Cancel(5, 1))
    assert d.said() == [] and d.free() < 16                   # what flies is still read
    d.tell(Moved(d.moves[0].id, True))
    assert d.said() == [Drained(5, 1, Reason.CANCELLED)]
    d.tell(Flushed())
    assert d.free() == 16


def test_failed_push_is_refused_and_drained_with_the_last_one() -> None:
    d = prefilled()
    d.grant(5, 10)
    d.tell(Moved(d.moves[0].id, False))
    assert d.said() == [Refused(5, 1, Reason.FAILED), Drained(5, 1, Reason.FAILED)]
    assert d.finished() == {1: Outcome.LOST}


def test_abort_tells_the_decode_engine_at_once_even_before_its_grant() -> None:
    d = prefilled()
    d.tell(Aborted(RequestId(1)))
    assert d.finished() == {1: Outcome.ABORT} and d.said() == [Refused(5, 0, Reason.REFUSED)]
    d.grant(5, 10)                                            # it has crossed that
    assert d.said() == [Drained(5, 1, Reason.UNKNOWN)]


def test_a_request_that_is_not_wanted_any_more_ends_without_an_answer() -> None:
    d = prefilled()
    d.hear(Cancel(5, 0))
    assert d.finished() == {1: Outcome.LOST} and d.said() == []


def test_what_is_unknown_is_acked() -> None:
    d = Driver("prefill")
    d.hear(Cancel(5, 1))
    d.grant(6, 10, generation=2)
    assert d.said() == [Drained(5, 1, Reason.CANCELLED), Drained(6, 2, Reason.UNKNOWN)]


def test_request_without_a_transfer_is_refused_by_a_prefill_engine() -> None:
    d = Driver("prefill")
    assert d.arrive(1, range(10)) == []
    assert d.finished() == {1: Outcome.REFUSED} and d.said() == []


def test_request_that_never_fits_is_refused_to_both_sides() -> None:
    d = Driver("prefill", hbm_pages=2)
    d.arrive(1, range(10), transfer=5)
    assert d.finished() == {1: Outcome.REFUSED} and d.said() == [Refused(5, 0, Reason.REFUSED)]


def test_computed_without_a_grant_gives_way_and_is_sent_all_the_same() -> None:
    d = prefilled(hbm_pages=4)
    d.arrive(2, range(50, 60), transfer=6)
    assert d.phase(1) is Phase.DROPPED
    d.retire()
    d.grant(6, 10)
    d.tell(Moved(d.moves.pop(0).id, True))
    assert d.finished() == {2: Outcome.SENT}
    assert d.phase(1) is Phase.DROPPED and d.plans == []      # not before it has its grant
    d.said()
    d.grant(5, 10, generation=2)
    d.run()                                                   # nothing is sampled twice
    assert d.token == 102
    d.tell(Moved(d.moves.pop(0).id, True))
    assert d.said() == [End(5, 2, 10, (100,))]


def test_granted_request_is_not_dropped_while_its_pushes_fly() -> None:
    d = prefilled()
    d.grant(5, 10)
    d.tell(Dropped(RequestId(1)))
    assert d.phase(1) is Phase.SENDING


def test_grant_of_another_length_is_not_the_same_request() -> None:
    d = prefilled()
    d.grant(5, 11)
    assert d.finished() == {1: Outcome.LOST} and d.moves == []
    assert d.said() == [Refused(5, 1, Reason.REFUSED), Drained(5, 1, Reason.REFUSED)]


def test_new_decode_engine_knows_nothing_of_what_was_granted() -> None:
    d = prefilled()
    d.arrive(2, range(50, 60), transfer=6)                    # nothing is granted for it
    d.retire()
    d.grant(5, 10)
    d.tell(PeerLeft())
    d.tell(PeerJoined())
    assert d.finished() == {1: Outcome.LOST, 2: Outcome.LOST} and d.said() == []
    d.tell(Moved(d.moves[0].id, True))
    assert d.said() == []                                     # nobody is there to be told


# ---------------------------------------------------------------- decode role
def receiving(**settings: object) -> Driver:
    """A decode engine that waits for a prompt of 10."""
    d = Driver("decode", **settings)
    assert d.arrive(1, range(10), transfer=5) == []
    assert d.phase(1) is Phase.RECEIVING
    assert d.said() == [Grant(5, 1, 10)]
    return d


def test_delivered_prompt_is_decoded_from_its_first_token() -> None:
    d = receiving()
    (grant,) = d.moves
    assert (grant.src, grant.dst, grant.first, grant.tokens) == (Tier.PEER, Tier.HBM, 0, 10)
    assert grant.src_pages == () and len(grant.dst_pages) == 3
    (decode,) = d.end(5, 10, 77)
    assert (decode.start, decode.count, decode.tokens) == ((10,), (1,), (77,))
    (bind,) = decode.binds
    assert bind.pages[0] == grant.dst_pages and bind.emitted == 1
    d.end(5, 10, 77)                                          # nonsense: it has ended
    d.run()
    assert d.tokens() == [(0, 77), (1, 100), (2, 101), (3, 102)]
    assert [o for o in d.out if isinstance(o, Started)] == [Started(RequestId(1), 0, 0, 0, 10)]
    assert d.finished() == {1: Outcome.LENGTH}
    d.tell(Flushed())
    assert d.free() == 16


def test_delivered_request_gets_its_row_later() -> None:
    d = Driver("decode", rows=1)
    d.arrive(2, range(50, 54), max_new=3)
    d.arrive(1, range(10), transfer=5)
    assert d.end(5, 10, 77) == [] and d.tokens() == [(0, 77)]
    assert d.phase(1) is Phase.RECEIVING and d.core.live[RequestId(1)].saving.is_done
    while d.phase(1) is Phase.RECEIVING:
        d.retire()
    plan = d.plans[-1]
    assert plan.rids == (1,) and plan.start == (10,) and plan.tokens == (77,) and len(plan.binds) == 1


def test_delivered_pages_serve_others_and_those_that_come_do_not() -> None:
    d = receiving()
    (miss,) = d.arrive(2, range(10))
    assert miss.start == (0,)
    d.end(5, 10, 77)
    d.run()
    (hit,) = d.arrive(3, range(10), namespace=0)
    assert hit.start == (8,)


def test_prefix_hit_gives_a_partial_grant() -> None:
    d = Driver("decode")
    d.arrive(1, range(10), max_new=1)
    d.run()
    d.arrive(2, range(14), transfer=6)
    assert d.said() == [Grant(6, 1, 14, 8)]
    (grant,) = d.moves
    assert (grant.first, grant.tokens, len(grant.dst_pages)) == (8, 6, 2)
    (decode,) = d.end(6, 14, 77)
    assert decode.start == (14,) and decode.binds[0].pages[0][2:] == grant.dst_pages
    assert [o for o in d.out if isinstance(o, Started)][-1] == Started(RequestId(2), 8, 0, 0, 6)


def test_refused_prompt_is_computed_here_and_its_pages_wait_for_the_ack() -> None:
    d = receiving()
    granted = set(d.moves[0].dst_pages)
    (prompt,) = d.hear(Refused(5, 1, Reason.REFUSED))
    assert (prompt.start, prompt.count) == ((0,), (10,))
    assert granted.isdisjoint(prompt.binds[0].pages[0]) and d.core.kv.device[0].pool.away == 3
    d.drained(5)
    assert d.core.kv.device[0].pool.away == 0 and d.said() == []
    d.run()
    assert d.tokens()[0] == (0, 100) and d.finished() == {1: Outcome.LENGTH}


def test_abort_while_receiving_frees_nothing_before_the_ack() -> None:
    d = receiving()
    d.tell(Aborted(RequestId(1)))
    assert d.finished() == {1: Outcome.ABORT} and d.said() == [Cancel(5, 1)]
    d.tell(Flushed())
    assert d.free() == 13
    d.hear(Drained(5, 2, Reason.CANCELLED))         # of another generation
    assert d.free() == 13
    d.drained(5)
    assert d.free() == 16 and not d.core.pairs[PeerId(0)].requests


def test_deadline_computes_the_prompt_here_and_is_no_proof() -> None:
    d = receiving()
    visit = d.core.live[RequestId(1)].visit
    (prompt,) = d.tell(Expired(RequestId(1), Phase.RECEIVING.value, visit))
    assert prompt.start == (0,) and d.said() == [Cancel(5, 1)]
    assert d.core.kv.device[0].pool.away == 3
    d.end(5, 10, 77)                                          # it was on its way: proof, but no token
    assert d.core.kv.device[0].pool.away == 0 and d.tokens() == []


def test_pages_of_a_dead_prefill_engine_come_back_with_its_connection() -> None:
    d = receiving()
    (prompt,) = d.tell(PeerLeft())
    assert prompt.start == (0,) and d.core.kv.device[0].pool.away == 0 and d.said() == []
    d.arrive(3, range(90, 94), transfer=7)                    # nobody is asked
    assert d.phase(3) is not Phase.RECEIVING
    d.tell(PeerJoined())
    d.arrive(2, range(50, 60), transfer=6)
    d.retire()                                                # a Grant follows the plan with its Move
    assert d.said() == [Grant(6, 2, 10)]


def test_who_waits_when_the_connection_ends_is_computed_here() -> None:
    d = Driver("decode", hbm_pages=4)
    d.arrive(1, range(12), transfer=5, max_new=2)
    d.arrive(2, range(50, 60), transfer=6)
    assert d.phase(2) is Phase.QUEUED and d.said() == [Grant(5, 1, 12)]
    d.tell(PeerLeft())
    d.run()
    assert set(d.finished()) == {1, 2} and d.said() == []


def test_who_was_refused_before_its_grant_is_computed_here() -> None:
    d = Driver("decode", hbm_pages=4)
    d.arrive(1, range(12), transfer=5, max_new=2)
    d.arrive(2, range(50, 60), transfer=6)
    d.said()
    d.hear(Refused(6, 0, Reason.REFUSED))
    d.end(5, 12, 77)
    d.run()
    assert set(d.finished()) == {1, 2} and d.said() == []


def test_who_ends_before_its_grant_is_withdrawn() -> None:
    d = Driver("decode", hbm_pages=4)
    d.arrive(1, range(12), transfer=5, max_new=2)
    d.arrive(2, range(50, 60), transfer=6)
    d.said()
    d.tell(Aborted(RequestId(2)))
    assert d.said() == [Cancel(6, 0)]


def test_request_without_a_transfer_is_served_by_a_decode_engine() -> None:
    d = Driver("decode")
    (prompt,) = d.arrive(1, range(10))
    assert prompt.start == (0,) and d.said() == []
    d.run()
    assert d.finished() == {1: Outcome.LENGTH}


def test_one_token_ends_with_its_delivery() -> None:
    d = Driver("decode")
    d.arrive(1, range(10), transfer=5, max_new=1)
    assert d.end(5, 10, 77) == []
    assert d.tokens() == [(0, 77)] and d.finished() == {1: Outcome.LENGTH}
    d.tell(Flushed())
    assert d.free() == 16


def test_delivered_request_that_is_dropped_keeps_its_first_token() -> None:
    d = Driver("decode", rows=1, prefix_cache=False)
    d.arrive(2, range(50, 54), max_new=3)
    d.arrive(1, range(10), transfer=5)
    d.end(5, 10, 77)
    d.tell(Dropped(RequestId(1)))
    d.run()
    mine = [o for o in d.out if isinstance(o, Token) and o.rid == 1]
    assert mine[0].token == 77 and [o.index for o in mine] == [0, 1, 2, 3]


def test_host_place_receives_into_host_pages() -> None:
    d = receiving_on_the_host()
    (grant,) = d.moves
    assert (grant.dst, len(grant.dst_pages)) == (Tier.DRAM, 3) and min(grant.dst_pages) >= 2_000
    (decode,) = d.end(5, 10, 77)
    assert d.state(1) == "decode.host" and d.core.live[RequestId(1)].place is Place.HOST
    (bind,) = decode.binds
    assert bind.host[0] == grant.dst_pages and set(bind.pages[0]) == {-1} and len(bind.hot[0]) == 1


def test_host_pages_of_an_aborted_request_wait_for_the_ack() -> None:
    d = receiving_on_the_host()
    d.tell(Aborted(RequestId(1)))
    assert d.free(Tier.DRAM) == 13
    d.drained(5)
    assert d.free(Tier.DRAM) == 16


def receiving_on_the_host() -> Driver:
    d = Driver("decode", dram_pages=16, hot_pages=1, always_hosted=True)
    d.arrive(1, range(10), transfer=5, selects=True)
    assert d.phase(1) is Phase.RECEIVING
    return d


def test_pages_in_quarantine_do_not_stop_those_who_run() -> None:
    d = Driver("decode", hbm_pages=9, rows=2)                  # 3 of them stay away
    d.arrive(1, range(50, 54), max_new=16)
    d.arrive(2, range(10), transfer=5)
    d.tell(Aborted(RequestId(2)))
    d.arrive(3, range(60, 64), max_new=16)
    for _ in range(60):                                       # the peer says nothing
        if d.plans:
            d.retire()
    assert set(d.finished()) == {1, 2, 3}


def test_a_prompt_that_is_computed_again_needs_no_page_for_the_token_that_it_gave() -> None:
    d = Driver("prefill", hbm_pages=3)
    d.arrive(1, range(12), transfer=5)
    d.retire()
    d.tell(Dropped(RequestId(1)))
    d.tell(Flushed())
    (again,) = d.grant(5, 12)
    assert again.start == (0,) and len(again.binds[0].pages[0]) == 3


def test_a_cancelled_push_that_hangs_keeps_its_pages_and_nobody_else() -> None:
    d = prefilled(hbm_pages=8)
    d.grant(5, 10)
    d.arrive(2, range(100, 110), transfer=6)                  # computed, and nobody grants pages for it
    d.retire()
    d.arrive(3, range(200, 220), transfer=7)
    assert d.phase(3) is Phase.QUEUED and d.phase(2) is Phase.SENDING, "the push may end any moment"
    d.hear(Cancel(5, 1))
    assert d.finished() == {1: Outcome.LOST} and d.phase(2) is Phase.DROPPED
    d.retire()
    assert d.phase(3) is Phase.SENDING


def test_forks_of_a_prompt_that_waits_for_its_grant_are_computed() -> None:
    d = Driver("prefill")
    d.arrive(1, range(10), transfer=5)
    d.arrive(2, range(10), transfer=6, leader=RequestId(1))
    assert d.plans[-1].rids == (1,)
    d.run()
    assert d.phase(1) is d.phase(2) is Phase.SENDING
    (started,) = [o for o in d.out if isinstance(o, Started) and o.rid == 2]
    assert started.hbm_tokens == 8


def test_two_prefill_engines_are_told_apart() -> None:
    """Each has grants and generations of its own: the end of one is no end of the other."""
    one, two = PeerId(0), PeerId(1)
    d = Driver("decode", peers=2, hbm_pages=32)
    d.tell(PeerJoined(two))
    for rid, peer in ((1, one), (2, two)):
        d.arrive(rid, range(rid * 100, rid * 100 + 10), transfer=5, peer=peer)
    d.tell()
    grants = {o.peer: o.what for o in d.out if isinstance(o, Say) and isinstance(o.what, Grant)}
    assert {peer: g.generation for peer, g in grants.items()} == {one: 1, two: 1}
    assert [m.peer for m in d.moves] == [one, two]
    d.tell(PeerLeft(one))                              # and what it was to send is computed here
    assert d.phase(1) is not Phase.RECEIVING and d.phase(2) is Phase.RECEIVING
    d.tell(Received(End(5, 1, 10, (77,)), two))
    assert (d.core.live[RequestId(2)].remote.delivered, d.tokens()) == (10, [(0, 77)])
