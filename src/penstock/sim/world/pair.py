"""A prefill engine and a decode engine in one virtual time, and a stream between them that breaks.

What is said and written arrives in order, sometimes late; the stream is cut, and made again; engines die,
what they wrote still lands, and they come back empty. Each engine is a `World` with its own core, ranks and
judge; what clients see is judged at the decode engine.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from random import Random
from typing import Self

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Message, Reason, Refused
from penstock.core.plan import (
    ONE_PEER,
    Aborted,
    Arrived,
    Claimed,
    Dropped,
    Event,
    Move,
    Outcome,
    Paused,
    PeerId,
    PeerJoined,
    PeerLeft,
    Promoted,
    Received,
    RequestId,
    Spilled,
)
from penstock.sim.ranks.clock import Clock
from penstock.sim.ranks.executor import Wire
from penstock.sim.world.scenario import Scenario, of_role
from penstock.sim.world.shared import Shared, SharedEngines
from penstock.sim.world.view import Live
from penstock.sim.world.workload import Expect
from penstock.sim.world.world import AIMED, MakeCore, World

MESSAGES_MAX = 200            # for each request
NOBODY, HELD = PeerId(1), 1_000_000           # whose a prompt is until it is asked for, and his transfers
ROOM_TIME = 100.0             # until a prompt that nobody has asked for ends


# Where a request may be when an answer comes late, by the role of who hears it.
KEPT = {"decode": ("loading", "loading", "prefill", "decode.device", "decode.host", "paused", "dropped",
                   *("decode.to_host", "decode.to_device") * 3),
        "prefill": (*("fetching",) * 3, "loading", "loading", "paused", "dropped")}
# By the state in which an answer waits for a request: what brings it nearer to that, from where it is.
NEARER: dict[str, dict[str, type[Paused | Dropped | Spilled | Promoted]]] = {
    "loading": {"prefill": Paused, "decode.device": Paused, "decode.host": Paused},
    "paused": {"prefill": Paused, "decode.device": Paused, "decode.host": Paused},
    "decode.to_host": {"decode.device": Spilled},
    "decode.host": {"decode.device": Spilled},
    "decode.to_device": {"decode.device": Spilled, "decode.host": Promoted},
    "dropped": {"prefill": Dropped, "decode.device": Dropped, "decode.host": Dropped, "sending": Dropped}}
# A state that such a wish leads to at once may be over soon: the answer comes right behind the wish.
BEHIND = {Paused: "paused", Dropped: "dropped", Spilled: "decode.to_host", Promoted: "decode.to_device"}
ON_HOST = ("decode.to_host", "decode.host", "decode.to_device")
KEPT_TRIES, KEPT_TIME = 100, 0.2
Kept = Grant | Cancel | End | Refused

# What both engines of a pair aim at, beside what their scenario says: pairs have little of it by chance.
RARE = (*(("prefill", "pause"),) * 4, ("paused", "drop"), ("decode.to_host", "drop"), ("loading", "drop"),
        ("loading", "stop"), ("receiving", "stop"), ("prefill", "stop"))
RARE_STATES = ("fetching", "decode.to_device", "loading")       # of these, the first that an engine has


@dataclass(slots=True, eq=False)
class Way:
    """One direction of a connection: what is on its way, in order. What does not take what has come is asked
    again, and all behind it waits."""

    clock: Clock
    is_joined: bool = False                           # the end that hears was told,
    is_open: bool = True                              # and not of its end
    ready: float = 0.0                                # when the last of them has come
    items: deque[tuple[float, Callable[[], bool]]] = field(default_factory=deque)

    def put(self, delay: float, item: Callable[[], bool]) -> None:
        self.ready = max(self.ready, self.clock.now + delay)
        self.items.append((self.ready, item))
        if len(self.items) == 1:
            self.clock.after(self.ready - self.clock.now, self._pump)

    def close(self) -> None:
        self.is_open = False
        self.items.clear()

    def _pump(self) -> None:
        while self.items and self.items[0][0] <= self.clock.now:
            if not self.items[0][1]():
                self.clock.after(KEPT_TIME, self._pump)
                return
            if self.items:                            # not closed by that
                self.items.popleft()
        if self.items:
            self.clock.after(self.items[0][0] - self.clock.now, self._pump)


@dataclass(slots=True, eq=False)
class SimConnection:
    """Between two incarnations. An end is closed when its engine has been told, or has died."""

    prefill: World
    decode: World
    to_prefill: Way
    to_decode: Way
    over: bool = False                                # cut, or an engine has died

    def way(self, world: World) -> Way:
        """To one of the two."""
        return self.to_decode if world is self.decode else self.to_prefill


class Pair(SharedEngines):
    """The two, `prefill` and `decode`."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False,
                 record: bool = False, ticks: int = 0) -> None:
        super().__init__(sc, make, "wire", blind=blind, record=record, ticks=ticks)
        self.net, self._rooms_rng = sc.net, Random(f"held {sc.seed}")
        self._claimed: set[RequestId] = set()         # of those that a router has sent
        self.grants: dict[tuple[int, int, int], tuple[World, list[Move]]] = {}
        self.kept_once: set[tuple[bool, int, type[Message]]] = set()
        self.fail_push = 0                            # the n-th push fails, whatever the rate; 0 is off
        self.line: SimConnection | None = None           # the newest
        decode = self._world(of_role(sc, "decode"), 1)
        self.engines = [self._world(of_role(sc, "prefill"), 1), decode]
        for e in self.decode.load.initial():
            self.decode.schedule(e)
        for world in (self.decode, self.prefill):
            world.faults()
            self._aim(world)
        self._connect()
        for _ in range(self.net.cuts):
            waits = KEPT_TRIES if self.rng.random() < self.net.keep else 0
            self.clock.after(self.rng.random() * (sc.span + 30), partial(self._cut, waits))
        for _ in range(self.net.deaths):
            self.clock.after(self.rng.random() * (sc.span + 30), self._die)

    @property
    def prefill(self) -> World:
        return self.engines[0]

    @property
    def decode(self) -> World:
        return self.engines[1]

    def _aim(self, world: World) -> None:
        """Events of each kind wait for the rarest phase that its engine has."""
        states = world.view.states
        if self.sc.aims:
            rarest = next(name for name in RARE_STATES if name in states)
            if self.rng.random() < 0.7:
                world.aims[:0] = [(rarest, kind) for kind in self.rng.sample(AIMED, len(AIMED))]
            world.aims += [aim for aim in RARE if aim[0] in states and self.rng.random() < 0.5]

    # ---------------------------------------------------------------- the connection
    def _connect(self) -> None:
        """Make one, if both live and none is there. Each end hears of it in its own time."""
        old = self.line
        if self.prefill.dead or self.decode.dead or (old is not None and (
                old.to_prefill.is_open or old.to_decode.is_open)):
            return
        line = self.line = SimConnection(self.prefill, self.decode, Way(self.clock), Way(self.clock))
        for world in (line.prefill, line.decode):
            line.way(world).put(self.rng.random(), partial(self._join, line, world))

    def _join(self, line: SimConnection, world: World) -> bool:
        line.way(world).is_joined = True
        world.lines.append(line)
        world.send(PeerJoined())
        return True

    def _close(self) -> None:
        """Both ends learn of it, each in its own time; until then what was sent still arrives."""
        line = self.line
        if line is not None and not line.over:
            line.over = True
            for world in (line.prefill, line.decode):
                slow = 20 if line.prefill.dead else 1         # what it has written lands first
                self.clock.after(self.rng.random() * 5 * slow, partial(self._leave, line, world))

    def _leave(self, line: SimConnection, world: World) -> None:
        way = line.way(world)
        way.close()
        if way.is_joined and not world.dead:
            world.send(PeerLeft())
        if not (line.to_prefill.is_open or line.to_decode.is_open):
            self.clock.after(self.rng.random() * 5, self._connect)

    def _cut(self, waits: int) -> None:
        """Now, or when a push is decided and in no plan yet: its connection will be over."""
        if waits and not self.prefill.view.has_pushes():
            self.clock.after(KEPT_TIME, partial(self._cut, waits - 1))
        else:
            self.cut(self.decode)

    def cut(self, world: World) -> None:
        if not (self.prefill.dead or self.decode.dead or self.line is None or self.line.over):
            self._close()

    # ---------------------------------------------------------------- requests
    def asked(self, world: World, e: Expect) -> None:
        """A request has come to the decode engine, which sends it on to whom it is joined with."""
        if not isinstance(world.line, SimConnection):
            return
        a = replace(e.arrived, priority=self.rng.choice((0, e.arrived.priority)))
        copy = Expect(a, e.seed, 0.0, (), Outcome.SENT, False)
        if self._rooms_rng.random() < self.net.rooms:
            held = replace(a, transfer=HELD + a.rid, peer=NOBODY)
            self.clock.after(self._rooms_rng.random() * self.net.delay, partial(
                self._enter, Expect(held, e.seed, 0.0, (), Outcome.SENT, False)))
        waits = 20 if self.sc.cfg.disk_pages and self.rng.random() < self.net.keep else 0
        self._put(world.line, world.line.prefill, self.net.delay, partial(self._ask, world.line, copy, waits))

    def _known(self, rid: RequestId) -> list[Expect]:
        """What the prefill engine has of a request; requests keep their numbers."""
        made = self.prefill.load.made
        while len(made) <= rid:
            made.append(Expect(Arrived(RequestId(len(made)), (0,), 1), 0, 0.0, (), Outcome.SENT, False))
        return made

    def _enter(self, e: Expect) -> None:
        """A router has sent a prompt to the prefill engine, for who asks for it or has; not for ever."""
        world, rid = self.prefill, e.arrived.rid
        if not (world.dead or (made := self._known(rid))[rid].arrived.transfer):
            made[rid] = e
            world.expect(e)
            self.clock.after(self._rooms_rng.random() * ROOM_TIME, partial(self._give_up, world, e))

    def _give_up(self, world: World, e: Expect) -> None:
        if e.arrived.rid not in self._claimed and e.finished is None:
            self._to(world, Aborted(e.arrived.rid))

    def _put(self, line: SimConnection, to: World, delay: float, item: Callable[[], bool]) -> bool:
        """Whether the connection is still there."""
        way = line.way(to)
        if way.is_open:
            way.put(self.rng.random() * delay, item)
        return way.is_open

    def _ask(self, line: SimConnection, e: Expect, waits: int) -> bool:
        world, rid = line.prefill, e.arrived.rid
        made = self._known(rid)
        if made[rid].arrived.peer == NOBODY and rid not in self._claimed and (
                made[rid].finished is not Outcome.LOST):
            self._claimed.add(rid)
            self.stats["claimed"] += 1
            self._to(world, Claimed(rid, e.arrived.transfer, ONE_PEER))
        elif not world.dead:
            made[rid] = e
            world.expect(e)
            if waits and self.rng.random() < 0.5:
                self._cross(rid, waits)
        return True

    def _cross(self, rid: RequestId, tries: int) -> None:
        """Let a Cancel cross a request that the prefill engine has just begun to fetch for."""
        here, there = self.prefill.view.get(rid), self.decode.view.get(rid)
        fetching = here is not None and here.phase is Phase.FETCHING
        if fetching and there is not None and there.phase is Phase.RECEIVING:
            self._to(self.decode, Dropped(rid))
        elif tries and (fetching or here is None or here.phase is Phase.QUEUED):
            self.clock.after(0.2, partial(self._cross, rid, tries - 1))

    # ---------------------------------------------------------------- messages
    def say(self, world: World, message: Message) -> None:
        rng, self.stats["messages"] = self.rng, self.stats["messages"] + 1
        assert self.stats["messages"] < MESSAGES_MAX * (1 + len(self.decode.load.made)), "a storm of messages"
        to_decode, transfer, line = world.sc.cfg.role == "prefill", message.transfer, world.line
        assert isinstance(line, SimConnection), f"{message}: said to nobody"
        if isinstance(message, Grant) and not self.blind:
            known = self.grants.get((transfer, message.generation, 0))
            assert known is not None and known[0] is world, f"{message}: said before its plan"
        there = line.decode if to_decode else line.prefill
        if isinstance(message, End) and rng.random() < self.net.push_fail:
            self.stats["bytes damaged"] += 1          # it is seen there, and said in the place of the End
            message = Drained(transfer, message.generation, Reason.BROKEN)
        state, once, delay = "", (to_decode, transfer, type(message)), self.net.delay
        keep = self.net.keep / 4 if isinstance(message, Grant) else self.net.keep
        r = there.view.of_transfer(transfer)
        if r is not None and r.phase is Phase.FETCHING and rng.random() < 0.5:
            delay = 0.0                        # that phase is short
        if isinstance(message, Kept) and rng.random() < keep and once not in self.kept_once:
            self.kept_once.add(once)
            state = rng.choice([name for name in KEPT[there.sc.cfg.role] if name in there.view.states])
            if r is not None and r.phase is Phase.FETCHING:
                state = "fetching"             # it will not be there again
        come = partial(self._come, there, message, state, [KEPT_TRIES])
        self.stats["message lost"] += not self._put(line, there, delay, come)

    def _come(self, world: World, message: Message, state: str, tries: list[int]) -> bool:
        """Deliver a message; with `state`, when the request that it is about is in it, and help it there."""
        r = world.view.of_transfer(message.transfer)
        if state and r is not None and tries[0] and not world.dead and not self._is_there(world, r, state):
            tries[0] -= 1
            return False
        self.stats["answer kept"] += 0 < tries[0] < KEPT_TRIES
        self._to(world, Received(message))
        return True

    def _is_there(self, world: World, r: Live, state: str) -> bool:
        here = r.state.name
        if here == state or (state == "fetching" and here != "queued") or (
                state in ON_HOST and not r.arrived.selects):
            return True
        wish = Dropped if r.phase is Phase.RECEIVING else NEARER.get(state, {}).get(here)
        if wish is None or self.rng.random() < 0.5:
            return False
        world.send(wish(r.rid))
        return BEHIND[wish] == state

    def _to(self, world: World, event: Event) -> None:
        if not world.dead:
            world.send(event)

    # ---------------------------------------------------------------- writes
    def wire(self, world: World) -> Wire:
        return Wire(partial(self._granted, world), lambda: world.line, partial(self._write, world))

    def _granted(self, world: World, move: Move) -> None:
        self.grants.setdefault((move.transfer, move.generation, move.group), (world, []))[1].append(move)

    def _write(self, writer: World, move: Move, values: dict[int, int], line: object,
              done: Callable[[bool], None]) -> None:
        rng = self.rng
        if line is not writer.line or not isinstance(line, SimConnection):
            self.stats["write refused"] += 1
            self.clock.after(rng.random(), partial(self._written, writer, done, False))
            return
        grant = self.grants.get((move.transfer, move.generation, move.group))
        assert grant is not None and grant[0] is line.decode, f"{move}: written without a grant"
        self.stats["writes"] += 1
        ok = rng.random() >= self.net.push_fail and self.stats["writes"] != self.fail_push
        self.stats["push failed"] += not ok
        part = values if ok else dict(list(values.items())[:len(values) // 2])
        late = 10 if rng.random() < 0.1 else 1
        self._put(line, line.decode, self.net.write * late, partial(self._land, line, move, part))
        self.clock.after(rng.random() * self.net.write, partial(self._written, writer, done, ok))

    def _written(self, writer: World, done: Callable[[bool], None], ok: bool) -> None:
        if not writer.dead:
            done(ok)

    def _land(self, line: SimConnection, move: Move, values: dict[int, int]) -> bool:
        world = line.decode
        if not world.dead:
            granted = self.grants[move.transfer, move.generation, move.group][1]
            self.stats["write of the dead landed"] += line.prefill.dead
            self.stats["late write"] += world.view.of_transfer(move.transfer) is None
            assert self.blind or world.view.generation(move.transfer) == move.generation, (
                f"transfer {move.transfer}: written after its end")
            for device, into in product(world.executor.devices, granted):
                device.receive(into, values)
        return True

    def leave(self, rid: RequestId) -> None:
        self.decode.send(Aborted(rid))

    # ---------------------------------------------------------------- death, and the end
    def _die(self) -> None:
        self.die(self.rng.choice(self.engines))

    def die(self, victim: World) -> None:
        """One engine goes, and comes back empty."""
        if victim.dead or not any(not e.finished for e in self.decode.load.made):
            return
        victim.dead = True
        if self.line is not None:
            self.line.way(victim).close()
            self._close()
        victim.executor.wire = None                   # it begins no more writes
        self.stats[f"{victim.sc.cfg.role} engine died"] += 1
        self._lose(victim)

    def _revive(self, old: World) -> None:
        super()._revive(old)
        self._connect()

    def _hold(self, world: World, event: Event) -> None:
        if world.sc.cfg.role == "decode":
            self.clock.after(2.0, partial(self.forward, world, event))

    def play(self) -> Self:
        super().play()
        assert all(e.sent for e in self.decode.load.made), "a request never came to the decode engine"
        for world in self.engines:
            assert not world.view.leftovers(), f"leak: {world.view.leftovers()}"
        return self


def start(sc: Scenario, make: MakeCore = Core, *, blind: bool = False, record: bool = False,
          ticks: int = 0) -> World | SharedEngines:
    """What `sc` asks for, one engine or two, ready to `play`."""
    kind = Pair if sc.pair else Shared if sc.cfg.store_root and sc.named == 2 else World
    return kind(sc, make, blind=blind, record=record, ticks=ticks)
