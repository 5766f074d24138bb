"""Fake ranks in virtual time: the simulator's side of the `Executor` protocol.

Steps execute in order on every rank, each rank at its own pace; copies run beside them and read
and write as late as their fences permit; failed copies tear their destination. An event is made
when every rank has reported. Decides nothing about requests.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from penstock.core.plan import (
    Arrived,
    Event,
    HotUse,
    Listed,
    Lookup,
    Move,
    Moved,
    MoveId,
    RequestId,
    Retired,
    StepId,
    StepPlan,
    Tier,
    Unstore,
)
from penstock.core.settings import CoreConfig
from penstock.sim.ranks.clock import Clock
from penstock.sim.ranks.device import Device, Identity, stored_as
from penstock.sim.ranks.store import SimStore

HOT_USE_STEPS = 4        # steps after which the core is told what rows on the host have missed
APART = 1.0              # ranks that end the same step or copy further apart than this go their own ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Virtual durations; each is drawn uniformly from 0.2 to 1 times its value."""

    step: float = 1.0               # one forward of one stage
    report: float = 0.2             # from a rank's last write until the loop hears of it
    copy: float = 1.0               # from permission to the read, and from the read to the write
    straggle: float = 0.0           # chance that a copy takes ten times as long
    fail: float = 0.0               # chance that a copy fails on one rank
    disk: float = 1.0               # how much slower a read from storage is,
    write: float = 1.0              # and a write to it
    shy: float = 0.0                # chance that a row returns fewer tokens than it may
    hang: float = 0.0               # what storage does wrong, see `store`
    full: float = 0.0
    lie: float = 0.0
    gone: float = 0.0
    dead: float = 0.0


class Wire(NamedTuple):
    """Writes of one engine of a pair into pages of the other."""

    granted: Callable[[Move], None]        # pages may be written under this transfer and generation
    connection: Callable[[], object]       # that a push belongs to which is ordered now
    # Send what a group stores of some positions over a connection; says when none of it is to be read any
    # more, and whether all has gone.
    write: Callable[[Move, dict[int, int], object, Callable[[bool], None]], None]


class SimExecutor:
    """`ranks` devices. `wake` is called whenever `poll` has something new."""

    def __init__(self, cfg: CoreConfig, clock: Clock, rng: Random, *, ranks: int = 1,
                 speeds: Speeds | None = None, wake: Callable[[], None] | None = None,
                 wire: Wire | None = None) -> None:
        self.clock, self.rng, self.speeds = clock, rng, speeds or Speeds()
        self.wire = wire
        self.wake = wake or (lambda: None)
        self.who: dict[RequestId, Identity] = {}
        self.busy: dict[Tier, set[int]] = {}       # pages that somebody keeps, if the judge says it
        self.devices = [Device(cfg.page_size, cfg.groups, self.who, self.busy, self.speeds.shy,
                               1 + cfg.draft_tokens, cfg.max_len)
                        for _ in range(ranks)]
        self.stages = cfg.pp_size
        self.lost = 0.0                   # chance that what it is storing is not stored: its engine has died
        self.fail_move = 0                # the n-th Move fails, whatever the rate; 0 is off
        self.stats: Counter[str] = Counter()
        self.num_asked = 0                # look-ups in storage
        self.in_flight = 0                # plans and moves without their event
        apart, way = Random(), self.speeds
        apart.setstate(rng.getstate())
        self.store = SimStore(way.hang, way.full, way.lie, way.gone, way.dead, apart, self.stats)
        self._queues: list[list[StepPlan]] = [[] for _ in range(ranks)]
        self._waiting: list[list[Callable[[], bool]]] = [[] for _ in range(ranks)]
        self._busy = [False] * ranks
        self._reports: dict[StepId, list[tuple[tuple[int, ...], ...]]] = {}
        self._first: dict[tuple[str, int], float] = {}     # when the first of several ranks was done
        self._retired = 0
        self._copies: dict[MoveId, int] = {}          # ranks that have not finished it
        self._flying: list[set[MoveId]] = [set() for _ in range(ranks)]
        self._moves: dict[MoveId, Move] = {}          # those of `_copies`
        self._torn: dict[MoveId, int] = {}            # moves that failed on some rank: pages that are good
        self._spoiled: dict[MoveId, list[int]] = {}   # what they write into these pages is wrong
        self._sampled: dict[StepId, list[RequestId]] = {}
        self._damaged: set[RequestId] = set()         # their tokens may be anything
        self._waits: dict[StepId, tuple[MoveId, ...]] = {}
        self._events: list[Event] = []

    # ---------------------------------------------------------------- Executor
    def register(self, a: Arrived, seed: int) -> None:
        self.who[a.rid] = Identity(a.namespace, seed, a.attention, len(a.prompt))

    def submit(self, plan: StepPlan) -> None:
        self.in_flight += 1 + sum(move.src is not Tier.PEER for move in plan.moves)
        self._reports[plan.step] = []
        self._waits[plan.step] = plan.waits
        self._sampled[plan.step] = [rid for rid, samples in zip(plan.rids, plan.samples, strict=True)
                                    if samples]
        for move in plan.moves:
            self._start(move)
        for k in range(len(self.devices)):
            self._queues[k].append(plan)
            self._kick(k)

    def ask_storage(self, out: Lookup | Unstore) -> None:
        """It answers in a while, with what it had when it was asked, or some of that."""
        store, rng = self.store, self.store.rng
        if isinstance(out, Unstore):
            store.unstore(self.devices, out.keys)
            return
        self.num_asked += 1
        present = store.present(self.devices, out)
        if rng.random() < 0.2:                 # or somebody answers for it, who knows of nothing
            present = present[:rng.choice((0, rng.randint(0, len(present))))]
        self.in_flight += 1
        self.clock.after(rng.choice((0.1, 1.0, 10.0)) * rng.random(),
                         lambda: self._event(Listed(out.rid, out.visit, present)))

    def poll(self, *, block: bool) -> Sequence[Event]:
        while block and not self._events and self.in_flight and self.clock.step():
            pass
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- steps
    def _delay(self, scale: float) -> float:
        return scale * (0.2 + 0.8 * self.rng.random())

    def _kick(self, k: int) -> None:
        if self._queues[k] and not self._busy[k]:
            if not self._flying[k].isdisjoint(self._queues[k][0].waits):
                self.stats["step waited for a load"] += 1
                return                            # again when it has landed
            self._busy[k] = True
            self.clock.after(self._delay(self.speeds.step), partial(self._run, k))

    def _run(self, k: int) -> None:
        plan = self._queues[k].pop(0)
        tokens = self.devices[k].execute(plan)
        self._busy[k] = False
        self._kick(k)
        self._waiting[k] = [start for start in self._waiting[k] if not start()]
        late = (self.stages - 1) * self.speeds.step
        self.clock.after(late + self._delay(self.speeds.report),
                         partial(self._report, plan.step, tokens))

    def _report(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        self._reports[step].append(tokens)
        self._ended(("step", step), len(self._reports[step]))
        while len(done := self._reports.get(StepId(self._retired + 1), [])) == len(self.devices):
            self._retired += 1
            # What read a copy that failed on one rank is garbage there: the core must not use it.
            torn = not self._torn.keys().isdisjoint(self._waits.pop(StepId(self._retired)))
            rids = self._sampled.pop(StepId(self._retired))
            assert torn or all(self._agree(rids, tokens, done[0]) for tokens in done), "ranks disagree"
            self.stats["step read a torn load"] += torn
            del self._reports[StepId(self._retired)]
            self._event(Retired(StepId(self._retired), done[0]))
            if self._retired % HOT_USE_STEPS == 0 and (use := self.devices[0].use):
                absurd = self._retired % (5 * HOT_USE_STEPS) == 0
                self._events.append(HotUse(StepId(self._retired), tuple(
                    (rid, -read if absurd else read, missed) for rid, (read, missed) in use.items())))
                self.devices[0].use = {}

    def _ended(self, what: tuple[str, int], ranks: int) -> None:
        """One more rank is done with a step or a copy; `ranks` are, with it."""
        if ranks == 1 < len(self.devices):
            self._first[what] = self.clock.now
        elif ranks == len(self.devices) > 1:
            self.stats["ranks apart"] += self.clock.now - self._first.pop(what) > APART

    def _agree(self, rids: list[RequestId], tokens: tuple[tuple[int, ...], ...],
               others: tuple[tuple[int, ...], ...]) -> bool:
        return tokens == others or all(a == b or rid in self._damaged
                                       for rid, a, b in zip(rids, tokens, others, strict=True))

    def damage(self, rids: set[RequestId], pages: set[tuple[Tier, int]]) -> None:
        """These pages are wrong from now on, whatever copy is about to fill them. Of `rids`, all of which
        have ended, the ranks may have read them before and after that."""
        self._damaged |= rids
        for tier, page in pages:
            for k, device in enumerate(self.devices):
                device.damage(tier, page)
                if tier is Tier.DISK:
                    self.store.damaged(k, device, page)
        for move in self._moves.values():
            self._spoiled[move.id] = [*self._spoiled.get(move.id, ()),
                                      *(page for page in stored_as(move, move.dst)
                                        if (move.dst, page) in pages)]

    def _event(self, event: Event) -> None:
        self.in_flight -= 1
        self._events.append(event)
        self.wake()

    # ---------------------------------------------------------------- copies
    def _start(self, move: Move) -> None:
        if Tier.PEER in (move.src, move.dst):
            self._start_peer(move)
            return
        self.stats["moves"] += 1
        bad = -1
        if self.rng.random() < self.speeds.fail or self.stats["moves"] == self.fail_move:
            bad = self.rng.randrange(len(self.devices))
            self.stats[f"{move.src.value} to {move.dst.value} failed"] += 1
        elif move.dst is Tier.DISK and not self.store.has_space():
            bad = 0
        self._copies[move.id], self._moves[move.id] = len(self.devices), move
        for k in range(len(self.devices)):
            self._flying[k].add(move.id)
            start = partial(self._try, k, move, bad)
            if not start():
                self._waiting[k].append(start)

    def _start_peer(self, move: Move) -> None:
        assert self.wire is not None
        if move.src is Tier.PEER:
            self.wire.granted(move)            # how it ends is not ours to say
            return
        self.stats["pushes"] += 1
        start = partial(self._try_push, move, self.wire.connection())
        if not start():
            self._waiting[0].append(start)

    def _try_push(self, move: Move, connection: object) -> bool:
        if self.devices[0].done < move.after:
            return False
        self.clock.after(self._delay(self.speeds.copy), partial(self._push, move, connection))
        return True

    def _push(self, move: Move, connection: object) -> None:
        if self.wire is None:
            return                             # this engine has died
        unit = self.devices[0].units[move.group]
        pages, values = self.devices[0].read(move), dict[int, int]()
        for p in range(move.first, move.first + move.tokens):
            values[p] = pages[p // unit - move.first // unit][p % unit]
        self.wire.write(move, values, connection, lambda ok: self._event(Moved(move.id, ok)))

    def _try(self, k: int, move: Move, bad: int) -> bool:
        """Begin the copy on rank k if its fence permits."""
        if self.devices[k].done < move.after:
            return False
        slow, late = 10.0 if self.rng.random() < self.speeds.straggle else 1.0, 0.0
        self.stats["straggler"] += slow > 1
        if Tier.DISK in (move.src, move.dst):
            slow *= self.speeds.disk if move.src is Tier.DISK else self.speeds.write
            late = self.store.late(slow)
        self.clock.after(self._delay(slow * self.speeds.copy) + late, partial(self._read, k, move, bad))
        return True

    def _read(self, k: int, move: Move, bad: int) -> None:
        good, num = len(move.src_pages), len(move.src_pages)
        if move.src is Tier.DISK:
            good = self.store.num_good(k, self.devices[k], move)
        data = self.devices[k].read(move, good if move.keys else -1)
        if k == bad or (good < num and not move.keys):       # tear it: the first half arrives, or less
            good = min(good, num // 2)
        self.clock.after(self._delay(self.speeds.copy), partial(self._land, k, move, good, data))

    def _land(self, k: int, move: Move, good: int, data: list[list[int]]) -> None:
        """`good` of its pages arrive, the rest is garbage; but storage takes nothing of a page, or all."""
        if self.lost and move.dst is Tier.DISK and self.store.rng.random() < self.lost:
            self.store.stats["store of the dead lost"] += 1
            return
        if good < len(data):
            self._torn[move.id] = min(good, self._torn.get(move.id, good))
            data = data[:good] + [[-7_000_003 - v for v in slots] for slots in data[good:]]
        if move.dst is Tier.DISK and move.keys:
            move = move._replace(dst_pages=move.dst_pages[:good], keys=move.keys[:good])
            data = data[:good]
        self.devices[k].write(move, data)
        for page in self._spoiled.get(move.id, ()):
            self.devices[k].damage(move.dst, page)
        if move.dst is Tier.DISK:
            self.store.stored(k, self.devices[k], move)
        self._copies[move.id] -= 1
        self._flying[k].remove(move.id)
        self._ended(("move", move.id), len(self.devices) - self._copies[move.id])
        if self._copies[move.id] == 0:
            del self._copies[move.id], self._moves[move.id]
            self._spoiled.pop(move.id, None)
            if any(other < move.id for other in self._copies):
                self.stats["moves reordered"] += 1
            if self.devices[k].done > move.after + 1:
                self.stats["late copy"] += 1
            torn = self._torn.get(move.id)
            self._event(Moved(move.id, torn is None, torn if torn and move.keys else 0))
        self._kick(k)
