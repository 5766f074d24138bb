"""A prefill engine and a decode engine in one virtual time, with a bad network between them.

Messages are lost, repeated, delayed and reordered; one-sided writes land late, even after their
engine has died; engines die and come back with a new epoch. Each engine is a `World` with its own
core, ranks and judge; what clients see is judged at the decode engine.
"""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Cancel, End, Grant, Message, Refused
from penstock.core.pair.protocol import Ask, Deadline, FenceEpoch, Remind, Renew
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Event,
    Move,
    Outcome,
    Overdue,
    Paused,
    PeerFenced,
    Promoted,
    Received,
    Reminded,
    Renewed,
    RequestId,
    Spilled,
)
from penstock.sim.clock import Clock
from penstock.sim.scenario import Scenario
from penstock.sim.workload import Expect
from penstock.sim.world import AIMED, MakeCore, World

TRIES_MAX = 60                # a message is repeated less often, however many are lost
MESSAGES_MAX = 200            # for each request


# Where a request may be when an answer comes late, by the role of who hears it.
KEPT = {"decode": (Phase.LOADING, Phase.LOADING, Phase.PREFILL, Phase.RESIDENT, Phase.HOSTED, Phase.PAUSED,
                   Phase.DROPPED, *(Phase.STAGING, Phase.PROMOTING) * 3),
        "prefill": (*(Phase.FETCHING,) * 3, Phase.LOADING, Phase.LOADING, Phase.PAUSED, Phase.DROPPED)}
# By the phase in which an answer waits for a request: what brings it nearer to that, from where it is.
NEARER: dict[Phase, dict[Phase, type[Paused | Dropped | Spilled | Promoted]]] = {
    Phase.LOADING: {Phase.PREFILL: Paused, Phase.RESIDENT: Paused, Phase.HOSTED: Paused},
    Phase.PAUSED: {Phase.PREFILL: Paused, Phase.RESIDENT: Paused, Phase.HOSTED: Paused},
    Phase.STAGING: {Phase.RESIDENT: Spilled},
    Phase.HOSTED: {Phase.RESIDENT: Spilled},
    Phase.PROMOTING: {Phase.RESIDENT: Spilled, Phase.HOSTED: Promoted},
    Phase.DROPPED: {Phase.PREFILL: Dropped, Phase.RESIDENT: Dropped, Phase.HOSTED: Dropped,
                    Phase.SENDING: Dropped}}
# A phase that such a wish leads to at once may be over soon: the answer comes right behind the wish.
BEHIND = {Paused: Phase.PAUSED, Dropped: Phase.DROPPED, Spilled: Phase.STAGING, Promoted: Phase.PROMOTING}
ON_HOST = (Phase.STAGING, Phase.HOSTED, Phase.PROMOTING)
KEPT_TRIES, KEPT_TIME = 180, 0.2
Kept = Grant | Cancel | End | Refused

# What both engines of a pair aim at, beside what their scenario says: pairs have little of it by chance.
RARE = (*((Phase.PREFILL, "pause"),) * 4, (Phase.PAUSED, "drop"), (Phase.STAGING, "drop"),
        (Phase.LOADING, "drop"), (Phase.LOADING, "stop"), (Phase.RECEIVING, "stop"), (Phase.PREFILL, "stop"))
RARE_PHASES = (Phase.FETCHING, Phase.PROMOTING, Phase.LOADING)        # of these, the first that an engine has


class Run(Protocol):
    """A World or a Pair."""

    sc: Scenario
    clock: Clock
    stats: Counter[str]

    @property
    def worlds(self) -> list[World]: ...

    def play(self) -> object:
        """Runs to the end; an AssertionError is a finding."""

    def digest(self) -> str: ...


@dataclass(slots=True, eq=False)
class Write:
    """A one-sided write: whose, under which epoch, and on how many ranks it has to land."""

    writer: World
    epoch: int
    left: int


class Pair:
    """Two worlds. `play()` runs to the end; an AssertionError is a finding."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False,
                 record: bool = False, ticks: int = 0) -> None:
        self.sc, self.net, self.clock = sc, sc.net, Clock()
        self.rng = Random(f"wire {sc.seed}")
        self.make, self.blind, self.record, self.ticks = make, blind, record, ticks
        self.stats: Counter[str] = Counter()
        self.grants: dict[tuple[int, int, int], tuple[World, Move]] = {}
        self.flying: list[Write] = []                 # one-sided writes that have not landed
        self.fenced: dict[int, int] = {}              # decode epoch -> prefill epoch that it has fenced
        self.copies: dict[RequestId, Expect] = {}
        self.kept: set[tuple[bool, int]] = set()      # to the decode engine or not, and the transfer
        self.kept_once: set[tuple[bool, int, type[Message]]] = set()
        self.newest = [0, 0]                          # message that has come, by the engine that hears it
        self.fail_push = 0                            # the n-th push fails, whatever the rate; 0 is off
        self.dead: list[World] = []
        self.decode = self._world("decode", 1)
        self.prefill = self._world("prefill", 1)
        for e in self.decode.load.initial():
            self.decode.schedule(e)
        for world in (self.decode, self.prefill):
            world.faults()
            self._aim(world)
        for _ in range(self.net.cuts):
            waits = KEPT_TRIES if self.rng.random() < self.net.keep else 0
            self.clock.after(self.rng.random() * (sc.span + 30), partial(self._cut, waits))
        for _ in range(self.net.deaths):
            self.clock.after(self.rng.random() * (sc.span + 30), self._die)

    def _world(self, role: str, epoch: int) -> World:
        return World(_of(self.sc, role, epoch), self.make, blind=self.blind, record=self.record,
                     ticks=self.ticks, link=self)

    def _aim(self, world: World) -> None:
        """Events of each kind wait for the rarest phase that its engine has."""
        phases = {source for source, _ in world.view.edges}
        if self.sc.aims:
            rarest = next(p for p in RARE_PHASES if p in phases)
            if self.rng.random() < 0.7:
                world.aims[:0] = [(rarest, kind) for kind in self.rng.sample(AIMED, len(AIMED))]
            world.aims += [aim for aim in RARE if aim[0] in phases and self.rng.random() < 0.5]

    @property
    def worlds(self) -> list[World]:
        """Every engine that there was, the living ones last."""
        return [*self.dead, self.prefill, self.decode]

    # ---------------------------------------------------------------- requests
    def scheduled(self, e: Expect) -> None:
        """The prefill engine gets it too, sooner or later or never."""
        if e.arrived.rid in self.copies or not e.arrived.transfer:
            return
        a = replace(e.arrived, priority=self.rng.choice((0, e.arrived.priority)))
        copy = Expect(a, e.seed, 0.0, (), Outcome.SENT, False)
        self.copies[a.rid] = copy
        if self.rng.random() >= self.net.skip:
            late = max(0.0, e.at - self.clock.now) + (self.rng.random() - 0.3) * self.net.late
            waits = 20 if self.sc.cfg.disk_pages and self.rng.random() < self.net.keep else 0
            self.clock.after(max(0.0, late), partial(self._arrive, copy, waits))
        else:
            self.stats["never came to prefill"] += 1

    def _arrive(self, e: Expect, waits: int) -> None:
        """Now, or when its Grant is on its way: that comes while the prefill engine fetches for it."""
        world, there = self.prefill, self.decode.view.get(e.arrived.rid)
        if waits and (there is None or there.phase is Phase.QUEUED):
            self.clock.after(0.3, partial(self._arrive, e, waits - 1))
            return
        made = world.load.made
        rid = e.arrived.rid
        while len(made) <= rid:                       # requests keep their numbers
            made.append(Expect(replace(e.arrived, rid=RequestId(len(made))), 0, 0.0, (),
                               Outcome.SENT, False))
        made[rid] = e
        world.expect(e)
        if waits and self.rng.random() < 0.5:
            self._cross(rid, 20)

    def _cross(self, rid: RequestId, tries: int) -> None:
        """Let a Cancel cross a request that the prefill engine has just begun to fetch for."""
        here, there = self.prefill.view.get(rid), self.decode.view.get(rid)
        fetching = here is not None and here.phase is Phase.FETCHING
        if fetching and there is not None and there.phase is Phase.RECEIVING:
            self._to(self.decode, Dropped(rid))
        elif tries and (fetching or here is None or here.phase is Phase.QUEUED):
            self.clock.after(0.2, partial(self._cross, rid, tries - 1))

    # ---------------------------------------------------------------- messages and timers
    def say(self, world: World, what: Message | Ask) -> None:
        after = self.clock.after
        match what:
            case Remind(transfer, n, tries):
                assert tries < TRIES_MAX, f"transfer {transfer} does not end"
                world.timer((4 + 8 * self.rng.random()) * min(tries + 1, 4), Reminded(transfer, n))
            case Deadline(transfer, n):
                world.timer(200 * (0.5 + self.rng.random()), Overdue(transfer, n))
            case FenceEpoch(epoch):
                after(self.rng.random() * 5, partial(self._fence, world, epoch))
            case Renew():
                after(self.rng.random() ** 4 * 5, partial(self._renew, world))
            case _:
                self._post(world, what)

    def _post(self, world: World, message: Message) -> None:
        rng, self.stats["messages"] = self.rng, self.stats["messages"] + 1
        assert self.stats["messages"] < MESSAGES_MAX * (1 + len(self.decode.load.made)), "a storm of messages"
        to_decode, transfer = world.sc.cfg.role == "prefill", getattr(message, "transfer", 0)
        if isinstance(message, Grant) and not self.blind:
            known = self.grants.get((transfer, message.generation, 0))
            assert known is not None and known[0] is world, f"{message}: said before its plan"
        # What is said after an answer that is kept does not overtake it.
        if rng.random() < self.net.lose or (to_decode, transfer) in self.kept:
            self.stats["message lost"] += 1
            return
        times = 2 if rng.random() < self.net.repeat else 1
        self.stats["message repeated"] += times - 1
        there = self.decode if to_decode else self.prefill
        send = partial(self._come, there, message, self.stats["messages"])
        once = to_decode, transfer, type(message)
        keep = self.net.keep / 4 if isinstance(message, Grant) else self.net.keep
        if isinstance(message, Kept) and rng.random() < keep and once not in self.kept_once:
            self.kept_once.add(once)
            known_to = {source for source, _ in there.view.edges}
            phase = rng.choice([p for p in KEPT[there.sc.cfg.role] if p in known_to])
            r = there.view.of_transfer(transfer)
            if r is not None and r.phase is Phase.FETCHING:
                phase = r.phase                # it will not be there again
            self.kept.add((to_decode, transfer))
            send, times = partial(self._keep, to_decode, message, phase, KEPT_TRIES), 1
        for _ in range(times):
            self.clock.after(rng.random() * self.net.delay, send)

    def _keep(self, to_decode: bool, message: Kept, phase: Phase, tries: int) -> None:
        """Deliver an answer when the request that it is about is in a phase, and help it there."""
        world, transfer = self.decode if to_decode else self.prefill, message.transfer
        r, copy = world.view.of_transfer(transfer), self.copies.get(RequestId(transfer - 1))
        there = tries == 0 or world.dead
        if r is None:
            there = there or to_decode or copy is None or copy.sent       # it has ended, or never comes
        elif phase is Phase.FETCHING and r.phase is not Phase.QUEUED:
            there = True                       # too late for that
        elif r.phase is not phase and (phase not in ON_HOST or r.arrived.selects):
            wish = Dropped if r.phase is Phase.RECEIVING else NEARER.get(phase, {}).get(r.phase)
            if wish is not None and not there and self.rng.random() < 0.5:
                world.send(wish(r.rid))
                there = BEHIND[wish] is phase
        if there or (r is not None and r.phase is phase):
            self.kept.discard((to_decode, transfer))
            self.stats["answer kept"] += tries < KEPT_TRIES
            self._to(world, Received(message))
        else:
            self.clock.after(KEPT_TIME, partial(self._keep, to_decode, message, phase, tries - 1))

    def _come(self, world: World, message: Message, n: int) -> None:
        """The n-th of all messages, which later ones to the same engine may have overtaken."""
        to_decode = world.sc.cfg.role == "decode"
        self.stats["message overtaken"] += n < self.newest[to_decode]
        self.newest[to_decode] = max(n, self.newest[to_decode])
        self._to(world, Received(message))

    def _to(self, world: World, event: Event) -> None:
        if not world.dead:
            world.send(event)

    # ---------------------------------------------------------------- one-sided writes
    def granted(self, move: Move) -> None:
        self.grants[move.transfer, move.generation, move.group] = self.decode, move

    def epoch(self) -> int:
        return self.prefill.view.epochs[0]

    def write(self, move: Move, values: dict[int, int], epoch: int, done: Callable[[bool], None]) -> None:
        rng = self.rng
        grant = self.grants.get((move.transfer, move.generation, move.group))
        now = self.decode.view.epochs[0]
        current = self.prefill.view.epochs[1] == now
        if grant is None or self.fenced.get(now, 0) >= epoch or not current:
            assert grant is not None or not current, f"{move}: written without a grant"
            self.stats["write refused"] += 1
            self.clock.after(rng.random(), partial(done, False))
            return
        self.stats["writes"] += 1
        ok = rng.random() >= self.net.push_fail and self.stats["writes"] != self.fail_push
        self.stats["push failed"] += not ok
        write = Write(self.prefill, epoch, len(grant[0].executor.devices))
        self.flying.append(write)
        for k in range(write.left):
            part = values if ok or k else dict(list(values.items())[:len(values) // 2])
            late = 10 if rng.random() < 0.1 else 1
            self.clock.after(rng.random() * self.net.write * late,
                             partial(self._land, grant, k, part, write, partial(done, ok)))

    def _land(self, grant: tuple[World, Move], k: int, values: dict[int, int], write: Write,
              done: Callable[[], None]) -> None:
        world, move = grant
        if not world.dead:
            self.stats["write of the dead landed"] += write.writer.dead
            self.stats["late write"] += world.view.of_transfer(move.transfer) is None
            known = world.view.known(move.transfer)
            assert self.blind or (known is not None and known.generation == move.generation), (
                f"transfer {move.transfer}: written after its end")
            world.executor.devices[k].receive(move, values)
        write.left -= 1
        if not write.left:
            self.flying.remove(write)
            if not write.writer.dead:
                done()

    # ---------------------------------------------------------------- fences and deaths
    def _fence(self, world: World, epoch: int) -> None:
        """The connection closes at once; it is drained when the last write under it has landed."""
        if world.dead:
            return
        mine = world.view.epochs[0]
        self.fenced[mine] = max(epoch, self.fenced.get(mine, 0))
        if any(w.epoch <= epoch for w in self.flying):
            self.clock.after(1.0, partial(self._fence, world, epoch))
            return
        self.stats["fenced"] += 1
        world.send(PeerFenced(epoch))

    def _renew(self, world: World) -> None:
        if not world.dead:
            self.stats["renewed"] += 1
            world.epoch += 1
            world.send(Renewed(world.epoch))

    def _cut(self, waits: int) -> None:
        """Now, or when a push is decided and in no plan yet: its connection will be over."""
        if waits and not self.prefill.view.has_pushes():
            self.clock.after(KEPT_TIME, partial(self._cut, waits - 1))
        else:
            self.cut(self.decode if waits else self.rng.choice((self.prefill, self.decode)))

    def cut(self, world: World) -> None:
        """`world` takes the other engine for dead, which lives."""
        if self.prefill.dead or self.decode.dead:
            return
        self.stats["cut off"] += 1
        if world is self.decode:
            self._fence(world, self.prefill.view.epochs[0])
        else:
            world.send(PeerFenced(self.decode.view.epochs[0]))

    def leave(self, transfer: int) -> None:
        self.decode.send(Aborted(RequestId(transfer - 1)))

    def _die(self) -> None:
        self.die(self.rng.choice((self.prefill, self.decode)))

    def die(self, victim: World) -> None:
        """One engine goes, with all that it knows, and comes back empty."""
        if victim.dead or not any(not e.finished for e in self.decode.load.made):
            return
        victim.dead = True
        self.dead.append(victim)
        role = victim.sc.cfg.role
        victim.executor.wire = None                   # it begins no more writes
        for event in victim.inbox:
            self.forward(victim, event)
        self.stats[f"{role} engine died"] += 1
        for e in victim.load.made:
            if e.finished is None and e.sent:
                e.finished = Outcome.LOST             # the router tells its client
        self.stats.update(victim.stats + victim.judge.stats + victim.executor.stats)
        self.clock.after(self.rng.random() * 20, partial(self._revive, victim))

    def _revive(self, old: World) -> None:
        role = old.sc.cfg.role
        world = self._world(role, old.epoch + 1)
        world.load, world.plans_max = old.load, old.plans_max
        world.judge.made, world.aims = old.load.made, old.aims
        world.executor.who.update(old.executor.who)
        if role == "decode":
            self.decode = world
        else:
            self.prefill = world
        world.wake()

    def forward(self, world: World, event: Event) -> None:
        """What the router does with an event for an engine that has died."""
        role = world.sc.cfg.role
        now = self.decode if role == "decode" else self.prefill
        if not now.dead:
            if isinstance(event, Arrived):
                now.send(event)
        elif isinstance(event, Arrived) and role == "decode":
            self.clock.after(2.0, partial(self.forward, world, event))

    # ---------------------------------------------------------------- the end
    def play(self) -> Pair:
        while True:
            while self.clock.step():
                pass
            idle = [world for world in (self.decode, self.prefill) if world.view.live]
            if not idle or not self.ticks:
                break
            self.ticks -= 1
            for world in idle:
                world.wake()
        assert all(e.sent for e in self.decode.load.made), "a request never came to the decode engine"
        for world in (self.decode, self.prefill):
            assert not world.dead
            world.close()
            self.stats.update(world.stats)
            assert not world.view.leftovers(), f"leak: {world.view.leftovers()}"
        assert not self.flying
        return self

    def digest(self) -> str:
        """Of everything that all engines decided, for a recorded run."""
        text = "".join(world.digest() for world in self.worlds)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def start(sc: Scenario, make: MakeCore = Core, *, blind: bool = False, record: bool = False,
          ticks: int = 0) -> Run:
    """What `sc` asks for, one engine or two, ready to `play`."""
    kind = Pair if sc.pair else World
    return kind(sc, make, blind=blind, record=record, ticks=ticks)


def _of(sc: Scenario, role: str, epoch: int) -> Scenario:
    """The engine of one side: another page size, another pool, the same model."""
    cfg = replace(sc.cfg, role=role, epoch=epoch)
    if role == "prefill":
        rng = Random(f"prefill {sc.seed}")
        size = rng.choice((cfg.page_size, cfg.page_size, 1, 2, 2 * cfg.page_size))
        groups = tuple(replace(group, page_tokens=group.page_tokens // cfg.page_size * size)
                       for group in cfg.groups)
        more = -(-cfg.page_size // size)
        cfg = replace(cfg, page_size=size, groups=groups, hbm_pages=cfg.hbm_pages * more,
                      dram_pages=cfg.dram_pages * more, disk_pages=cfg.disk_pages * more)
        cfg = replace(cfg, pp_size=rng.choice((1, cfg.pp_size)), overlap=rng.random() < 0.5,
                      rows=rng.choice((1, 2, cfg.rows)), draft_tokens=0,
                      hbm_pages=cfg.hbm_pages * rng.choice((1, 1, 2)))
        if rng.random() < 0.15:                       # it refuses what the decode engine takes
            slab = cfg.groups[0].slab_pages
            small = max(2 + cfg.hot_pages, cfg.hbm_pages // 4)
            cfg = replace(cfg, hbm_pages=-(-small // slab) * slab, always_hosted=False,
                          hot_pages=0)
    return replace(sc, cfg=cfg, stops=sc.stops if role == "decode" else 0,
                   stop=sc.stop if role == "decode" else 0.0,
                   speeds=sc.speeds, ranks=sc.ranks)
