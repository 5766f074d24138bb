"""Rooms of a prefill instance: one prompt that a router has sent here, one that is asked for, in any order."""
from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.config.request.params import SamplingParams
from penstock.core.pair.messages import Reason
from penstock.core.plan import Finished, Outcome, RequestId
from penstock.engine.pd.rendezvous import OVER_MAX, RendezvousWait, Rooms
from penstock.engine.wire import BootstrapRoom, RemotePrefill, Submit

KEEP_S = 5.0
RID = 1 << 40
END = Finished(RequestId(RID), Outcome.SENT)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def submit(number: int, prompt: tuple[int, ...] = (1, 2, 3), index: int = 0, **params: object) -> Submit:
    return Submit(rid=number + 1, prompt=list(prompt), params=SamplingParams(**params), stop_ids=[],
                  max_new=1, room=BootstrapRoom(number, index))


def asked(number: int, *more: object, transfer: int = 9, peer: int = 0, **params: object) -> RemotePrefill:
    return RemotePrefill(peer, transfer, replace(submit(number, *more, **params), rid=0))


def rooms() -> tuple[Rooms, Clock]:
    clock = Clock()
    return Rooms(KEEP_S, clock), clock


def test_the_two_meet_in_either_order_and_once() -> None:
    r, clock = rooms()
    one, two = submit(1), asked(2)
    assert r.opened(one) is None and r.asked(two, RID) is None
    assert r.asked(asked(1), RID) is one
    assert r.opened(submit(2)) == RendezvousWait(clock.now + KEEP_S, asked=two, rid=RID)
    for number in (1, 2):
        assert r.asked(asked(number), RID) is Reason.TAKEN and r.opened(submit(number)) is Reason.TAKEN
    assert r.wait_s is None and r.passed() == []


def test_choices_of_a_request_have_a_place_each() -> None:
    r, _ = rooms()
    first, second = submit(1), submit(1, (1, 2, 3), 1)
    assert r.opened(first) is None and r.opened(second) is None
    assert r.asked(asked(1, (1, 2, 3), 1), RID) is second and r.asked(asked(1), RID) is first


def test_a_second_one_does_not_take_the_place_of_the_first() -> None:
    r, _ = rooms()
    one = submit(1)
    assert r.opened(one) is None and r.opened(submit(1)) is Reason.TAKEN
    assert r.asked(asked(1), RID) is one
    assert r.asked(asked(2), RID) is None and r.asked(asked(2, transfer=10), RID) is Reason.TAKEN


def test_another_prompt_or_another_choice_of_its_first_token_is_another_request() -> None:
    r, _ = rooms()
    one = submit(1, temperature=0.0, max_tokens=1)
    assert r.opened(one) is None
    assert r.asked(asked(1, (1, 2, 4), temperature=0.0), RID) is Reason.OTHER
    assert r.asked(asked(1, temperature=1.0), RID) is Reason.OTHER
    assert r.asked(asked(1, temperature=0.0, max_tokens=500), RID) is one
    assert r.asked(asked(2, (1, 2, 4)), RID) is None
    assert r.opened(submit(2)) is Reason.OTHER


def test_who_waits_too_long_is_told_and_the_room_is_over() -> None:
    r, clock = rooms()
    one, two = submit(1), asked(2)
    assert r.opened(one) is None and r.asked(two, RID) is None and r.wait_s == KEEP_S
    clock.now += KEEP_S
    assert r.wait_s == 0
    assert r.passed() == [one]
    assert r.asked(asked(1), RID) is Reason.LATE and r.asked(asked(2), RID) is Reason.LATE
    assert r.opened(submit(2)) is Reason.LATE and r.wait_s is None


def test_a_prompt_waits_from_when_it_was_told_of() -> None:
    r, clock = rooms()
    one = submit(1)
    assert r.opened(one) is None
    clock.now += KEEP_S - 1
    r.computed(one.room)
    clock.now += KEEP_S - 1
    assert r.passed() == [] and r.asked(asked(1), RID) is one


def test_a_prompt_that_has_ended_is_late_and_who_has_gone_waits_no_more() -> None:
    r, _ = rooms()
    one = submit(1)
    assert r.opened(one) is None and r.asked(asked(2, peer=3), RID) is None
    r.ended(one.room, END)
    r.left(3)
    assert r.asked(asked(1), RID) is Reason.LATE and r.wait_s is None
    r.ended(one.room, END)
    assert r.opened(submit(2)) is None                  # the other end may come back and ask again


def test_what_was_asked_for_may_be_done_before_the_router_has_sent_it() -> None:
    r, _ = rooms()
    two = asked(2)
    assert r.asked(two, RID) is None
    r.ended(two.submit.room, END)
    found = r.opened(submit(2))
    assert isinstance(found, RendezvousWait) and found.end is END


def test_what_is_over_is_known_of_so_many_rooms() -> None:
    r, _ = rooms()
    for number in range(OVER_MAX + 1):
        assert r.opened(submit(number)) is None and isinstance(r.asked(asked(number), RID), Submit)
    assert r.asked(asked(1), RID) is Reason.TAKEN and len(r._over) == OVER_MAX


@pytest.mark.parametrize(("name", "wrong", "seen_by"), [
    ("alike", lambda *_: True, test_another_prompt_or_another_choice_of_its_first_token_is_another_request),
    ("key_of", lambda room: (room.number, 0), test_choices_of_a_request_have_a_place_each),
    ("key_of", lambda room: (0, room.index), test_what_is_over_is_known_of_so_many_rooms)])
def test_a_room_that_is_given_to_another_request_is_seen(monkeypatch, name, wrong, seen_by) -> None:
    monkeypatch.setattr(f"penstock.engine.pd.rendezvous.{name}", wrong)
    with pytest.raises(AssertionError):
        seen_by()
