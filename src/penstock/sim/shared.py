"""Two engines of one kind on one storage, in one virtual time: what one has stored the other finds.

They are asked the same, one later than the other. They die, what they were storing then lands or does not,
and they come back empty. Each engine is a `World` with its own core, ranks and judge.
"""
from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from random import Random

from penstock.core.core import Core
from penstock.core.pair.messages import Message
from penstock.core.plan import Arrived, Event, Outcome, Tier
from penstock.sim.clock import Clock
from penstock.sim.scenario import Scenario
from penstock.sim.workload import Expect
from penstock.sim.world import MakeCore, World

LOST = 0.5                  # chance that what an engine was storing when it died is not stored
SECOND = 100                # the epochs of the second engine begin behind this


class Shared:
    """`play()` runs to the end; an AssertionError is a finding."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False, record: bool = False,
                 ticks: int = 0) -> None:
        self.sc, self._make, self._blind, self._record, self.ticks = sc, make, blind, record, ticks
        self.clock, self.stats, self.rng = Clock(), Counter[str](), Random(f"shared {sc.seed}")
        self.engines: list[World] = []
        self.dead: list[World] = []
        self.held: list[tuple[World, Event]] = []      # for an engine that is to come
        for epoch in (1, SECOND + 1):
            world = self._world(epoch)
            late = self.rng.random() * (sc.span + 20) if self.engines else 0.0
            self.engines.append(world)
            for e in world.load.initial():
                e.at += late
                world.schedule(e)
            world.faults()
        self.engines[0].executor.store.stats = self.stats
        for _ in range(self.rng.choice((0, 1, 1, 3))):
            self.clock.after(self.rng.random() * (2 * sc.span + 20), self._die)

    def _world(self, epoch: int) -> World:
        world = World(self.sc, self._make, blind=self._blind, record=self._record, ticks=self.ticks,
                      link=self, epoch=epoch)
        if self.engines:
            ours, first = world.executor, self.engines[0].executor
            ours.store = first.store
            for device, other in zip(ours.devices, first.devices, strict=True):
                device.memory[Tier.DISK] = other.memory[Tier.DISK]
        return world

    # ---------------------------------------------------------------- what a World asks of its link
    def wire(self, world: World) -> None:
        """There is no other end."""

    def say(self, world: World, message: Message) -> None:
        """Nobody hears it."""

    def asked(self, world: World, e: Expect) -> None:
        """Nobody else computes it."""

    def cut(self, world: World) -> None:
        """There is no connection."""

    def leave(self, transfer: int) -> None:
        """There is no transfer."""

    def forward(self, world: World, event: Event) -> None:
        """An event for an engine that has died: what is to come is for the one after it."""
        now = next(w for w in self.engines if w.load is world.load)
        if isinstance(event, Arrived):
            if now.dead:
                self.held.append((world, event))
            else:
                now.send(event)

    # ---------------------------------------------------------------- death
    def _die(self) -> None:
        victim = self.rng.choice(self.engines)
        if victim.dead or not any(not e.finished for e in victim.load.made):
            return
        victim.dead = True
        self.dead.append(victim)
        victim.executor.lost = LOST
        for event in victim.inbox:
            self.forward(victim, event)
        for e in victim.load.made:
            if e.finished is None and e.sent:
                e.finished = Outcome.LOST
        self.stats["engine on a shared storage died"] += 1
        self.stats.update(victim.stats + victim.judge.stats + victim.executor.stats)
        self.clock.after(self.rng.random() * 20, partial(self._revive, victim))

    def _revive(self, old: World) -> None:
        world = self._world(old.epoch + 1)
        world.load, world.plans_max = old.load, old.plans_max
        world.judge.made, world.aims = old.load.made, old.aims
        world.executor.who.update(old.executor.who)
        self.engines[self.engines.index(old)] = world
        held, self.held = self.held, []
        for whose, event in held:
            self.forward(whose, event)
        world.wake()

    # ---------------------------------------------------------------- the end
    @property
    def worlds(self) -> list[World]:
        return [*self.dead, *self.engines]

    def play(self) -> Shared:
        while True:
            while self.clock.step():
                pass
            idle = [world for world in self.engines if world.view.live]
            if not idle or not self.ticks:
                break
            self.ticks -= 1
            for world in idle:
                world.wake()
        for world in self.engines:
            assert not world.dead and all(e.sent for e in world.load.made), "a request never came"
            world.close()
            hits = world.judge.stats["prefix hits from storage"]
            self.stats["hits after a restart"] += hits * (world.epoch % SECOND > 1)
            self.stats["hits of the second engine"] += hits * (world.epoch > SECOND)
            self.stats.update(world.stats)
        return self

    def digest(self) -> str:
        """Of everything that all engines decided, for a recorded run."""
        return hashlib.sha256("".join(w.digest() for w in self.worlds).encode()).hexdigest()[:16]
