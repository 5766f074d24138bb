"""How long a request may be in a phase: deadlines that are set, and those that have passed."""
from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.core.lifecycle import Phase
from penstock.core.plan import Entered, Expired

if TYPE_CHECKING:
    from penstock.engine.storing import Storing


class Timers:
    def __init__(self, clock: Callable[[], float], deadlines_s: Mapping[str, float],
                 storing: Storing | None) -> None:
        """deadlines_s: by phase. storing: says itself how long its pages are waited for."""
        self._clock, self._deadlines_s, self._storing = clock, deadlines_s, storing
        self._heap: list[tuple[float, int, Expired]] = []      # when, and in order of their setting
        self._num_set = 0

    @property
    def wait_s(self) -> float | None:
        """Until the next one; None: there is none."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def set(self, entered: Entered, num_prompt: int) -> None:
        """For a request with a prompt of so many tokens, if this phase has a deadline."""
        limit_s = self._deadlines_s.get(entered.phase)
        if self._storing is not None and entered.phase == Phase.FETCHING.value:
            limit_s = self._storing.patience_s(num_prompt)
        if limit_s is not None:
            self._num_set += 1
            heapq.heappush(self._heap, (self._clock() + limit_s, self._num_set,
                                        Expired(entered.rid, entered.phase, entered.visit)))

    def passed(self) -> list[Expired]:
        """Those that have passed since the last call."""
        passed: list[Expired] = []
        now = self._clock() if self._heap else 0.0
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[2])
        return passed
