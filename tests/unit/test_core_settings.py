"""What the core refuses to plan for: cache groups that no prefix hit could be found for."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, RequestId, Retired, Started
from penstock.core.settings import CacheGroup, CoreConfig

FULL = CacheGroup(name="full", page_bytes=0)


def hit(group: CacheGroup) -> int:
    """Cached tokens of a prompt that has come before."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=60, groups=(FULL, group)))
    cached = list[int]()
    for rid in (0, 1):
        events: list[Event] = [Arrived(RequestId(rid), tuple(range(9)), 5)]
        while events:
            advance = core.advance(events)
            cached = [o.hbm_tokens for o in advance.outputs if isinstance(o, Started)] or cached
            core.check()
            plan = advance.plan
            events = [] if plan is None else [Retired(plan.step, tuple((9,) for s in plan.samples if s))]
    return cached[0]


@pytest.mark.parametrize("group", [
    CacheGroup(name="more", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=3, page_tokens=2),
    CacheGroup(name="state", page_bytes=0, snapshot=True, page_tokens=4)], ids=lambda group: group.name)
def test_a_prompt_that_has_come_before_is_found(group: CacheGroup) -> None:
    assert hit(group) == 8


@pytest.mark.parametrize("group", [
    CacheGroup(name="more", page_bytes=0, page_tokens=4),
    CacheGroup(name="window", page_bytes=0, window=3, page_tokens=4),
    CacheGroup(name="selector", page_bytes=0, selector=True, page_tokens=4),
    CacheGroup(name="state", page_bytes=0, snapshot=True, page_tokens=3)], ids=lambda group: group.name)
def test_pages_that_no_hit_could_end_with_are_refused(group: CacheGroup) -> None:
    with pytest.raises(ValueError, match=group.name):
        hit(group)
