"""Several engines in one virtual time, and two of a kind on one storage: what one has stored the other finds.

Each engine is a `World` with its own core, ranks and judge. They die, and come back empty. Those on one
storage are asked the same, one later than the other; what one was storing when it died lands or does not.
"""
from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from random import Random
from typing import Self

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Outcome, Tier
from penstock.sim.world.scenario import Scenario
from penstock.sim.world.world import Link, MakeCore, World

LOST = 0.5                  # chance that what an engine was storing when it died is not stored
SECOND = 100                # the epochs of the second engine begin behind this


class SharedEngines(Link):
    """`play()` runs to the end; an AssertionError is a finding."""

    def __init__(self, sc: Scenario, make: MakeCore, name: str, *, blind: bool, record: bool,
                 ticks: int) -> None:
        super().__init__()
        self.sc, self._make, self.blind, self._record, self.ticks = sc, make, blind, record, ticks
        self.stats, self.rng = Counter[str](), Random(f"{name} {sc.seed}")
        self.engines: list[World] = []
        self.dead: list[World] = []
        self._held: list[tuple[World, Event]] = []      # for an engine that is to come

    def _world(self, sc: Scenario, epoch: int) -> World:
        return World(sc, self._make, blind=self.blind, record=self._record, ticks=self.ticks, link=self,
                     epoch=epoch)

    @property
    def worlds(self) -> list[World]:
        """Every engine that there was, the living ones last."""
        return [*self.dead, *self.engines]

    # ---------------------------------------------------------------- death
    def forward(self, world: World, event: Event) -> None:
        """What the router does with an event for an engine that has died: what is to come is for the one
        after it."""
        now = next(w for w in self.engines if w.load is world.load)
        if isinstance(event, Arrived):
            if now.dead:
                self._hold(world, event)
            else:
                now.send(event)

    def _hold(self, world: World, event: Event) -> None:
        """There is none yet."""
        self._held.append((world, event))

    def _lose(self, victim: World) -> None:
        """It is gone, with all that it knows."""
        self.dead.append(victim)
        for event in victim.inbox:
            self.forward(victim, event)
        for e in victim.load.made:
            if e.finished is None and e.sent:
                e.finished = Outcome.LOST             # the router tells its client
        self.stats.update(victim.stats + victim.judge.stats + victim.executor.stats)
        self.clock.after(self.rng.random() * 20, partial(self._revive, victim))

    def _revive(self, old: World) -> None:
        world = self._world(old.sc, old.epoch + 1)
        world.load, world.plans_max = old.load, old.plans_max
        world.judge.made, world.aims = old.load.made, old.aims
        world.executor.who.update(old.executor.who)
        self.engines[self.engines.index(old)] = world
        world.wake()
        held, self._held = self._held, []
        for whose, event in held:
            self.forward(whose, event)

    # ---------------------------------------------------------------- the end
    def play(self) -> Self:
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
            assert not world.dead
            world.close()
            self.stats.update(world.stats)
        return self

    def digest(self) -> str:
        """Of everything that all engines decided, for a recorded run."""
        return hashlib.sha256("".join(w.digest() for w in self.worlds).encode()).hexdigest()[:16]


class Shared(SharedEngines):
    """Two on one storage."""

    def __init__(self, sc: Scenario, make: MakeCore = Core, *, blind: bool = False, record: bool = False,
                 ticks: int = 0) -> None:
        super().__init__(sc, make, "shared", blind=blind, record=record, ticks=ticks)
        for epoch in (1, SECOND + 1):
            world = self._world(sc, epoch)
            late = self.rng.random() * (sc.span + 20) if self.engines else 0.0
            self.engines.append(world)
            for e in world.load.initial():
                e.at += late
                world.schedule(e)
            world.faults()
        self.engines[0].executor.store.stats = self.stats
        for _ in range(self.rng.choice((0, 1, 1, 3))):
            self.clock.after(self.rng.random() * (2 * sc.span + 20), self._die)

    def _world(self, sc: Scenario, epoch: int) -> World:
        world = super()._world(sc, epoch)
        if self.engines:
            ours, first = world.executor, self.engines[0].executor
            ours.store = first.store
            for device, other in zip(ours.devices, first.devices, strict=True):
                device.memory[Tier.DISK] = other.memory[Tier.DISK]
        return world

    def _die(self) -> None:
        victim = self.rng.choice(self.engines)
        if not victim.dead and any(not e.finished for e in victim.load.made):
            victim.dead, victim.executor.lost = True, LOST
            self.stats["engine on a shared storage died"] += 1
            self._lose(victim)

    def play(self) -> Self:
        super().play()
        for world in self.engines:
            assert all(e.sent for e in world.load.made), "a request never came"
            hits = world.judge.stats["prefix hits from storage"]
            self.stats["hits after a restart"] += hits * (world.epoch % SECOND > 1)
            self.stats["hits of the second engine"] += hits * (world.epoch > SECOND)
        return self
