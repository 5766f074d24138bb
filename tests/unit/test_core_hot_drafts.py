"""What hot buffers have for drafts: at once, of what is cached, while rows draft, and nobody waits for it."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.lifecycle import Phase
from penstock.core.plan import Arrived, HotUse, Paused, RequestId, Spilled, StepId

NEEDED = 8       # pages: 4 positions of 8 tokens each
CACHED = 19


def full(**settings: object) -> Driver:
    """A device of 24 pages, most of them cached, and not on the host."""
    d = Driver(**{"rows": 16, "hbm_pages": 24, "dram_pages": 400, "hot_pages": 3, "hot_pages_max": 12,
                  "budget": 8, "draft_tokens": 3, "draft_positions": 16, "always_hosted": True,
                  "step_tokens": 400, **settings})
    d.arrive(99, range(1_000, 1_000 + 4 * CACHED), max_new=1)
    d.retire()
    while d.moves:
        d.land(ok=False)
    assert cached(d) == CACHED and not d.core.running
    return d


def cached(d: Driver) -> int:
    return d.core.kv.device[0].pool.num_evictable - sum(r.num_hot - r.hot.least for r in d.core.kv.grown)


def sizes(d: Driver) -> list[int]:
    return [r.num_hot for r in d.core.hosted]


def hosted(d: Driver, rid: int, tokens: int = 36, max_new: int = 60, **more: object) -> None:
    """It decodes, and the device knows all of it."""
    d.arrive(rid, range(100 * rid, 100 * rid + tokens), max_new=max_new, selects=True, **more)
    while d.state(rid) != "decode.host":
        d.retire()
    d.retire()


@pytest.mark.parametrize("drafts, pages", [(None, NEEDED), (3, NEEDED), (1, 4), (0, 3)])
def test_a_hosted_row_has_what_its_drafts_need_at_once(drafts: int | None, pages: int) -> None:
    d = full()
    hosted(d, 1, drafts=drafts)
    assert sizes(d) == [pages]
    assert cached(d) >= CACHED - pages + 3 - 1, "more is evicted than that, and a page that stays free"


@pytest.mark.parametrize("settings, pages", [
    ({"draft_tokens": 0}, 3), ({"draft_positions": 0}, 3), ({"draft_positions": 3}, 6),
    ({"draft_positions": 1}, 3), ({"hot_pages_max": 5}, 5)])
def test_it_has_no_more_than_it_may(settings: dict[str, int], pages: int) -> None:
    d = full(**settings)
    hosted(d, 1)
    assert sizes(d) == [pages]


def test_a_row_that_is_short_needs_no_more_than_all_of_it() -> None:
    d = full()
    hosted(d, 1, tokens=17, max_new=5)
    assert sizes(d) == [6]


def test_of_what_lies_on_the_device_drafts_get_as_many_as_fit() -> None:
    d = full()
    for rid in (1, 2):
        hosted(d, rid)
    assert sizes(d) == [NEEDED, NEEDED]
    hosted(d, 3)                                 # of 24 pages, and one for each row that runs
    assert d.core.kv.device[0].pool.free >= 3 and sum(sizes(d)) > 3 * 3
    assert min(sizes(d)) >= 3 and cached(d) <= 1


@pytest.mark.parametrize("positions, third", [(8, 4), (5, 3)])      # each may have one draft, or none
def test_many_rows_draft_less_or_nothing_and_evict_no_more(positions: int, third: int) -> None:
    d = full(hbm_pages=60, draft_positions=positions)
    hosted(d, 1)
    hosted(d, 2)
    before = sizes(d)
    hosted(d, 3)
    assert sizes(d) == [*before, third] and cached(d) == CACHED


def test_they_draft_again_when_others_have_ended() -> None:
    d = full(hbm_pages=60, draft_positions=8)
    hosted(d, 1, max_new=6)
    hosted(d, 2)
    hosted(d, 3)
    while RequestId(1) in d.core.live:
        d.retire()
    d.retire()
    assert sizes(d) == [NEEDED, NEEDED]


def test_who_was_elsewhere_when_drafts_ended_keeps_nothing_for_them() -> None:
    d = full(hbm_pages=60, draft_positions=4, rows=3, dram_pages=800)
    hosted(d, 1)
    assert sizes(d) == [NEEDED]
    d.tell(Paused(RequestId(1)), *(Arrived(RequestId(rid), tuple(range(100 * rid, 100 * rid + 36)),
                                           max_new=20 if rid == 2 else 60, priority=-1, selects=True)
                                   for rid in (2, 3, 4)))
    while RequestId(2) in d.core.live:
        d.land() if d.moves else d.retire()
    while d.state(1) != "decode.host":
        d.land() if d.moves else d.retire()
    assert [r.hot_kept for r in d.core.hosted] == [3, 3, 3]


def test_an_admission_takes_what_is_cached_first_and_then_from_drafts() -> None:
    d = full(always_hosted=False)
    hosted_by_size(d)
    assert sizes(d) == [NEEDED]
    before = cached(d)
    d.arrive(2, range(5_000, 5_000 + 4 * (before - 4)), max_new=3)
    assert d.phase(2) is not Phase.QUEUED and sizes(d) == [NEEDED], "what is cached would have been enough"
    d.arrive(3, range(7_000, 7_000 + 24), max_new=3)
    d.retire()
    assert d.phase(3) is not Phase.QUEUED and sizes(d) < [NEEDED]


def hosted_by_size(d: Driver) -> None:
    hosted(d, 1, tokens=100, max_new=20)         # the device could not hold it


def test_what_was_taken_back_evicts_nothing_at_once() -> None:
    d = full(always_hosted=False)
    hosted_by_size(d)
    d.arrive(2, range(5_000, 5_000 + 4 * 15), max_new=30)
    while d.state(2) != "decode.device":
        d.retire()
    small, evicted = sizes(d), d.core.kv.device[0].evicted
    assert small < [NEEDED]
    seen = []
    for step in range(12):
        d.tell(HotUse(StepId(step), ((RequestId(1), 10, 0),)))
        d.retire()
        seen += sizes(d)
    assert seen == sorted(seen, reverse=True) and d.core.kv.device[0].evicted == evicted


def test_what_would_not_be_enough_stays_cached() -> None:
    d = full(budget=16, hot_pages=4, hot_pages_max=16, draft_tokens=1)
    for rid in (1, 2, 3):
        hosted(d, rid)
    assert sizes(d) == [8, 8, 4] and cached(d) == 1


def test_drafts_take_nothing_before_the_head_of_the_line() -> None:
    d = full(always_hosted=False)
    d.arrive(2, range(5_000, 5_000 + 32), max_new=12)
    d.retire()
    d.arrive(1, range(100), max_new=20, selects=True)
    d.arrive(3, range(7_000, 7_000 + 60), max_new=2)     # waits for the end of 2
    d.retire()
    assert d.state(1) == "decode.host" and cached(d) > NEEDED
    while RequestId(2) in d.core.live:
        assert d.phase(3) is Phase.QUEUED and sizes(d) == [3]
        d.retire()
    while RequestId(3) in d.core.live:
        d.land() if d.moves else d.retire()
    assert sizes(d) == [NEEDED]


def test_a_row_that_goes_on_from_the_host_drafts_once_the_device_knows() -> None:
    d = full(always_hosted=False, hbm_pages=40)
    d.arrive(1, range(36), max_new=60, selects=True)
    while d.moves:
        d.land()
    d.tell(Spilled(RequestId(1)))
    while d.state(1) != "decode.host":
        d.land() if d.moves else d.retire()
    d.retire()
    d.retire()
    assert sizes(d) == [NEEDED]
