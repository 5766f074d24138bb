"""The planner. `Core.advance(events) -> Advance(plan, outputs)` is a pure function of its history.

No clock, no random source, no thread, no I/O, no torch. Synchronous, overlapped and pipelined
execution are this one loop with another `depth`. `_go` is the only function that changes a phase; it
derives what to acquire and release from the tables of `lifecycle`.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from penstock.core import check, lifecycle, room, schedule
from penstock.core.holdings import Holdings
from penstock.core.lifecycle import ACTIVE, WAITING, IllegalTransition, Mode, Phase, Trigger
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
    Output,
    Paused,
    Rates,
    RequestId,
    Retired,
    Started,
    StepId,
    StepPlan,
    Stopped,
    Tier,
    Token,
)
from penstock.core.request import Request
from penstock.core.settings import CoreConfig


class Core:
    """One engine's scheduler. `advance` until it returns no plan, then wait for events."""

    def __init__(self, cfg: CoreConfig) -> None:
        mode = Mode(host=cfg.dram_pages > 0, disk=cfg.disk_pages > 0)
        self.cfg = cfg
        self.edges = lifecycle.edges(mode)
        self.holds = lifecycle.holds(mode)
        self.may_hold = lifecycle.may_hold(mode)
        self.have = Holdings(cfg)
        self.live: dict[RequestId, Request] = {}
        self.running: list[Request] = []       # phases with a row, in order of service
        self.waiting: list[Request] = []       # phases without, in order of service
        self.in_flight: dict[StepId, list[schedule.Issued]] = {}
        self.taken = 0                         # edges taken so far
        self.counters: dict[str, int] = dict.fromkeys(
            ("pauses", "drops", "prefix_queries", "prefix_hbm_hits", "prefix_dram_hits", "prefix_disk_hits",
             "failed_moves"), 0)
        self.rates: Rates | None = None        # None: not measured yet
        self._blocked: tuple[int, ...] = ()    # when the head of the queue last did not fit
        self._seq = 0
        self._out: list[Output] = []

    # ---------------------------------------------------------------- public
    def advance(self, events: Sequence[Event]) -> Advance:
        """Apply events, take every edge that needs no step, and plan at most one step."""
        self._out = []
        for event in events:
            self._apply(event)
        plan: StepPlan | None = None
        while True:                            # to a fixed point: planning may free, freeing may admit
            before = self.taken, self.have.drain()
            self._progress()
            plan = schedule.plan(self)
            if plan is not None or (self.taken, self.have.drain()) == (before[0], 0):
                return Advance(plan, tuple(self._out))

    def check(self) -> None:
        """Every invariant that can be seen from inside; raises AssertionError."""
        check.check(self)

    def stats(self) -> dict[str, float]:
        """Gauges and counters for metrics; cheap enough for every scrape."""
        have = self.have
        return {
            "requests_running": len(self.running), "requests_waiting": len(self.waiting),
            "requests_paused": sum(r.phase is Phase.PAUSED for r in self.waiting),
            "rows_free": have.rows.free,
            "hbm_pages": have.hbm.capacity, "hbm_pages_free": have.hbm.free,
            "hbm_pages_held": len(have.hbm.held), "hbm_pages_fenced": have.hbm.in_limbo,
            "hbm_pages_in_use": len({c.page for r in self.live.values() for c in r.table}),
            "dram_pages": have.dram.capacity, "dram_pages_free": have.dram.free,
            "dram_pages_held": len(have.dram.held), "dram_pages_fenced": have.dram.in_limbo,
            "disk_pages": have.disk.capacity, "disk_pages_free": have.disk.free,
            "disk_pages_held": len(have.disk.held), "disk_pages_fenced": have.disk.in_limbo,
            "moves_in_flight": len(have.flights), "steps": have.issued,
            "hbm_evictions": have.tree.evicted[Tier.HBM],
            "dram_evictions": have.tree.evicted[Tier.DRAM],
            "disk_evictions": have.tree.evicted[Tier.DISK],
            **self.counters,
        }

    # ---------------------------------------------------------------- events
    def _apply(self, event: Event) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case Aborted(rid, damaged):
                if (r := self.live.get(rid)) is not None:
                    path = list(r.path)
                    self._end(r, Outcome.ABORT)
                    if damaged:
                        self.have.distrust(path)
            case Stopped(rid, count):
                if (r := self.live.get(rid)) is not None and count <= r.num_output:
                    self._end(r, Outcome.STOP)
            case Paused(rid):
                self._ask(rid, Trigger.PAUSE)
            case Dropped(rid):
                self._ask(rid, Trigger.DROP)
            case Flushed():
                while any([self.have.tree.evict(tier, 1 << 60) for tier in Tier]):
                    pass
            case Expired(rid, phase, visit):
                r = self.live.get(rid)
                if r is not None and (r.phase.value, r.visit) == (phase, visit):
                    self._expire(r)
            case Rates():
                self.rates = event
            case Retired(step, tokens):
                self._retire(step, tokens)
            case Moved():
                self._landed(event)
            case _:
                assert_never(event)

    def _arrive(self, a: Arrived) -> None:
        assert a.rid not in self.live and a.prompt and a.max_new > 0
        g, n = self.cfg.page_size, len(a.prompt)
        # The last output token needs no KV, so this many positions must fit.
        fits = min(self.cfg.max_len, self.cfg.hbm_pages * g + 1) - n
        if fits < 1:
            self._out.append(Finished(a.rid, Outcome.REFUSED, (
                f"the prompt has {n} tokens; the context length is {self.cfg.max_len} and the "
                f"device pool holds {self.cfg.hbm_pages} pages of {g} tokens")))
            return
        r = Request(a, self._seq, min(a.max_new, fits), list(a.prompt), n)
        self._seq += 1
        self.live[a.rid] = r
        schedule.insert(self.waiting, r)

    def _ask(self, rid: RequestId, trigger: Trigger) -> None:
        """Somebody outside wishes an edge; ignored where the tables do not have it."""
        r = self.live.get(rid)
        if r is not None and (r.phase, trigger) in self.edges:
            self._go(r, trigger)

    def _expire(self, r: Request) -> None:
        if r.phase is Phase.QUEUED:
            self._end(r, Outcome.EXPIRED)
        elif r.phase is Phase.FETCHING:
            self._go(r, Trigger.DROP)

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        assert step == self.have.retired + 1, "results arrive in step order"
        self.have.retired = step
        results, g = iter(tokens), self.cfg.page_size
        for row in self.in_flight.pop(step):
            r = row.request
            r.in_flight -= 1
            new = next(results) if row.width else ()
            if r.phase is Phase.DONE:
                continue                       # over-run: issued before we knew that it had ended
            r.pending -= row.width
            outcome = self._take(r, new)
            if row.life == r.life:
                short = row.width - len(new)   # what the plan allowed for and did not come
                assert short >= 0, "more tokens than the plan allows"
                r.computed -= short
                r.settled += row.end - row.start - short
                if r.settled >= (len(r.path) + 1) * g:
                    self.have.seal(r)          # before it may end: its pages serve others
            if outcome is not None:
                self._end(r, outcome)

    def _take(self, r: Request, tokens: tuple[int, ...]) -> Outcome | None:
        """Append output tokens, as far as they count. Returns why the request ends with them."""
        a, n = r.arrived, r.num_output
        for token in tokens:
            r.tokens.append(token)
            self._out.append(Token(a.rid, n, token))
            n += 1
            if token in a.stop and n > a.min_new:
                return Outcome.STOP
            if n >= r.max_new:
                return Outcome.LENGTH
        return None

    def _landed(self, event: Moved) -> None:
        self.counters["failed_moves"] += not event.ok
        failed = self.have.landed(event.id, event.ok)
        if failed:
            for r in [r for r in self.running if any(c in failed for c in r.table)]:
                self._go(r, Trigger.DROP)
            self.have.discard(failed)

    def _end(self, r: Request, outcome: Outcome) -> None:
        moved = self._go(r, Trigger.END)
        assert moved, "ending never needs resources"
        del self.live[r.rid]
        self._out.append(Finished(r.rid, outcome))

    # ---------------------------------------------------------------- transitions
    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        """Change the phase. False means not enough resources: nothing has changed."""
        target = self.edges.get((r.phase, trigger))
        if target is None:
            raise IllegalTransition(f"{r.phase} --{trigger}--> ?")
        source, keep = r.phase, (*self.holds[target], *self.may_hold[target])
        gained = [x for x in self.holds[target] if x not in self.holds[source]]
        if gained and not self.have.acquire(r, gained, spare):
            return False
        r.phase = target
        self.have.release(r, [x for x in lifecycle.Lease if x not in keep])
        if target in (Phase.DROPPED, Phase.DONE):
            r.life += 1
            self.have.forget_path(r)
        self.taken += 1
        r.visit += 1
        self._file(r, source)
        if target is Phase.FETCHING:
            self._out.append(Entered(r.rid, target.value, r.visit))
        return True

    def _file(self, r: Request, source: Phase) -> None:
        """Keep the two queues and the counters in step with a phase that has just changed."""
        if source in ACTIVE and r.phase not in ACTIVE:
            self.running.remove(r)
        elif source in WAITING and r.phase not in WAITING:
            self.waiting.remove(r)
        if r.phase in ACTIVE and source not in ACTIVE:
            schedule.insert(self.running, r)
        elif r.phase in WAITING and source not in WAITING:
            schedule.insert(self.waiting, r)
        r.gave_way += source in ACTIVE and r.phase in WAITING
        self.counters["pauses"] += r.phase is Phase.PAUSED
        self.counters["drops"] += r.phase is Phase.DROPPED

    # ---------------------------------------------------------------- progress without a step
    def _progress(self) -> None:
        for r in self.waiting:
            if r.phase is Phase.PAUSED and not r.is_parked and r.in_flight == 0:
                self.have.park(r)
        if self.cfg.disk_pages:
            self._fetch()
        self._admit()
        for r in [r for r in self.running if r.phase is Phase.LOADING]:
            if not r.moves and all(c.ready for c in r.table):
                self._go(r, Trigger.LANDED)
                if not r.started:
                    self._started(r)

    def _fetch(self) -> None:
        """Start reading stored prefixes early, if reading beats computing them again."""
        for r in list(self.waiting):
            if r.phase is not Phase.QUEUED or r.asked_storage or not self._may_start(r):
                continue
            r.asked_storage = True
            pages = self.have.stored(r)
            if pages and (self.rates is None or self.rates.disk_page_us
                          < self.cfg.page_size * self.rates.prefill_token_us):
                self._go(r, Trigger.FETCH)

    def _admit(self) -> None:
        """Give rows and pages to the waiting, in order; the first that does not fit blocks the rest,
        so that nobody starves behind smaller requests."""
        for r in list(self.waiting):
            if not self._may_start(r):
                continue
            known = r.phase in (Phase.QUEUED, Phase.FETCHING)
            trigger = Trigger.ADMIT if known else Trigger.RESUME
            state = (r.rid, self.taken, self.have.freed, len(self.have.flights))
            if state == self._blocked and self.have.issued > self.have.retired:
                return                         # nothing has changed since it did not fit
            if not self._go(r, trigger, spare=room.headroom(self, r)):
                self._blocked = state
                room.for_admission(self, r)
                return

    def _may_start(self, r: Request) -> bool:
        if r.in_flight or r.moves or (r.phase is Phase.PAUSED and not r.is_parked):
            return False
        if r.phase is Phase.FETCHING and not self.have.is_fetched(r):
            return False
        leader = self.live.get(r.arrived.leader) if r.arrived.leader is not None else None
        # A fork waits until the pages of the prompt it shares are sealed.
        return leader is None or leader.num_output > 0

    def _started(self, r: Request) -> None:
        r.started = True
        g, disk = self.cfg.page_size, min(r.fetched, r.loads)    # not what failed on its way
        hbm, dram, disk = (len(r.path) - r.loads) * g, (r.loads - disk) * g, disk * g
        self.counters["prefix_queries"] += r.num_prompt
        self.counters["prefix_hbm_hits"] += hbm
        self.counters["prefix_dram_hits"] += dram
        self.counters["prefix_disk_hits"] += disk
        self._out.append(Started(r.rid, hbm, dram, disk))
