"""Moves between host pages and a store, in threads of its own, and what the store is asked.

Owns the threads, the queues, and when a store that fails is left alone. A store may be slow, full, hung, dead
or lying: that costs hits. Every Move is answered once, a hung one when it ends; every Lookup is answered
once, and soon. No thread is joined: one may be inside a read that never ends.

The bytes need no lock, as with `mover.Mover`: a stored page is full, and the core lets no step touch a page
that is being read before its Moved. Sources and targets belong to no step, so there is no fence to wait for.
"""
from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.core.plan import Event, Listed, Lookup, Move, Moved, Tier
from penstock.memory.pool import PageLayout
from penstock.memory.stores.objects import Bounded, Store, Verdict

log = logging.getLogger(__name__)

LOOK_S = 0.5                # so long a request waits for what the store says that it has
FAILURES_MAX, PAUSE_MAX_S = 3, 60.0     # failures in a row after which it is left alone: first a second
FULL_S = 30.0               # so long nothing is written to a full disk
DENIED_MAX = 1 << 16        # keys of damaged pages that are remembered
COUNT_S = 600.0             # between two looks at how much there is
TOUCH_S = 60.0              # between two times that a page's use is reported
TOUCHED_MAX = 1 << 16       # pages whose last time is remembered,
USES_MAX = 64               # and prompts whose report waits: further ones are dropped
FREE = 0.8                  # of what is free, without a quota
COUNTED = ("read_objects", "read_bytes", "written_objects", "written_bytes", "known_objects", "gone", "bad",
           "failed", "timed_out", "denied", "lookups", "lookups_late", "pages_asked", "pages_found",
           "pages_missed", "refused_full", "swept_bytes", "read_seconds", "write_seconds")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Flight:
    """A Move: how many of its parts are still worked at, and of each page whether it is in place."""

    move: Move
    left: int
    ok: list[bool]
    began: float = field(default_factory=time.monotonic)


_Job = tuple[_Flight, range]


@dataclass(slots=True)
class _Asked:
    """A look-up: what was found until now, and whether it was answered."""

    lookup: Lookup
    limit: float
    found: bytearray = field(default_factory=bytearray)
    answered: threading.Event = field(default_factory=threading.Event)


class HostPages(Protocol):
    """Whole host pages of one cache group; `BlockPool` of those of this machine."""

    layout: PageLayout

    def bytes_of(self, page: int) -> memoryview:
        """What it has. Raises OSError where another machine that has some of it is gone."""

    def room(self, page: int) -> memoryview:
        """Where its bytes go, then `placed`."""

    def placed(self, page: int, room: memoryview) -> None:
        """Raises as `bytes_of`."""


class Storage:
    """See above. `start`, `ask` and `deny` return at once; `collect` tells what has ended since."""

    def __init__(self, store: Store, pools: Sequence[HostPages], wake: Callable[[], None], *,
                 quota: int | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """pools: whole host pages by cache group. wake: called in the threads when there is something to
        collect. quota: of a Bounded store, bytes there at most, of all engines; None: FREE of what is
        free by now, beside what is there."""
        self.store, self._pools, self._wake, self._clock = store, pools, wake, clock
        self._quota = quota
        self._bounded = store if isinstance(store, Bounded) and not store.readonly else None
        self._reads: SimpleQueue[_Job] = SimpleQueue()
        self._writes: SimpleQueue[_Job] = SimpleQueue()
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._watched: SimpleQueue[_Asked] = SimpleQueue()
        self._uses: SimpleQueue[tuple[bytes, ...]] = SimpleQueue()
        self._touched: OrderedDict[bytes, float] = OrderedDict()    # of one thread
        self._ended: SimpleQueue[Event] = SimpleQueue()
        self._lock = threading.Lock()          # around what follows
        self._denied: OrderedDict[bytes, None] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._failures, self._pause_s, self._paused_until, self._full_until = 0, 0.0, 0.0, 0.0
        self._hung = False                     # a look-up has not come back in time
        self._used = 0                         # bytes in the folder, as far as is known
        self.page_s = 0.0                      # seconds of a page that was read lately; 0: none was
        self.in_flight = 0                     # moves and look-ups without an answer yet
        self._queued = Counter(read=0, write=0)    # pages of moves that are not at an end
        self._sweeps = threading.Event()
        self._largest = max(pool.layout.page_bytes for pool in pools)
        bodies = [*[self._read, self._answer] * store.readers, *[self._write] * store.writers,
                  self._watch, self._touch]
        for body in [*bodies, self._sweep] if self._bounded is not None else bodies:
            threading.Thread(target=body, daemon=True, name=f"penstock-storage{body.__name__}").start()

    # ------------------------------------------------------------ for the loop
    def start(self, move: Move) -> None:
        """Read or write pages of a Move. Asserts that they are well formed."""
        n = len(move.keys)
        assert Tier.DISK in (move.src, move.dst) and Tier.DRAM in (move.src, move.dst)
        assert n == len(move.src_pages) == len(move.dst_pages) >= 1, f"move {move.id}: {n} keys"
        assert move.tokens == n * self._pools[move.group].layout.page_size, f"move {move.id}: an open page"
        size = self.store.part
        parts = [range(i, min(n, i + size)) for i in range(0, n, size)]
        flight = _Flight(move, len(parts), [False] * n)
        queue = self._reads if move.src is Tier.DISK else self._writes
        self.in_flight += 1
        with self._lock:
            self._queued[_way(move)] += n
        for part in parts:
            queue.put((flight, part))

    def ask(self, lookup: Lookup) -> None:
        """What of these pages there is. While the store hangs or is left alone: nothing."""
        self.in_flight += 1
        if self._hung or self._is_paused():
            self._end(Listed(lookup.rid, lookup.visit, b""))
            return
        asked = _Asked(lookup, time.monotonic() + LOOK_S)
        self._asked.put(asked)
        self._watched.put(asked)

    def deny(self, keys: Iterable[bytes]) -> None:
        """These are damaged: from now on none is shown or taken, and what there is of them is removed."""
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._denied[key] = None
                if len(self._denied) > DENIED_MAX:
                    self._denied.popitem(last=False)
            self._count["denied"] += len(keys)
        if not self.store.readonly:
            threading.Thread(target=self._remove, args=(keys,), daemon=True).start()

    def used(self, keys: tuple[bytes, ...]) -> None:
        """A request has begun with these pages, from the first of its prompt, wherever they were."""
        if self._uses.qsize() < USES_MAX:
            self._uses.put(keys)

    @property
    def num_read(self) -> float:
        """Pages that were read so far."""
        return self._count["read_objects"]

    def collect(self, *, wait: bool = False) -> list[Event]:
        """What has ended. With `wait` it blocks for the first, unless nothing is in flight."""
        found: list[Event] = []
        while self.in_flight:
            try:
                found.append(self._ended.get(block=wait and not found))
            except Empty:
                break
            self.in_flight -= 1
        return found

    def stats(self) -> dict[str, float]:
        """By metric name."""
        with self._lock:
            count, queued = Counter(self._count), dict(self._queued)
            paused_s, full_s = (max(0.0, until - self._clock()) for until in (self._paused_until,
                                                                             self._full_until))
        return {**{f"storage_{name}_total": float(count[name]) for name in COUNTED},
                **{f'storage_queued_pages{{way="{way}"}}': float(n) for way, n in queued.items()},
                "storage_up": float(not (self._hung or self._is_paused())),
                "storage_paused_seconds": paused_s, "storage_full_seconds": full_s,
                "storage_bytes": float(self._used), "storage_bytes_max": float(self._quota or 0),
                "storage_in_flight": float(self.in_flight)}

    # ------------------------------------------------------------ a store that fails
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _worked(self) -> None:
        with self._lock:
            self._failures, self._pause_s = 0, 0.0

    def _failed(self, error: OSError) -> None:
        """A fault of the world. After FAILURES_MAX in a row it is left alone for 1, 2, 4 ... seconds."""
        with self._lock:
            self._count["failed"] += 1
            self._count["timed_out"] += error.errno == errno.ETIMEDOUT
            self._failures += 1
            if self._failures < FAILURES_MAX or self._is_paused():
                return
            self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s or 1.0)
            self._paused_until = self._clock() + self._pause_s
            pause_s = self._pause_s
        log.warning("storage: %s; it is left alone for %g s", error.strerror or error, pause_s)

    def _is_denied(self, key: bytes) -> bool:
        with self._lock:
            return key in self._denied

    # ------------------------------------------------------------ the threads
    def _end(self, event: Event) -> None:
        self._ended.put(event)
        self._wake()

    def _ended_part(self, flight: _Flight) -> None:
        with self._lock:
            flight.left -= 1
            last = not flight.left
            if last:
                self._queued[_way(flight.move)] -= len(flight.ok)
        if last:
            good = next((i for i, ok in enumerate(flight.ok) if not ok), len(flight.ok))
            if flight.move.src is Tier.DISK and good:
                page_s = (time.monotonic() - flight.began) / good
                self.page_s = page_s if not self.page_s else 0.7 * self.page_s + 0.3 * page_s
            self._end(Moved(flight.move.id, good == len(flight.ok), good if good < len(flight.ok) else 0))

    def _read(self) -> None:
        self._work(self._reads, self._read_part, "read_seconds")

    def _write(self) -> None:
        self._work(self._writes, self._write_part, "write_seconds")

    def _work(self, jobs: SimpleQueue[_Job], part_of: Callable[[_Flight, range], None], seconds: str) -> None:
        while True:
            flight, part = jobs.get()
            began = time.monotonic()
            try:
                if not self._is_paused():
                    part_of(flight, part)
            except OSError as e:
                if jobs is self._writes and e.errno in FULL:
                    with self._lock:
                        self._full_until = self._clock() + FULL_S
                    self._sweeps.set()
                    log.warning("storage: %s; nothing is written for %g s", e.strerror or e, FULL_S)
                else:
                    self._failed(e)
            with self._lock:
                self._count[seconds] += time.monotonic() - began  # type: ignore[assignment]
            self._ended_part(flight)

    def _read_part(self, flight: _Flight, part: range) -> None:
        """Pages from the front: those behind one that is missing are of no use. Raises OSError."""
        move, pool = flight.move, self._pools[flight.move.group]
        keys = [move.keys[i] for i in part]
        keys = keys[:next((n for n, key in enumerate(keys) if self._is_denied(key)), len(keys))]
        pages = [pool.room(move.dst_pages[i]) for i in part[:len(keys)]]
        verdicts = self.store.get(keys, move.group, pages)
        for i, key, page, verdict in zip(part, keys, pages, verdicts, strict=False):
            self._worked()
            good = verdict is Verdict.GOOD
            if good:
                pool.placed(move.dst_pages[i], page)
            with self._lock:
                self._count["read_objects" if good else verdict.value] += 1
                self._count["read_bytes"] += len(pages[0]) if good else 0
            flight.ok[i] = good and not self._is_denied(key)
            if verdict is Verdict.BAD and not self.store.readonly:
                self.store.delete([key], move.group)
            if not flight.ok[i]:
                return

    def _write_part(self, flight: _Flight, part: range) -> None:
        """Raises OSError: what is behind the page that failed is not written."""
        move, pool = flight.move, self._pools[flight.move.group]
        size = pool.layout.page_bytes
        these = [i for i in part if not self._is_denied(move.keys[i])]
        if not these:
            return
        keys = [move.keys[i] for i in these]
        pages = [pool.bytes_of(move.src_pages[i]) for i in these]
        puts = self.store.put(keys, move.group, pages)
        for n, (i, key) in enumerate(zip(these, keys, strict=True)):
            if not self._has_room(size, len(these) - n):
                return
            written = next(puts)
            self._worked()
            with self._lock:
                self._count["written_objects" if written else "known_objects"] += 1
                self._count["written_bytes"] += written
                self._used += written
            if self._is_denied(key):           # meanwhile
                self.store.delete([key], move.group)
            else:
                flight.ok[i] = True

    def _has_room(self, size: int, num_left: int) -> bool:
        """Whether the quota lets the next of so many pages be written; it asks for a sweep if not."""
        with self._lock:
            full = self._quota is not None and self._used + size > self._quota
            late = self._clock() < self._full_until
            self._count["refused_full"] += num_left * (full or late)
        if full:
            self._sweeps.set()
        return not (full or late)

    def _answer(self) -> None:
        while True:
            asked = self._asked.get()
            if asked.answered.is_set():
                continue                       # it was answered for the store, which has hung since
            lookup, found = asked.lookup, asked.found
            try:
                for key, groups in zip(lookup.keys, self.store.present(lookup.keys), strict=False):
                    if not groups or self._is_denied(key) or time.monotonic() > asked.limit:
                        break
                    found.append(groups)
            except OSError as e:
                self._failed(e)
            self._hung = False
            self._tell(asked)

    def _tell(self, asked: _Asked, *, late: bool = False) -> bool:
        """The answer, of what was found until now. False: somebody else has given it."""
        with self._lock:
            if asked.answered.is_set():
                return False
            asked.answered.set()
            found, num = bytes(asked.found), len(asked.lookup.keys)
            self._hung = self._hung or (late and not found)
            self._count["lookups"] += 1
            self._count["lookups_late"] += late
            self._count["pages_asked"] += num
            self._count["pages_found"] += len(found)
            self._count["pages_missed"] += num - len(found)
        self._end(Listed(asked.lookup.rid, asked.lookup.visit, found))
        return True

    def _watch(self) -> None:
        """Answers look-ups that the store does not answer in time. It hangs if it has said nothing."""
        while True:
            asked = self._watched.get()
            if asked.answered.wait(max(0.0, asked.limit - time.monotonic() + 0.05)):
                continue
            if self._tell(asked, late=True) and self._hung:
                log.warning("storage: no answer in %g s; no request waits for it until it has answered", LOOK_S)

    def _touch(self) -> None:
        """Tells the store of uses that it does not see. Who uses a page uses all before it, so those before
        one that was reported lately were reported too."""
        touched = self._touched
        while True:
            keys, now = self._uses.get(), self._clock()
            known = next((i for i in range(len(keys) - 1, -1, -1)
                          if now < touched.get(keys[i], -TOUCH_S) + TOUCH_S), -1)
            new = keys[known + 1:]
            if not new or self._hung or self._is_paused():
                continue
            for key in new:
                touched[key] = now
                touched.move_to_end(key)
            while len(touched) > TOUCHED_MAX:
                touched.popitem(last=False)
            try:
                self.store.used(new)
            except OSError as e:
                self._failed(e)

    def _remove(self, keys: Sequence[bytes]) -> None:
        for group in range(len(self._pools)):
            try:
                self.store.delete(keys, group)
            except OSError as e:
                self._failed(e)

    def _sweep(self) -> None:
        """Counts what there is, now and then, and makes room when it is too much."""
        store = self._bounded
        assert store is not None
        while True:
            try:
                self._used, gone = store.sweep(self._quota, self.store.part * self._largest)
                if self._quota is None:
                    self._quota = int(FREE * (self._used + store.free_bytes))
                with self._lock:
                    self._count["swept_bytes"] += gone
            except OSError as e:
                self._failed(e)
            self._sweeps.wait(COUNT_S)
            self._sweeps.clear()


def _way(move: Move) -> str:
    return "read" if move.src is Tier.DISK else "write"
