"""An engine in virtual time: the real planner, and steps and copies that only take time."""
from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.core import Core
from penstock.core.plan import (
    Event,
    Listed,
    Lookup,
    Move,
    Moved,
    MoveId,
    Output,
    Rates,
    RequestId,
    Retired,
    Started,
    StepPlan,
    Tier,
    Unstore,
)
from penstock.plan.rates import Rates as Speeds
from penstock.plan.shape import Planned
from penstock.plan.steps import StepTime, transfer_bytes


class Clock:
    """Virtual seconds. What is due at the same time runs in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._count), run))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, run = heapq.heappop(self._due)
            run()


@dataclass(slots=True)
class Link:
    """Transfers one after the other, in one direction."""

    bytes_s: float
    start_s: float = 0.0
    free_at: float = 0.0
    busy_s: float = 0.0
    bytes: float = 0.0

    def send(self, now: float, nbytes: float) -> float:
        """Return when the last byte arrives."""
        takes = self.start_s + nbytes / self.bytes_s
        self.free_at = max(now, self.free_at) + takes
        self.busy_s += takes
        self.bytes += nbytes
        return self.free_at


class Store:
    """The storage of all engines: pages by key, the least recently written or read go first."""

    def __init__(self, nbytes: float, speeds: Speeds, scale: float, share: float) -> None:
        """share: of its bytes and of its bandwidth, which these engines have."""
        self._room = share * nbytes
        self._pages: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        self.reads = Link(share * speeds.store_read_bytes_s / scale, speeds.store_us / 1e6)
        self.writes = Link(share * speeds.store_write_bytes_s / scale, speeds.store_us / 1e6)

    def present(self, keys: Sequence[bytes], groups: int) -> bytes:
        found = []
        for key in keys:
            bits = sum(1 << g for g in range(groups) if (key, g) in self._pages)
            if not bits:
                break
            found.append(bits)
        return bytes(found)

    def write(self, move: Move, page_bytes: float) -> None:
        for key in move.keys:
            self._room -= page_bytes * ((key, move.group) not in self._pages)
            self._pages[key, move.group] = page_bytes
            self._pages.move_to_end((key, move.group))
        while self._room < 0:
            self._room += self._pages.popitem(last=False)[1]

    def good(self, move: Move) -> int:
        """How many of the first pages of a read are there."""
        for i, key in enumerate(move.keys):
            if (key, move.group) not in self._pages:
                return i
            self._pages.move_to_end((key, move.group))
        return len(move.keys)

    def deny(self, keys: Sequence[bytes], groups: int) -> None:
        for key in keys:
            for g in range(groups):
                self._room += self._pages.pop((key, g), 0.0)


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    lands: set[MoveId] = field(default_factory=set)     # loads that it waits for and that have not ended
    computed: bool = False


class VirtualEngine:
    """One engine. `outputs` receives what its planner says, at the time of the clock."""

    def __init__(self, planned: Planned, rates: Speeds, clock: Clock, outputs: Callable[[Sequence[Output]], None],
                 token: Callable[[RequestId, int], int], *, store: Store | None = None, scale: float = 1.0) -> None:
        """token: id of the output at this position of a request, counted from the first of its prompt."""
        self.core = Core(planned.core)
        self.cfg = planned.core
        self.up, self.down = Link(rates.load_bytes_s / scale), Link(rates.save_bytes_s / scale)
        self.busy_s = 0.0
        self.counts: Counter[str] = Counter()
        self._steps = StepTime(self.core, planned.shape, rates, scale)
        self._clock, self._outputs, self._token, self._store = clock, outputs, token, store
        self._events: list[Event] = []
        self._turn_due = False
        self._queue: deque[_Step] = deque()             # the first runs
        self._running = False
        self._retired = 0
        self._flying: set[MoveId] = set()
        self._after: list[Move] = []                    # moves whose step has not retired
        if store is not None:
            page = sum(g.page_bytes for g in self.cfg.groups)
            token_s = scale * planned.shape.prompt_flops(0, 1) / rates.prompt_flops_s
            self.send(Rates(1e6 * scale * page / rates.store_read_bytes_s, 1e6 * token_s))

    def send(self, event: Event) -> None:
        """The planner gets it now, with all that is due at the same time."""
        self._events.append(event)
        if not self._turn_due:
            self._turn_due = True
            self._clock.at(self._clock.now, self._turn)

    @property
    def idle(self) -> bool:
        return not (self._queue or self._flying or self._events)

    # ---------------------------------------------------------------- one turn
    def _turn(self) -> None:
        self._turn_due = False
        events, self._events = self._events, []
        while True:
            advance = self.core.advance(events)
            events = []
            self._answer(advance.outputs)
            if advance.plan is not None:
                self._submit(advance.plan)
            elif not self.core.flushing:
                break

    def _answer(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Lookup):
                assert self._store is not None, "an engine without storage has nothing to look up"
                listed = Listed(output.rid, output.visit, self._store.present(output.keys, len(self.cfg.groups)))
                self._later(self._store.reads.start_s, listed)
            elif isinstance(output, Started):
                self._steps.begun += output.hbm_tokens + output.dram_tokens + output.disk_tokens
            elif isinstance(output, Unstore) and self._store is not None:
                self._store.deny(output.keys, len(self.cfg.groups))
        self._outputs(outputs)

    def _later(self, seconds: float, event: Event) -> None:
        self._clock.at(self._clock.now + seconds, lambda: self.send(event))

    # ---------------------------------------------------------------- steps
    def _submit(self, plan: StepPlan) -> None:
        self._flying.update(move.id for move in plan.moves)
        self._queue.append(_Step(plan, {move for move in plan.waits if move in self._flying}))
        for move in plan.moves:
            if move.after <= self._retired:
                self._copy(move)
            else:
                self._after.append(move)
        self._start()

    def _start(self) -> None:
        if self._running or not self._queue:
            return
        self._running, step = True, self._queue[0]
        takes = self._steps.seconds(step.plan)
        self.busy_s += takes
        self._clock.at(self._clock.now + takes, lambda: self._computed(step))

    def _computed(self, step: _Step) -> None:
        step.computed = True
        self._end()

    def _end(self) -> None:
        """Retire the step that runs, if it is computed and its loads have landed."""
        if not self._queue or not self._queue[0].computed or self._queue[0].lands:
            return
        plan, self._running = self._queue.popleft().plan, False
        self._retired = int(plan.step)
        if (use := self._steps.hot_use(plan)) is not None:
            self.send(use)
        self.send(Retired(plan.step, tuple(
            (self._token(rid, start + count),)
            for rid, start, count, samples in zip(plan.rids, plan.start, plan.count, plan.samples, strict=True)
            if samples)))
        ready = [move for move in self._after if move.after <= self._retired]
        self._after = [move for move in self._after if move.after > self._retired]
        for move in ready:
            self._copy(move)
        self._start()

    # ---------------------------------------------------------------- copies
    def _copy(self, move: Move) -> None:
        nbytes, now = transfer_bytes(self.cfg, move.group, move.tokens), self._clock.now
        if Tier.DISK in (move.src, move.dst):
            assert self._store is not None, "an engine without storage moves nothing there"
            link = self._store.reads if move.src is Tier.DISK else self._store.writes
        else:
            link = self.up if move.dst is Tier.HBM else self.down
        self.counts[f"{move.src.value} to {move.dst.value}"] += len(move.dst_pages)
        self._clock.at(link.send(now, nbytes), lambda: self._landed(move))

    def _landed(self, move: Move) -> None:
        good = len(move.dst_pages)
        if self._store is not None and move.src is Tier.DISK:
            good = self._store.good(move)
        elif self._store is not None and move.dst is Tier.DISK:
            self._store.write(move, self.cfg.groups[move.group].page_bytes)
        whole = good == len(move.dst_pages)
        self._flying.discard(move.id)
        self.send(Moved(move.id, whole, 0 if whole else good))
        for step in self._queue:
            step.lands.discard(move.id)
        self._end()
