"""Sessions in the scheduler: whose pages go first, and a prompt that storage brings up before it is asked for."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.core import Core
from penstock.core.plan import Aborted, Flushed, Listed, Lookup, Outcome, RequestId, SessionEnded, Started
from penstock.core.policy.sessions import SHARED, Session, Sessions
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
    sessions = Sessions(2)
    first, second = sessions.begin(1), sessions.begin(2)
    assert sessions.begin(1) is first and sessions.begin(0) is SHARED
    sessions.begin(3)
    sessions.end(2)
    assert not second.ended and sessions.begin(1) is first
    assert isinstance(first, Session) and not SHARED.ends


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
