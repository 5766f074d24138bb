"""The prefill/decode pair, rule by rule (RELIABILITY.md), as one conversation each; and its seeded bugs."""
from __future__ import annotations

import pytest
from pair_mutants import MUTANTS
from protocol import World, hunt

from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Hello, Message, Reason, Refused
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.pair.protocol import (
    Deadline,
    Declined,
    FenceEpoch,
    Granted,
    Landed,
    Remind,
    Renew,
    Sent,
    Side,
    Withdrawn,
)

D, P, T = 10, 20, 7        # epochs of the two ends, a transfer


def said(side: Side) -> list[Message]:
    """Messages since the last call, without timers."""
    return [m for m in side.outbox if not isinstance(m, Remind | Deadline | FenceEpoch | Renew)]


def take(side: Side) -> list[Message]:
    out = said(side)
    side.outbox.clear()
    return out


def last(side: Side, kind: type) -> object:
    return next(a for a in reversed(side.outbox) if isinstance(a, kind))


def decode() -> DecodeSide:
    side = DecodeSide(D)
    side.received(Hello(P, D))
    side.outbox.clear()
    return side


def prefill() -> PrefillSide:
    side = PrefillSide(P)
    side.received(Hello(D, P))
    side.outbox.clear()
    return side


def pushing(generation: int = 1, tokens: int = 64) -> PrefillSide:
    side = prefill()
    side.expect(T)
    assert side.received(Grant(D, P, T, generation, tokens)) == [Granted(T, generation, tokens, 0)]
    side.outbox.clear()
    return side


def draining() -> PrefillSide:
    """A push is in flight, and the decode side has cancelled."""
    side = pushing()
    side.push_started(T, 1)
    assert side.received(Cancel(D, P, T, 1)) == [Withdrawn(T, Reason.CANCELLED)]
    assert take(side) == []
    return side


# ---------------------------------------------------------------- the way it should go
def test_a_grant_that_ended_before_it_was_said_is_not_said() -> None:
    side = decode()
    side.open(T, 64)                           # and, before anything is said, its peer is fenced
    assert side.fenced(P) == [Landed(T, 1, False, Reason.LOST)]
    assert not [m for m in said(side) if isinstance(m, Grant | Cancel)]
    side.received(Hello(P + 1, D))
    side.open(T, 64)
    assert [m.generation for m in said(side) if isinstance(m, Grant)] == [2]


def test_a_transfer() -> None:
    d, p = DecodeSide(D), PrefillSide(P)
    p.expect(T)
    d.open(T, 64)
    prefilled: list[object] = []
    landed: list[object] = []
    for _ in range(4):
        for m in take(d):
            prefilled += p.received(m)
        for m in take(p):
            landed += d.received(m)
    assert prefilled == [Granted(T, 1, 64, 0)]
    p.push_started(T, 1)
    assert p.finish(T, 0, (5,)) == []
    assert p.push_ended(1, True) == [Sent(T, 1)]
    (end,) = take(p)
    assert d.received(end) == [Landed(T, 1, True, Reason.NONE, 0, (5,))]
    assert not d.table and not landed


# ---------------------------------------------------------------- rule 1
def test_rule_1_pages_wait_for_proof_however_often_time_passes() -> None:
    d = decode()
    d.open(T, 64)
    assert d.cancel(T) == []
    for _ in range(50):
        remind = last(d, Remind)
        assert isinstance(remind, Remind)
        d.outbox.clear()
        assert d.reminded(T, remind.n) == []
        assert said(d) == [Cancel(D, P, T, 1)]
    assert d.received(Drained(P, D, T, 1, Reason.CANCELLED)) == [Landed(T, 1, False, Reason.CANCELLED)]


def test_rule_1_a_fence_of_the_senders_epoch_is_proof() -> None:
    d = decode()
    d.open(T, 64)
    assert d.fenced(P - 1) == []
    assert d.fenced(P) == [Landed(T, 1, False, Reason.LOST)]
    assert d.fenced(P) == []


def test_rule_1_nobody_was_told_so_nobody_writes() -> None:
    d = DecodeSide(D)
    d.open(T, 64)
    assert d.cancel(T) == [Landed(T, 1, False, Reason.CANCELLED)]


# ---------------------------------------------------------------- rule 2
def test_rule_2_drained_only_after_the_last_write() -> None:
    p = draining()
    p.received(Cancel(D, P, T, 1))             # a repeated abort must not be acked either
    assert take(p) == []
    p.push_ended(1, True)
    assert take(p) == [Drained(P, D, T, 1, Reason.CANCELLED)]


def test_rule_2_unknown_early_and_late_cancels_are_acked() -> None:
    p = prefill()
    p.received(Cancel(D, P, T, 1))
    assert take(p) == [Drained(P, D, T, 1, Reason.CANCELLED)]
    p.received(Grant(D, P, T, 1, 64))          # it was overtaken, and begins nothing
    assert p.expect(T) == [Withdrawn(T, Reason.CANCELLED)]
    p.outbox.clear()
    p.received(Cancel(D, P, T, 1))
    assert take(p) == [Drained(P, D, T, 1, Reason.CANCELLED)]
    p = pushing()
    p.finish(T, 0, (5,))
    p.outbox.clear()
    p.received(Cancel(D, P, T, 1))             # the End is on its way
    assert take(p) == [Drained(P, D, T, 1, Reason.CANCELLED)]


def test_rule_2_holds_after_everything_was_forgotten() -> None:
    p = prefill()
    p.received(Cancel(D, P, T, 3))
    deadline = last(p, Deadline)
    assert isinstance(deadline, Deadline)
    assert p.expired(T, deadline.n) == [] and not p.table
    p.expect(T)
    p.outbox.clear()
    assert p.received(Grant(D, P, T, 3, 64)) == []
    assert take(p) == [Refused(P, D, T, 3, Reason.FORGOTTEN), Drained(P, D, T, 3, Reason.FORGOTTEN)]
    assert p.received(Grant(D, P, T, 4, 64)) == [Granted(T, 4, 64, 0)]


# ---------------------------------------------------------------- rule 3
def test_rule_3_a_grant_waits_for_its_request() -> None:
    p = prefill()
    assert p.received(Grant(D, P, T, 1, 64)) == []
    assert p.expect(T) == [Granted(T, 1, 64, 0)]


def test_rule_3_a_refusal_waits_for_its_grant_and_for_one_only() -> None:
    p = prefill()
    p.expect(T)
    p.refuse(T)
    p.outbox.clear()
    p.received(Grant(D, P, T, 1, 64))
    assert take(p) == [Refused(P, D, T, 1, Reason.REFUSED), Drained(P, D, T, 1, Reason.REFUSED)]
    p.received(Grant(D, P, T, 2, 64))
    assert take(p) == []
    assert p.expect(T) == [Granted(T, 2, 64, 0)]


def test_rule_3_a_refusal_survives_the_first_greeting() -> None:
    """Found by the driver: the decode engine waited for a copy that had been refused."""
    p = PrefillSide(P)
    p.expect(T)
    p.refuse(T)
    p.received(Hello(D, P))
    p.outbox.clear()
    p.received(Grant(D, P, T, 1, 64))
    assert take(p) == [Refused(P, D, T, 1, Reason.REFUSED), Drained(P, D, T, 1, Reason.REFUSED)]


def test_rule_3_what_waits_has_a_deadline() -> None:
    p = prefill()
    p.received(Grant(D, P, T, 1, 64))
    n = p.table[T].n
    p.outbox.clear()
    p.expired(T, n)
    assert take(p) == [Refused(P, D, T, 1, Reason.EXPIRED), Drained(P, D, T, 1, Reason.EXPIRED)]
    assert p.expired(T, n) == [] and p.table   # stale
    assert p.expired(T, p.table[T].n) == [] and not p.table
    p.expect(T + 1)
    assert p.expired(T + 1, p.table[T + 1].n) == [Withdrawn(T + 1, Reason.EXPIRED)]
    assert p.expired(T + 1, p.table[T + 1].n) == [] and not p.table


# ---------------------------------------------------------------- rule 4
def test_rule_4_messages_of_other_incarnations_have_no_effect_and_are_counted() -> None:
    d = decode()
    d.open(T, 64)
    d.cancel(T)
    d.outbox.clear()
    assert d.received(Drained(P - 1, D, T, 1, Reason.CANCELLED)) == []
    assert d.received(Drained(P, D - 1, T, 1, Reason.CANCELLED)) == []
    assert d.received(Drained(P, D, T, 2, Reason.CANCELLED)) == []
    assert d.received(Drained(P + 1, D, T, 1, Reason.CANCELLED)) == []      # cannot speak for the dead
    assert d.counters == {"old_sender": 1, "receiver": 1, "generation": 1, "unfenced_sender": 1}
    assert last(d, FenceEpoch) == FenceEpoch(P)
    assert d.fenced(P) == [Landed(T, 1, False, Reason.CANCELLED)]
    assert d.peer == P + 1


def test_rule_4_a_new_decode_engine_ends_everything_of_the_old() -> None:
    p = pushing()
    p.push_started(T, 1)
    assert p.received(Hello(D + 1, P)) == [Withdrawn(T, Reason.LOST)]
    assert p.push_ended(1, False) == [] and not p.table and not p.pushes
    p.outbox.clear()
    p.received(Cancel(D, P, T, 1))
    assert take(p) == [] and p.counters == {"old_sender": 1}


def test_rule_4_who_was_fenced_alive_goes_on_as_another() -> None:
    d, p = decode(), pushing()
    d.fenced(P)
    d.received(End(P, D, T, 1, 64, 0, (5,)))
    (hello,) = take(d)
    assert hello == Hello(D, P, fenced=P)
    p.received(hello)
    p.received(hello)
    assert p.outbox == [Renew()]
    assert p.restart(P + 1) == [Withdrawn(T, Reason.LOST)]
    d.open(T, 64)
    d.received(take(p)[0])
    assert last(d, Grant) == Grant(D, P + 1, T, 1, 64)


def test_rule_4_greetings_come_to_an_end() -> None:
    d, p = DecodeSide(D), PrefillSide(P)
    for _ in range(5):
        hellos = take(d), take(p)
        for m in hellos[0]:
            p.received(m)
        for m in hellos[1]:
            d.received(m)
    assert (d.peer, p.peer) == (P, D) and not d.outbox and not p.outbox


# ---------------------------------------------------------------- rule 5
def test_rule_5_a_refusal_is_told_before_the_last_write_ends() -> None:
    p, d = pushing(), decode()
    p.push_started(T, 1)
    p.push_started(T, 2)
    assert p.push_ended(1, False) == [Withdrawn(T, Reason.FAILED)]
    (refused,) = take(p)
    d.open(T, 64)
    assert d.received(refused) == [Declined(T, 1, Reason.FAILED)]
    assert d.received(refused) == []
    assert p.push_ended(2, True) == []
    (drained,) = take(p)
    assert d.received(drained) == [Landed(T, 1, False, Reason.FAILED)]
    d.outbox.clear()
    assert d.open(T, 64) == 2                  # asked again
    assert d.received(drained) == [] and d.table


def test_rule_5_a_lost_answer_comes_again_when_asked_for() -> None:
    p = pushing()
    p.refuse(T)
    again = take(p)
    p.received(Grant(D, P, T, 1, 64))
    assert take(p) == again == [Refused(P, D, T, 1, Reason.REFUSED), Drained(P, D, T, 1, Reason.REFUSED)]
    p = pushing()
    p.finish(T, 0, (5,))
    again = take(p)
    p.received(Grant(D, P, T, 1, 64))
    assert take(p) == again == [End(P, D, T, 1, 64, 0, (5,))]


# ---------------------------------------------------------------- rules 8 and 9
def test_rule_8_the_end_follows_the_last_push_and_has_the_tokens_of_its_generation() -> None:
    p = pushing()
    p.push_started(T, 1)
    p.finish(T, 0, (5,))
    assert take(p) == []
    p.push_ended(1, False)
    p.expect(T)
    p.outbox.clear()
    p.received(Grant(D, P, T, 2, 64))
    p.finish(T, 0, (6,))
    assert take(p) == [End(P, D, T, 2, 64, 0, (6,))]


@pytest.mark.parametrize(("end", "landed"), [
    (End(P, D, T, 1, 64, 0, (5, 6, 7)), Landed(T, 1, True, Reason.NONE, 2, (7,))),
    (End(P, D, T, 1, 64, 2, (7,)), Landed(T, 1, True, Reason.NONE, 2, (7,))),
    (End(P, D, T, 1, 64, 0, ()), Landed(T, 1, True, Reason.NONE, 2, ())),
    (End(P, D, T, 1, 64, 3, (8,)), Landed(T, 1, False, Reason.BROKEN)),
    (End(P, D, T, 1, 63, 0, (5, 6, 7)), Landed(T, 1, False, Reason.BROKEN)),
    (End(P, D, T, 1, 64, -1, (5, 6, 7)), Landed(T, 1, False, Reason.BROKEN)),
])
def test_rule_9_no_token_twice_and_none_left_out(end: End, landed: Landed) -> None:
    d = decode()
    d.open(T, 64, emitted=2)
    assert d.received(end) == [landed]


# ---------------------------------------------------------------- the driver
def test_the_pair_survives_its_network() -> None:
    assert hunt(range(300)) == (None, "")


def test_every_fault_fires() -> None:
    met: dict[str, int] = {}
    for seed in range(200):
        world = World(seed)
        fired = world.run()
        for name in (*(n for n in fired if fired[n]), *world.decode.counters,
                     *("prefill_" + n for n in world.prefill.counters)):
            met[name] = met.get(name, 0) + 1
    for name in ("lost", "repeated", "straggler", "push_failed", "refuse", "refuse_early", "abort", "fence",
                 "abort_unopened", "decode_died", "prefill_died", "cut", "hung_up", "renewed", "asked_again",
                 "Declined", "fenced_sender", "unfenced_sender", "generation", "prefill_receiver",
                 "prefill_old_sender", "prefill_repeated", "prefill_draining"):
        assert met.get(name, 0) >= 2, (name, met)


def test_same_seed_same_run() -> None:
    assert World(3).run() == World(3).run()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_seeded_bug_is_caught(name: str) -> None:
    seed, _ = hunt(range(600), *MUTANTS[name])
    assert seed is not None, f"{name} survived"
