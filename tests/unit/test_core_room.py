"""Who gives way for host pages, where the simulator hardly ever comes."""
from __future__ import annotations

import itertools

import pytest
from driver import Driver

from penstock.core.core import Core
from penstock.core.lifecycle import Phase, Place
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Event,
    Moved,
    MoveId,
    Outcome,
    Paused,
    Promoted,
    RequestId,
    Retired,
    Spilled,
    StepPlan,
    Tier,
)
from penstock.core.settings import CacheGroup, CoreConfig

LONG, SHORT = RequestId(1), RequestId(2)


def test_a_row_on_the_device_gives_up_its_twin_before_a_hosted_row_is_dropped() -> None:
    """LONG fills the host. SHORT begins alike, so that only its open page is there too."""
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=8, dram_pages=12, hot_pages=1, step_tokens=64,
                           max_len=64))
    events: list[Event] = [Arrived(LONG, tuple(range(40)), 7, selects=True),
                           Arrived(SHORT, tuple(range(7)), 20, selects=True)]
    twins, gone = 0, 0
    for _ in range(40):
        plan = core.advance(events).plan
        core.check()
        if plan is None:
            break
        if LONG in core.live and SHORT in core.live:
            twins += any(t.host and t.host[-1] is not None for t in core.live[SHORT].tables)
            gone += any(m.row == core.live[SHORT].row and max(m.host) < 0 for m in plan.remaps)
        assert LONG not in core.live or core.live[LONG].state.name in (
            "loading", "prefill", "decode.host"), core.live[LONG].state
        events = [Retired(plan.step, ((7,),) * sum(plan.samples)), *(Moved(m.id, True) for m in plan.moves)]
    assert twins and gone, "SHORT never had a twin, or never gave it up"
    assert not core.live and core.counters["drops"] == 0


def test_a_row_on_its_way_to_the_host_gives_way_before_the_first_of_all() -> None:
    """LONG is hosted and needs the page that SHORT, who is younger, has just reserved to go there too."""
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=8, dram_pages=11, hot_pages=1, step_tokens=64,
                           max_len=64))
    events: list[Event] = [Arrived(LONG, tuple(range(38)), 6, selects=True),
                           Arrived(SHORT, tuple(range(7)), 6, selects=True)]
    slow, asked = list[Event](), False
    for _ in range(60):
        plan = core.advance(events).plan
        core.check()
        if plan is None:
            if not slow:
                break
            events, slow = slow, []            # what SHORT has given up is still being written
            continue
        assert LONG not in core.live or core.live[LONG].state.name in (
            "loading", "prefill", "decode.host"), core.live[LONG].state
        events = [Retired(plan.step, ((7,),) * sum(plan.samples))]
        slow += [Moved(m.id, True) for m in plan.moves]
        if not asked and SHORT in core.live and core.live[SHORT].state.name == "decode.device":
            asked, events = True, [*events, Spilled(SHORT)]
        elif LONG not in core.live or not asked:
            events, slow = events + slow, []
    assert asked and not core.live and core.counters["drops"] == 1


def test_a_hosted_row_comes_back_when_the_last_copies_of_another_have_landed() -> None:
    """The other has ended, its pages are in the way as long as their write-through flies, and after that
    no edge is taken and no page becomes free."""
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=28, dram_pages=64, hot_pages=1, budget=60))
    events: list[Event] = [Arrived(RequestId(0), tuple(range(1000, 1040)), 8)]
    states = list[str]()
    for turn in range(14):
        if turn == 2:
            events.append(Arrived(RequestId(1), tuple(range(100, 109)), 40, selects=True))
        if turn == 12:
            assert states[-3:] == ["decode.host"] * 3 and len(core.live) == 1
            events.append(Moved(MoveId(1), True))
        plan = core.advance(events).plan
        core.check()
        assert plan is not None
        states.append(core.live[RequestId(int(turn > 1))].state.name)
        events = [Moved(m.id, True) for m in plan.moves if m.id != 1]
        events.append(Retired(plan.step, tuple((9,) for s in plan.samples if s)))
    assert states[-2:] == ["decode.to_device", "decode.device"]


@pytest.mark.parametrize("ahead", range(6))
def test_a_spill_goes_on_in_the_next_step_though_the_host_is_full_of_cached_pages(ahead: int) -> None:
    """With a selector group neither a page nor a slab of the host is free. What the prompt left open, and
    each page after it, has its host page all the same: nothing is left to be copied."""
    d = Driver(hbm_pages=60, dram_pages=24, hot_pages=1, max_len=64, groups=(
        CacheGroup(name="full", page_bytes=0), CacheGroup(name="selector", page_bytes=0, selector=True)))
    for rid in (3, 4):
        d.arrive(rid, range(100 * rid, 100 * rid + 41), 1)
        d.run()
    assert not d.core.kv.arenas[Tier.DRAM].free
    d.arrive(1, range(14), 40, selects=True)
    for _ in range(1 + ahead):
        d.retire()
        while d.moves:
            d.land()
    assert d.state(1) == "decode.device"
    d.tell(Spilled(LONG))
    assert d.core.live[LONG].place is Place.HOST
    (plan,) = d.retire()
    assert plan.rows
    d.run()
    assert d.finished()[1] is Outcome.LENGTH


def test_who_comes_to_the_host_leaves_those_who_run_there_a_page_to_grow() -> None:
    """Its prompt would take the last host pages, and the next token of the other would drop it again."""
    d = Driver(hbm_pages=8, dram_pages=12, hot_pages=1, max_len=64, always_hosted=True)
    d.arrive(1, range(16), 8, selects=True)
    d.arrive(2, range(100, 132), 4, selects=True)
    d.run()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.LENGTH}
    assert d.core.counters["drops"] == 0


def test_who_runs_from_the_host_grows_nothing_on_the_device() -> None:
    """Four rows decode from the host. The fifth needs one page of a hot buffer, and one is free."""
    d = Driver(rows=5, hbm_pages=5, dram_pages=80, hot_pages=1, max_len=64, always_hosted=True)
    for rid in range(5):
        d.arrive(rid, range(100 * rid, 100 * rid + 10), 20, selects=True)
    for _ in range(4):
        d.retire()
    assert [d.state(rid) for rid in range(5)] == ["decode.host"] * 5


def test_who_pauses_keeps_on_the_device_what_the_host_has_promised_to_another() -> None:
    """All that SHORT has is cached on the host; LONG, whose prompt takes its pages later, counts on that."""
    d = Driver(hbm_pages=16, dram_pages=12, hot_pages=1, max_len=64, step_tokens=8, take_pages=2,
               always_hosted=True)
    d.arrive(2, range(18), 30)
    for _ in range(4):
        d.retire()
        while d.moves:
            d.land()
    d.arrive(1, range(100, 138), 4, selects=True)
    d.retire()
    assert d.phase(1) is Phase.PREFILL and d.core.kv.arenas[Tier.DRAM].num_reserved
    d.tell(Paused(SHORT))
    d.retire()
    (table,) = d.core.live[SHORT].tables
    assert d.phase(2) is Phase.PAUSED and d.core.live[SHORT].saving.is_done and any(table.device)
    while d.plans:
        d.retire()
        while d.moves:
            d.land()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.LENGTH} and not d.core.counters["drops"]


# ---------------------------------------------------------------- a pause takes turns
def _half_saved() -> Driver:
    """LONG has 10 pages of which a turn saves two; SHORT decodes next to it."""
    d = Driver(hbm_pages=32, dram_pages=32, save_pages=2, max_len=128)
    d.arrive(2, range(500, 506), 60)
    d.arrive(1, range(38), 60)
    while d.core.live[LONG].num_output < 2:
        d.retire()
        while d.moves:
            d.land()
    d.tell(Paused(LONG))
    while not d.core.live[LONG].saving.at:
        d.retire()
    return d


def test_a_paused_request_saves_its_pages_over_turns_and_then_gets_its_row_again() -> None:
    d = _half_saved()
    r = d.core.live[LONG]
    (table,) = r.tables
    left = [sum(copy is not None for copy in table.device)]
    while r.phase is Phase.PAUSED:
        assert r.row is None and not d.core.admission.may_start(r)
        d.retire()
        if r.phase is Phase.PAUSED:
            left.append(sum(copy is not None for copy in table.device))
    assert len(left) >= 4 and all(0 <= a - b <= 2 for a, b in itertools.pairwise(left)), left
    d.run()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.LENGTH} and not d.core.counters["drops"]


@pytest.mark.parametrize("event", [Aborted(LONG), Dropped(LONG)])
def test_half_a_pause_gives_back_all_that_it_has(event: Event) -> None:
    d = _half_saved()
    r = d.core.live[LONG]
    assert any(r.tables[0].device) and any(r.tables[0].host) and not r.saving.is_done
    d.tell(event)
    assert r.saving.at is None and not any(r.held.reserve)
    d.run()
    assert not d.core.live and d.core.kv.arenas[Tier.DRAM].pools[0].num_evictable == len(
        d.core.kv.arenas[Tier.DRAM].pools[0].held)


def test_half_a_pause_goes_on_at_once_when_no_step_is_in_flight() -> None:
    d = _half_saved()
    d.tell(Aborted(SHORT))
    while d.plans and d.core.live[LONG].phase is Phase.PAUSED:
        d.retire()
    d.run()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.ABORT}


@pytest.mark.parametrize(("host", "pauses"), [(16, True), (12, False)])
def test_who_is_paused_keeps_on_the_device_what_the_host_has_no_room_for(host: int, pauses: bool) -> None:
    """LONG has 26 pages, too many for one look: the host must have room for half of them."""
    d = Driver(rows=2, hbm_pages=60, dram_pages=host, save_pages=1, max_len=200, step_tokens=200)
    d.arrive(2, range(500, 506), 90)
    d.arrive(1, range(102), 60)
    d.arrive(3, range(700, 703), 90, priority=-1)      # takes its row
    while d.core.live[LONG].num_output < 2:
        d.retire()
        while d.moves:
            d.land()
    r = d.core.live[LONG]
    d.tell(Paused(LONG))
    assert (r.phase is Phase.PAUSED) is pauses
    while r.phase is Phase.PAUSED and not (r.saving.is_done and not r.saving.is_copying):
        d.retire()
        while d.moves:
            d.land()
    if pauses:
        up, down = (sum([copy is not None for copy in c]) for c in (r.tables[0].device, r.tables[0].host))
        assert r.phase is Phase.PAUSED and up + down == 26 and 26 // 2 <= down <= host
    d.run()
    assert set(d.finished().values()) == {Outcome.LENGTH} and not d.core.counters["drops"]


# ---------------------------------------------------------------- for those who wait
def test_rows_go_on_from_the_host_so_that_those_in_line_get_theirs() -> None:
    """A device for five prompts, and a host for all. No row need grow for that."""
    d, most, steps = Driver(rows=12, hbm_pages=40, dram_pages=400, hot_pages=1, max_len=128), 0, 0
    for rid in range(12):
        d.arrive(rid, range(1000 * rid, 1000 * rid + 31), 24, selects=True)
    while d.plans:
        d.retire()
        while d.moves:
            d.land()
        most, steps = max(most, len(d.core.running)), steps + 1
    assert most == 12 and steps < 40, (most, steps)
    assert d.finished() == dict.fromkeys(range(12), Outcome.LENGTH)
    assert d.core.counters["spills"] and not (d.core.counters["pauses"] or d.core.counters["drops"])


def test_a_dense_request_in_line_gets_pages_that_others_can_do_without() -> None:
    d = Driver(rows=4, hbm_pages=40, dram_pages=400, hot_pages=2, max_len=256)
    d.arrive(0, range(120), 40, selects=True)
    d.arrive(1, range(1000, 1080), 4)
    for _ in range(6):
        d.retire()
        while d.moves:
            d.land()
    assert (d.state(0), d.state(1)) == ("decode.host", "decode.device")
    d.run()
    assert d.finished() == {0: Outcome.LENGTH, 1: Outcome.LENGTH}


@pytest.mark.parametrize("prompt", [230, 150])
def test_nobody_goes_to_the_host_for_somebody_who_would_not_fit_all_the_same(prompt: int) -> None:
    """Of 60 pages it needs 58, and the two could leave it 44; or 38, and the younger could leave it 36: the
    first of all stays."""
    d = Driver(rows=4, hbm_pages=60, dram_pages=400, hot_pages=8, max_len=256)
    for rid in range(2):
        d.arrive(rid, range(1000 * rid, 1000 * rid + 62), 60, selects=True)
    d.arrive(9, range(9000, 9000 + prompt), 4)
    for _ in range(20):
        d.retire()
        while d.moves:
            d.land()
    assert [d.state(rid) for rid in (0, 1, 9)] == ["decode.device", "decode.device", "queued"]
    assert d.core.counters["spills"] == 0


def test_who_gave_way_twice_ends_before_the_next_that_outranks_it_gets_a_row() -> None:
    """Those who come before it in the order of service would make it give way for ever, one after another."""
    d = Driver(page_size=1, rows=2, hbm_pages=36)
    d.arrive(1, range(10), 24, priority=1)
    for rid in (2, 3, 4):
        d.arrive(rid, range(100 * rid, 100 * rid + 12), 12)
        while rid in d.core.live and 1 in d.core.live:
            d.retire()
    d.run()
    assert list(d.finished()) == [2, 3, 1, 4]
    assert d.core.counters["drops"] == 2


# ---------------------------------------------------------------- over several turns
def test_a_long_prompt_takes_its_pages_as_it_comes_to_them_and_nobody_else_gets_those() -> None:
    """16 pages: 10 for the first, two at once. The second needs 6, and one is for the first to grow."""
    d = Driver(take_pages=2, step_tokens=8, rows=2)
    d.arrive(1, range(40), 4)
    pool, arena = d.core.kv.device[0].pool, d.core.kv.arenas[Tier.HBM]
    assert len(pool.held) == 2 and arena.reserved == [8]
    d.arrive(2, range(100, 124), 4)
    for _ in range(4):
        assert (d.phase(1), d.phase(2)) == (Phase.PREFILL, Phase.QUEUED)
        assert len(pool.held) + arena.num_reserved == 10
        d.retire()
    assert (len(pool.held), arena.reserved) == (10, [0])
    d.run()
    assert d.finished() == {1: Outcome.LENGTH, 2: Outcome.LENGTH}
    assert d.core.counters["drops"] == d.core.counters["pauses"] == 0


def test_who_ends_in_the_middle_of_its_prompt_is_promised_nothing_any_more() -> None:
    d = Driver(take_pages=2, step_tokens=8)
    d.arrive(1, range(40), 4)
    d.arrive(2, range(100, 140), 4)
    d.tell(Aborted(RequestId(1)))
    d.run()
    assert d.core.kv.arenas[Tier.HBM].num_reserved == 0 and d.finished()[2] is Outcome.LENGTH


def test_a_long_request_gives_up_its_pages_in_portions_and_at_once_if_they_are_needed() -> None:
    d = Driver(take_pages=2, step_tokens=64, rows=2)
    d.arrive(9, range(900, 904), 30)
    d.arrive(1, range(40), 1)
    pool, free = d.core.kv.device[0].pool, list[int]()
    while 1 in d.core.live:
        d.retire()
    for _ in range(8):
        free.append(pool.num_evictable)
        d.retire()
    assert free == sorted(free) and free[0] < free[-1] < 10 and d.core.kv.freeing, free
    d.arrive(2, range(200, 244), 1)
    assert d.phase(2) is Phase.PREFILL
    d.run()
    assert d.finished() == dict.fromkeys((9, 1, 2), Outcome.LENGTH)


def test_a_dropped_request_gives_up_its_pages_in_portions_and_begins_with_them_again() -> None:
    d = Driver(take_pages=4, hit_pages=8, step_tokens=64, rows=2, hbm_pages=64)
    d.arrive(9, range(900, 904), 40)
    d.arrive(1, range(40), 20)
    while d.core.live[LONG].num_output < 2:
        d.retire()
    r, table = d.core.live[LONG], d.core.live[LONG].tables[0]
    named = len(r.path)
    d.tell(Dropped(LONG))
    [gone] = d.core.kv.freeing
    assert gone.tables == [table] and 0 < named - len(gone.path) <= 2 and r.tables != [table]
    while r.phase is Phase.DROPPED:
        before, left = len(r.path), len(gone.path)
        d.retire()
        assert len(r.path) - before <= 8 and left - len(gone.path) <= 2
    assert r.retired == 4 * named
    d.run()
    assert d.finished() == {9: Outcome.LENGTH, 1: Outcome.LENGTH} and d.core.counters["drops"] == 1


def test_a_promotion_loads_few_pages_at_once() -> None:
    """What it and others miss meanwhile comes over the same link. The page that was open is one more."""
    d, loads = Driver(hbm_pages=40, dram_pages=400, hot_pages=2, load_pages=2, max_len=256), list[int]()
    d.arrive(0, range(120), 90, selects=True)
    d.arrive(1, range(1000, 1080), 4)          # somebody else needs the device for a while
    while d.plans or d.moves:
        if 1 not in d.core.live and 0 in d.core.live and d.state(0) == "decode.host":
            d.tell(Promoted(RequestId(0)))
        if 0 in d.core.live and d.state(0) == "decode.to_device":
            loads.append(sum(len(m.dst_pages) for m in d.moves if m.dst is Tier.HBM))
        while d.moves:
            d.land()
        if d.plans:
            d.retire()
    assert max(loads) <= 3 and sum(loads) >= 8 and d.core.counters["promotions"] == 1, loads
    assert d.finished() == {0: Outcome.LENGTH, 1: Outcome.LENGTH}


def test_a_row_goes_to_the_host_and_comes_back_page_by_page_without_a_bind() -> None:
    """Each page is read from the device as soon as its load has landed, and one flies at a time."""
    core = Core(CoreConfig(page_size=4, rows=1, hbm_pages=24, dram_pages=40, hot_pages=4, step_tokens=64,
                           load_pages=1, max_len=64))
    events: list[Event] = [Arrived(LONG, tuple(range(26)), 30, selects=True)]
    plans: list[StepPlan] = []
    for turn in range(30):
        plan = core.advance(events).plan
        core.check()
        assert plan is not None
        plans.append(plan)
        events = [Retired(plan.step, ((7,),) * sum(plan.samples)), *(Moved(m.id, True) for m in plan.moves),
                  *([Spilled(LONG)] * (turn == 2)), *([Promoted(LONG)] * (turn == 5))]
        if turn > 6 and core.live[LONG].state.name == "decode.device":
            break
    assert [len(plan.binds) for plan in plans] == [1] + [0] * (len(plans) - 1)
    spilled, *mapped = [(m, plan) for plan in plans for m in plan.remaps]
    assert spilled[0].entries == tuple(range(7)) and min(spilled[0].host) >= 0
    assert len(mapped) == spilled[0].device.count(-1) == 4
    assert all([len(m.entries) == 1 and min(m.device) >= 0 for m, _ in mapped])
    assert len({plan.step for _, plan in mapped}) == len(mapped)
    hot = [resize.pages for plan in plans for resize in plan.resizes]
    assert [len(pages) for pages in hot] == [4, 0] and [h.keeps for h in hot[0]] == [3, 4, 5, 6]
