"""Which API key's request enters the scheduler next: the key that was served least, then its own `priority`.

Owns requests that have not entered yet, and a count of tokens for each key (virtual token counters,
arXiv:2401.00588). It releases a few at a time, because the scheduler serves in the order of arrival. Knows
neither the core nor what a key is called.
"""
from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.wire import Submit

if TYPE_CHECKING:
    from penstock.engine.request import Live

LINE_MIN = 4     # requests that may wait in the scheduler while no slot is free: storage is asked for them
WAITING = "requests_waiting", 'requests_in_phase{phase="queued"}'


class Fair:
    """Requests by key, and the tokens that each key has been served."""

    def __init__(self) -> None:
        self._held: dict[int, Submit] = {}
        self._lines: dict[int, list[tuple[int, int]]] = {}     # by key, a heap: (priority, request id)
        self._served: dict[int, int] = {}                      # tokens by key
        self._now = 0                                          # of the key that was released last

    def __len__(self) -> int:
        return len(self._held)

    def add(self, m: Submit) -> None:
        """Keep `m`, which has a tenant, until it is its turn. A key that had nothing here gets no credit for
        the time before."""
        if self._clean(m.origin.tenant) is None:
            self._served[m.origin.tenant] = max(self._now, self._served.get(m.origin.tenant, 0))
        self._held[m.rid] = m
        heapq.heappush(self._lines.setdefault(m.origin.tenant, []), (m.params.priority, m.rid))

    def drop(self, rid: int) -> bool:
        """Forget a request whose client has gone, and return whether it was here."""
        return self._held.pop(rid, None) is not None

    def charge(self, tenant: int, tokens: int) -> None:
        """`tokens` were computed for this key, or, below 0, were charged and not computed."""
        if tenant:
            self._served[tenant] = self._served.get(tenant, 0) + tokens

    def started(self, live: Live) -> None:
        """Its prompt was charged: cached tokens cost nothing."""
        found = live.started
        if found is not None:
            cached = found.hbm_tokens + found.dram_tokens + found.disk_tokens
            self.charge(live.tenant, -min(live.num_prompt, cached))

    def ended(self, live: Live) -> None:
        """It is over; one that never started cost nothing."""
        if live.started is None:
            self.charge(live.tenant, -live.num_prompt)

    def counted(self, stats: Mapping[str, float]) -> dict[str, float]:
        """The scheduler's numbers with the requests that wait here."""
        return {name: value + len(self) if name in WAITING else value for name, value in stats.items()}

    def release(self, waiting: Iterable[tuple[Live, bool]], slots: int,
                step_tokens: int | None) -> list[Submit]:
        """Return the requests that enter now, in order, and charge their prompts.

        waiting: each request that waits in the scheduler, and whether it waits for the prompt of another
        choice. slots: free ones. step_tokens: so many prompt tokens that wait are enough, None: no bound.
        """
        line = list(waiting)
        own = Counter([live.tenant for live, _ in line])
        prompts = [live.num_prompt for live, follows in line if not follows]
        num_waiting, tokens, most = len(prompts), sum(prompts), max(LINE_MIN, slots)
        released: list[Submit] = []
        while num_waiting < most and not (num_waiting and step_tokens is not None and tokens >= step_tokens):
            there = [t for t in list(self._lines) if self._clean(t) is not None and own[t] < most]
            if not there:
                break
            tenant = min(there, key=lambda t: (self._served[t], self._lines[t][0][1]))
            m = self._held.pop(heapq.heappop(self._lines[tenant])[1])
            self._now = max(self._now, self._served[tenant])
            self.charge(tenant, len(m.prompt))
            own[tenant] += 1
            num_waiting, tokens = num_waiting + 1, tokens + len(m.prompt)
            params = msgspec.structs.replace(m.params, priority=0)     # it was for this key's requests
            released.append(msgspec.structs.replace(m, params=params))
        return released

    def _clean(self, tenant: int) -> int | None:
        """The next request of this key, None if it has none here."""
        line = self._lines.get(tenant, [])
        while line and line[0][1] not in self._held:
            heapq.heappop(line)
        if not line:
            self._lines.pop(tenant, None)
            return None
        return line[0][1]
