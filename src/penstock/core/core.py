"""The planner. `Core.advance(events) -> Advance(plan, outputs)` is a pure function of its history.

No clock, no random source, no thread, no I/O, no torch. Synchronous, overlapped and pipelined
execution are this one loop with another `depth`.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import assert_never

from penstock.core import check, faults, retire, schedule
from penstock.core.kv import allocate, listing, offload, prefetch, promote
from penstock.core.kv.pages import PARTS
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Phase, Place, Role, Trigger
from penstock.core.pair.bridge import FromPeer, pairings
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Dropped,
    Event,
    Expired,
    Finished,
    Flushed,
    HotUse,
    Listed,
    Moved,
    MoveId,
    Outcome,
    Paused,
    Promoted,
    Rates,
    Republish,
    RequestId,
    RetentionEnded,
    Retired,
    SessionEnded,
    Spilled,
    StepId,
    Stopped,
    Tier,
)
from penstock.core.policy import capacity, reclaim
from penstock.core.policy.queue import Admission
from penstock.core.policy.residency import Residency
from penstock.core.published import Published
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.state import CoreState

WISHES = {Paused: Trigger.PAUSE, Dropped: Trigger.DROP}


class Core(CoreState):
    """One engine's scheduler. `advance` until it returns no plan, then wait for events."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        self.admission = Admission(self)
        self.residency = Residency(self, self.admission)
        self.pairs = pairings(self, Role(cfg.role))
        self.watchers += self.pairs.values()
        self.published = Published(cfg, self.kv)
        self._seq = 0

    # ---------------------------------------------------------------- public
    def advance(self, events: Sequence[Event]) -> Advance:
        """Apply events, take every edge that needs no step, and plan at most one step."""
        self.out, self.revoke_pending = [], self.revoke_pending and not events
        if events or self.admission.step != self.kv.issued:
            self.admission.begin_turn()        # else the last call went to its end
        if events:
            self.kv.spent = None if self.kv.may_start else self.kv.spent
            self.kv.saves_left, self.kv.may_start = self.cfg.save_pages, True
        self._hear(events)
        if events:
            # A turn that gives up pages has less of its share left for hits.
            self.kv.hits_left = self.cfg.hit_pages - self.kv.part * self.kv.gives_up
            self.kv.parts_left = PARTS
            self.kv.free_gradually(all=not self.running)
        if events or not self.running:
            self.kv.tree.give_up_flushed(self.cfg.take_pages)
            self.sessions.age(self.kv.tree, self.cfg.take_pages)
        # To a fixed point: planning may free, freeing may admit. Each request moves a few times at most.
        for _ in range(100 + 20 * len(self.live)):
            self.kv.drain()
            before = self.edges_taken, self.kv.freed, self.kv.saves_left, self.taken_early
            self._progress()
            plan = schedule.plan(self)
            self.kv.drain()
            now = self.edges_taken, self.kv.freed, self.kv.saves_left, self.taken_early
            idle = now == before and not self.admission.is_due()
            if plan is None and idle and self.kv.gives_up and not (self.in_flight and self.running):
                self.kv.free_gradually(all=True)  # no more than PARTS portions of that were given up
                self.kv.hits_left = 1 << 60    # what is refused now would be given up, and tried again, for ever
                continue
            if plan is None and idle and not self.in_flight:      # no event may come that makes these go on
                if self.is_saving:
                    self.kv.saves_left, self.kv.may_start = 1 << 60, True
                    continue
                if self.admission.is_underway and not (self.kv.moves.flying and self.kv.rows.num_held):
                    self.kv.hits_left = 1 << 60
                    continue
                if self.admission.is_full:
                    self.admission.begin_turn()
                    continue
            if plan is not None or idle:
                for pair in self.pairs.values():
                    self.out += pair.flush()
                return Advance(plan, tuple(self.out), self.published.news(bool(events) or not self.running))
        raise AssertionError("planning comes to no end")

    @property
    def flushing(self) -> bool:
        """Whether `advance` without events gives up more of what was flushed, or reports more cached pages: while
        no request runs, whose turns do that as well."""
        return bool(self.kv.tree.to_flush or self.published.late or self.sessions.is_late) and not self.running

    def check(self) -> None:
        """Every invariant that can be seen from inside; raises AssertionError."""
        check.check(self, self.pairs)
        schedule.check(self)

    def stats(self) -> dict[str, float]:
        """Gauges and counters for metrics. Nothing here walks requests that wait, or pages."""
        kv, gauges = self.kv, dict[str, float]()
        for tier, arena in kv.arenas.items():
            spaces = [space for space in kv.tree.spaces if space.tier is tier]
            free = sum(p.free for p in arena.pools) + sum(len(arena.free) * p.per_slab
                                                          for p in arena.pools[:1])
            gauges |= {
                f"{tier.value}_pages": sum(p.capacity for p in arena.pools)
                + len(arena.free) * arena.pools[0].per_slab,
                f"{tier.value}_pages_free": free,
                f"{tier.value}_pages_held": sum(p.num_held for p in arena.pools),
                f"{tier.value}_pages_in_use": sum(p.num_held - p.num_evictable for p in arena.pools),
                f"{tier.value}_pages_fenced": sum(p.in_limbo for p in arena.pools),
                f"{tier.value}_evictions": sum(space.evicted for space in spaces),
            }
        for space in kv.tree.spaces if len(self.cfg.groups) > 1 else ():
            of = f'{{tier="{space.tier.value}",group="{self.cfg.groups[space.group].name}"}}'
            gauges[f"cache_group_pages{of}"] = held = space.pool.num_held
            gauges[f"cache_group_bytes{of}"] = held * self.cfg.groups[space.group].page_bytes
        if self.pairs:
            gauges["peer_ignored"] = sum(sum(p.side.counters.values()) for p in self.pairs.values())
        return {
            "requests_running": len(self.running), "requests_waiting": len(self.waiting),
            "requests_paused": len(self.by_phase[Phase.PAUSED]),
            "requests_hosted": len(self.hosted),
            **{f'requests_in_phase{{phase="{name}"}}': len(queue) for name, queue in self.by_state()},
            "rows_free": kv.rows.free, "pages_to_store": kv.moves.num_to_store,
            "retained_pages": len(kv.tree.retained.users),
            "moves_in_flight": len(kv.moves.flying), "steps": kv.issued, **self.residency.stats(),
            **gauges, **self.counters,
        }

    # ---------------------------------------------------------------- events
    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            for watcher in self.watchers:
                watcher.event(event)
            self._apply(event)
            for watcher in self.watchers:
                watcher.applied(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, FromPeer):
            if self.pairs:
                self.pairs[event.peer].hear(event)
            return
        match event:
            case Retired(step, tokens):
                self._retire(step, tokens)
            case Moved():
                self._landed(event)
            case Arrived():
                self._arrive(event)
            case Aborted(rid, damaged):
                if (r := self.live.get(rid)) is not None:
                    if damaged:
                        faults.damaged(self, r)
                    else:
                        self.end(r, Outcome.ABORT)
                        self.kv.free_gradually(all=False)
            case Stopped(rid, count):
                if (r := self.live.get(rid)) is not None and count <= r.num_output:
                    self.end(r, Outcome.STOP)
            case Paused() | Dropped():
                self.request_edge(event.rid, WISHES[type(event)])
            case Spilled(rid):
                if (r := self.live.get(rid)) is not None and reclaim.may_spill(self, r):
                    r.setbacks.forced += bool(reclaim.spill(self, r))
            case Promoted(rid):
                if (r := self.live.get(rid)) is not None and r.state == (Phase.DECODE, Place.HOST):
                    r.setbacks.forced += bool(self.transition(r, Trigger.RELOCATE, Place.TO_DEVICE))
            case Flushed():
                self.kv.flush()
            case SessionEnded(session):
                self.sessions.end(session)
            case RetentionEnded(session):
                self.sessions.unretain(session)
            case Republish():
                self.published.again()
            case Expired(rid, phase, visit):
                r = self.live.get(rid)
                if r is not None and (r.phase.value, r.visit) == (phase, visit):
                    self._expire(r)
            case Rates():
                self.rates = event
            case Listed(rid, visit, present):
                r = self.live.get(rid)
                if r is not None and r.visit == visit and r.storage.keys:
                    self.look_up(r, listing.listed(self.kv, r, present))
            case HotUse(_, rows):
                self.residency.hear(rows)
            case _:
                assert_never(event)

    def _arrive(self, a: Arrived) -> None:
        assert a.rid not in self.live and a.prompt and a.max_new > 0
        n, hosted = len(a.prompt), capacity.may_host(self.cfg, a)
        # The last output token needs no KV; but nothing is longer than the context.
        longest = min(self.cfg.max_len - 1, capacity.largest(self.cfg, hosted))
        fits = longest + 1 - n
        if fits < 1 or (self.prefills_only and not (a.transfer or a.warms)):
            self.out.append(Finished(a.rid, Outcome.REFUSED, capacity.refusal(self.cfg, a, longest)))
            if self.pairs:
                self.pairs[a.peer].refused(a.transfer)
            return
        r = Request(a, self._seq, min(a.max_new, fits), [], n, self.kv.tables(),
                    n if self.prefills_only else self.cfg.max_len + n)
        most = min(n + r.max_new - 1, r.compute_limit)
        r.drafts = self.cfg.draft_tokens if a.drafts is None else min(self.cfg.draft_tokens, a.drafts)
        r.hot.least = capacity.hot_units(self.cfg, most)
        r.hot.most = capacity.hot_units(self.cfg, most, grown=True)
        r.may_host = hosted and capacity.fits(self.cfg, Place.HOST, n + r.max_new - 1)
        r.session = self.sessions.begin(a.session, retains=a.retains)
        self._seq += 1
        self.live[a.rid] = r
        if a.warms:
            self.warming.append(r)
        self.enqueue_new(r)
        leader = self.live.get(a.leader) if a.leader is not None else None
        if leader is not None and not leader.num_output:
            r.follow(leader)                   # until the pages of the prompt that they share are sealed
        else:
            self.enqueue(r)
        if self.pairs:
            self.pairs[a.peer].arrived(r)

    def request_edge(self, rid: RequestId, trigger: Trigger) -> None:
        """Somebody outside wishes an edge; ignored where the tables do not have it."""
        r = self.live.get(rid)
        if r is not None and (r.phase, trigger) in self.edges and not r.remote.is_pushed:
            r.setbacks.forced += bool(self.transition(r, trigger))

    def _expire(self, r: Request) -> None:
        if r.phase is Phase.QUEUED or (r.phase is Phase.DROPPED and not r.started):
            self.end(r, Outcome.EXPIRED)
        elif r.phase is Phase.FETCHING or (r.phase is Phase.RECEIVING and not r.saving.is_done):
            self.transition(r, Trigger.DROP)

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        retire.retire(self, step, tokens)

    def _landed(self, event: Moved) -> None:
        self.counters["failed_moves"] += not event.ok
        kv = self.kv
        if event.id not in kv.moves.flying:
            return
        flight, lost = kv.moves.landed(event.id, event.ok, event.good)
        # What is in no table is not looked for there.
        gone = frozenset([copy for copy in lost if copy.pins or copy.readers])
        for r in list(self.live.values()) if lost else ():
            if gone or event.id in r.step_depends_on:
                self.copies_lost(r, event.id, gone)
        for r in kv.freeing if lost else ():
            offload.lose(kv, r, gone)
        if gone:
            kv.lose_pins(gone)
        kv.moves.finish(flight)
        kept = flight.dst.tier is Tier.DRAM and any([target.pins for _, target in flight.pairs])
        # What they pin may be in place now. Their tables are long: others are not looked at.
        for r in sorted(self.saving if lost else flight.savers if kept else (), key=lambda r: r.key):
            if r.saving.is_copying:
                offload.let_go_of_device(kv, r)
                self.update_parked(r)
        if flight.request is not None and flight.request.phase is Phase.PAUSED:
            self.update_parked(flight.request)
        if flight.dst.tier is Tier.PEER and flight.request is not None:
            self.pairs[flight.request.arrived.peer].push_ended(event.id, event.ok)

    def copies_lost(self, r: Request, id: MoveId, lost: Collection[Copy]) -> None:
        """Copies have gone that `r` may count on, or that steps in flight have waited for."""
        counted = offload.lose(self.kv, r, lost)
        r.setbacks.forced += counted or id in r.step_depends_on
        if id in r.step_depends_on:            # perhaps of a row that it has given up
            r.invalid_through = r.last_issue
        if r.remote.grant is not None and r.remote.pushed > r.remote.grant.start and counted:
            self.end(r, Outcome.LOST)         # what it has sent may be wrong
        elif id in r.step_depends_on and (r.phase, Trigger.DROP) in self.edges:
            self.transition(r, Trigger.DROP)
        elif r.place is Place.TO_HOST and counted:
            self.transition(r, Trigger.RELOCATE, Place.DEVICE)       # it stays
        elif counted and (r.row is not None or r.phase in (Phase.SENDING, Phase.RECEIVING)
                          or (r.saving.is_done and not self.kv.is_complete(r))):
            self.transition(r, Trigger.DROP)          # what has gone is computed again
        if r.phase is Phase.PAUSED:
            self.update_parked(r)                     # it may have only the device's page now

    # ---------------------------------------------------------------- progress without a step
    def _progress(self) -> None:
        kv = self.kv
        self.is_saving = bool(kv.softening) and kv.soften_some()
        for r in list(self.saving):
            if r.phase is Phase.PAUSED and not r.saving.is_done and (
                    r.saving.at or not (r.moves or kv.in_flight(r))):
                if not offload.save(kv, r):
                    self.is_saving = True
                    continue
                self.update_parked(r)
                if r.saving.may_lack and not kv.is_complete(r):
                    self.transition(r, Trigger.DROP)  # it had lost a page before that
            if r.phase is Phase.PAUSED and offload.may_let_go(r):
                offload.let_go_of_device(kv, r)
                self.update_parked(r)
                self.is_saving |= offload.may_let_go(r)
            if (r.phase is Phase.FETCHING and r.storage.has_more and kv.moves.reads_left
                    and prefetch.is_fetched(kv, r)):
                prefetch.read(kv, r)
                self.update_parked(r)
        for pair in self.pairs.values():
            pair.push_ready()
        if self.prefetch_queue and kv.moves.reads_left:
            self._fetch()
        if self.warming:
            self._end_warm()
        self.admission.admit()
        for r in list(self.transient):
            if r.blocked_on and not any([copy.ready for copy in r.blocked_on]):
                continue                       # tables are long: it looks when one of these has landed
            if r.phase is Phase.LOADING:
                if not kv.may_start and len(r.path) > allocate.LONG:
                    self.is_saving = True      # the plan will name all of its pages: a turn for that alone
                    continue
                self._start(r)
            elif r.phase is Phase.PREFILL and not r.todo:
                self.transition(r, Trigger.PREFILLED)  # prefill role: all of it was cached
            elif r.place is Place.TO_HOST:
                reclaim.stage(self, r)
            elif r.place is Place.TO_DEVICE:
                if not promote.load_next(kv, r):
                    reclaim.undo_promotion(self, r)        # what it was promised cannot be had
                elif not (r.promotion.loading or r.moves) and r.promotion.reload_at is None:
                    self.transition(r, Trigger.RELOCATE, Place.DEVICE)
            self.is_saving |= r.promotion.reload_at is not None and kv.saves_left <= 0
        if self.hosted:
            self.residency.progress()

    def _start(self, r: Request) -> None:
        """Leave LOADING once all is in place, or so little is missing that a step may wait for it."""
        missing = allocate.missing(r)
        if missing is None or len(missing) > self.cfg.wait_pages:
            most = self.cfg.wait_pages + 1     # as long as these are missing, too many are
            r.blocked_on = (missing[-most:] if missing is not None else
                            [copy for below, copy in r.found.arriving if below][-1:])
            return
        r.step_depends_on = sorted({copy.filled_by for copy in missing})
        self.transition(r, Trigger.LANDED)
        if not r.started:
            self.started(r)

    def _end_warm(self) -> None:
        """Requests that wait for storage alone end when it has been asked, and has brought what it will."""
        for r in list(self.warming):
            waits = r.storage.is_due or r.storage.keys or (
                r.phase is Phase.FETCHING and (r.storage.has_more or not prefetch.is_fetched(self.kv, r)))
            if not waits:
                self.end(r, Outcome.WARMED)

    def _fetch(self) -> None:
        """Start reading stored prefixes early, if reading beats computing them again."""
        queued, self.prefetch_queue = self.prefetch_queue, []
        for i, r in enumerate(queued):
            if not self.kv.moves.reads_left:
                self.prefetch_queue = queued[i:]
                return
            r.storage.is_due = False
            pages = prefetch.stored(self.kv, r)
            if pages and (self.rates is None or self.rates.disk_page_us
                          < self.cfg.page_size * self.rates.prefill_token_us):
                self.transition(r, Trigger.FETCH)
