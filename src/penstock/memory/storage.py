"""Moves between host pages and a store, in threads of its own, and what the store is asked.

Owns the threads, the queues, and when a store that fails is left alone. A store may be slow, full, hung, dead
or lying: that costs hits. Every Move is answered once, a hung one when it ends; every Lookup is answered
once, and soon. Nobody joins a thread: one may be inside a read that never ends.

The bytes need no lock, as with `mover.Mover`: a stored page is sealed, and the core lets nobody touch a page
that is being read before it is told. Sources and targets belong to no step, so there is no fence to wait for.
"""
from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from penstock.core.plan import Event, Listed, Lookup, Move, Moved, Tier
from penstock.memory.files import Files, Verdict, sweep
from penstock.memory.pool import BlockPool

log = logging.getLogger(__name__)

READERS, WRITERS = 4, 2
PART = 16                   # pages of a move that one thread reads or writes
LOOK_S = 0.5                # so long a request waits for what the store says that it has
FAILURES_MAX, PAUSE_MAX_S = 3, 60.0     # failures in a row after which it is left alone: first a second
FULL_S = 30.0               # so long nothing is written to a full disk
DENIED_MAX = 1 << 16        # keys of damaged pages that are remembered
COUNT_S = 600.0             # between two looks at how much there is
FREE = 0.8                  # of what is free, without a quota
COUNTED = ("read_objects", "read_bytes", "written_objects", "written_bytes", "known_objects", "gone", "bad",
           "failed", "denied", "lookups", "lookups_late", "pages_asked", "pages_found", "refused_full",
           "swept_bytes", "read_seconds", "write_seconds")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Flight:
    """A Move: how many of its parts are still worked at, and of each page whether it is in place."""

    move: Move
    left: int
    ok: list[bool]
    began: float = field(default_factory=time.monotonic)


_Job = tuple[_Flight, range]


class Storage:
    """See above. `start`, `ask` and `deny` return at once; `collect` tells what has ended since."""

    def __init__(self, files: Files, pools: Sequence[BlockPool], wake: Callable[[], None], *,
                 quota: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """pools: whole host pages by cache group. wake: called in the threads when there is something to
        collect. quota: bytes in the folder at most, of all engines; None: FREE of what is free by now, beside
        what is there."""
        self.files, self._pools, self._wake, self._clock = files, pools, wake, clock
        self._quota = quota
        self._reads: SimpleQueue[_Job] = SimpleQueue()
        self._writes: SimpleQueue[_Job] = SimpleQueue()
        self._asked: SimpleQueue[tuple[Lookup, float, threading.Event]] = SimpleQueue()
        self._watched: SimpleQueue[tuple[Lookup, float, threading.Event]] = SimpleQueue()
        self._ended: SimpleQueue[Event] = SimpleQueue()
        self._lock = threading.Lock()          # around what follows
        self._denied: OrderedDict[bytes, None] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._failures, self._pause_s, self._paused_until, self._full_until = 0, 0.0, 0.0, 0.0
        self._hung = False                     # a look-up has not come back in time
        self._used = 0                         # bytes in the folder, as far as is known
        self.page_s = 0.0                      # seconds of a page that was read lately; 0: none was
        self.in_flight = 0                     # moves and look-ups that are not told
        self._sweeps = threading.Event()
        self._largest = max(pool.layout.page_bytes for pool in pools)
        bodies = [*[self._read] * READERS, *[self._write] * WRITERS, self._answer, self._watch]
        for body in bodies if files.readonly else [*bodies, self._sweep]:
            threading.Thread(target=body, daemon=True, name=f"penstock-storage{body.__name__}").start()

    # ------------------------------------------------------------ for the loop
    def start(self, move: Move) -> None:
        """Read or write pages of a Move. Asserts that they are well formed."""
        n = len(move.keys)
        assert Tier.DISK in (move.src, move.dst) and Tier.DRAM in (move.src, move.dst)
        assert n == len(move.src_pages) == len(move.dst_pages) >= 1, f"move {move.id}: {n} keys"
        assert move.tokens == n * self._pools[move.group].layout.page_size, f"move {move.id}: an open page"
        parts = [range(i, min(n, i + PART)) for i in range(0, n, PART)]
        flight, queue = _Flight(move, len(parts), [False] * n), self._queue(move)
        self.in_flight += 1
        for part in parts:
            queue.put((flight, part))

    def _queue(self, move: Move) -> SimpleQueue[_Job]:
        return self._reads if move.src is Tier.DISK else self._writes

    def ask(self, lookup: Lookup) -> None:
        """What of these pages there is. While the store hangs or is left alone: nothing."""
        self.in_flight += 1
        if self._hung or self._is_paused():
            self._end(Listed(lookup.rid, lookup.visit, b""))
            return
        asked = lookup, time.monotonic() + LOOK_S, threading.Event()
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
        if not self.files.readonly:
            threading.Thread(target=self._remove, args=(keys,), daemon=True).start()

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
            count = Counter(self._count)
        return {**{f"storage_{name}_total": float(count[name]) for name in COUNTED},
                "storage_up": float(not (self._hung or self._is_paused())),
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
            self._failures += 1
            if self._failures < FAILURES_MAX or self._is_paused():
                return
            self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s or 1.0)
            self._paused_until = self._clock() + self._pause_s
            pause_s = self._pause_s
        log.warning("storage: %s; it is left alone for %g s", error.strerror, pause_s)

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
            good = next((i for i, ok in enumerate(flight.ok) if not ok), len(flight.ok))
            if flight.move.src is Tier.DISK and good:
                page_s = (time.monotonic() - flight.began) / good
                self.page_s = page_s if not self.page_s else 0.7 * self.page_s + 0.3 * page_s
            self._end(Moved(flight.move.id, good == len(flight.ok), good if good < len(flight.ok) else 0))

    def _read(self) -> None:
        while True:
            flight, part = self._reads.get()
            began = time.monotonic()
            for i in part:
                if not self._read_page(flight, i):
                    break                      # those behind it are of no use
            with self._lock:
                self._count["read_seconds"] += time.monotonic() - began  # type: ignore[assignment]
            self._ended_part(flight)

    def _read_page(self, flight: _Flight, i: int) -> bool:
        move, key = flight.move, flight.move.keys[i]
        if self._is_paused() or self._is_denied(key):
            return False
        page = bytes_of(self._pools[move.group], move.dst_pages[i])
        try:
            verdict = self.files.get(key, move.group, page)
            if verdict is Verdict.BAD and not self.files.readonly:
                self.files.delete(key, move.group)
        except OSError as e:
            self._failed(e)
            return False
        self._worked()
        good = verdict is Verdict.GOOD
        with self._lock:
            self._count["read_objects" if good else verdict.value] += 1
            self._count["read_bytes"] += len(page) if good else 0
        flight.ok[i] = good and not self._is_denied(key)
        return flight.ok[i]

    def _write(self) -> None:
        while True:
            flight, part = self._writes.get()
            began = time.monotonic()
            for i in part:
                self._write_page(flight, i)
            with self._lock:
                self._count["write_seconds"] += time.monotonic() - began  # type: ignore[assignment]
            self._ended_part(flight)

    def _write_page(self, flight: _Flight, i: int) -> None:
        move, key = flight.move, flight.move.keys[i]
        page = bytes_of(self._pools[move.group], move.src_pages[i])
        if self._is_paused() or self._is_denied(key) or not self._has_room(len(page)):
            return
        try:
            written = self.files.put(key, move.group, page)
            if self._is_denied(key):           # meanwhile
                self.files.delete(key, move.group)
                return
        except OSError as e:
            if e.errno in FULL:
                with self._lock:
                    self._full_until = self._clock() + FULL_S
                self._sweeps.set()
                log.warning("storage: %s; nothing is written for %g s", e.strerror, FULL_S)
            else:
                self._failed(e)
            return
        self._worked()
        flight.ok[i] = True
        with self._lock:
            self._count["written_objects" if written else "known_objects"] += 1
            self._count["written_bytes"] += written
            self._used += written

    def _has_room(self, size: int) -> bool:
        """Whether the quota lets a page be written; it asks for a sweep if not."""
        with self._lock:
            full = self._quota is not None and self._used + size > self._quota
            late = self._clock() < self._full_until
            self._count["refused_full"] += full or late
        if full:
            self._sweeps.set()
        return not (full or late)

    def _answer(self) -> None:
        while True:
            lookup, limit, told = self._asked.get()
            if told.is_set():
                continue                       # it was answered for the store, which has hung since
            found = bytearray()
            try:
                for key in lookup.keys:
                    groups = 0 if self._is_denied(key) else self.files.present(key)
                    if not groups or time.monotonic() > limit:
                        break
                    found.append(groups)
            except OSError as e:
                self._failed(e)
            self._hung = False
            with self._lock:
                first = not told.is_set()
                told.set()
                self._count["lookups"] += 1
                self._count["pages_asked"] += len(lookup.keys)
                self._count["pages_found"] += len(found)
            if first:
                self._end(Listed(lookup.rid, lookup.visit, bytes(found)))

    def _watch(self) -> None:
        """Answers look-ups that the store does not answer in time."""
        while True:
            lookup, limit, told = self._watched.get()
            if told.wait(max(0.0, limit - time.monotonic() + 0.05)):
                continue
            with self._lock:
                if told.is_set():
                    continue
                told.set()
                self._hung = True
                self._count["lookups_late"] += 1
            log.warning("storage: no answer in %g s; nobody waits for it until it has answered", LOOK_S)
            self._end(Listed(lookup.rid, lookup.visit, b""))

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for group in range(len(self._pools)):
                try:
                    self.files.delete(key, group)
                except OSError as e:
                    self._failed(e)

    def _sweep(self) -> None:
        """Counts what there is, now and then, and makes room when it is too much."""
        while True:
            try:
                self._used, gone = sweep(self.files.root, self._quota, room=PART * self._largest)
                if self._quota is None:
                    self._quota = self._used + int(FREE * free_bytes(self.files.root))
                with self._lock:
                    self._count["swept_bytes"] += gone
            except OSError as e:
                self._failed(e)
            self._sweeps.wait(COUNT_S)
            self._sweeps.clear()


def bytes_of(pool: BlockPool, page: int) -> memoryview:
    """The bytes of a page, writable."""
    return pool.page(page).reshape(-1).view(torch.uint8).numpy().data


def free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free
