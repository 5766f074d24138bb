"""Nobody starves: in storms that nobody disturbs, every wait is within the bound of ADR 0011."""
from __future__ import annotations

from dataclasses import replace

import driver
import pytest

from penstock.core import schedule
from penstock.core.plan import Arrived, Outcome, RequestId
from penstock.core.policy import capacity, queue, reclaim
from penstock.core.policy.queue import Admission
from penstock.core.settings import CoreConfig
from penstock.sim.programs.waiting import WAIT_MAX, Fed, Waiting, fair, overtaken, report

MODES = ("model=1,hot_pages=0", "dram_pages=0,model=1,hot_pages=0", "model=1,hot_pages=2",
         "model=3,hot_pages=0", "model=3,hot_pages=2", "model=1,hot_pages=1,always_hosted=1")

# Where it once did: it was spilled, found no hot buffer and was paused.
FIRST_GAVE_WAY = (("model=1,hot_pages=2", 1035), ("model=1,hot_pages=2", 1070))

# Rows of two groups left holes in slabs, and who gave way twice was counted as if they were none.
SCATTERED = "model=1,hot_pages=2", 1014


@pytest.mark.parametrize("mode", MODES)
def test_a_storm_of_64_keeps_the_bound(mode: str) -> None:
    num_preemptions = 0
    for seed in range(5):
        waiting = fair(seed, mode)
        assert not waiting.late(), (seed, mode, waiting.late())
        assert len(waiting.seen) >= 64 and len(waiting.ended()) + sum(
            w.refused for w in waiting.seen.values()) == len(waiting.seen)
        num_preemptions += sum(w.num_preemptions for w in waiting.ended())
    assert num_preemptions > 5, "no pressure: this tests nothing"


@pytest.mark.parametrize("first,mode", [(100 + 20 * i, mode) for i, mode in enumerate(MODES)])
def test_the_bound_holds_when_requests_keep_coming(first: int, mode: str) -> None:
    for seed in range(first, first + 12):
        waiting = fair(seed, f"{mode},span={(seed % 3) * 60 + 1}", requests=20)
        assert not waiting.late(), (seed, mode, waiting.late())


def test_the_bound_sees_a_core_that_serves_the_youngest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def youngest(self: Admission) -> None:
        self.is_underway = False               # as `admit` does: a hit may take several turns
        for r in self.core.runnable[::-1]:
            if self.may_start(r) and not self._enter(r):
                reclaim.for_admission(self.core, r)
                return

    monkeypatch.setattr(Admission, "admit", youngest)
    late = [line for seed in range(12) for line in fair(seed, MODES[0]).late()]
    assert any("ahead of it" in line for line in late)


def test_the_bound_sees_who_gives_way_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "headroom", lambda core, r, place: capacity.growing(core))
    late = [line for seed in range(16, 24) for line in fair(seed, MODES[1]).late()]
    assert any("gave way" in line for line in late)


def test_a_call_without_events_starts_no_load_of_a_hit() -> None:
    assert not fair(220).late()


def test_who_gave_way_twice_does_not_for_those_of_a_higher_priority_who_come_later() -> None:
    assert not fair(1005, "model=3,hot_pages=0").late()


@pytest.mark.parametrize("mode,seed", FIRST_GAVE_WAY)
def test_the_first_of_all_is_not_paused_for_want_of_a_hot_buffer(mode: str, seed: int) -> None:
    assert not fair(seed, mode).late()


def test_holes_in_slabs_are_not_room_for_who_gave_way_twice() -> None:
    mode, seed = SCATTERED
    assert max(w.num_preemptions for w in fair(seed, mode).ended()) <= 2


def test_a_fork_waits_for_those_that_got_rows_while_its_leader_was_computed() -> None:
    """It cannot start before that, and blocks nobody: they count as found running."""
    d = driver.Driver(rows=6, hbm_pages=68, step_tokens=2, overlap=True)
    waiting = Fed(d.core)
    leader = Arrived(RequestId(1), tuple(range(16)), 1)
    fork = replace(leader, rid=RequestId(2), leader=leader.rid)
    others = [Arrived(RequestId(10 + k), (1_000 + k,), 226) for k in range(5)]
    d.tell(leader, fork, *others)
    d.run()
    waited = waiting.seen[fork.rid]
    assert waited.behind >= {o.rid for o in others} and not waited.num_preemptions
    assert waiting.ratio(waited) < WAIT_MAX
    waited.behind.clear()
    assert waiting.ratio(waited) > WAIT_MAX, "this is what ADR 0011 says of forks"


def _played(cfg: CoreConfig) -> Waiting:
    """Request 0 runs; 1 waits behind it; 2 comes later and goes first; 3 comes after 1."""
    waiting = Waiting(cfg)
    for rid, priority in ((0, 0), (1, 0)):
        waiting.arrive(Arrived(RequestId(rid), (1,) * 8, 4, priority=priority), [RequestId(0)] * rid)
    for _ in range(3):
        waiting.step()
    waiting.arrive(Arrived(RequestId(2), (1,) * 8, 4, priority=-1), [RequestId(0)])
    waiting.arrive(Arrived(RequestId(3), (1,) * 8, 4), [RequestId(0)])
    for rid in (0, 2, 1, 3):
        for _ in range(4):
            waiting.step()
            waiting.token(RequestId(rid), ())
        waiting.finish(RequestId(rid), Outcome.LENGTH)
    return waiting


def test_work_ahead_is_what_comes_before_it_and_what_it_found_running() -> None:
    cfg = CoreConfig(page_size=4, rows=1, hbm_pages=3, step_tokens=4)
    waiting = _played(cfg)
    seen = [waiting.seen[RequestId(rid)] for rid in range(4)]
    assert [waiting.alone(w) for w in seen] == [7] * 4             # 12 positions, 4 outputs
    assert [waiting.work(w) for w in seen] == [10.0] * 4           # the whole engine, and 12 of 4 a step
    assert [w.until - w.since for w in seen] == [7, 15, 8, 16]
    # 2 was served before 0 had ended by its priority; it found 0 running.
    assert [waiting.ahead(w) for w in seen] == [17, 27, 17, 37]
    assert not waiting.late()


def test_a_wait_beyond_the_bound_and_a_first_that_gives_way_are_found() -> None:
    waiting = _played(CoreConfig(page_size=4, rows=8, hbm_pages=64, step_tokens=64))
    last = waiting.seen[RequestId(3)]
    for _ in range(WAIT_MAX * 40):
        waiting.step()
    waiting.seen[RequestId(3)] = replace(last, until=waiting.steps)
    assert len(waiting.late()) == 1
    waiting.arrive(Arrived(RequestId(9), (1,), 1), [])
    waiting.give_way(RequestId(9), [])         # alone: to nobody
    assert len(waiting.late()) == 1
    waiting.give_way(RequestId(9), [RequestId(3)])
    assert "first of all" in waiting.late()[-1]


def test_the_command_says_the_worst() -> None:
    said: list[str] = []
    assert report(range(2), MODES[0], said.append) == 0
    assert said[-1].startswith("0 findings; at worst")


@pytest.mark.parametrize("seeds", [pytest.param(range(1_000, 1_040), marks=pytest.mark.sweep),
                                   pytest.param(range(1_040, 1_100), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_the_bound_over_many_seeds(mode: str, seeds: range) -> None:
    for seed in seeds:
        late = fair(seed, mode).late()
        assert not late, (seed, mode)


def test_a_short_prompt_behind_a_long_one_begins_soon_and_hardly_delays_it() -> None:
    assert not [line for seed in range(12) for line in overtaken(seed)]


def test_a_core_that_computes_prompts_strictly_in_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_ahead", lambda core, prompts, budget: {})
    assert any("a short prompt began" in line for seed in range(3) for line in overtaken(seed))


def test_a_core_that_computes_short_prompts_first_whatever_they_cost_is_found(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_ahead", lambda core, prompts, budget: {
        r.rid: budget for r in prompts[1:]} if len(prompts) > 1 and prompts[1].todo > 2 else {})
    monkeypatch.setattr("penstock.sim.programs.waiting.LATER_MAX", 0.0)
    assert any("a long prompt took" in line for seed in range(12) for line in overtaken(seed))
