"""What the planner emits, read step by step on examples small enough to check by hand."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Entered,
    Expired,
    Finished,
    Flushed,
    Moved,
    Outcome,
    Paused,
    Rates,
    RequestId,
    Retired,
    Started,
    Stopped,
    Tier,
    Token,
)
from penstock.core.settings import CacheGroup


def test_prompt_is_prefilled_in_chunks_and_samples_once() -> None:
    d = Driver(step_tokens=3)
    (first,) = d.arrive(1, range(8))
    assert (first.start, first.count, first.samples) == ((0,), (3,), (False,))
    (second,) = d.retire()
    (third,) = d.retire()
    assert (second.start, second.count, second.samples) == ((3,), (3,), (False,))
    assert (third.start, third.count, third.samples) == ((6,), (2,), (True,))
    assert first.tokens + second.tokens + third.tokens == tuple(range(8))
    assert len(first.binds) == 1 and not second.binds and not third.binds


def test_decode_mixes_with_prefill_under_the_token_budget() -> None:
    d = Driver(step_tokens=4)
    d.arrive(1, range(4))
    d.arrive(2, range(10, 20))
    (mixed,) = d.retire()
    assert mixed.rids == (1, 2) and mixed.count == (1, 3)
    assert mixed.tokens == (-1, 10, 11, 12)


def test_overlap_plans_a_step_on_a_token_nobody_has_seen() -> None:
    d = Driver(overlap=True)
    first, second = d.arrive(1, range(4))
    assert first.tokens == (0, 1, 2, 3) and second.tokens == (-1,)
    assert d.tell() == []                  # two plans in flight is the limit


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("rows", [3, 8, 9])
def test_each_stage_of_a_pipeline_has_rows_to_decode(rows: int, stages: int) -> None:
    """Prompts of all of them end in one step: rows that have met part again."""
    d = Driver(rows=16, hbm_pages=96, pp_size=stages)
    d.tell(*(Arrived(RequestId(i), (i, 1, 2, 3), 30) for i in range(rows)))
    for _ in range(3 * stages):
        d.retire()
    sizes = [len(plan.rows) for plan in d.plans]
    assert max(sizes) == -(-rows // stages) and sum(sizes) == rows
    seen = [rid for plan in d.plans for rid in plan.rids]
    assert sorted(seen) == list(range(rows))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows_of_a_pipeline_decode_together_and_their_next_step_is_in_flight(rows: int, stages: int) -> None:
    """Also those that came later, once their prompts have been computed."""
    d = Driver(rows=16, hbm_pages=96, pp_size=stages, pp_together=8, overlap=True)
    d.tell(*(Arrived(RequestId(i), (i, 1, 2, 3), 60) for i in range(rows - rows // 2)))
    for _ in range(5):
        d.retire()
    d.tell(*(Arrived(RequestId(i), (i, 1, 2, 3), 60) for i in range(rows - rows // 2, rows)))
    for _ in range(12):
        d.retire()
        assert len(d.plans) <= stages + 1
    assert [sorted(plan.rids) for plan in d.plans] == [list(range(rows))] * 2
    assert {tuple(plan.count) for plan in d.plans} == {(1,) * rows}


def test_one_row_more_than_few_and_they_take_turns() -> None:
    d = Driver(rows=16, hbm_pages=96, pp_size=2, pp_together=3, overlap=True)
    d.tell(*(Arrived(RequestId(i), (i, 1, 2, 3), 60) for i in range(4)))
    for _ in range(8):
        d.retire()
    assert [len(plan.rids) for plan in d.plans] == [2, 2, 2]


def test_growth_appends_a_page_exactly_at_the_page_edge() -> None:
    d = Driver()
    d.arrive(1, range(4))
    (decode,) = d.retire()
    assert len(decode.grows) == 1 and len(decode.grows[0].pages) == 1 and decode.grows[0].index == 1
    (decode,) = d.retire()
    assert decode.grows == ()


def test_repeated_prompt_shares_sealed_pages() -> None:
    d = Driver()
    d.arrive(1, range(10))
    d.run()
    (hit,) = d.arrive(2, range(10))
    assert hit.start == (8,) and hit.count == (2,)
    assert [o for o in d.out if isinstance(o, Started)][-1] == Started(RequestId(2), 8, 0)


def test_another_namespace_shares_nothing() -> None:
    d = Driver()
    d.arrive(1, range(10))
    d.run()
    (miss,) = d.arrive(2, range(10), namespace=7)
    assert miss.start == (0,)


def test_fork_waits_for_its_leader_and_recomputes_only_the_tail() -> None:
    d = Driver()
    (only,) = d.tell(Arrived(RequestId(1), tuple(range(10)), 4),
                     Arrived(RequestId(2), tuple(range(10)), 4, leader=RequestId(1)))
    assert only.rids == (1,)
    (both,) = d.retire()
    assert both.rids == (1, 2) and both.start == (10, 8)
    assert both.binds[0].pages[0][:2] == only.binds[0].pages[0][:2]


def test_without_prefix_cache_forks_still_share_and_nothing_stays() -> None:
    d = Driver(prefix_cache=False)
    d.tell(Arrived(RequestId(1), tuple(range(10)), 2, namespace=1),
           Arrived(RequestId(2), tuple(range(10)), 2, namespace=1, leader=RequestId(1)))
    (both,) = d.retire()
    assert both.start == (10, 8)
    d.run()
    assert d.core.kv.device[0].pool.free == 16


def test_pause_writes_to_the_host_and_resume_computes_nothing_twice() -> None:
    d = Driver(dram_pages=8)
    d.arrive(1, range(6), max_new=8)
    d.retire()                             # token 100 known, its KV in flight
    d.tell(Paused(RequestId(1)))
    assert d.phase(1) is Phase.PAUSED
    d.retire()
    moved = [m for m in d.moves if m.dst is Tier.DRAM]
    assert sorted(m.tokens for m in moved) == [3, 4]     # a sealed page, and 3 tokens of the open one
    d.land()
    d.land()
    (load,) = d.moves
    assert load.src is Tier.DRAM and load.tokens == 3
    assert d.phase(1) is Phase.LOADING
    (decode,) = d.land()
    assert decode.start == (7,) and decode.count == (1,) and len(decode.binds) == 1


def test_a_paused_request_whose_copies_fail_keeps_what_is_on_the_device() -> None:
    d = Driver(dram_pages=8)
    d.arrive(1, range(6), max_new=8)
    d.retire()
    d.tell(Paused(RequestId(1)))
    d.retire()
    while d.moves:
        d.land(ok=False)
    plan = d.plans[-1]
    assert plan.start == (7,) and plan.count == (1,)     # nothing is computed again
    d.run()
    assert d.finished() == {1: Outcome.LENGTH}


def test_drop_recomputes_prompt_and_output() -> None:
    d = Driver()
    d.arrive(1, range(6), max_new=4)
    d.retire()
    d.tell(Dropped(RequestId(1)))
    assert d.phase(1) is Phase.DROPPED
    (again,) = d.retire()
    assert again.start == (4,) and again.tokens == (4, 5, 100, 101)
    d.run()
    assert [o.token for o in d.out if isinstance(o, Token)] == [100, 101, 102, 103]


def test_pressure_pauses_the_youngest_and_everybody_finishes() -> None:
    d = Driver(hbm_pages=5, dram_pages=16, page_size=2, rows=3)
    for rid in (1, 2, 3):
        d.arrive(rid, [rid] * 2, max_new=6)
    d.run()
    assert d.finished() == dict.fromkeys((1, 2, 3), Outcome.LENGTH)
    assert d.core.counters["pauses"] > 0 and d.core.counters["drops"] == 0
    assert [o.index for o in d.out if isinstance(o, Token) and o.rid == 3] == list(range(6))


def test_pressure_without_a_host_tier_drops() -> None:
    d = Driver(hbm_pages=5, page_size=2, rows=3)
    for rid in (1, 2, 3):
        d.arrive(rid, [rid] * 2, max_new=6)
    d.run()
    assert d.finished() == dict.fromkeys((1, 2, 3), Outcome.LENGTH)
    assert d.core.counters["drops"] > 0


def test_promised_pages_spare_a_second_victim() -> None:
    d = Driver(hbm_pages=6, page_size=2, rows=3, overlap=True)
    for rid in (1, 2, 3):
        d.arrive(rid, [rid] * 3, max_new=8)
    while d.core.counters["drops"] == 0:
        d.retire()
    d.tell()                               # the victim's pages are behind the step in flight
    assert d.core.counters["drops"] == 1
    d.run()
    assert set(d.finished().values()) == {Outcome.LENGTH}


def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    d = Driver(hbm_pages=2)
    d.arrive(1, range(9))
    (end,) = d.out
    assert isinstance(end, Finished) and end.outcome is Outcome.REFUSED
    assert "9 tokens" in end.reason and "2 pages of 4 tokens" in end.reason


def test_growth_beyond_the_whole_pool_ends_with_length() -> None:
    d = Driver(hbm_pages=2)
    d.arrive(1, range(6), max_new=50)
    d.run()
    assert d.finished() == {1: Outcome.LENGTH}
    assert sum(isinstance(o, Token) for o in d.out) == 3     # positions 6 and 7, and one without KV


def test_stop_token_under_overlap_discards_the_over_run() -> None:
    d = Driver(overlap=True)
    d.arrive(1, range(4), max_new=9, stop=frozenset({101}))
    d.run()
    assert [o.token for o in d.out if isinstance(o, Token)] == [100, 101]
    assert d.finished() == {1: Outcome.STOP}


def test_stop_token_counts_only_after_min_new() -> None:
    d = Driver()
    d.arrive(1, range(4), max_new=9, stop=frozenset({100, 102}), min_new=2)
    d.run()
    assert [o.token for o in d.out if isinstance(o, Token)] == [100, 101, 102]


def test_late_stop_and_repeated_abort_are_harmless() -> None:
    d = Driver()
    d.arrive(1, range(4), max_new=9)
    d.retire()
    d.tell(Stopped(RequestId(1), 1), Aborted(RequestId(1)), Aborted(RequestId(1)), Aborted(RequestId(9)))
    assert d.finished() == {1: Outcome.STOP}
    d.run()
    d.tell(Flushed())
    assert d.core.kv.device[0].pool.free == 16


def test_abort_returns_everything_once_its_step_has_retired() -> None:
    d = Driver(overlap=True)
    d.arrive(1, range(6), max_new=9)
    d.tell(Aborted(RequestId(1)))
    assert d.core.kv.device[0].pool.free < 16 and d.core.kv.rows.free == 3     # fenced, not free
    d.run()
    assert d.core.kv.device[0].pool.free == 16 and d.core.kv.rows.free == 4


def test_host_copies_serve_a_prefix_that_left_the_device() -> None:
    d = Driver(hbm_pages=3, dram_pages=8)
    d.arrive(1, range(10), max_new=1)
    d.run()
    d.arrive(2, range(50, 60), max_new=1)
    d.run()
    d.arrive(3, range(10), max_new=1)
    d.run()
    assert [o for o in d.out if isinstance(o, Started)][-1].dram_tokens == 8
    assert d.finished() == dict.fromkeys((1, 2, 3), Outcome.LENGTH)


def test_priority_is_served_first() -> None:
    d = Driver(rows=1)
    d.arrive(1, range(4), max_new=1)
    d.arrive(2, range(4, 8), max_new=1)
    (plan,) = d.tell(Arrived(RequestId(3), (9, 9), 1, priority=-1)) or d.retire()
    assert plan.rids == (3,)


def test_full_host_keeps_prefixes_not_suffixes() -> None:
    # A host pool that is full evicted the first chunk of the very prompt that was being written.
    d = Driver(hbm_pages=6, dram_pages=12, page_size=4, step_tokens=8)
    prompts = [[rid] * 20 for rid in (1, 2, 3, 4)]
    for rid, prompt in enumerate(prompts, 1):
        d.arrive(rid, prompt, max_new=1)
        d.run()
    d.arrive(9, prompts[-2], max_new=1)
    d.run()
    started = [o for o in d.out if isinstance(o, Started)][-1]
    assert started.dram_tokens + started.hbm_tokens >= 12


def test_repeated_hits_do_not_grow_the_eviction_order() -> None:
    d = Driver(hbm_pages=64)
    for rid in range(1, 120):
        d.arrive(rid, range(40), max_new=1)
        d.run()
    assert max(len(space.order) for space in d.core.kv.tree.spaces) <= 10     # one entry a page


def test_waiting_behind_busy_rows_costs_nothing_per_step() -> None:
    d = Driver(rows=1, hbm_pages=64)
    d.arrive(1, range(40), max_new=30)
    d.retire()
    d.arrive(2, range(40), max_new=1)
    before = d.core.kv.tree._entry
    for _ in range(20):
        d.retire()
    assert d.core.kv.tree._entry - before <= 6        # the pages that request 1 has sealed


def test_pages_of_a_damaged_request_serve_nobody() -> None:
    d = Driver()
    d.arrive(1, range(10), max_new=4)
    d.retire()
    d.tell(Aborted(RequestId(1), damaged=True))
    d.run()
    d.arrive(2, range(10), max_new=1)
    d.run()
    assert [o for o in d.out if isinstance(o, Started)][-1].hbm_tokens == 0


def test_drafts_are_upper_bounds_and_seal_on_what_came() -> None:
    d = Driver(draft_tokens=2, page_size=4)
    d.arrive(1, range(3), max_new=9)
    (decode,) = d.retire()
    assert decode.start == (3,) and decode.count == (3,) and decode.tokens == (-1, -1, -1)
    plan = d.plans.pop(0)
    (decode,) = d.tell(Retired(plan.step, ((101, 102),)))
    assert decode.start == (5,) and decode.tokens == (-1, -1, -1)
    plan = d.plans.pop(0)
    (decode,) = d.tell(Retired(plan.step, ((),)))
    assert decode.start == (5,) and decode.tokens == (-1, -1, -1)     # nothing came: again


def test_storage_brings_back_what_the_host_forgot() -> None:
    d = Driver(hbm_pages=3, dram_pages=4, disk_pages=32)
    for rid in (1, 2, 3, 4):
        d.arrive(rid, [rid] * 10, max_new=1)
        d.run()
    d.arrive(9, [1] * 10, max_new=1)
    assert d.phase(9) is Phase.FETCHING
    d.run()
    assert [o for o in d.out if isinstance(o, Started)][-1] == Started(RequestId(9), 0, 0, 8)


def test_slow_storage_is_not_asked_when_computing_is_faster() -> None:
    d = Driver(hbm_pages=3, dram_pages=4, disk_pages=32)
    for rid in (1, 2, 3, 4):
        d.arrive(rid, [rid] * 10, max_new=1)
        d.run()
    d.tell(Rates(disk_page_us=5_000.0, prefill_token_us=100.0))
    d.arrive(9, [1] * 10, max_new=1)
    assert d.phase(9) is not Phase.FETCHING


def test_storage_that_hangs_costs_a_deadline_and_its_pages_stay_fenced() -> None:
    d = Driver(hbm_pages=3, dram_pages=4, disk_pages=32)
    for rid in (1, 2, 3, 4):
        d.arrive(rid, [rid] * 10, max_new=1)
        d.run()
    d.arrive(9, [1] * 10, max_new=1)
    (entered,) = [o for o in d.out if isinstance(o, Entered)]
    hung = d.moves.pop()
    d.tell(Expired(entered.rid, entered.phase, entered.visit + 1))
    assert d.phase(9) is Phase.FETCHING                  # not this visit
    d.tell(Expired(entered.rid, entered.phase, entered.visit))
    d.run()
    assert d.finished()[9] is Outcome.LENGTH
    assert all(p in d.core.kv.host[0].pool.held for p in hung.dst_pages)
    d.tell(Moved(hung.id, True))
    d.tell(Flushed())
    assert d.core.kv.host[0].pool.free == 4


def test_who_fetched_in_vain_still_has_a_deadline_in_line() -> None:
    d = Driver(page_size=2, hbm_pages=5, dram_pages=4, disk_pages=99, rows=1)
    for rid, first in ((1, 0), (2, 100), (3, 200)):
        d.arrive(rid, range(first, first + 7), max_new=1)
        d.run()
    d.arrive(4, (7,), max_new=8)                   # it has the only row
    d.arrive(5, range(7), max_new=1)
    assert d.phase(5) is Phase.FETCHING
    entered = [o for o in d.out if isinstance(o, Entered) and o.rid == 5]
    d.tell(Expired(RequestId(5), entered[-1].phase, entered[-1].visit))
    assert d.phase(5) is Phase.DROPPED
    waits = [o for o in d.out if isinstance(o, Entered) and o.rid == 5][-1]
    assert waits.phase == "dropped"
    d.tell(Expired(RequestId(5), waits.phase, waits.visit))
    assert d.finished()[5] is Outcome.EXPIRED


@pytest.mark.parametrize("settings", [
    {}, {"max_len": 20}, {"dram_pages": 12, "disk_pages": 9, "hot_pages": 2}])
def test_a_refusal_says_how_long_a_prompt_may_be_and_that_is_served(settings: dict[str, int]) -> None:
    d = Driver(page_size=4, hbm_pages=8, step_tokens=64, **settings)
    d.arrive(1, range(200), max_new=1, selects=True)
    [end] = [o for o in d.out if isinstance(o, Finished)]
    n, longest = [int(word) for word in end.reason.split() if word.isdigit()][:2]
    assert end.outcome is Outcome.REFUSED and n == 200
    d.arrive(2, range(longest), max_new=1, selects=True)
    d.arrive(3, range(longest + 1), max_new=1, selects=True)
    d.run()
    assert d.finished()[2] is Outcome.LENGTH and d.finished()[3] is Outcome.REFUSED


def test_a_prefill_engine_says_what_it_does_not_serve() -> None:
    d = Driver(role="prefill")
    d.arrive(1, range(5))
    [end] = [o for o in d.out if isinstance(o, Finished)]
    assert end.outcome is Outcome.REFUSED and "transfer" in end.reason


@pytest.mark.parametrize("between, hbm, dram", [(False, 24, 0), (True, 0, 24)])
def test_pages_that_all_windows_have_left_behind_are_hits_where_the_windows_are(
        between: bool, hbm: int, dram: int) -> None:
    """Of 24 tokens that are found the last 8 are read: from the device or, once it lost them, the host."""
    d = Driver(hbm_pages=8, dram_pages=40, max_len=64, groups=(
        CacheGroup(name="window", page_bytes=0, window=8),))
    d.arrive(1, range(24), 1)
    d.run()
    if between:
        d.arrive(2, range(100, 130), 1)
        d.run()
    d.arrive(3, range(26), 1)
    d.run()
    started = [o for o in d.out if isinstance(o, Started)][-1]
    assert (started.hbm_tokens, started.dram_tokens) == (hbm, dram)
