"""How long a request waits, measured in the work that is ahead of it: the bound of ADR 0011.

Watches a core from outside: arrivals, steps with rows, who gives way, ends. Knows how much of an engine
a request takes, and nothing of pages. Also the storms that put the bound to the test, and a short prompt
behind a long one (ADR 0082).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from penstock.core.core import Core
from penstock.core.lifecycle import ACTIVE, WAITING, Place, State, Trigger
from penstock.core.plan import Advance, Arrived, Event, Finished, Outcome, RequestId, Retired, Token
from penstock.core.settings import CoreConfig
from penstock.sim.world.scenario import Scenario, draw
from penstock.sim.world.view import Live, View, Watcher, capacity
from penstock.sim.world.world import World

GAVE_WAY_MAX = 3                  # ADR 0011
WAIT_MAX = GAVE_WAY_MAX + 1       # times the work ahead: each time it gives way it may wait once more
BEGINS_STEPS = 8                  # ADR 0082: then a short prompt behind a long one has begun
LATER_MAX = 0.05                  # and so much later the long one begins to answer, at most


@dataclass(slots=True)
class Wait:
    """One request. Steps are counted from the start of the engine."""

    arrived: Arrived
    key: tuple[int, int]                   # order of service
    since: int                             # steps before it arrived
    until: int = -1                        # steps when it ended; -1: it lives
    outputs: int = 0
    refused: bool = False
    num_preemptions: int = 0
    # Who had a row when it arrived, when it gave way, and when its leader first answered.
    behind: set[RequestId] = field(default_factory=set)


class Waiting:
    """Fed with what happens, in order; `late` says who waited too long."""

    def __init__(self, cfg: CoreConfig) -> None:
        self.cfg = cfg
        self.steps = 0
        self.seen: dict[RequestId, Wait] = {}
        self.firsts: list[RequestId] = []      # gave way to others, and came before all
        # Windows are taken as they are needed: a step may get no further than a page.
        by_page = any(group.reach for group in cfg.groups)
        self.chunk = min(cfg.step_tokens, cfg.page_size) if by_page else cfg.step_tokens

    # ---------------------------------------------------------------- what happens
    def arrive(self, a: Arrived, running: Iterable[RequestId]) -> None:
        self.seen[a.rid] = Wait(a, (a.priority, len(self.seen)), self.steps, behind=set(running))

    def step(self) -> None:
        """A step with rows was issued. One that only moves pages is nobody's service."""
        self.steps += 1

    def token(self, rid: RequestId, running: Iterable[RequestId]) -> None:
        w = self.seen[rid]
        w.outputs += 1
        if w.outputs == 1:
            for fork in self.seen.values():
                if fork.arrived.leader == rid:
                    fork.behind.update(running)

    def give_way(self, rid: RequestId, running: Iterable[RequestId]) -> None:
        w = self.seen[rid]
        w.num_preemptions += 1
        w.behind.update(others := list(running))
        # Alone it gives way to nobody: its pages lay scattered, and are laid out anew.
        if others and w.key == min(q.key for q in self.seen.values() if q.until < 0):
            self.firsts.append(rid)

    def finish(self, rid: RequestId, outcome: Outcome) -> None:
        self.seen[rid].until = self.steps
        self.seen[rid].refused = outcome is Outcome.REFUSED

    # ---------------------------------------------------------------- the bound
    def alone(self, w: Wait) -> int:
        """Steps that it takes when it has the engine for itself, at worst."""
        positions = len(w.arrived.prompt) + w.outputs
        return -(-positions // self.chunk) + w.outputs * self.cfg.depth

    def share(self, w: Wait) -> float:
        """The part of the engine that it occupies at full length: rows, device or host memory."""
        cfg, a = self.cfg, w.arrived
        tokens, parts = min(len(a.prompt) + a.max_new - 1, cfg.max_len), [1 / cfg.rows]
        for place in (Place.DEVICE, Place.HOST) if capacity.may_host(cfg, a) else (Place.DEVICE,):
            if capacity.fits(cfg, place, tokens):
                device, host = capacity.needs(cfg, place, tokens)
                parts.append(self._part(device, cfg.hbm_pages, place))
                parts.append(self._part(host, cfg.dram_pages, place) if any(host) else 0)
        return max(parts) if len(parts) > 1 else 1.0

    def _part(self, pages: Sequence[int], pool: int, place: Place) -> float:
        """In slabs; what comes and goes may lie one page to a slab."""
        groups = self.cfg.groups
        if len(groups) == 1:
            return pages[0] / pool
        loose = [g.reach > 0 or (place is Place.HOST and g.hosted) for g in groups]
        slabs = sum(n if alone else -(-n // g.slab_pages)
                    for g, n, alone in zip(groups, pages, loose, strict=True))
        return min(1.0, slabs / (pool // groups[0].slab_pages))

    def work(self, w: Wait) -> float:
        """Steps of the whole engine that its service is worth."""
        positions = len(w.arrived.prompt) + w.outputs
        return self.alone(w) * self.share(w) + positions / self.cfg.step_tokens

    def ahead(self, w: Wait) -> float:
        """The work of all who are served before it: those that come before it in the order of service,
        also later arrivals of higher priority, and those that it found running. A fork comes after its
        leader. Its own service comes on top."""
        key = w.key
        leader = self.seen.get(w.arrived.leader) if w.arrived.leader is not None else None
        if leader is not None:
            key = max(key, leader.key)
        return self.alone(w) + sum(
            self.work(q) for q in self.seen.values()
            if q is not w and not q.refused and q.until > w.since and q.since < w.until
            and (q.key <= key or q.arrived.rid in w.behind))

    def ratio(self, w: Wait) -> float:
        return (w.until - w.since) / self.ahead(w)

    def ended(self) -> list[Wait]:
        return [w for w in self.seen.values() if w.until >= 0 and not w.refused]

    def late(self) -> list[str]:
        """Every request that the bound does not hold for."""
        lines = [f"request {w.arrived.rid} took {w.until - w.since} steps for {self.ahead(w):.1f} ahead of it"
                 for w in self.ended() if self.ratio(w) > WAIT_MAX]
        lines += [f"request {w.arrived.rid} gave way {w.num_preemptions} times"
                  for w in self.ended() if w.num_preemptions > GAVE_WAY_MAX]
        return lines + [f"request {rid} gave way to others, and was the first of all" for rid in self.firsts]


# ---------------------------------------------------------------- watching a core
class Fed(Waiting, Watcher):
    """A Waiting that is fed with all that a core does from now on."""

    def __init__(self, core: Core) -> None:
        super().__init__(core.cfg)
        self.view, self._advance = View(core), core.advance
        core.watchers.append(self)
        core.advance = self._watched  # type: ignore[method-assign]

    def _running(self) -> list[RequestId]:
        return [r.rid for r in self.view.running]

    def _watched(self, events: Sequence[Event]) -> Advance:
        for event in events:
            if isinstance(event, Arrived):
                self.arrive(event, self._running())
        result = self._advance(events)
        if result.plan is not None and result.plan.rows:
            self.step()
        for out in result.outputs:
            if isinstance(out, Token):
                self.token(out.rid, self._running())
            elif isinstance(out, Finished):
                self.finish(out.rid, out.outcome)
        return result

    def taken(self, r: Live, source: State, trigger: Trigger) -> None:
        if source.phase in ACTIVE and r.phase in WAITING:
            self.give_way(r.rid, self._running())


# Nobody is asked to give way, nobody leaves before the end, no copy fails, nothing comes from storage.
CALM = ("aims=0,pair=0,spills=0,pauses=0,drops=0,aborts=0,stops=0,abort=0,stop=0,turns=0,flushes=0,"
        "fail=0,expire=0,shy=0,damages=0,jumps=0,disk_pages=0,prompt_max=12,new_max=40,rows=6,span=1")


def calm(seed: int, mode: str = "", requests: int = 64) -> Scenario:
    """Requests that arrive together; the device holds 1.1 times the largest of them, the host all."""
    sc = draw(seed, f"requests={requests},{CALM}" + (f",{mode}" if mode else ""))
    longest, slab = sc.prompt_max + sc.new_max, sc.cfg.groups[0].slab_pages
    slabs = 1
    while not capacity.fits(replace(sc.cfg, hbm_pages=slabs * slab), Place.DEVICE, longest):
        slabs += 1
    host = requests * slabs * slab if sc.cfg.dram_pages else 0
    return replace(sc, cfg=replace(sc.cfg, hbm_pages=int(1.1 * slabs + 1) * slab, dram_pages=host,
                                   max_len=longest))


def fair(seed: int, mode: str = "", requests: int = 64) -> Waiting:
    """Play a calm storm to its end. Judged by what a user could see, and by `Waiting.late`."""
    world = World(calm(seed, mode, requests), blind=True)
    waiting = Fed(world.core)
    world.play()
    return waiting


def behind(seed: int, *, short: bool = True) -> tuple[int, int]:
    """One short prompt arrives while a long one is computed; short: or does not. Returns the steps from its
    arrival to the first that computes a part of it, and those to the one that ends the long prompt."""
    rng = Random(seed)
    step, page, decoding = rng.choice((32, 64, 256)), rng.choice((2, 4, 16)), rng.randrange(4)
    length = rng.randint(20, 40) * step
    core = Core(CoreConfig(page_size=page, rows=decoding + 3, hbm_pages=3 * length // page + 64,
                           max_len=1 << 20, step_tokens=step, overlap=rng.random() < 0.5,
                           pp_size=rng.choice((1, 1, 2))))
    long, late = RequestId(1), RequestId(2)
    waits: list[Event] = [Arrived(RequestId(3 + i), (i,) * 9, 1_000) for i in range(decoding)]
    waits.append(Arrived(long, tuple(range(length)), 4))
    events, flying = list[Event](), list[Event]()
    at, begun, steps = rng.randint(2, 8), 0, 0
    while True:
        if steps == at and short and not begun:
            waits.append(Arrived(late, tuple(range(length, length + rng.randint(1, length // 40))), 4))
            begun = -1
        events, waits = [*waits, *events], []
        advance = core.advance(events)
        events = []
        if advance.plan is not None:
            steps += 1
            samples = dict(zip(advance.plan.rids, advance.plan.samples, strict=True))
            begun = steps - at if begun < 0 and late in samples else begun
            if samples.get(long):
                return begun, steps
            flying.append(Retired(advance.plan.step, ((9,),) * sum(advance.plan.samples)))
        if advance.plan is None or len(flying) == core.cfg.depth:
            events = [flying.pop(0)]


def overtaken(seed: int) -> list[str]:
    """What breaks the promise of ADR 0082."""
    (begun, steps), (_, alone) = behind(seed), behind(seed, short=False)
    lines = []
    if not 0 < begun <= BEGINS_STEPS:
        lines.append(f"a short prompt began {begun} steps after it arrived behind a long one")
    if steps > alone + math.ceil(LATER_MAX * alone):
        lines.append(f"a long prompt took {steps} steps with a short one behind it, {alone} alone")
    return lines


def report(seeds: Iterable[int], mode: str, say: Callable[[str], None]) -> int:
    """Say who waited too long, and at the end the worst of all. Returns how many there were."""
    late, worst, num_preemptions = 0, 0.0, 0
    for seed in seeds:
        waiting = fair(seed, mode)
        lines = [*waiting.late(), *overtaken(seed)]
        for line in lines:
            say(f"penstock sim --fair --seed {seed}{f' --mode {mode}' if mode else ''}    # {line}")
        late += len(lines)
        worst = max([worst, *map(waiting.ratio, waiting.ended())])
        num_preemptions = max([num_preemptions, *(w.num_preemptions for w in waiting.ended())])
    say(f"{late} findings; at worst {worst:.2f} times the work ahead, gave way {num_preemptions} times")
    return late
