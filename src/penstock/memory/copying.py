"""One copy between two pools, and the thread that makes copies beside the steps.

Owns the bytes of a copy while it runs, and what went wrong in it. Knows neither fences nor the
order of copies: it is handed what is due.
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Group, Move, MoveId, Tier
from penstock.memory.across import copy_rows
from penstock.memory.pool import BlockPool, PagePool

log = logging.getLogger(__name__)

# How long the thread's end is waited for: it stops after the copy it is in, of at most seconds.
STOP_S = 10.0
_FLYING = 256               # copies of a device on the way at once: a page is copied in 50 us
# A copy to a device of so few bytes goes a part of the layers at a time: a step may wait for it by layer. How
# many parts, and how small one of a page may be, are guesses.
SPLIT_BYTES = 128 << 20
_PARTS, _PART_BYTES = 4, 256 << 10


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that has ended. `bytes` have arrived: none of a failed one count."""

    move: Move
    ok: bool
    bytes: int
    seconds: float


End: TypeAlias = Callable[[], Copied]
Begin: TypeAlias = Callable[[Move], End]


def parts_of(num_layers: int, num_parts: int) -> list[slice]:
    """Layers [0, num_layers) in runs of about the same length; no part is empty but of no layers."""
    return [slice(num_layers * p // num_parts, num_layers * (p + 1) // num_parts) for p in range(num_parts)]


def _runs(move: Move, src: PagePool, dst: PagePool, num_pages: int) -> Iterator[tuple[int, int]]:
    """Its first pages in runs that follow each other in both pools, as few copies as can be: (at, how many)."""
    at = 0
    while at < num_pages:
        a, b = move.src_pages[at], move.dst_pages[at]
        most, count = min(num_pages - at, src.together(a), dst.together(b)), 1
        while count < most and move.src_pages[at + count] == a + count and move.dst_pages[at + count] == b + count:
            count += 1
        yield at, count
        at += count


class Copier:
    """Copies one move's tokens at a call, from any thread.

    On a CUDA device copies run beside the steps, on a stream for each direction; `flying` is how many may
    be on the way before the first is waited for. `events`, there: of each copy that has begun and is not
    forgotten, one behind each of its `parts_of` the layers.
    """

    def __init__(self, pools: Mapping[tuple[Tier, Group], PagePool]) -> None:
        self._pools = pools
        device = any(tier is Tier.HBM and pool.pages.is_cuda for (tier, _), pool in pools.items()
                     if isinstance(pool, BlockPool))
        self.flying = _FLYING if device else 1
        self.events: dict[MoveId, Sequence[torch.cuda.Event]] = {}
        self._streams: dict[bool, torch.cuda.Stream | None] = {
            up: torch.cuda.Stream() if device else None for up in (False, True)}  # type: ignore[no-untyped-call]

    def __call__(self, move: Move, *, torn: bool = False) -> Copied:
        """`torn` stops it half way. A fault is logged and answered, never raised."""
        return self.begin(move, torn=torn)()

    def begin(self, move: Move, *, torn: bool = False) -> End:
        """Starts a copy, and on a CPU ends it; what it returns waits for its end."""
        tokens = move.tokens // 2 if torn else move.tokens
        started, stream = time.perf_counter(), self._streams[move.dst is Tier.HBM]
        events: list[torch.cuda.Event] = []
        with self._faults(move) as ok:
            with torch.cuda.stream(stream):
                if stream is not None:
                    stream.query()      # has torch make the context this thread's, which the driver's calls need
                for layers in self._layers(move):
                    self._copy_tokens(move, tokens, layers)
                    if stream is not None:
                        events.append(stream.record_event())
        done = None
        if stream is not None:
            done = events[-1] if ok else stream.record_event()
            self.events[move.id] = events if ok else [done]

        def end() -> Copied:
            arrived = not torn and bool(ok)
            if done is not None:
                with self._faults(move) as waited:
                    done.synchronize()
                arrived = arrived and bool(waited)
            return Copied(move, arrived, self._bytes(move) if arrived else 0, time.perf_counter() - started)
        return end

    @contextlib.contextmanager
    def _faults(self, move: Move) -> Iterator[list[bool]]:
        """The faults of the world: of a device, of memory that is not there, of a tier behind a file.
        Anything else, as two shapes that differ, is our bug and must be seen. What it yields is filled when
        there was none."""
        ok: list[bool] = []
        try:
            yield ok
            ok.append(True)
        except (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError, OSError):
            log.exception("move %d: %s to %s failed", move.id, move.src.name, move.dst.name)

    def _layers(self, move: Move) -> Sequence[slice | None]:
        """The runs of layers that it is cut into; None: all at once."""
        layout = self._pools[move.dst, move.group].layout
        split = self.flying > 1 and move.dst is Tier.HBM and self._bytes(move) <= SPLIT_BYTES
        parts = min(_PARTS, layout.num_layers, layout.page_bytes // _PART_BYTES) if split else 1
        return parts_of(layout.num_layers, parts) if parts > 1 else [None]

    def _copy_tokens(self, move: Move, tokens: int, layers: slice | None) -> None:
        src, dst = self._pools[move.src, move.group], self._pools[move.dst, move.group]
        if not dst.writes:              # another rank makes this copy: the move ends when all have said so
            return
        whole, left = divmod(tokens, src.layout.page_size)
        for at, count in _runs(move, src, dst, whole):
            self._copy(src.block(move.src_pages[at], count), dst.block(move.dst_pages[at], count), layers)
        if left:
            units = src.layout.units(left)
            self._copy(src.block(move.src_pages[whole], 1)[..., :units, :],
                       dst.block(move.dst_pages[whole], 1)[..., :units, :], layers)

    def _copy(self, source: Tensor, target: Tensor, layers: slice | None) -> None:
        """[P, L, K, C, U, H]"""
        if layers is not None:
            source, target = source[:, layers], target[:, layers]
        if self.flying == 1 or (source.is_contiguous() and target.is_contiguous()):
            target.copy_(source, non_blocking=True)
        else:                           # a TP rank's heads of host pages, or a page's first tokens
            copy_rows(target, source, torch.cuda.current_stream().cuda_stream)

    def _bytes(self, move: Move) -> int:
        layout = self._pools[move.src, move.group].layout
        if not self._pools[move.dst, move.group].writes:
            return 0
        whole, left = divmod(move.tokens, layout.page_size)
        return whole * layout.page_bytes + layout.units(left) * layout.unit_bytes


class CopyThread:
    """One daemon thread that copies in the order of `start`; torch copies without the interpreter
    lock, so steps go on meanwhile. Up to `flying` copies are on the way at once.

    It starts with the first copy, and stops when this object goes or the interpreter ends, after
    the copy that it is in. An exception that `copy` lets through ends it; `collect` raises it.
    """

    def __init__(self, begin: Begin, wake: Callable[[], None] | None = None, flying: int = 1) -> None:
        """wake: called in the thread whenever there is something to collect."""
        self._begin, self._wake, self._most = begin, wake, flying
        self._jobs: SimpleQueue[Move | End | None] = SimpleQueue()
        self._ended: SimpleQueue[Copied | BaseException] = SimpleQueue()
        self._died: BaseException | None = None
        self._started = False
        self._flying = 0

    def start(self, job: Move | End) -> None:
        """Copy a move after those before it, or see one to its end that has begun. Returns at once."""
        if not self._started:
            self._start_thread()
        self._flying += 1
        self._jobs.put(job)

    def collect(self, *, wait: bool) -> list[Copied]:
        """Copies that have ended, in order. With `wait`, blocks until there is one, unless none
        is flying. Raises RuntimeError, from its cause, once the thread has died."""
        found: list[Copied] = []
        while self._flying and self._died is None:
            try:
                ended = self._ended.get(block=wait and not found)
            except Empty:
                break
            if isinstance(ended, BaseException):
                self._died = ended
                break
            self._flying -= 1
            found.append(ended)
        if self._died is not None and not found:
            raise RuntimeError(f"the copy thread died with {self._flying} copies") from self._died
        return found

    def _start_thread(self) -> None:
        self._started = True
        stop, ready = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=_work, args=(self._begin, self._most, self._jobs, self._ended, stop, ready, self._wake),
            daemon=True, name="penstock-copy")
        # torch's number of threads is one per thread, plus one for threads to come: the worker
        # sets its own, and then the caller sets both back.
        num_threads = torch.get_num_threads()
        thread.start()
        ready.wait()
        torch.set_num_threads(num_threads)
        # A daemon that is inside torch when the interpreter goes takes the process down with a
        # core dump, hence an end at exit as well, which `finalize` brings.
        weakref.finalize(self, _stop, thread, self._jobs, stop)


def _work(begin: Begin, most: int, jobs: SimpleQueue[Move | End | None],
          ended: SimpleQueue[Copied | BaseException], stop: threading.Event, ready: threading.Event,
          wake: Callable[[], None] | None) -> None:
    """The thread's body. It has no reference to its CopyThread, which could not go otherwise."""
    torch.set_num_threads(1)            # cores are the steps' business; one copies 10 GB/s
    ready.set()
    flying: deque[End] = deque()
    try:
        while True:
            try:
                if len(flying) < most:
                    job = jobs.get(block=not flying)
                    if job is None or stop.is_set():
                        return
                    flying.append(job if callable(job) else begin(job))
                    continue
            except Empty:
                pass
            ended.put(flying.popleft()())
            if wake is not None:
                wake()
    except BaseException as e:          # handed over, not handled: `collect` raises it
        ended.put(e)
        if wake is not None:
            wake()


def _stop(thread: threading.Thread, jobs: SimpleQueue[Move | End | None],
          stop: threading.Event) -> None:
    stop.set()
    jobs.put(None)
    if thread is not threading.current_thread():        # a garbage collection may run in any
        thread.join(STOP_S)
