"""What policies ask costs the same however many requests run or wait. Counted, as in test_core_planning."""
from __future__ import annotations

from typing import Any

import pytest
from counting import bytecodes

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import Aborted, Arrived, Event, Listed, Lookup, Moved, Paused, RequestId, Retired
from penstock.core.settings import CoreConfig

PAGE, PROMPT = 4, 6                            # 4 + 2 tokens: all rows need a third page in the same turn


class Engine:
    """A core whose plans are answered in the next turn."""

    def __init__(self, rows: int, **settings: Any) -> None:
        base: dict[str, Any] = {"page_size": PAGE, "rows": rows, "hbm_pages": 10_000, "step_tokens": 100_000,
                                "admissions": 10_000, "max_len": 1000}
        self.core = Core(CoreConfig(**(base | settings)))
        self.events: list[Event] = []
        self.last = 0
        self.asked: list[Lookup] = []          # of storage, in the last turn

    def arrive(self, n: int, tokens: int = PROMPT, max_new: int = 60) -> None:
        self.events += [Arrived(RequestId(self.last + i), (self.last + i, *range(1, tokens)), max_new)
                        for i in range(1, n + 1)]
        self.last += n

    def turn(self) -> None:
        events, self.events = self.events, []
        advance = self.core.advance(events)
        self.asked, plan = [o for o in advance.outputs if isinstance(o, Lookup)], advance.plan
        if plan is not None:
            self.events = [Retired(plan.step, ((7,),) * sum(plan.samples)),
                           *(Moved(m.id, True) for m in plan.moves)]

    def costs(self, turns: int) -> list[int]:
        return [bytecodes(self.turn) for _ in range(turns)]


def short(rows: int, waiting: int, **settings: Any) -> Engine:
    """All rows are about to lack a page in the same turn, but for a few."""
    e = Engine(rows, hbm_pages=3 * rows + 3, **settings)
    e.arrive(rows)
    e.turn()
    e.arrive(waiting)
    e.turn()
    assert len(e.core.running) == rows and len(e.core.waiting) == waiting
    return e


KINDS: list[dict[str, Any]] = [{}, {"dram_pages": 3000}, {"dram_pages": 40}, {"overlap": True}]


@pytest.mark.parametrize("kind", KINDS, ids=["drop", "pause", "host full", "overlap"])
def test_rows_that_lack_pages_cost_the_same_whatever_waits(kind: dict[str, Any]) -> None:
    costs = []
    for waiting in (10, 640):
        e = short(12, waiting, **kind)
        costs.append(e.costs(14))
        assert e.core.counters["pauses"] + e.core.counters["drops"] > 3
    few, many = costs
    assert sum(many) <= 1.1 * sum(few) and max(many) <= 1.2 * max(few)


@pytest.mark.parametrize("host", [0, 1, 20], ids=["drop", "host full", "pause"])
def test_rows_that_lack_pages_cost_the_same_each(host: int) -> None:
    costs = []
    for rows in (16, 128):
        e = short(rows, 4 * rows, dram_pages=host * rows)
        costs.append(max(e.costs(10)) / rows)
        assert e.core.counters["pauses"] + e.core.counters["drops"] >= 2
    assert costs[1] <= 1.3 * costs[0]


def test_requests_that_pause_at_once_cost_the_same_each() -> None:
    costs = []
    for rows in (8, 64):
        e = Engine(rows + 1, dram_pages=2000)
        e.arrive(rows + 1, tokens=30)
        e.turn()
        e.turn()
        e.events += [Paused(RequestId(i)) for i in range(1, rows + 1)]
        costs.append(sum(e.costs(4)) / rows)
        assert len(e.core.by_phase[Phase.PAUSED]) + len(e.core.running) == rows + 1
        assert not e.core.saving
    assert costs[1] <= 1.25 * costs[0]


def test_an_admission_costs_the_same_whatever_runs() -> None:
    costs = []
    for rows in (10, 200):
        e = Engine(rows + 40)
        e.arrive(rows)
        e.turn()
        alone = min(e.costs(4))
        e.arrive(40)
        costs.append(bytecodes(e.turn) - alone)
        assert len(e.core.running) == rows + 40
    assert costs[1] <= 1.25 * costs[0]


def test_an_admission_beside_a_row_that_has_given_way_often_costs_the_same_whatever_runs() -> None:
    costs = []
    for rows in (10, 300):
        e = Engine(rows + 40)
        e.arrive(rows)
        e.turn()
        r = e.core.running[-1]
        r.setbacks.preemptions = 2
        e.core.tired.append(r)
        alone = min(e.costs(4))
        e.events += [Arrived(RequestId(5000 + i), (5000 + i, *range(1, PROMPT)), 60, priority=-1)
                     for i in range(40)]
        costs.append(bytecodes(e.turn) - alone)
        assert len(e.core.running) == rows + 40
    assert costs[1] <= 1.25 * costs[0]


# ---------------------------------------------------------------- a burst
def test_a_burst_gets_rows_over_several_turns() -> None:
    e = Engine(400, admissions=64, step_tokens=256, hbm_pages=20_000)
    e.arrive(400, tokens=40)
    running = []
    for _ in range(8):
        e.turn()
        running.append(len(e.core.running))
    assert running == [64, 128, 192, 256, 320, 384, 400, 400]


def test_a_burst_of_short_prompts_gets_the_rows_that_the_step_has_use_for() -> None:
    e = Engine(400, admissions=64, step_tokens=100 * PROMPT)
    e.arrive(400)
    e.turn()
    assert len(e.core.running) == 100
    e = Engine(400, admissions=64)
    e.arrive(400)
    e.turn()
    assert len(e.core.running) == 128          # more would make the turn long


def test_a_burst_of_long_prompts_stops_when_it_has_many_pages() -> None:
    e = Engine(400, admissions=4, step_tokens=64)
    e.arrive(10, tokens=900)                   # 225 pages each, of 4 * 128
    e.turn()
    assert len(e.core.running) == 3


def test_a_burst_ends_though_no_event_comes() -> None:
    e = Engine(20, admissions=1)
    e.arrive(20, max_new=9)
    for _ in range(60):
        e.turn()
        e.core.check()
    assert not e.core.live


# ---------------------------------------------------------------- who waits for something else, and who asks
def test_requests_that_wait_for_an_answer_of_storage_cost_nothing() -> None:
    costs = []
    for waiting in (10, 400):
        e = Engine(4, dram_pages=400, disk_pages=1000, store_root=b"root")
        e.arrive(4, tokens=3)                  # less than a page: storage has nothing of these
        e.turn()
        e.arrive(waiting, tokens=20)
        e.turn()
        asked = e.asked
        assert len(asked) == waiting == len(e.core.runnable) and not e.core.candidates
        costs.append(sum(e.costs(6)))
        e.events += [Listed(o.rid, o.visit, bytes(len(o.keys))) for o in asked]
        e.turn()
        assert e.core.candidates == e.core.runnable != []
    assert costs[1] <= 1.02 * costs[0]


def test_one_that_leaves_from_the_middle_costs_the_same_whatever_waits() -> None:
    costs = []
    for waiting in (20, 1280):
        e = Engine(4)
        e.arrive(4 + waiting)
        e.turn()
        e.events += [Aborted(RequestId(4 + waiting // 2 + i)) for i in range(5)]
        costs.append(bytecodes(e.turn))
    assert costs[1] <= 1.5 * costs[0]          # it is found by halving


def test_stats_cost_the_same_whatever_waits_and_equal_a_count() -> None:
    costs = []
    for waiting in (10, 500):
        e = short(8, waiting, dram_pages=40)
        for _ in range(6):
            e.turn()
        costs.append(bytecodes(e.core.stats))
        stats, states = e.core.stats(), [r.state.name for r in e.core.live.values()]
        assert stats["requests_paused"] == states.count("paused") > 0
        told = {name: n for name, n in stats.items() if name.startswith("requests_in_phase")}
        assert sum(told.values()) == len(states) and len(told) == 12
        for state in states:
            assert told[f'requests_in_phase{{phase="{state}"}}'] == states.count(state)
        named = {id(c) for r in e.core.live.values() for t in r.tables for c in t.device if c is not None}
        assert stats["hbm_pages_in_use"] == len(named) > 0
    assert costs[1] <= 1.02 * costs[0]
