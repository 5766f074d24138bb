"""Virtual time: a heap of callbacks. Ties run in the order in which they were scheduled."""
from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Run `call` `delay` units of virtual time from now."""
        self._num += 1
        heapq.heappush(self._heap, (self.now + delay, self._num, call))

    def step(self) -> bool:
        """Run the next callback. False if there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True
