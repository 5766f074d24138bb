"""Whose long text is worked on next: a bounded number wait, and a tenant has one in work at a time.

No tenant takes more than half of the places. The work runs on one thread. A client that leaves does not give
its place away: its text is being worked on all the same.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TooManyTexts(Exception):
    """More texts at once than may be worked on or wait for it."""


class Turns:
    """One thread, taken in turns by tenants. `run` on one event loop; `close` anywhere."""

    def __init__(self, name: str, most: int) -> None:
        """most    texts that are worked on or wait"""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-{name}")
        self._most = most
        self._open: dict[bytes, list[asyncio.Lock]] = {}    # by tenant: its lock, once for each open text

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    async def run(self, tenant: bytes, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises TooManyTexts at once."""
        own = len(self._open.get(tenant, ()))
        # Without keys there is one tenant, b"", and no other to leave places for.
        if self.num_open >= self._most or (tenant and own >= max(1, self._most // 2)):
            raise TooManyTexts
        locks = self._open.setdefault(tenant, [])
        locks.append(locks[0] if locks else asyncio.Lock())
        task = asyncio.ensure_future(self._when_it_may(locks[0], work))
        task.add_done_callback(lambda done: self._ended(tenant, done))
        return await asyncio.shield(task)

    async def _when_it_may(self, lock: asyncio.Lock, work: Callable[[], T]) -> T:
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ended(self, tenant: bytes, done: asyncio.Task[T]) -> None:
        self._open[tenant].pop()
        if not self._open[tenant]:
            del self._open[tenant]
        if not done.cancelled():
            done.exception()                # retrieved: its caller may be gone

    def close(self) -> None:
        """Take no more work. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
