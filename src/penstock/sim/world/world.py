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
from penstock.core.pair.messages import Message
from penstock.core.plan import (
    ONE_PEER,
    Aborted,
    Advance,
    Arrived,
    Dropped,
    Entered,
    Event,
    Expired,
    Finished,
    Flushed,
    Lookup,
    Moved,
    Outcome,
    Paused,
    PeerJoined,
    PeerLeft,
    Promoted,
    Rates,
    Republish,
    RequestId,
    Retired,
    Say,
    Spilled,
    StepPlan,
    Stopped,
    Token,
    Unstore,
)
from penstock.core.settings import CoreConfig
from penstock.sim.ranks.clock import Clock
from penstock.sim.ranks.executor import SimExecutor, Wire
from penstock.sim.world import damage, sessions
from penstock.sim.world.judge import Judge
from penstock.sim.world.scenario import Scenario
from penstock.sim.world.view import Live, Watcher, alike
from penstock.sim.world.workload import Expect, Workload

Poke = type[Paused] | type[Dropped] | type[Aborted] | type[Spilled] | type[Promoted]
POKES: dict[str, Poke] = {
    "pause": Paused, "drop": Dropped, "abort": Aborted, "spill": Spilled, "promote": Promoted}
RECEIVING = Phase.RECEIVING.value
# Names of states, see `lifecycle.State`.
SHORT = ("fetching", "fetching", "loading", "decode.to_host", "decode.host", "decode.to_device", "decode.to_device",
         "paused")
AIMED = (*POKES, "stop", "flush", "rates", "cut")
ASKED = (Paused, Dropped, Spilled, Promoted)
STRAYS = 2                 # deadlines that nobody has set
AIMS = {"spill": "decode.device", "promote": "decode.host"}
MakeCore = Callable[[CoreConfig], Core]


class Link:
    """What several worlds in one virtual time give each of them: nothing, unless it is overridden."""

    def __init__(self) -> None:
        self.clock = Clock()

    def wire(self, world: World) -> Wire | None:
        """How the ranks of one engine reach the other."""

    def say(self, world: World, message: Message) -> None:
        """A message of one engine."""

    def asked(self, world: World, e: Expect) -> None:
        """A request has come to the decode engine; its prefill engine gets it too."""

    def forward(self, world: World, event: Event) -> None:
        """An event for an engine that has died."""

    def cut(self, world: World) -> None:
        """The connection breaks."""

    def leave(self, rid: RequestId) -> None:
        """A client leaves while the prefill engine works for it."""


class World(Watcher):
    """`play()` runs to the end; an AssertionError is a finding."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False,
                 record: bool = False, ticks: int = 0, link: Link | None = None,
                 epoch: int = 1) -> None:
        """`epoch`: which incarnation of the engine it is."""
        self.sc, self.alone, self.link, self.epoch = sc, link is None, link or Link(), epoch
        self.clock = self.link.clock
        self.rng = Random(f"faults {sc.seed} {sc.cfg.role} {epoch}")
        self.core = make(sc.cfg)
        self.executor = SimExecutor(sc.cfg, self.clock, Random(f"device {sc.seed} {sc.cfg.role}"),
                                    ranks=sc.ranks, speeds=sc.speeds, wake=self.wake,
                                    wire=self.link.wire(self))
        if (bend := getattr(self.core, "bend", None)) is not None:
            bend(self.executor)           # a seeded bug of the ranks
        self.load = Workload(sc)
        self.judge = Judge(sc, self.core, self.executor, self.load.made, blind=blind)
        self.view = self.judge.view
        self.stats: Counter[str] = Counter()
        self._damage_rng = Random(f"damage {sc.seed} {sc.cfg.role} {epoch}")
        self._stray_rng = Random(f"stray {sc.seed} {sc.cfg.role} {epoch}")
        self._damage_due = 0              # requests whose KV is found to be damaged
        self._asked: tuple[Live, int] | None = None        # whom an event wishes an edge, and its visit
        self.core.watchers.append(self)
        self.inbox: list[Event] = []
        self._timers: dict[int, Event] = {}
        self._tickets = 0
        self.aims: list[tuple[str, str]] = []
        self.trace: list[tuple[Event, ...]] | None = [] if record else None
        self.plans: list[StepPlan | None] = []
        self.turns = 0                    # of the loop
        self.ticks = ticks                # idle turns allowed, for programs that refuse things
        self.refuses = self.judge.policy.refused = ticks > 0
        self.heard = 0                    # events that the core was given
        self.abort_at = 0                 # abort somebody behind the n-th of them; 0 is off
        self.plans_max = 0
        self.ending: list[RequestId] = []     # aborted or stopped by the events of this turn
        self.dead = False                 # one engine of a pair has died
        self.lines: list[object] = []     # connections that it was told of, and has not noted
        self.line: object = None          # the one that it is joined by
        self._scheduled = False
        self._held = False                # the loop turns late
        if self.alone:
            for e in self.load.initial():
                self.schedule(e)
            self.faults()

    # ---------------------------------------------------------------- what happens when
    def schedule(self, e: Expect) -> None:
        a, rng = e.arrived, self.rng
        self._register(e)
        at = e.at - self.clock.now
        self.clock.after(at, partial(self.send, a))
        if rng.random() < self.sc.abort:
            late = at + rng.choice((0.0, 1.0, 10.0, 40.0)) * rng.random()
            for _ in range(rng.choice((1, 1, 2))):
                self.clock.after(late, partial(self.send, Aborted(a.rid)))
        self._expire(a, at)

    def _register(self, e: Expect) -> None:
        self.executor.register(e.arrived, e.seed)
        self.plans_max += 6 * (len(e.arrived.prompt) + e.arrived.max_new) + 40

    def _expire(self, a: Arrived, at: float) -> None:
        rng = self.rng
        if rng.random() < self.sc.expire:
            late = at + rng.choice((0.0, 1.0, 20.0)) * rng.random()
            self.timer(late, Expired(a.rid, Phase.QUEUED.value, 0))

    def _entered(self, out: Entered) -> None:
        """The deadline of a phase: of one that waits in a queue again, if such have any."""
        most = self.sc.net.patience if out.phase == RECEIVING else self.sc.deadline
        if out.phase == Phase.DROPPED.value:
            most = 20.0
            if self.rng.random() >= self.sc.expire:
                return
        self.timer(self.rng.random() * most, Expired(out.rid, out.phase, out.visit))

    def expect(self, e: Expect) -> None:
        """A request arrives now, from the other engine."""
        self._register(e)
        self._expire(e.arrived, 0.0)
        self.send(e.arrived)

    def faults(self) -> None:
        rng, sc = self.rng, self.sc
        for _ in range(rng.choice((0, 0, 1, 3))):
            rates = Rates(rng.choice((1.0, 10.0, 100.0)), rng.choice((1.0, 5.0, 50.0)))
            self.clock.after(rng.random() * sc.span, partial(self.send, rates))
        for num, kind in ((sc.pauses, "pause"), (sc.drops, "drop"), (sc.aborts, "abort"),
                          (sc.stops, "stop"), (sc.spills, "spill"), (sc.spills, "promote")):
            for _ in range(num):
                self.clock.after(rng.random() * (sc.span + 20), partial(self._poke, kind))
        for _ in range(sc.flushes):
            self.clock.after(rng.random() * (sc.span + 20), partial(self.send, Flushed()))
        if rng.random() < 0.1:
            self.clock.after(rng.random() * sc.span, partial(self.send, Aborted(RequestId(10**6))))
        sessions.schedule(self)
        for _ in range(sc.damages):
            self.clock.after(self._damage_rng.random() * (sc.span + 20), self._find_damage)
        for _ in range(STRAYS):
            self.clock.after(self._stray_rng.random() * (sc.span + 20), self._stray)
        for _ in range(sc.republishes):
            self.clock.after(sc.span / 2, partial(self.inbox.append, Republish()))     # with the next event
        for _ in range(sc.jumps):
            self.clock.after(self._damage_rng.random() * (sc.span + 20), self._leap)
        short = [name for name in SHORT if name in self.view.states]
        self.aims = [(rng.choice(short), rng.choice(AIMED)) for _ in range(sc.aims if short else 0)]
        if sc.cfg.role == "prefill" and (sc.cfg.disk_pages or self._stray_rng.random() < 0.3):
            self.aims[:0] = (("fetching", self._stray_rng.choice(("cut", "leave"))),
                             ("loading", self._stray_rng.choice(("cut", "expire"))))

    def _aim(self) -> None:
        """Some events wait for a state that is too short to be met by chance."""
        for name, kind in self.aims:
            made = self.load.made
            r = next((r for r in self.view.live if r.state.name == name and (kind != "stop" or made[r.rid].got)), None)
            if r is None:
                continue
            rid = r.rid
            self.stats["aimed"] += 1
            self.aims.remove((name, kind))
            if kind == "cut":
                self.link.cut(self)
            elif kind == "stop":
                self.send(Stopped(rid, len(made[rid].got)))
            elif kind == "expire":
                self.send(Expired(rid, r.phase.value, r.visit))
            elif kind == "leave":
                self.link.leave(rid)
            elif kind == "flush":
                self.send(Flushed())
            elif kind == "rates":
                self.send(Rates(10.0, 10.0))
            else:
                self.send(POKES[kind](rid))
            return

    def _poke(self, kind: str) -> None:
        """Aim at a state first, then at a request in it: a short one as often. Sometimes at who has ended."""
        rng, made = self.rng, self.load.made
        live = [r for r in self.view.live if kind != "stop" or made[r.rid].got]
        if kind in AIMS and rng.random() < 0.7:         # a random state would mostly ignore it
            live = [r for r in live if r.state.name == AIMS[kind] and r.arrived.selects] or live
        if live and rng.random() < 0.9:
            rid = rng.choice(alike(rng, live)).rid
        elif live or rng.random() < 0.2:                # seldom if there is nobody that it could concern
            rid = RequestId(rng.randrange(len(made) + 1))
        else:
            return
        if kind != "stop":
            self.send(POKES[kind](rid))
            # Before it has settled down; but not where rows should come to the end of their promotions.
            wild = self.sc.pauses or self.sc.drops or self.sc.aborts
            if wild and kind != "abort" and rng.random() < 0.3:
                again = POKES[rng.choice(("abort", "drop", "pause"))](rid)
                self.clock.after(rng.random() * 3, partial(self.send, again))
        elif rid < len(made) and (got := len(made[rid].got)):
            self.send(Stopped(rid, rng.randint(1, got)))

    def _stray(self) -> None:
        """A deadline of a stay in some phase, which may be one that has none."""
        rng, live = self._stray_rng, self.view.live
        if live:
            r = rng.choice(alike(rng, live))
            self.send(Expired(r.rid, r.phase.value, r.visit))

    def _find_damage(self) -> None:
        self._damage_due += 1
        self.wake()

    def _found_damage(self) -> list[Event]:
        """Somebody is aborted, behind the results that showed the damage."""
        found = [damage.victim(self.view, self._damage_rng) for _ in range(self._damage_due)]
        self._damage_due = 0
        return [Aborted(rid, damaged=True) for rid in found if rid is not None]

    def event(self, event: Event) -> None:
        if isinstance(event, Aborted) and event.damaged and (r := self.view.get(event.rid)) is not None:
            self._damaged(r)
        asked = self.view.get(event.rid) if isinstance(event, ASKED) else None
        self._asked = None if asked is None else (asked, asked.visit)

    def _damaged(self, r: Live) -> None:
        if damage.is_stale(self.view, r):
            self.stats["damage of a step behind a drop"] += 1
            return
        self.judge.distrusted.update(damage.distrusted(self.view, r))
        self.judge.forced.update({r.rid, *(q.rid for q in damage.sharers(self.view, r))})
        self.stats += damage.strike(self.view, self.executor, r, self._damage_rng)
        if r.origin.shares_pages and not r.origin.retried:
            self.stats["computed again for itself"] += 1       # it goes on, and says what it would have said
        else:
            self.load.made[r.rid].aborted = True
            self.ending.append(r.rid)

    def applied(self, event: Event) -> None:
        if self._asked is not None and self._asked[0].visit != self._asked[1]:
            self.stats[type(event).__name__.lower()] += 1          # with an effect

    def timer(self, delay: float, event: Event) -> None:
        """`event` comes after `delay`, or when the clock leaps."""
        self._tickets += 1
        self._timers[self._tickets] = event
        self.clock.after(delay, partial(self._ring, self._tickets))

    def _ring(self, ticket: int) -> None:
        if (event := self._timers.pop(ticket, None)) is not None:
            self.send(event)

    def _leap(self) -> None:
        """The machine slept: all that should have come meanwhile comes now."""
        self.stats["clock leapt"] += bool(self._timers)
        for ticket in list(self._timers):
            self._ring(ticket)

    def send(self, event: Event) -> None:
        if self.dead:
            self.link.forward(self, event)
            return
        self.inbox.append(event)
        self.wake()

    def wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._held = self.rng.random() < self.sc.hold
            late = self.rng.random() * 3 if self._held else 0.0
            self.clock.after(late, self._turn)

    # ---------------------------------------------------------------- the loop, one turn
    def _turn(self) -> None:
        self._scheduled = False
        if self.dead:
            return
        self.turns += 1
        polled = list(self.executor.poll(block=False))
        mail, self.inbox = self.inbox, []
        events = mail + polled if self.rng.random() < 0.5 else polled + mail
        self.stats["events held"] += self._held and len(events) > 1
        at = self.abort_at - self.heard
        self.heard += len(events)
        if 0 < at <= len(events):
            live = [r.rid for r in self.view.live if not self.load.made[r.rid].aborted]
            events[at:at] = [Aborted(self.rng.choice(live))] if live else []
        events += self._found_damage()
        self.judge.forced.clear()
        for event in events:
            self._note(event)
        before = None if any([isinstance(e, Retired | Moved) for e in events]) else self._changes()
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
                    self._entered(out)
                elif isinstance(out, Lookup | Unstore):
                    self.executor.ask_storage(out)
            for rid in self.ending:
                assert self.load.made[rid].finished is not None, f"request {rid} was not ended"
            self.ending.clear()
            self.judge.published(adv.cached)
            if adv.plan is not None:
                self.judge.plan(adv.plan)
            if events or adv.plan is not None or adv.outputs:
                self.judge.state(planned=adv.plan is not None)
            self.plans += () if self.trace is None else (adv.plan,)
            self._say(adv)
            if adv.plan is None and not self.core.flushing:
                if not self.refuses:
                    self._still(before)
                if self.aims:
                    self._aim()
                return
            if adv.plan is not None and self.rng.random() < self.sc.hold / 2:
                self.wake()                   # a loop that polls between two plans
                return
            events = []
            self.judge.forced.clear()

    def _say(self, adv: Advance) -> None:
        """Hand over the plan, then what is said to the peer."""
        if adv.plan is not None:
            assert adv.plan.step <= self.plans_max, "starvation: too many steps"
            self.executor.submit(adv.plan)
        for out in adv.outputs:
            if isinstance(out, Say) and out.peer == ONE_PEER:
                self.link.say(self, out.what)

    def _changes(self) -> tuple[int, int, int]:
        """What planning does shows in one of these: edges taken, units that came back, steps."""
        return self.view.num_edges, self.view.num_freed, self.judge.issued

    def _still(self, before: tuple[int, int, int] | None) -> None:
        """The core said that there is nothing to do: then nothing happens without an event. It is not asked
        again if this turn brought no step's and no copy's end, and led to nothing."""
        if (now := self._changes()) != before:
            assert self.core.advance(()) == Advance(None, ()), "it went to sleep with work to do"
            assert self._changes() == now, "it went to sleep with an edge to take"
        self.judge.still(self.executor.in_flight)

    def _note(self, event: Event) -> None:
        made, view = self.load.made, self.view
        match event:
            case Retired(step):
                self.judge.retired = step
            case Arrived(rid):
                made[rid].sent = True
                if self.sc.cfg.role == "decode" and event.transfer:
                    self.link.asked(self, made[rid])
            case PeerJoined():
                self.line = self.lines.pop(0)
            case PeerLeft():
                self.line = None
                self.stats["cut off"] += 1
            case Aborted(rid, damaged=False):     # else see `event`
                if rid < len(made) and made[rid].sent and made[rid].finished is None:
                    self.stats["aborted twice" if made[rid].aborted else "aborted"] += 1
                    made[rid].aborted = True
                    self.ending.append(rid)
                else:
                    self.stats["aborted unknown"] += 1
            case Stopped(rid, count):
                self.stats["stopped unknown"] += view.get(rid) is None
                if made[rid].finished is None:
                    made[rid].stop_at = count
                    self.ending.append(rid)
                    self.stats["stopped late"] += 1
            case Paused(rid) | Dropped(rid) | Spilled(rid) | Promoted(rid):
                name = type(event).__name__.lower()
                self.stats[f"{name} unknown"] += view.get(rid) is None
                self.judge.forced.add(rid)
            case Expired(rid, phase, visit):
                r = view.get(rid)
                if r is None:                     # it may have arrived in this very batch
                    fresh = made[rid].sent and made[rid].finished is None and visit == 0
                else:
                    fresh = (r.phase.value, r.visit) == (phase, visit)
                made[rid].expired |= fresh and (phase == Phase.QUEUED.value or (
                    r is not None and r.phase is Phase.DROPPED and not r.started))
                self.stats[f"{phase} expired" if fresh else "stale deadline"] += 1
                self.judge.forced.add(rid)
            case _:
                self.stats[type(event).__name__.lower()] += 1

    def _maybe_stop(self, out: Token) -> None:
        """The detokenizer sees a stop string in what it was given, and says so a little late."""
        if self.rng.random() < self.sc.stop / 8:
            late = self.rng.random() * self.rng.choice((0.0, 1.0, 6.0))
            self.clock.after(late, partial(self.send, Stopped(out.rid, out.index + 1)))

    def _maybe_turn(self, out: Finished) -> None:
        if self.sc.cfg.role == "prefill" or self.judge.issued > self.sc.steps:
            return                         # the decode engine's answers go on, for a while
        if out.outcome in (Outcome.STOP, Outcome.LENGTH):
            e = self.load.next_turn(self.load.made[out.rid], self.clock.now)
            if e is not None:
                self.schedule(e)

    # ---------------------------------------------------------------- run and judge
    def play(self) -> World:
        while True:
            while self.clock.step():
                pass
            if not self.view.live or self.ticks == 0:
                break
            self.ticks -= 1
            self.stats["idle ticks"] += 1
            self._turn()
        self.close()
        return self

    def close(self) -> None:
        """Everything has happened: all requests ended, and all that was taken came back."""
        for e in self.load.made:
            if e.sent or self.alone:
                assert e.finished is not None, f"stalled: request {e.arrived.rid} never finished"
        if not self.judge.blind:
            self.core.check()                  # what came after the last step
        self.core.advance((Flushed(),))
        while self.core.flushing:
            self.core.advance(())
        self.judge.end()
        self.stats["messages without effect"] += int(self.core.stats().get("peer_ignored", 0))
        if not self.judge.blind:
            assert not self.view.leftovers(), f"leak: {self.view.leftovers()}"
        self.stats += self.judge.stats + self.executor.stats

    @property
    def worlds(self) -> list[World]:
        return [self]

    def digest(self) -> str:
        assert self.trace is not None
        every = self.plans, [(e.got, e.finished) for e in self.load.made]
        return hashlib.sha256(repr(every).encode()).hexdigest()[:16]
