"""One simulated run: a core, fake ranks, requests and faults, all from one seed.

The loop is the production loop: drain events, advance, submit, until there is no plan. It has no
timer, so a core that would need one to make progress stalls here and fails.
"""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Dropped,
    Entered,
    Event,
    Expired,
    Finished,
    Flushed,
    Moved,
    Outcome,
    Paused,
    Rates,
    RequestId,
    Retired,
    StepPlan,
    Stopped,
    Token,
)
from penstock.core.settings import CoreConfig
from penstock.sim.clock import Clock
from penstock.sim.executor import SimExecutor
from penstock.sim.judge import Judge
from penstock.sim.scenario import Scenario
from penstock.sim.workload import Expect, Workload

POKES: dict[str, type[Paused] | type[Dropped] | type[Aborted]] = {
    "pause": Paused, "drop": Dropped, "abort": Aborted}
MakeCore = Callable[[CoreConfig], Core]


class World:
    """`play()` runs to the end; an AssertionError is a finding."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False,
                 record: bool = False, ticks: int = 0) -> None:
        self.sc, self.clock = sc, Clock()
        self.rng = Random(f"faults {sc.seed}")
        self.core = make(sc.cfg)
        self.executor = SimExecutor(sc.cfg, self.clock, Random(f"device {sc.seed}"),
                                    ranks=sc.ranks, speeds=sc.speeds, wake=self._wake)
        self.load = Workload(sc)
        self.judge = Judge(sc, self.core, self.executor, self.load.made, blind=blind)
        self.stats: Counter[str] = Counter()
        self.inbox: list[Event] = []
        self.trace: list[tuple[Event, ...]] | None = [] if record else None
        self.plans: list[StepPlan | None] = []
        self.turns = 0
        self.ticks = ticks                # idle turns allowed, for programs that refuse things
        self.refuses = ticks > 0
        self.abort_turn = 0               # abort something at the n-th turn; 0 is off
        self.plans_max = 0
        self.ending: list[RequestId] = []     # aborted or stopped by the events of this turn
        self._scheduled = False
        for e in self.load.initial():
            self._schedule(e)
        self._faults()

    # ---------------------------------------------------------------- what happens when
    def _schedule(self, e: Expect) -> None:
        a, rng = e.arrived, self.rng
        self.executor.register(a.rid, a.namespace, e.seed)
        self.plans_max += 6 * (len(a.prompt) + a.max_new) + 40
        at = e.at - self.clock.now
        self.clock.after(at, partial(self._send, a))
        if rng.random() < self.sc.abort:
            late = at + rng.choice((0.0, 1.0, 10.0, 40.0)) * rng.random()
            for _ in range(rng.choice((1, 1, 2))):
                self.clock.after(late, partial(self._send, Aborted(a.rid)))

        if rng.random() < self.sc.expire:
            late = at + rng.choice((0.0, 1.0, 20.0)) * rng.random()
            self.clock.after(late, partial(self._send, Expired(a.rid, Phase.QUEUED.value, 0)))

    def _faults(self) -> None:
        rng, sc = self.rng, self.sc
        for _ in range(rng.choice((0, 0, 1, 3))):
            rates = Rates(rng.choice((1.0, 10.0, 100.0)), rng.choice((1.0, 5.0, 50.0)))
            self.clock.after(rng.random() * sc.span, partial(self._send, rates))
        for num, kind in ((sc.pauses, "pause"), (sc.drops, "drop"), (sc.aborts, "abort"),
                          (sc.stops, "stop")):
            for _ in range(num):
                self.clock.after(rng.random() * (sc.span + 20), partial(self._poke, kind))
        for _ in range(sc.flushes):
            self.clock.after(rng.random() * (sc.span + 20), partial(self._send, Flushed()))
        if rng.random() < 0.1:
            self.clock.after(rng.random() * sc.span, partial(self._send, Aborted(RequestId(10**6))))

    def _poke(self, kind: str) -> None:
        """Aim at a phase first, then at a request in it: short phases are hit as often as long
        ones. Sometimes at a request that has finished or is not known."""
        rng, made = self.rng, self.load.made
        live = [r for r in self.core.live.values() if kind != "stop" or made[r.rid].got]
        if live and rng.random() < 0.9:
            phases = {r.phase: None for r in live}      # a dict keeps the order of insertion
            phase = rng.choice(list(phases))
            rid = rng.choice([r.rid for r in live if r.phase is phase])
        else:
            rid = RequestId(rng.randrange(len(made) + 1))
        if kind != "stop":
            self._send(POKES[kind](rid))
            if kind != "abort" and rng.random() < 0.3:      # before it has settled down
                again = POKES[rng.choice(("abort", "drop", "pause"))](rid)
                self.clock.after(rng.random() * 3, partial(self._send, again))
        elif rid < len(made) and (got := len(made[rid].got)):
            self._send(Stopped(rid, rng.randint(1, got)))

    def _send(self, event: Event) -> None:
        self.inbox.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            late = self.rng.random() * 3 if self.rng.random() < self.sc.hold else 0.0
            self.clock.after(late, self._turn)

    # ---------------------------------------------------------------- the loop, one turn
    def _turn(self) -> None:
        self._scheduled = False
        self.turns += 1
        polled = list(self.executor.poll(block=False))
        mail, self.inbox = self.inbox, []
        events = mail + polled if self.rng.random() < 0.5 else polled + mail
        if self.turns == self.abort_turn:
            live = [rid for rid in self.core.live if not self.load.made[rid].aborted]
            events += [Aborted(self.rng.choice(live))] if live else []
        self.judge.forced.clear()
        for event in events:
            self._note(event)
        while True:
            if self.trace is not None:
                self.trace.append(tuple(events))
            adv = self.core.advance(events)
            for out in adv.outputs:
                self.judge.output(out)
                if isinstance(out, Token):
                    self._maybe_stop(out)
                elif isinstance(out, Finished):
                    self._maybe_turn(out)
                elif isinstance(out, Entered):
                    late = self.rng.random() * self.sc.deadline
                    self.clock.after(late, partial(self._send, Expired(out.rid, out.phase, out.visit)))
            for rid in self.ending:
                assert self.load.made[rid].finished is not None, f"request {rid} was not ended"
            self.ending.clear()
            if adv.plan is not None:
                self.judge.plan(adv.plan)
            if events or adv.plan is not None or adv.outputs:
                self.judge.state()
            if self.trace is not None:
                self.plans.append(adv.plan)
            if adv.plan is None:
                if not self.refuses:
                    self._still()
                return
            assert adv.plan.step <= self.plans_max, "starvation: too many steps"
            self.executor.submit(adv.plan)
            if self.rng.random() < self.sc.hold / 2:
                self._wake()                   # a loop that polls between two plans
                return
            events = []
            self.judge.forced.clear()

    def _still(self) -> None:
        """The core said that there is nothing to do: then nothing happens without an event."""
        edges = self.judge.edges.total()
        assert self.core.advance(()) == Advance(None, ()), "it went to sleep with work to do"
        assert self.judge.edges.total() == edges, "it went to sleep with an edge to take"

    def _note(self, event: Event) -> None:
        """Tell the judge what it may expect, and count what fires."""
        live, made = self.core.live, self.load.made
        match event:
            case Arrived(rid):
                made[rid].sent = True
            case Aborted(rid):
                if rid < len(made) and made[rid].sent and made[rid].finished is None:
                    self.stats["aborted twice" if made[rid].aborted else "aborted"] += 1
                    made[rid].aborted = True
                    self.ending.append(rid)
                else:
                    self.stats["aborted unknown"] += 1
                self.judge.meets(event, rid)
            case Stopped(rid, count):
                if made[rid].finished is None:
                    made[rid].stop_at = count
                    self.ending.append(rid)
                    self.stats["stopped late"] += 1
                self.judge.meets(event, rid)
            case Paused(rid) | Dropped(rid):
                name = type(event).__name__.lower()
                self.stats[name if rid in live else f"{name} unknown"] += 1
                self.judge.forced.add(rid)
                self.judge.meets(event, rid)
            case Expired(rid, phase, visit):
                self.judge.meets(event, rid)
                r = live.get(rid)
                if r is None:                     # it may have arrived in this very batch
                    fresh = made[rid].sent and made[rid].finished is None and visit == 0
                else:
                    fresh = (r.phase.value, r.visit) == (phase, visit)
                made[rid].expired |= fresh and phase == Phase.QUEUED.value
                kind = "queue expired" if phase == Phase.QUEUED.value else "fetch expired"
                self.stats[kind if fresh else "stale deadline"] += 1
                self.judge.forced.add(rid)
            case Rates():
                self.stats["rates"] += 1
            case Flushed():
                self.stats["flushed"] += 1
            case Retired(step):
                self.judge.retired = step
                for rid in self.judge.steps.pop(step, ()):
                    self.judge.meets(event, rid)
            case Moved(id, _):
                self.judge.moves.pop(id, None)

    def _maybe_stop(self, out: Token) -> None:
        """The detokenizer sees a stop string in what it was given, and says so a little late."""
        if self.rng.random() < self.sc.stop / 8:
            late = self.rng.random() * self.rng.choice((0.0, 1.0, 6.0))
            self.clock.after(late, partial(self._send, Stopped(out.rid, out.index + 1)))

    def _maybe_turn(self, out: Finished) -> None:
        if out.outcome in (Outcome.STOP, Outcome.LENGTH):
            e = self.load.next_turn(self.load.made[out.rid], self.clock.now)
            if e is not None:
                self._schedule(e)

    # ---------------------------------------------------------------- run and judge
    def play(self) -> World:
        while True:
            while self.clock.step():
                pass
            if not self.core.live or self.ticks == 0:
                break
            self.ticks -= 1
            self.stats["idle ticks"] += 1
            self._turn()
        for e in self.load.made:
            assert e.finished is not None, f"stalled: request {e.arrived.rid} never finished"
        self.core.advance((Flushed(),))
        self.judge.end()
        self.stats += self.judge.stats + self.executor.stats
        return self

    def digest(self) -> str:
        """Of everything that the core decided, for a recorded run."""
        assert self.trace is not None
        text = repr((self.plans, [(e.got, e.finished) for e in self.load.made]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
