"""A prompt that is cached gets its pages in portions, as long as another request has a row."""
from __future__ import annotations

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.plan import Aborted, Dropped, Flushed, RequestId, Tier
from tests.doubles.driver import Driver

PROMPT, PAGES = range(1000, 1082), 20          # whole pages of 4 tokens


def cached(**settings: object) -> Driver:
    """Request 9 decodes, and the prompt of another is cached. A turn matches and pins 4 pages at most."""
    d = Driver(**{"hbm_pages": 90, "take_pages": 2, "step_tokens": 100, "rows": 4, "max_len": 400, **settings})
    d.arrive(9, range(4), 200)
    d.arrive(1, PROMPT, 1)
    while 1 in d.core.live or d.core.kv.leaving:
        d.retire()
    return d


def pins(d: Driver) -> int:
    return sum([len(entry.pins) for entry in d.core.kv.entering.values()])


def test_a_hit_is_matched_and_pinned_in_portions_and_begins_whole() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    turns, before = 1, 0
    while d.phase(2) is Phase.QUEUED:
        assert d.core.live[RequestId(2)].row is None and pins(d) - before <= 4
        before = pins(d)
        d.retire()
        turns += 1
    assert turns == 2 * PAGES // 4 and d.core.counters["prefix_hbm_hits"] == 4 * PAGES
    assert not d.core.kv.entering and not d.core.kv.returned
    d.run()


def test_a_hit_alone_is_taken_in_one_turn() -> None:
    d = cached()
    d.tell(Aborted(RequestId(9)))
    d.arrive(2, PROMPT, 4)
    assert d.phase(2) is not Phase.QUEUED and d.core.counters["prefix_hbm_hits"] == 4 * PAGES


@pytest.mark.parametrize("turns", range(1, 11))
def test_an_abort_in_the_middle_of_a_hit_leaves_nothing(turns: int) -> None:
    d = cached()
    loose = d.core.kv.arenas[Tier.HBM].loose
    d.arrive(2, PROMPT, 4)
    for _ in range(turns):
        d.retire()
    d.tell(Aborted(RequestId(2)))
    while d.core.kv.returned or d.core.kv.leaving:
        d.retire()
    assert not d.core.kv.entering and d.core.kv.arenas[Tier.HBM].loose == loose


def test_a_hit_under_way_gives_way_to_who_needs_its_pages() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    while pins(d) < 8:
        d.retire()
    kv = d.core.kv
    can = kv.device[0].pool.free + kv.arenas[Tier.HBM].loose
    assert not kv.lacks(Tier.HBM, [can + 8]) and not kv.entering and not kv.returned
    assert d.phase(2) is Phase.QUEUED and d.core.live[RequestId(2)].path == []
    d.run()                                    # it begins anew
    assert d.core.counters["prefix_hbm_hits"] == 4 * PAGES


def test_what_is_evicted_in_the_middle_of_a_hit_shortens_it() -> None:
    d = cached()
    d.arrive(2, PROMPT, 4)
    while not 0 < pins(d) < PAGES:
        d.retire()
    kept = pins(d)
    d.tell(Flushed())
    while d.phase(2) is Phase.QUEUED:
        d.retire()
    assert d.core.counters["prefix_hbm_hits"] in (4 * kept, 4 * (kept + 4))
    d.run()


def test_choices_of_a_prompt_share_its_tokens_and_what_was_matched() -> None:
    d = cached()
    prompt, before = tuple(PROMPT), 0
    d.arrive(2, prompt, 60)
    for rid in (3, 4):
        d.arrive(rid, prompt, 4, leader=RequestId(2))
    leader, forks = d.core.live[RequestId(2)], [d.core.live[RequestId(rid)] for rid in (3, 4)]
    assert all([fork.arrived.prompt is leader.arrived.prompt for fork in forks])
    while not leader.num_output:
        d.retire()
    looked = d.core.kv.hits_left
    assert forks[1].known is leader.path and looked >= 0
    turns = 0
    while any([fork.phase is Phase.QUEUED for fork in forks]):
        assert pins(d) - before <= 4
        before = pins(d) if pins(d) > before else 0
        d.retire()
        turns += 1
    assert turns <= 2 * PAGES // 4 + 2         # they pin, and match nothing again
    d.run()


def test_who_is_dropped_and_hits_what_it_had_is_admitted_in_portions() -> None:
    d = cached()
    d.arrive(2, PROMPT, 30)
    while not d.core.live[RequestId(2)].num_output:
        d.retire()
    d.tell(Dropped(RequestId(2)))
    while d.phase(2) is Phase.DROPPED:
        assert d.core.live[RequestId(2)].row is None
        d.retire()
    d.run()
