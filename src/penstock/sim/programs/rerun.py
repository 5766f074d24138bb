"""A recorded flight without its beginning, flown again: alike, not exactly.

The requests that were live arrive anew (prompt and outputs so far), fake ranks answer, and what came from
outside comes again after as many steps; the simulator's judge watches. It reaches states like the recorded
ones, not the same. Not of one engine of a pair: its peer would have to answer as the recorded one did.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

from penstock.core.core import Core
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Event,
    Expired,
    Moved,
    Outcome,
    Paused,
    Promoted,
    RequestId,
    Retired,
    Spilled,
    Stopped,
)
from penstock.replay.flight import Log
from penstock.replay.redact import Held
from penstock.sim.ranks.executor import Speeds
from penstock.sim.ranks.model import oracle
from penstock.sim.world.scenario import Scenario, draw
from penstock.sim.world.workload import Expect
from penstock.sim.world.world import MakeCore, World

TAIL = 8                 # steps after the last recorded one, before what still runs is aborted
FORCED: dict[str, type[Paused] | type[Dropped] | type[Spilled]] = {
    "paused": Paused, "dropped": Dropped, "decode.host": Spilled}


def _scenario(log: Log) -> Scenario:
    """Nothing of its own: one rank, no faults, and numbers that tell pages of one tier from another's."""
    cfg = log.cfg
    slab = max(group.slab_pages for group in cfg.groups)
    wide = 1 + max(cfg.rows, slab * max(cfg.hbm_pages, cfg.dram_pages, cfg.disk_pages))
    cfg = replace(cfg, hbm_base=wide, dram_base=2 * wide, row_base=3 * wide, disk_base=4 * wide,
                  group_base=5 * wide)
    return replace(
        draw(0), cfg=cfg, ranks=1, speeds=Speeds(), requests=0, abort=0.0, aborts=0, stops=0, stop=0.0,
        turns=0.0, pauses=0, drops=0, spills=0, flushes=0, deadline=1e9, expire=0.0, hold=0.0,
        damages=0, aims=0, jumps=0)


class Again(World):
    """Plays one log. `notes` counts what could not be done again."""

    def __init__(self, log: Log, make: MakeCore = Core, *, blind: bool = False) -> None:
        self.given = _outputs(log)
        self.notes: Counter[str] = Counter()
        self.log = log
        super().__init__(_scenario(log), make, blind=blind)
        self.index: dict[RequestId, RequestId] = {}     # recorded number -> the one it has here
        self.known: dict[RequestId, int] = {}           # outputs that its prompt here ends with
        self.standins: dict[int, int] = {}              # of a recorded output -> the token here
        self.steps = sum(turn.plan is not None for turn in log.turns)
        self.due = _outside(log)                        # (steps since the start, event), in order
        self.late: list[Stopped] = []                   # for requests that are not that far here
        self.start: int | None = None                   # steps issued when the recorded time begins
        fed = sum(len(h.arrived.prompt) + len(h.outputs) for h in log.held)
        self.warm_max = 2 * fed // log.cfg.step_tokens + 4 * len(log.held)
        for held in log.held:
            if held.phase != "queued":
                self._begin(held.arrived, held)

    def faults(self) -> None:
        """None of the random ones."""

    # ---------------------------------------------------------------- requests
    def _begin(self, a: Arrived, held: Held | None = None) -> None:
        known = () if held is None else held.outputs
        made, rid = self.load.made, RequestId(len(self.load.made))
        prompt = tuple(self.standins.get(t, t) for t in (*a.prompt, *known))
        most = min(self.log.cfg.max_len, self.load.most[a.selects] + 1) - len(prompt)
        left = a.max_new - len(known)
        if held is not None and (most < 1 or left < 1):
            self.notes["held requests that were at their ends, or do not fit as a prompt"] += 1
            return
        # Truth as far as this run can get: hashes of a long context take long.
        cfg, steps = self.log.cfg, self.warm_max + self.steps + TAIL
        n = min(most, left, (steps + 3 * cfg.depth) * (1 + cfg.draft_tokens))
        truth = oracle(prompt, n, a.namespace, rid, a.attention, self.load.reaches) if n > 0 else ()
        outcome = Outcome.LENGTH if n > 0 else Outcome.REFUSED
        outputs = self.given.get(a.rid, [])
        for here, recorded in zip(truth, outputs, strict=False):
            self.standins.setdefault(recorded, here)
        stop, min_new = frozenset[int](), 0
        hits = [i for i, t in enumerate(outputs[:n]) if t in a.stop and len(known) + i >= a.min_new]
        if hits:
            min_new = hits[0]
            stop = frozenset(truth[min_new:min_new + 1])
            truth, outcome = truth[:min_new + 1], Outcome.STOP
        if a.warms:
            truth, outcome = (), Outcome.WARMED
        leader = self._leader(a, prompt, held)
        here_ = replace(a, rid=rid, prompt=prompt, max_new=left, stop=stop, min_new=min_new, leader=leader)
        e = Expect(here_, rid, self.clock.now, truth, outcome, most < left)
        self.index[a.rid], self.known[a.rid] = rid, len(known)
        made.append(e)
        self.schedule(e)

    def _leader(self, a: Arrived, prompt: tuple[int, ...], held: Held | None) -> RequestId | None:
        leader = self.index.get(a.leader) if a.leader is not None else None
        if leader is None or (held is not None and held.outputs):
            return None
        return leader if self.load.made[leader].arrived.prompt == prompt else None

    # ---------------------------------------------------------------- recorded time
    def _turn(self) -> None:
        if self.start is None and self._warm():
            self._start()
        while self.start is not None and self.due and (
                self.due[0][0] <= self.judge.issued - self.start):
            self._again()
        for stopped in list(self.late):
            self._stop(stopped)
        if self.start is not None and self.judge.issued >= self.start + self.steps + TAIL:
            self._abort_all()
        super()._turn()

    def _warm(self) -> bool:
        """Whether all that was admitted is again. Not for ever: some may wait for what comes next."""
        return self.judge.issued >= self.warm_max or all(e.got or e.finished for e in self.load.made)

    def _start(self) -> None:
        self.start = self.judge.issued
        for held in self.log.held:
            rid = self.index.get(held.arrived.rid)
            if held.phase == "queued":
                self._begin(held.arrived, held)
            elif rid is not None and self.view.get(rid) is not None and held.phase in FORCED:
                self.inbox.append(FORCED[held.phase](rid))

    def _again(self) -> None:
        _, what = self.due.pop(0)
        match what:
            case Arrived():
                self._begin(what)
            case Stopped():
                self.late.append(what)
            case Aborted(rid) | Paused(rid) | Dropped(rid) | Spilled(rid) | Promoted(rid) | Expired(rid):
                live = self.view.get(self.index.get(rid, RequestId(-1)))
                if live is None:
                    self.notes[f"{type(what).__name__} of a request that is not there, or no more"] += 1
                elif isinstance(what, Expired):
                    visit = live.visit if live.phase.value == what.phase else what.visit
                    self.inbox.append(replace(what, rid=live.rid, visit=visit))
                else:
                    poke: Event = replace(what, rid=live.rid)
                    self.inbox.append(poke)
            case _:
                self.inbox.append(what)

    def _stop(self, what: Stopped) -> None:
        """Deliver it once the request has as many tokens here."""
        rid = self.index.get(what.rid, RequestId(-1))
        count = max(1, what.count - self.known.get(what.rid, 0))
        live = self.view.get(rid)
        if live is not None and len(self.load.made[rid].got) < count:
            return
        self.late.remove(what)
        if live is None:
            self.notes["Stopped of a request that is not there, or no more"] += 1
        else:
            self.inbox.append(Stopped(rid, count))

    def _abort_all(self) -> None:
        self.inbox += [Aborted(r.rid) for r in self.view.live if not self.load.made[r.rid].aborted]

    # ---------------------------------------------------------------- the whole
    def play(self) -> World:
        while True:
            while self.clock.step():
                pass
            if self.start is None:
                self._start()              # what did not start by now waits for something recorded
            elif self.due:
                self._again()              # the recorded engine had more to do meanwhile
            elif self.view.live:
                self._abort_all()
            else:
                break
            self.wake()
        return super().play()


def _outputs(log: Log) -> dict[RequestId, list[int]]:
    """Stand-ins of what each request was given during the flight, as far as they counted."""
    given: dict[RequestId, list[int]] = {}
    plans = {turn.plan["step"]: turn.plan for turn in log.turns if turn.plan is not None}
    for e in (e for turn in log.turns for e in turn.events):
        if isinstance(e, Retired) and (plan := plans.get(e.step)) is not None:
            sampled = [rid for rid, samples in zip(plan.get("rids", ()), plan.get("samples", ()),
                                                   strict=True) if samples]
            for rid, tokens in zip(sampled, e.tokens, strict=True):
                given.setdefault(RequestId(rid), []).extend(t for t in tokens if t >= 0)
    return given


def _outside(log: Log) -> list[tuple[int, Event]]:
    """What did not come from the ranks, each with the steps before it."""
    at, step = list[tuple[int, Event]](), 0
    for turn in log.turns:
        at += [(step, e) for e in turn.events if not isinstance(e, Retired | Moved)]
        step += turn.plan is not None
    return at


def alike(log: Log, make: MakeCore = Core) -> tuple[str, list[str]]:
    """Plays an incomplete log of an engine without a peer; returns what ran, and what could not be done
    again. An AssertionError is a finding of the judge."""
    world = Again(log, make)
    world.play()
    world.notes["failed copies"] += sum(isinstance(e, Moved) and not e.ok for turn in log.turns
                                        for e in turn.events)
    world.notes["Stopped that never became due"] += len(world.late)
    world.notes["the exception of the last turn"] += not log.turns[-1].returned if log.turns else 0
    notes = [f"{n} x {what}" for what, n in sorted(world.notes.items()) if n > 0]
    return (f"like it, not exact: {len(world.load.made)} requests, {world.judge.issued} steps for "
            f"{world.steps} recorded ones; the judge found nothing"), notes
