"""Sessions in the scheduler: whose pages go first, and a prompt that storage brings up before it is asked for."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.core import Core
from penstock.core.kv.prefix_tree import unpack
from penstock.core.plan import (
    NAME_BITS,
    Aborted,
    Dropped,
    Flushed,
    Listed,
    Lookup,
    Outcome,
    RequestId,
    RetentionEnded,
    SessionEnded,
    Started,
)
from penstock.core.policy.sessions import SHARED, Retained, Session, Sessions
from penstock.core.settings import CoreConfig

SHARED_PROMPT = list(range(1000, 1016))         # four pages


def begun(d: Driver, rid: int) -> int:
    """Tokens of its prompt that were cached."""
    [found] = [o for o in d.out if isinstance(o, Started) and o.rid == rid]
    return found.hbm_tokens + found.dram_tokens


def asked(d: Driver, rid: int, prompt: list[int], **more: object) -> int:
    d.arrive(rid, prompt, max_new=1, **more)
    d.run()
    return begun(d, rid)


def two_conversations(**settings: object) -> Driver:
    """24 pages: 1 has used eight, of which 2 has four; 2 has four more, and was asked before 1."""
    d = Driver(hbm_pages=24, **settings)
    asked(d, 1, [*SHARED_PROMPT, *range(100, 117)], session=7)
    asked(d, 2, [*SHARED_PROMPT, *range(200, 217)])
    asked(d, 3, [*SHARED_PROMPT, *range(100, 117)], session=7)
    return d


@pytest.mark.parametrize("ends", [True, False])
def test_pages_of_an_ended_session_go_first_and_shared_ones_stay(ends: bool) -> None:
    d = two_conversations()
    d.tell(*[SessionEnded(7)] * ends)
    asked(d, 4, list(range(3000, 3058)))          # fifteen pages: three of the twelve that are cached must go
    assert asked(d, 5, [*SHARED_PROMPT, *range(200, 217)]) == (32 if ends else 16 + 4)
    assert bool(d.core.sessions.remembered) is not ends


def test_an_unknown_session_ends_without_effect_and_twice_is_once() -> None:
    d = two_conversations()
    orders = [[c.number for c in space.order] for space in d.core.kv.tree.spaces]
    d.tell(SessionEnded(8))
    assert orders == [[c.number for c in space.order] for space in d.core.kv.tree.spaces]
    d.tell(SessionEnded(7))
    ended = [[c.number for c in space.order] for space in d.core.kv.tree.spaces]
    assert ended != orders
    d.tell(SessionEnded(7))
    assert ended == [[c.number for c in space.order] for space in d.core.kv.tree.spaces]


def test_a_long_request_that_is_aborted_as_its_session_ends_gives_up_the_oldest_pages() -> None:
    """Its pages go back in portions, when others need them: they are as old as if they had gone at once."""
    d = Driver(hbm_pages=90, take_pages=4, step_tokens=400)
    asked(d, 1, list(range(2000, 2100)))
    d.arrive(5, range(8), max_new=30)             # beside one that runs
    d.arrive(2, range(100, 200), max_new=9, session=7)
    while RequestId(2) in d.core.live and not d.core.live[RequestId(2)].num_output:
        d.retire()
    d.tell(Aborted(RequestId(2)), SessionEnded(7))
    assert d.core.kv.freeing, "it is not long"
    asked(d, 3, list(range(3000, 3160)))          # forty pages; 1 has 25 and 2 as many
    assert asked(d, 4, list(range(2000, 2100))) == 96


def test_a_session_in_use_ends_with_its_request_and_may_begin_again() -> None:
    d = Driver(hbm_pages=24)
    asked(d, 1, list(range(200, 233)))
    d.arrive(2, range(100, 133), max_new=3, session=7)
    d.tell(SessionEnded(7))
    d.run()
    asked(d, 3, list(range(3000, 3040)))
    assert asked(d, 4, list(range(200, 233))) == 32, "an older prompt without a session went first"
    d = Driver(hbm_pages=24)
    asked(d, 1, list(range(100, 133)), session=7)
    d.tell(SessionEnded(7))
    assert asked(d, 2, list(range(100, 133)), session=7) == 32, "the pages that ended are still found"
    asked(d, 3, list(range(200, 233)))
    asked(d, 4, list(range(3000, 3042)))
    assert asked(d, 5, list(range(100, 133))) < 32, "it was used again, but before 3"


def test_a_flush_hides_pages_of_ended_sessions_as_others() -> None:
    d = two_conversations()
    d.tell(SessionEnded(7))
    d.tell(Flushed())
    assert asked(d, 4, [*SHARED_PROMPT, *range(100, 117)], session=7) == 0
    d.tell(SessionEnded(7))
    assert asked(d, 5, [*SHARED_PROMPT, *range(100, 117)]) == 32, "pages that were used since the flush are hidden"


def test_marking_the_pages_of_a_long_session_takes_several_turns() -> None:
    d = Driver(hbm_pages=80, take_pages=5, step_tokens=400)
    asked(d, 1, list(range(201)), session=7)
    d.core.kv.free_gradually(all=True)
    turns = 0
    d.core.advance((SessionEnded(7),))
    while d.core.flushing:
        d.core.advance(())
        turns += 1
    assert turns == 10                            # fifty pages, five a turn, and a look whether there are more
    assert {node.last_used for node in d.core.kv.tree.nodes()} == {0}


def test_of_many_sessions_the_latest_are_known() -> None:
    sessions = Sessions(2, Retained())
    first, second = sessions.begin(1), sessions.begin(2)
    assert sessions.begin(1) is first and sessions.begin(0) is SHARED
    sessions.begin(3)
    sessions.end(2)
    assert not second.ended and sessions.begin(1) is first
    assert isinstance(first, Session) and not SHARED.ends


def test_a_tenant_with_many_sessions_makes_none_of_another_unknown() -> None:
    d, other = Driver(hbm_pages=40, dram_pages=40, retained_pages=16, sessions_max=3), 1 << NAME_BITS
    asked(d, 1, conversation(1, 4), session=7, retains=True)
    for n in range(5):
        asked(d, 2 + n, conversation(2 + n, 2), session=other | 1 + n)
    assert d.core.stats()["retained_pages"] == 4
    d.tell(SessionEnded(7))
    assert d.core.stats()["retained_pages"] == 0


# ---------------------------------------------------------------- retained
def host_pages(d: Driver) -> list[int]:
    """Tokens that each page begins with, the next to be evicted first."""
    return [unpack(copy.node.key)[0] for copy in d.core.kv.host[0].order]


def conversation(n: int, pages: int) -> list[int]:
    """A prompt of so many whole pages, and a token."""
    return [*range(1000 * n, 1000 * n + 4 * pages + 1)]


def retaining(most: int, **settings: object) -> Driver:
    return Driver(hbm_pages=40, dram_pages=40, retained_pages=most, **settings)


def test_pages_of_retained_sessions_outlive_later_prompts_and_another_sessions_pages() -> None:
    d = retaining(8)
    asked(d, 1, conversation(1, 8), session=7, retains=True)
    asked(d, 2, conversation(2, 8), session=8)
    for rid in range(3, 9):
        asked(d, rid, conversation(rid, 16))
    assert asked(d, 9, conversation(1, 8), session=7) == 32
    assert asked(d, 10, conversation(2, 8), session=8) == 0
    assert d.core.stats()["retained_pages"] == 8


def test_pages_that_a_session_gives_up_go_as_others_by_their_last_use() -> None:
    d = retaining(8)
    asked(d, 1, conversation(1, 4), session=7, retains=True)
    asked(d, 2, conversation(2, 4))
    assert host_pages(d)[-4:] == [1012, 1008, 1004, 1000]
    d.tell(RetentionEnded(7))
    assert host_pages(d) == [1012, 1008, 1004, 1000, 2012, 2008, 2004, 2000]
    asked(d, 3, conversation(1, 4), session=7)
    assert host_pages(d)[-4:] == [1012, 1008, 1004, 1000], "it was used last"
    asked(d, 4, conversation(2, 4))
    assert host_pages(d)[-4:] == [2012, 2008, 2004, 2000], "nothing asks for it any more"
    assert d.core.stats()["retained_pages"] == 0


def test_what_sessions_share_is_retained_while_one_of_them_is() -> None:
    d = retaining(16)
    asked(d, 1, [*SHARED_PROMPT, *range(100, 109)], session=7, retains=True)
    asked(d, 2, [*SHARED_PROMPT, *range(200, 209)], session=8, retains=True)
    assert d.core.stats()["retained_pages"] == 4 + 2 + 2
    d.tell(SessionEnded(7))
    asked(d, 3, conversation(3, 4))
    assert host_pages(d)[:2] == [104, 100] and host_pages(d)[-6:] == [204, 200, 1012, 1008, 1004, 1000]
    d.tell(SessionEnded(8))
    assert d.core.stats()["retained_pages"] == 0


def test_a_session_that_goes_another_way_retains_its_latest_request_only() -> None:
    d = retaining(16)
    asked(d, 1, [*SHARED_PROMPT, *range(100, 117)], session=7, retains=True)
    asked(d, 2, [*SHARED_PROMPT, *range(200, 209)], session=7)
    assert sorted(unpack(page.key)[0] for page in d.core.sessions.retained.users) == [
        200, 204, 1000, 1004, 1008, 1012]
    asked(d, 3, SHARED_PROMPT, session=7)
    assert d.core.stats()["retained_pages"] == 4


def test_a_request_that_ends_while_it_pins_cached_pages_to_get_a_row_changes_nothing_of_what_is_retained() -> None:
    d = retaining(16, hit_pages=2)
    asked(d, 1, conversation(1, 8), session=7, retains=True)
    d.arrive(2, conversation(2, 1), max_new=40)
    d.arrive(3, conversation(1, 8), max_new=9, session=7)
    r = d.core.live[RequestId(3)]
    while not r.started:
        d.retire()
    d.tell(Dropped(r.rid))
    while not r.path:
        d.retire()
    assert r.row is None, "all is pinned in one turn"
    d.tell(Aborted(r.rid))
    assert d.core.stats()["retained_pages"] == 8


def test_beyond_the_bound_the_tenant_with_the_most_loses_its_newest_session() -> None:
    d, other = retaining(12), 1 << NAME_BITS
    asked(d, 1, conversation(1, 4), session=1, retains=True)
    asked(d, 2, conversation(2, 4), session=2, retains=True)
    asked(d, 3, conversation(3, 5), session=other | 3, retains=True)

    def retained() -> list[int]:
        return sorted({unpack(page.key)[0] // 1000 for page in d.core.sessions.retained.users})

    assert retained() == [1, 3]
    asked(d, 4, conversation(2, 4), session=2)
    assert retained() == [1, 3], "it does not fit"
    asked(d, 5, conversation(1, 8), session=1)
    assert retained() == [3], "its tenant has the most"
    asked(d, 6, conversation(3, 13), session=other | 3)
    assert retained() == [], "one alone has more than may be retained"
    asked(d, 7, conversation(2, 4), session=2)
    assert retained() == [2]


def test_retained_pages_change_their_place_in_portions() -> None:
    d = retaining(40, take_pages=3)
    asked(d, 1, conversation(1, 20), session=7, retains=True)
    d.core.kv.free_gradually(all=True)
    while d.core.flushing:
        d.core.advance(())
    assert d.core.stats()["retained_pages"] == 20
    left, event = list[float](), (RetentionEnded(7),)
    while event or d.core.flushing:
        d.core.advance(event)
        event = ()
        left.append(d.core.stats()["retained_pages"])
    assert left == [17, 14, 11, 8, 5, 2, 0] and not d.core.sessions.is_late


@pytest.mark.parametrize("again", [False, True])
def test_a_flush_hides_retained_pages_at_once_and_evicts_them(again: bool) -> None:
    d = retaining(40, take_pages=3)
    asked(d, 1, conversation(1, 8), session=7, retains=True)
    d.core.advance((Flushed(),))
    if again:
        assert asked(d, 2, conversation(1, 8), session=7) == 0
        while d.core.flushing:
            d.core.advance(())
        assert d.core.stats()["retained_pages"] == 8, "it still asks"
        d.core.advance((Flushed(), SessionEnded(7)))
    while d.core.flushing:
        d.core.advance(())
    assert all(not pool.num_held for arena in d.core.kv.arenas.values() for pool in arena.pools)
    assert bool(d.core.sessions.remembered) is False


def test_a_flush_while_an_ended_request_still_has_pages_hides_them_and_none_that_is_used_later() -> None:
    d = Driver(rows=3, hbm_pages=200, dram_pages=200, retained_pages=40, take_pages=4, step_tokens=400)
    d.arrive(1, conversation(1, 2), max_new=40)   # beside one that runs
    d.arrive(2, conversation(2, 60), max_new=40)
    while RequestId(2) in d.core.live and not d.core.live[RequestId(2)].num_output:
        d.retire()
    d.tell(Aborted(RequestId(2)))
    assert d.core.kv.gives_up, "it is not long"
    d.tell(Flushed())
    d.arrive(3, conversation(3, 3), max_new=1, session=7, retains=True)
    while RequestId(1) in d.core.live:
        d.retire()
    tree = d.core.kv.tree
    assert len(d.core.sessions.retained.users) == 3
    assert not any([tree.is_flushed(page) for page in d.core.sessions.retained.users])
    assert asked(d, 4, conversation(2, 60)) == 0
    assert asked(d, 5, conversation(3, 3), session=7) == 12


def test_retained_pages_are_evicted_before_a_request_waits() -> None:
    d = retaining(40)
    asked(d, 1, conversation(1, 36), session=7, retains=True)
    assert asked(d, 2, conversation(2, 39)) == 0
    assert asked(d, 3, conversation(1, 36), session=7) < 36 * 4
    assert d.core.stats()["retained_pages"] == 36


def test_a_banished_page_is_retained_no_longer_and_those_before_it_are() -> None:
    d = retaining(16)
    asked(d, 1, conversation(1, 8), session=7, retains=True)
    tree = d.core.kv.tree
    node = next(node for node in tree.nodes() if node.depth == 5)
    tree.banish(node)
    assert sorted(page.depth for page in d.core.sessions.retained.users) == [1, 2, 3, 4]
    d.core.check()
    assert asked(d, 2, conversation(1, 8), session=7) == 16
    assert sorted(page.depth for page in d.core.sessions.retained.users) == [*range(1, 9)]
    d.tell(SessionEnded(7))
    assert d.core.stats()["retained_pages"] == 0


# ---------------------------------------------------------------- warm
STORED = {"dram_pages": 24, "disk_pages": 64, "page_size": 4, "store_root": b"root"}


def answered(d: Driver, present: int) -> None:
    """Storage has so many of the pages that it was last asked for."""
    lookup = [o for o in d.out if isinstance(o, Lookup)][-1]
    d.tell(Listed(lookup.rid, lookup.visit, bytes([1] * present)))


def test_a_warm_prompt_is_in_host_memory_and_takes_no_row() -> None:
    d = Driver(**STORED)
    d.arrive(9, range(100, 133), session=7, warms=True)
    answered(d, 6)
    assert [m.src.value for m in d.moves] == ["disk"] and not d.plans and not d.finished()
    d.run()
    assert d.finished() == {9: Outcome.WARMED} and not [o for o in d.out if isinstance(o, Started)]
    nodes = list(d.core.kv.tree.nodes())
    assert len(nodes) == 6 and all(n.ready(d.core.kv.host[0]) for n in nodes) and not d.core.warming
    d.arrive(10, range(100, 133), max_new=1, session=7)
    [lookup] = [o for o in d.out if isinstance(o, Lookup) and o.rid == 10]
    d.tell(Listed(lookup.rid, lookup.visit, b"\0\0"))
    d.run()
    [started] = [o for o in d.out if isinstance(o, Started)]
    assert (started.dram_tokens, started.disk_tokens) == (24, 0)


@pytest.mark.parametrize("settings", [{}, {"dram_pages": 24}, STORED, {**STORED, "role": "prefill"}])
def test_a_warm_request_without_anything_to_read_ends_at_once(settings: dict[str, object]) -> None:
    d = Driver(**settings)
    d.arrive(9, range(100, 133), warms=True)
    if "store_root" in settings:
        assert not d.finished()
        answered(d, 0)
    assert d.finished() == {9: Outcome.WARMED} and not d.moves and not d.plans


def test_a_read_that_fails_ends_a_warm_request_and_leaves_nothing() -> None:
    d = Driver(**STORED)
    d.arrive(9, range(100, 133), warms=True)
    answered(d, 8)
    d.land(ok=False)
    d.run()
    assert d.finished() == {9: Outcome.WARMED}
    core: Core = d.core
    core.advance((Flushed(),))
    while core.flushing:
        core.advance(())
    assert all(not pool.num_held for arena in core.kv.arenas.values() for pool in arena.pools)
    assert CoreConfig(page_size=4, rows=1, hbm_pages=4).sessions_max == 4096
