"""What a step costs, in rows looked at and in bytecodes: by counting, a busy machine changes nothing."""
from __future__ import annotations

import copy
import copyreg
import gc
import hashlib
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from counting import bytecodes
from sortedcontainers import SortedKeyList

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv.prefix_tree import Copy
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Event,
    Moved,
    Paused,
    PeerJoined,
    RequestId,
    Retired,
    StepPlan,
    Tier,
)
from penstock.core.policy.queue import Admission
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.sim.world.pair import Pair
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import World

FULL = CacheGroup(name="full", page_bytes=0)
SELECTOR = CacheGroup(name="selector", page_bytes=0, selector=True, slab_pages=2)
KINDS: dict[str, dict[str, Any]] = {
    "one group": {},
    "host tier": {"dram_pages": 20_000},
    "three groups": {"groups": (FULL, CacheGroup(name="window", page_bytes=0, window=12),
                                CacheGroup(name="state", page_bytes=0, snapshot=True, page_tokens=8))},
    "hosted": {"groups": (FULL, SELECTOR), "dram_pages": 20_000, "hot_pages": 2, "always_hosted": True},
    "overlapped": {"overlap": True},
}


def answer(plan: StepPlan) -> list[Event]:
    return [Retired(plan.step, ((7,),) * sum(plan.samples)), *(Moved(m.id, True) for m in plan.moves)]


class Engine:
    """A core whose plans are answered in the next turn but `depth` - 1."""

    def __init__(self, rows: int, **settings: Any) -> None:
        self.core = Core(CoreConfig(**dict(page_size=8, rows=rows, hbm_pages=60_000, max_len=1 << 17,
                                           step_tokens=1 << 17) | settings))
        self.flying: list[StepPlan] = []
        self.looked = 0                        # rows, by the last turn

    def turn(self, *events: Event) -> StepPlan:
        """One step retires, if one is out, and one is planned."""
        before = self.core.counters["rows_looked_at"]
        if len(self.flying) == self.core.cfg.depth:
            events = (*answer(self.flying.pop(0)), *events)
        plan = self.core.advance(events).plan
        assert plan is not None
        self.flying.append(plan)
        self.looked = self.core.counters["rows_looked_at"] - before
        return plan

    def drain(self, *events: Event) -> None:
        """Until nothing is left to do."""
        while True:
            if (plan := self.core.advance(events).plan) is not None:
                self.flying.append(plan)
            elif not self.flying:
                return
            events = tuple(answer(self.flying.pop(0))) if plan is None else ()

    def start(self, prompts: Sequence[int], max_new: int = 1000, **more: Any) -> None:
        """All rows decode."""
        first = len(self.core.live)
        self.turn(*(Arrived(RequestId(first + i), tuple(i * 100_000 + p for p in range(n)), max_new, **more)
                    for i, n in enumerate(prompts)))
        for _ in range(6):
            self.turn()
        while self.core.kv.softening:          # of a long table that takes turns
            self.turn()


def test_what_others_have_left_to_the_collector_is_not_counted() -> None:
    class Late:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            sum(range(3))

    def call() -> list[list[int]]:
        return [[] for _ in range(2 * gc.get_threshold()[0])]

    clean = bytecodes(call)
    for _ in range(9):
        Late()
    assert bytecodes(call) == clean


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_looks_at_the_rows_that_cross_a_page(kind: str) -> None:
    e = Engine(16, **KINDS[kind])
    e.start([24] * 16, selects=True)           # all lengths are the same: they cross together
    looked = []
    for _ in range(32):
        plan = e.turn()
        assert len(plan.rows) == 16
        assert e.looked >= len({g.row for g in plan.grows})
        looked.append(e.looked)
    # Each row and page: chosen, told to the device, retired.
    assert sum(looked) == 16 * 4 * 3 and sum(n > 0 for n in looked) <= 8


def test_rows_that_draft_nothing_are_not_looked_at_beside_those_that_do() -> None:
    e = Engine(16, draft_tokens=3)
    e.start([24] * 14, selects=True, drafts=0)
    e.turn(*(Arrived(RequestId(100 + i), tuple(range(24)), 1000, drafts=i) for i in (1, 9)))
    e.turn()
    looked, before = [], e.turn()
    for _ in range(32):
        plan = e.turn()
        width = dict(zip(plan.rids, plan.count, strict=True))
        assert [width[RequestId(i)] for i in (0, 13, 101, 109)] == [1, 1, 2, 4]
        assert plan.rids is before.rids and plan.count is before.count      # nothing of them is made anew
        looked.append(e.looked)
    # As above, and each row that drafts three times a step.
    assert sum(looked) == 14 * 4 * 3 + 32 * 2 * 3


def test_a_row_that_ends_or_pauses_is_looked_at_alone() -> None:
    e = Engine(8, dram_pages=1000)
    e.start([24] * 7)
    e.start([26], max_new=20)                  # they cross pages in other steps than it ends
    while len(e.core.live) == 8:
        e.turn()
    assert e.looked == 1
    while e.turn().grows or e.looked:          # to a step in which nobody crosses a page
        pass
    plan = e.turn(Paused(RequestId(3)))
    assert len(plan.rows) == 6 and e.looked <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_the_same_at_any_length(kind: str) -> None:
    costs = []
    for length in (96, 9600):                  # multiples of the page
        e = Engine(4, **KINDS[kind])
        e.start([length] * 4, selects=True)
        costs.append([bytecodes(e.turn) for _ in range(16)])
    short, long = costs
    assert sum(long) <= 1.02 * sum(short) and max(long) <= 1.1 * max(short)


def test_rows_that_go_on_cost_little_beside_those_that_change() -> None:
    cost = []
    for rows in (16, 64):
        e = Engine(rows)
        e.start([24] * rows)
        counts = [bytecodes(e.turn) for _ in range(8)]
        cost.append((min(counts), max(counts)))
    a_row = (cost[1][0] - cost[0][0]) / 48
    a_change = (cost[1][1] - cost[0][1]) / 48
    assert a_row < 200 and a_row < a_change / 5


@pytest.mark.parametrize("kind", [{}, {"dram_pages": 1000, "disk_pages": 1000}], ids=["device", "storage"])
def test_who_waits_in_the_queue_costs_nothing(kind: dict[str, Any]) -> None:
    costs = []
    for waiting in (1, 200):
        e = Engine(4, **kind)
        e.start([24] * 4)
        e.turn(*(Arrived(RequestId(100 + i), (i, 1), 5) for i in range(waiting)))
        costs.append(sum(bytecodes(e.turn) for _ in range(8)))
    assert costs[1] <= 1.02 * costs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_that_does_not_fit_costs_the_same_at_any_length(kind: str) -> None:
    costs = []
    for pages in (40, 400):
        e = Engine(4, **(KINDS[kind] | {"hbm_pages": 3 * pages, "max_len": 24 * pages}
                         | ({"dram_pages": 3 * pages} if kind == "hosted" else {})))
        e.start([4 * pages] * 3, selects=True)
        e.turn(Arrived(RequestId(8), tuple(range(18 * pages)), 5, selects=True))
        for _ in range(3):                     # what it has in common with another takes turns to match
            e.turn()
        costs.append(sum(bytecodes(e.turn) for _ in range(24)))
        assert [r.rid for r in e.core.waiting] == [8]
    assert costs[1] <= 1.02 * costs[0]


def test_who_is_not_tried_again_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    real = Admission._is_blocked

    def checked(self: Admission, r: Request) -> bool:
        nonlocal tried
        blocked = real(self, r)
        tried += blocked
        if blocked and tried % 16 == 0:         # a copy of everything takes its time
            mirror = copy.deepcopy(self.core)
            assert not mirror.admission._enter(mirror.live[r.rid])
        return blocked

    monkeypatch.setattr(Admission, "_is_blocked", checked)
    # A list that is made from its elements cannot be copied where these lead back to it.
    monkeypatch.setitem(copyreg.dispatch_table, SortedKeyList,
                        lambda order: (SortedKeyList.__new__, (SortedKeyList,), order.__dict__))

    deep = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)              # a page knows the next
    try:
        for seed in range(10_000, 10_020):
            scenario = draw(seed)
            (Pair if scenario.pair else World)(scenario).play()
    finally:
        sys.setrecursionlimit(deep)
    assert tried > 600


def test_a_row_whose_pages_still_load_costs_the_same_at_any_length() -> None:
    costs = []
    for pages in (20, 400):
        e = Engine(2, hbm_pages=pages + 8, dram_pages=8 * pages, max_len=8 * pages, hit_pages=1_000)
        prompt = tuple(range(8 * pages - 40))
        for rid, tokens in enumerate((prompt, prompt[::-1], (5, *prompt))):
            e.drain(Arrived(RequestId(rid), tokens, 1))        # the later ones evict the first
        e.turn(Arrived(RequestId(8), (1, 2, 3), 30))
        plan = e.turn(Arrived(RequestId(9), prompt, 5))
        assert sum(len(m.dst_pages) for m in plan.moves if m.dst is Tier.HBM) > pages / 2
        e.flying[-1] = replace(plan, moves=())                 # nobody answers them
        e.turn()
        costs.append(sum(bytecodes(e.turn) for _ in range(6)))
        assert e.core.live[RequestId(9)].phase.value == "loading"
    assert costs[1] <= 1.02 * costs[0]


def test_who_waits_for_storage_costs_the_same_at_any_length() -> None:
    costs = []
    for pages in (40, 400):
        e = Engine(2, hbm_pages=2 * pages, dram_pages=8 * pages, disk_pages=8 * pages)
        prompt, kv = tuple(range(8 * pages + 1)), e.core.kv
        e.drain(Arrived(RequestId(0), prompt, 1))
        kv.tree.evict(kv.device[0], pages)
        kv.tree.evict(kv.host[0], 4)       # the end: all of the path is looked at to find it
        e.turn(Arrived(RequestId(8), (1, 2, 3), 30))
        plan = e.turn(*(Arrived(RequestId(rid), prompt, 5) for rid in (1, 2, 3)))
        assert [m.src for m in plan.moves] == [Tier.DISK]
        e.flying[-1] = replace(plan, moves=())                 # nobody answers it
        e.turn()
        costs.append(sum(bytecodes(e.turn) for _ in range(6)))
        assert [r.phase.value for r in e.core.waiting] == ["fetching"] * 3
    assert costs[1] <= 1.02 * costs[0]


def test_who_pauses_costs_the_same_at_any_length() -> None:
    costs = []
    for pages in (40, 400):
        e = Engine(2, dram_pages=8 * pages)
        e.turn(Arrived(RequestId(0), tuple(range(8 * pages)), 50, priority=1),
               Arrived(RequestId(1), (1, 2), 900))
        e.turn(Arrived(RequestId(2), (2, 2), 900))
        (save,) = e.flying[-1].moves
        assert len(save.src_pages) == pages
        e.flying[-1] = replace(e.flying[-1], moves=())         # nobody answers it
        e.turn(Paused(RequestId(0)))
        for _ in range(3):                     # so many turns it saves its pages
            e.turn()
        assert e.core.live[RequestId(0)].saving.is_copying
        costs.append(sum(bytecodes(e.turn) for _ in range(32)))
    assert costs[1] <= 1.02 * costs[0]


def test_hosted_rows_that_have_lent_nothing_are_not_asked() -> None:
    costs = []
    for pages in (40, 400):
        e = Engine(4, **KINDS["hosted"])
        e.start([8 * pages] * 4, selects=True)
        kv, want = e.core.kv, [60_001, 0]
        assert not kv.make_free(Tier.HBM, want)
        costs.append(bytecodes(partial(kv.make_free, Tier.HBM, want)))
    assert costs[1] <= 1.02 * costs[0]


def test_pages_that_the_peer_still_has_cost_the_same_however_many() -> None:
    costs = []
    for pages in (10, 1000):
        e = Engine(2, hbm_pages=3 * pages, role="decode")
        plan = e.turn(PeerJoined(), *(
            Arrived(RequestId(rid), tuple(range(8 * pages)), 5, transfer=rid) for rid in (1, 2)))
        e.flying[-1] = replace(plan, moves=())                 # grants, which no executor answers
        e.turn(Aborted(RequestId(1)), Aborted(RequestId(2)), Arrived(RequestId(8), (1, 2, 3), 30))
        assert e.core.kv.arenas[Tier.HBM].away == 2 * pages
        costs.append(sum(bytecodes(e.turn) for _ in range(6)))
    assert costs[1] <= 1.02 * costs[0]


def test_a_lost_page_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of many pages fails, and others have many: not each of these is compared with each of those."""
    e = Engine(4, dram_pages=1000)
    prompt, space = tuple(range(10**6, 10**6 + 801)), e.core.kv.device[0]
    e.drain(Arrived(RequestId(7), prompt, 1))
    e.core.kv.tree.evict(space, 1000)
    e.start([800] * 3)
    plan = e.turn(Arrived(RequestId(9), prompt, 5))
    (load,) = [m for m in plan.moves if m.dst is Tier.HBM]
    assert len(load.dst_pages) == 100
    e.flying[-1] = replace(plan, moves=())
    compared = 0

    def equal(self: Copy, other: object) -> bool:
        nonlocal compared
        compared += 1
        return self is other

    monkeypatch.setattr(Copy, "__eq__", equal)
    e.turn(Moved(load.id, False))
    assert e.core.counters["drops"] == 1 and compared < 100


def test_requests_that_ended_are_freed_without_the_collector() -> None:
    gc.collect()
    others = {id(o) for o in gc.get_objects() if type(o) is Request}
    gc.disable()
    try:
        e = Engine(4, dram_pages=1000)
        e.start([24] * 4, max_new=20)
        e.drain()
        assert not e.core.live
        assert not any(type(o) is Request and id(o) not in others for o in gc.get_objects())
    finally:
        gc.enable()


def _answers(seed: int, monkeypatch: pytest.MonkeyPatch, *, unchanged_until: bool, pair: bool) -> str:
    """A digest of all that a run's cores answer. Without `unchanged_until`, every row is looked at."""
    seen = hashlib.sha256()

    class Seen(Core):
        def advance(self, events: Sequence[Event]) -> Advance:
            got = super().advance(events)
            seen.update(repr((events, got)).encode())
            return got

    with monkeypatch.context() as m:
        if not unchanged_until:
            m.setattr(schedule, "unchanged_until", lambda r: 0)
            m.setattr(schedule, "append_until", lambda core, r: 0)
        if pair:
            Pair(draw(seed), Seen).play()
        else:
            World(draw(seed), Seen).play()
    return seen.hexdigest()


@pytest.mark.parametrize("seed", range(24))
def test_rows_counted_on_are_planned_as_if_looked_at(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = seed % 6 == 5
    fast, slow = (_answers(seed, monkeypatch, unchanged_until=s, pair=pair) for s in (True, False))
    assert fast == slow


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_planner_takes_as_much_memory_as_a_start_says(page_size: int) -> None:
    pages = 8_000
    cfg = CoreConfig(page_size=page_size, rows=2, hbm_pages=pages, max_len=1 << 20, step_tokens=1 << 20)
    gc.collect()
    tracemalloc.start()
    core, events = Core(cfg), list[Event]()
    for i in range(4):                         # each takes a quarter, less its last pages
        prompt = tuple(range(1 << 20, (1 << 20) + page_size * (pages // 4 - 2) + i))
        events += [Arrived(RequestId(1 + i), tuple([token * (i + 1) for token in prompt]), 2)]
    del prompt
    while events or core.live or core.kv.freeing:
        step = core.advance(events).plan
        events = [Retired(step.step, ((9,),) * sum(step.samples))] if step is not None else []
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    cached = core.kv.arenas[Tier.HBM].pools[0].num_held
    assert cached > 0.99 * pages and 0.9 < used / cfg.planner_bytes < 1.1
