"""The planner. `Core.advance(events) -> Advance(plan, outputs)` is a pure function of its history.

No clock, no random source, no thread, no I/O, no torch. Synchronous, overlapped and pipelined
execution are this one loop with another `depth`. `transition` is the only function that changes a phase; it
derives what to acquire and release from the tables of `lifecycle`.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import assert_never

from penstock.core import check, lifecycle, retire, schedule
from penstock.core.kv import allocate, growth, listing, offload, prefetch, promote, sealing
from penstock.core.kv.pages import NONE_LEFT, Headroom, Refused, Shortage, Trial
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import (
    ACTIVE,
    BUSY,
    HOLDING,
    LINE,
    WAITING,
    IllegalTransition,
    Phase,
    Role,
    Trigger,
)
from penstock.core.pair.bridge import FromPeer, pairings
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
    HotUse,
    Listed,
    Lookup,
    Moved,
    MoveId,
    Outcome,
    Paused,
    Promoted,
    Rates,
    RequestId,
    Retired,
    Spilled,
    Started,
    StepId,
    Stopped,
    Tier,
    Unstore,
    Used,
)
from penstock.core.policy import capacity, reclaim
from penstock.core.policy.queue import Admission
from penstock.core.policy.residency import Residency
from penstock.core.request import Request, insert
from penstock.core.settings import CoreConfig
from penstock.core.state import CoreState
from penstock.core.watch import Watcher

PAGES = (lifecycle.Lease.HBM, lifecycle.Lease.DEVICE_ONLY, lifecycle.Lease.DRAM)
WISHES = {Paused: Trigger.PAUSE, Dropped: Trigger.DROP, Promoted: Trigger.PROMOTE}


class Core(CoreState):
    """One engine's scheduler. `advance` until it returns no plan, then wait for events."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        self.admission = Admission(self)
        self.residency = Residency(self, self.admission)
        self.pairs = pairings(self, Role(cfg.role))
        self.watchers: list[Watcher] = []      # add yourself
        self._seq = 0

    # ---------------------------------------------------------------- public
    def advance(self, events: Sequence[Event]) -> Advance:
        """Apply events, take every edge that needs no step, and plan at most one step."""
        self.out, self.revoke_pending = [], self.revoke_pending and not events
        self._hear(events)
        if events:
            self.kv.leave(all=not self.running)
        # To a fixed point: planning may free, freeing may admit. Each request moves a few times at most.
        for _ in range(100 + 20 * len(self.live)):
            self.kv.drain()
            before = self.edges_taken, self.kv.freed
            self._progress()
            plan = schedule.plan(self)
            self.kv.drain()
            idle = (self.edges_taken, self.kv.freed) == before and not self.admission.is_due()
            if plan is not None or idle:
                for pair in self.pairs.values():
                    self.out += pair.flush()
                return Advance(plan, tuple(self.out))
        raise AssertionError("planning comes to no end")

    def check(self) -> None:
        """Every invariant that can be seen from inside; raises AssertionError."""
        check.check(self, self.pairs)
        schedule.check(self)

    def stats(self) -> dict[str, float]:
        """Gauges and counters for metrics. Walks the page tables of live requests: 15 ms for 64,000 pages."""
        kv, gauges = self.kv, dict[str, float]()
        for tier, arena in kv.arenas.items():
            spaces = [space for space in kv.tree.spaces if space.tier is tier]
            free = sum(p.free for p in arena.pools) + sum(len(arena.free) * p.per_slab
                                                          for p in arena.pools[:1])
            gauges |= {
                f"{tier.value}_pages": sum(p.capacity for p in arena.pools)
                + len(arena.free) * arena.pools[0].per_slab,
                f"{tier.value}_pages_free": free,
                f"{tier.value}_pages_held": sum(len(p.held) for p in arena.pools),
                f"{tier.value}_pages_fenced": sum(p.in_limbo for p in arena.pools),
                f"{tier.value}_evictions": sum(space.evicted for space in spaces),
            }
        phases = [r.phase for r in self.live.values()]
        if self.pairs:
            gauges["peer_ignored"] = sum(sum(p.side.counters.values()) for p in self.pairs.values())
        return {
            "requests_running": len(self.running), "requests_waiting": len(self.waiting),
            "requests_paused": phases.count(Phase.PAUSED),
            "requests_hosted": phases.count(Phase.HOSTED) + phases.count(Phase.PROMOTING),
            **{f'requests_in_phase{{phase="{p.value}"}}': phases.count(p) for p in Phase
               if p is not Phase.DONE},
            "rows_free": kv.rows.free, "pages_to_store": kv.moves.num_to_store,
            "hbm_pages_in_use": len({id(c) for r in self.live.values() for t in r.tables
                                     for c in t.device if c is not None}),
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
                self.pairs[event.peer].event(event)
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
                    path = self.kv.tainted_by(r) if damaged else []
                    self.end(r, Outcome.ABORT)
                    self.kv.leave(all=damaged)
                    if keys := self.kv.moves.invalidate(path):
                        self.out.append(Unstore(keys))
            case Stopped(rid, count):
                if (r := self.live.get(rid)) is not None and count <= r.num_output:
                    self.end(r, Outcome.STOP)
            case Paused() | Dropped() | Promoted():
                self.request_edge(event.rid, WISHES[type(event)])
            case Spilled(rid):
                if (r := self.live.get(rid)) is not None and reclaim.may_spill(self, r):
                    r.excused += bool(self.spill(r))
            case Flushed():
                self.kv.leave(all=True)
                while self.kv.tree.evict_all(self.kv.tree.spaces):
                    pass
            case Expired(rid, phase, visit):
                r = self.live.get(rid)
                if r is not None and (r.phase.value, r.visit) == (phase, visit):
                    self._expire(r)
            case Rates():
                self.rates = event
            case Listed(rid, visit, present):
                r = self.live.get(rid)
                if r is not None and r.visit == visit and r.asked:
                    self._look_up(r, listing.listed(self.kv, r, present))
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
        if fits < 1 or (self.prefills_only and not a.transfer):
            self.out.append(Finished(a.rid, Outcome.REFUSED, capacity.refusal(self.cfg, a, longest)))
            if self.pairs:
                self.pairs[a.peer].refused(a.transfer)
            return
        r = Request(a, self._seq, min(a.max_new, fits), list(a.prompt), n, self.kv.tables(),
                    n if self.prefills_only else self.cfg.max_len + n)
        most = min(n + r.max_new - 1, r.compute_limit)
        r.hot_units = capacity.hot_units(self.cfg, most)
        r.hot_units_max = capacity.hot_units_max(self.cfg, most)
        r.may_host = hosted and capacity.fits(self.cfg, lifecycle.Place.HOST, n + r.max_new - 1)
        self._seq += 1
        self.live[a.rid] = r
        insert(self.waiting, r)
        leader = self.live.get(a.leader) if a.leader is not None else None
        if leader is not None and not leader.num_output:
            r.leader = leader                  # until the pages of the prompt that they share are sealed
            leader.forks.append(r)
            leader.append_until = 0
        else:
            self.enqueue(r)
        if self.pairs:
            self.pairs[a.peer].arrived(r)

    def request_edge(self, rid: RequestId, trigger: Trigger) -> None:
        """Somebody outside wishes an edge; ignored where the tables do not have it."""
        r = self.live.get(rid)
        if r is not None and (r.phase, trigger) in self.edges and not r.is_pushed:
            r.excused += bool(self.transition(r, trigger))

    def _expire(self, r: Request) -> None:
        if r.phase is Phase.QUEUED or (r.phase is Phase.DROPPED and not r.started):
            self.end(r, Outcome.EXPIRED)
        elif r.phase is Phase.FETCHING or (r.phase is Phase.RECEIVING and not r.is_saved):
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
            if gone or event.id in r.waits:
                self.copies_lost(r, event.id, gone)
        for r in kv.leaving if lost else ():
            offload.lose(kv, r, gone)
        kv.moves.finish(flight)
        kept = flight.dst.tier is Tier.DRAM and any([target.pins for _, target in flight.pairs])
        for r in self.saving if kept or lost else ():
            if r.is_saving:                     # it may be what pins them; its tables are long
                offload.let_go_of_device(kv, r)
        if flight.dst.tier is Tier.PEER and flight.request is not None:
            self.pairs[flight.request.arrived.peer].push_ended(event.id, event.ok)

    def copies_lost(self, r: Request, id: MoveId, lost: Collection[Copy]) -> None:
        """Copies have gone that `r` may count on, or that steps in flight have waited for."""
        counted = offload.lose(self.kv, r, lost)
        r.excused += counted or id in r.waits
        if id in r.waits:                      # perhaps of a row that it has given up
            r.invalid_through = r.last_issue
        if r.grant is not None and r.pushed > r.grant.start and counted:
            self.end(r, Outcome.LOST)         # what it has sent may be wrong
        elif id in r.waits and (r.phase, Trigger.DROP) in self.edges:
            self.transition(r, Trigger.DROP)
        elif r.phase is Phase.STAGING and counted:
            self.transition(r, Trigger.STAY)
        elif counted and (r.row is not None or r.phase in (Phase.SENDING, Phase.RECEIVING)
                          or (r.is_saved and not self.kv.is_complete(r))):
            self.transition(r, Trigger.DROP)          # what has gone is computed again

    def delivered(self, r: Request, tokens: tuple[int, ...]) -> None:
        r.delivered = r.num_prompt - r.retired
        if not r.started:
            self._started(r)
        r.computed = r.retired = r.num_prompt
        r.is_saved = True                     # it keeps what it has until it gets a row
        self.update_runnable(r)
        sealing.seal(self.kv, r)
        if (outcome := retire.take(self, r, tokens)) is not None:
            self.end(r, outcome)

    def sent(self, r: Request) -> None:
        self.transition(r, Trigger.SENT)
        del self.live[r.rid]
        self.out.append(Finished(r.rid, Outcome.SENT))

    def end(self, r: Request, outcome: Outcome) -> None:
        moved = self.transition(r, Trigger.END)
        assert moved, "ending never needs resources"
        self.answers += r.num_output > 0
        self.answered += r.num_output
        del self.live[r.rid]
        self.out.append(Finished(r.rid, outcome))

    # ---------------------------------------------------------------- transitions
    def transition(self, r: Request, trigger: Trigger, headroom: Headroom = NONE_LEFT) -> Trial:
        target = self.edges.get((r.phase, trigger))
        if target is None:
            raise IllegalTransition(f"{r.phase} --{trigger}--> ?")
        for watcher in self.watchers:
            watcher.edge(r, trigger)
        source, place = r.phase, lifecycle.place_after(r.phase, trigger, r.place)
        holds = self.holds[target, place]
        gains = any(x not in self.holds[source, r.place] for x in holds) or target is Phase.PAUSED
        if gains and not (trial := self.kv.acquire(r, target, holds, place, headroom)):
            return trial
        r.phase, r.place = target, place
        keep = (*holds, *self.may_hold[target, place])
        leaves = target is Phase.DONE and self.kv.is_long(r)       # it gives up its pages in later turns
        self.kv.release(r, [x for x in lifecycle.Lease if x not in keep and not (leaves and x in PAGES)])
        if source is Phase.LOADING:            # what the device has may be what does not get to the host
            r.failed_saves = r.failed_saves + 1 if target is Phase.DROPPED else 0
        if target in (Phase.DROPPED, Phase.DONE):
            r.kv_epoch += 1
            r.moves = set()                    # its pages wait for them behind fences
            (self.kv.leaving.append if leaves else self.kv.forget_path)(r)
        elif (source, target) == (Phase.PROMOTING, Phase.RESIDENT):
            promote.leave_host(self.kv, r)
        elif trigger is Trigger.STAY:          # its host pages are not complete, nor will they be
            r.failed_saves += 1
            moves = self.kv.moves
            moves.cancel_planned([m for m in moves.outbox if moves.flying[m.id].request is r])
            growth.leave_mirrors(self.kv, r)
            self.kv.release(r, [lifecycle.Lease.DRAM])
        elif (source, target) == (Phase.PROMOTING, Phase.HOSTED):
            promote.stop_reload(self.kv, r)
        if source is Phase.PROMOTING:
            r.loading = []
        r.issued, r.unchanged_until, r.append_until, r.awaits = None, 0, 0, []
        self.edges_taken += 1
        r.visit += 1
        self.update_queues(r, source)
        if self.pairs:
            self.pairs[r.arrived.peer].entered(r, source)
        r.is_saved, r.is_saving, r.coming, r.hot_wait_until = False, False, None, StepId(0)
        if target in (Phase.FETCHING, Phase.RECEIVING) or (target is Phase.DROPPED and not r.started):
            self.out.append(Entered(r.rid, target.value, r.visit))
        for watcher in self.watchers:
            watcher.taken(r, source, trigger)
        return True

    def update_runnable(self, r: Request) -> None:
        waits = r.leader is None and (r.phase in LINE or (r.phase is Phase.RECEIVING and r.delivered > 0))
        if self.prefills_only and r.num_output and r.grant is None:
            waits = False                      # it has been computed once: it waits for its grant
        if waits and not r.is_runnable:
            insert(self.runnable, r)
        elif r.is_runnable and not waits:
            self.runnable.remove(r)
        r.is_runnable = waits

    def enqueue(self, r: Request) -> None:
        """A request that nothing keeps from being served joins the line, and storage is asked for it."""
        self.update_runnable(r)
        if r.is_runnable and self.cfg.disk_pages:
            self._look_up(r, more=bool(self.cfg.store_root) and self.cfg.prefix_cache)

    def _look_up(self, r: Request, more: bool) -> None:
        """Ask storage for pages that the tree does not know; then for what is known to be there."""
        r.asked = listing.keys(self.kv, r) if more else ()
        if r.asked:
            self.out.append(Lookup(r.rid, r.visit, r.asked))
        else:
            insert(self.prefetch_queue, r)
            r.prefetch_pending = True

    def release_forks(self, r: Request) -> None:
        for fork in r.forks:
            fork.leader = None
            self.enqueue(fork)
        r.forks = []

    def update_queues(self, r: Request, source: Phase) -> None:
        """Keep the queues and the counters in step with a phase that has just changed."""
        for queue, phases in ((self.running, ACTIVE), (self.waiting, WAITING), (self.transient, BUSY),
                              (self.saving, HOLDING)):
            if source in phases and r.phase not in phases:
                queue.remove(r)
            elif r.phase in phases and source not in phases:
                insert(queue, r)
        self.update_runnable(r)
        if r.prefetch_pending:                       # it was queued, and is no more
            self.prefetch_queue.remove(r)
            r.prefetch_pending = False
        r.asked = ()
        if r.phase is Phase.DONE:
            self.release_forks(r)
        r.num_preemptions += source in ACTIVE and r.phase in (Phase.PAUSED, Phase.DROPPED)
        self.counters["pauses"] += r.phase is Phase.PAUSED
        self.counters["drops"] += r.phase is Phase.DROPPED
        self.counters["spills"] += r.phase is Phase.STAGING
        self.counters["promotions"] += source is Phase.PROMOTING and r.phase is Phase.RESIDENT

    # ---------------------------------------------------------------- progress without a step
    def _progress(self) -> None:
        kv = self.kv
        for r in list(self.saving):
            if r.phase is Phase.PAUSED and not (r.is_saved or r.moves or kv.in_flight(r)):
                offload.save(kv, r)
                if not kv.is_complete(r):
                    self.transition(r, Trigger.DROP)  # it had lost a page before that
            if (r.phase is Phase.FETCHING and r.more and kv.moves.reads_left
                    and prefetch.is_fetched(kv, r)):
                prefetch.read(kv, r)
        for pair in self.pairs.values():
            pair.push_ready()
        if self.prefetch_queue and kv.moves.reads_left:
            self._fetch()
        self.admission.admit()
        for r in list(self.transient):
            if r.awaits and not any([copy.ready for copy in r.awaits]):
                continue                       # tables are long: it looks when one of these has landed
            if r.phase is Phase.LOADING:
                self._start(r)
            elif r.phase is Phase.PREFILL and not r.todo:
                self.transition(r, Trigger.PREFILLED)  # prefill role: all of it was cached
            elif r.phase is Phase.STAGING:
                self._stage(r)
            elif r.phase is Phase.PROMOTING:
                promote.load_next(kv, r)
                if not (r.loading or r.moves):
                    self.transition(r, Trigger.LANDED)
        if self.cfg.sparse:
            self.residency.progress()

    def _start(self, r: Request) -> None:
        """Leave LOADING once all is in place, or so little is missing that a step may wait for it."""
        missing = allocate.missing(r)
        if missing is None or len(missing) > self.cfg.wait_pages:
            most = self.cfg.wait_pages + 1     # as long as these are missing, too many are
            r.awaits = (missing[-most:] if missing is not None
                       else allocate.last_missing(t.host for t in r.tables))
            return
        r.waits = sorted({copy.filled_by for copy in missing})
        self.transition(r, Trigger.LANDED)
        if not r.started:
            self._started(r)

    def spill(self, r: Request) -> Trial:
        if trial := self.transition(r, Trigger.SPILL):
            self._stage(r)
        return trial

    def _stage(self, r: Request) -> None:
        kv = self.kv
        if not r.is_saved and not offload.is_staged(kv, r):
            if kv.in_flight(r):
                return
            offload.save_down(kv, r, all_groups=False)
            r.is_saved = True
        if offload.is_staged(kv, r):
            trial = self.transition(r, Trigger.LANDED)
            if not trial and not self._is_heating(r, trial):
                reclaim.yield_device(self, r)     # no hot buffer to be had, nor is one on its way
        elif r.is_saved and not r.moves and not offload.is_coming(r):
            reclaim.yield_device(self, r)         # the host has no room any more
        elif r.is_saved:
            r.awaits = allocate.last_missing(t.host for t in r.tables if t.hosted)

    def _is_heating(self, r: Request, refused: Refused) -> bool:
        """Whether pages for the hot buffer of `r`, who was just refused them, are behind fences. It waits
        for the steps that were in flight when it was first refused: others may get those pages."""
        r.hot_wait_until = r.hot_wait_until or self.kv.issued
        return isinstance(refused, Shortage) and refused.behind and self.kv.retired < r.hot_wait_until

    def _fetch(self) -> None:
        """Start reading stored prefixes early, if reading beats computing them again."""
        queued, self.prefetch_queue = self.prefetch_queue, []
        for i, r in enumerate(queued):
            if not self.kv.moves.reads_left:
                self.prefetch_queue = queued[i:]
                return
            r.prefetch_pending = False
            pages = prefetch.stored(self.kv, r)
            if pages and (self.rates is None or self.rates.disk_page_us
                          < self.cfg.page_size * self.rates.prefill_token_us):
                self.transition(r, Trigger.FETCH)

    def _started(self, r: Request) -> None:
        r.started = True
        g, disk = self.cfg.page_size, min(r.fetched, r.loads)    # not what failed on its way
        hbm, dram, disk = (len(r.path) - r.loads) * g, (r.loads - disk) * g, disk * g
        self.counters["prefix_queries"] += r.num_prompt
        self.counters["prefix_hbm_hits"] += hbm
        self.counters["prefix_dram_hits"] += dram
        self.counters["prefix_disk_hits"] += disk
        self.counters["prefix_cut"] += r.cut * g
        self.counters["prefix_recomputed"] += self.kv.recomputed(r)
        self.out.append(Started(r.rid, hbm, dram, disk, r.delivered))
        if self.cfg.store_root and (keys := tuple([node.digest for node in r.path if node.digest])):
            self.out.append(Used(keys))
        if self.cfg.store_reused:
            sealing.reuse(self.kv, r)
