"""Copies to the host that always fail: the engine goes on with what the device has."""
from __future__ import annotations

from collections import deque

import pytest

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Finished, Moved, RequestId, Retired, StepPlan, Tier
from penstock.core.settings import CoreConfig


@pytest.mark.parametrize("hot", [0, 1, 2])
@pytest.mark.parametrize("hbm", [6, 8, 10, 14])
def test_a_row_that_cannot_be_spilled_gives_way_in_another_way(hot: int, hbm: int) -> None:
    core = Core(CoreConfig(page_size=2, rows=3, hbm_pages=hbm, dram_pages=20, hot_pages=hot))
    prompts = [tuple(range(100 * k, 100 * k + 5)) for k in range(3)]
    events: list[Event] = [Arrived(RequestId(k), p, 8, selects=True) for k, p in enumerate(prompts)]
    ended, steps, moves = set[int](), deque[StepPlan](), deque[Moved]()
    for _ in range(600):
        advance = core.advance(events)
        core.check()
        ended |= {o.rid for o in advance.outputs if isinstance(o, Finished)}
        events, plan = [], advance.plan
        if plan is not None:
            steps.append(plan)
            moves += [Moved(m.id, m.dst is not Tier.DRAM) for m in plan.moves]
        elif moves:
            events = [moves.popleft()]
        elif steps:
            plan = steps.popleft()
            events = [Retired(plan.step, tuple((9,) for s in plan.samples if s))]
        else:
            break
    assert ended == {0, 1, 2}
