"""What a planner knows, and the edges that its requests take.

Policies, the schedule and the seam to a peer are given this, and need to know no more of `Core`. `transition`
is the only function that changes a phase; it derives what to acquire and release from the lease tables.
"""
from __future__ import annotations

from typing import TypeAlias

from penstock.core import lifecycle
from penstock.core.kv import claims, listing, promote, sealing
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.listing import Trial
from penstock.core.kv.pages import NONE_LEFT, Headroom
from penstock.core.lifecycle import (
    ACTIVE,
    LINE,
    WAYS_IN,
    IllegalTransition,
    Lease,
    Mode,
    Phase,
    Place,
    Role,
    State,
    Trigger,
)
from penstock.core.plan import (
    Entered,
    Event,
    Finished,
    Lookup,
    Outcome,
    Output,
    Rates,
    RequestId,
    Row,
    Started,
    StepId,
    Used,
)
from penstock.core.policy.sessions import Sessions
from penstock.core.queues import Queues, insert, keep, remove
from penstock.core.request import Request, ScheduledRow
from penstock.core.settings import CoreConfig

PAGES = (Lease.HBM, Lease.DEVICE_ONLY, Lease.DRAM)
Columns: TypeAlias = tuple[tuple[Row, ...], tuple[RequestId, ...], tuple[int, ...], tuple[bool, ...]]


class Watcher:
    """Receives events and edges as they happen, once it is in `Core.watchers`, and takes no edge itself. Each of
    these does nothing until it is overridden."""

    def event(self, event: Event) -> None:
        """It is about to be applied."""

    def applied(self, event: Event) -> None:
        """It has been, and no edge of the planner's own was taken since."""

    def edge(self, r: Request, trigger: Trigger, place: Place) -> None:
        """It is asked for, and may be refused for want of pages. place: where the KV of `r` would be."""

    def taken(self, r: Request, source: State, trigger: Trigger) -> None:
        """`r` has left `source` for the state that it is in."""

    def counted(self, r: Request, step: StepId, tokens: int) -> None:
        """So many of the results of `step` for `r` are its tokens; all are where this is not called. step 0: of
        those of a prefill instance; where this is not called, none are."""


class CoreState(Queues):
    """One engine's requests, their pages, and the edges that requests take."""

    def __init__(self, cfg: CoreConfig) -> None:
        role = Role(cfg.role)
        mode = Mode(host=cfg.dram_pages > 0, disk=cfg.disk_pages > 0, sparse=cfg.sparse, role=role)
        super().__init__(cfg)
        self.cfg, self.mode = cfg, mode
        self.edges = lifecycle.edges(mode)
        self.holds = lifecycle.holds(mode)
        self.may_hold = lifecycle.may_hold(mode)
        self.kv = KVCache(cfg)
        self.live: dict[RequestId, Request] = {}
        self.runnable: list[Request] = []      # of those waiting, who waits for a row,
        self.candidates: list[Request] = []    # and of these, who waits for no answer of storage
        self.prefetch_queue: list[Request] = []  # of those queued, whom storage was not asked for
        self.in_flight: dict[StepId, list[ScheduledRow]] = {}
        self.columns: dict[int, tuple[list[ScheduledRow], Columns]] = {}  # of the last plans
        self.edges_taken = 0
        self.counters: dict[str, int] = dict.fromkeys(
            ("pauses", "drops", "spills", "promotions", "prefix_queries", "prefix_hbm_hits",
             "prefix_dram_hits", "prefix_disk_hits", "prefix_recomputed", "failed_moves", "rows_looked_at",
             "computed_again",
             *(f'prefix_cache_cut_total{{group="{group.name}"}}' for group in cfg.groups if group.reach)), 0)
        self.rates: Rates | None = None        # None: not measured yet
        self.sessions = Sessions(cfg.sessions_max, self.kv.tree.retained)
        self.warming: list[Request] = []       # those that end when storage has been read
        self.answers = 0                       # requests that have ended with some output,
        self.answered = 0                      # and tokens of it
        self.prefills_only = role is Role.PREFILL
        self.last_revoke_step = StepId(0)      # when a grant was last given up for its pages,
        self.revoke_pending = False            # and whether since the last event
        self.is_saving = False                 # a request saves or lends more of its pages in the next turn
        self.taken_early = 0                   # times that a prompt took pages and waits for more before a step
        self.out: list[Output] = []
        self.watchers: list[Watcher] = []      # add yourself

    # ---------------------------------------------------------------- transitions
    def transition(self, r: Request, trigger: Trigger, place: Place | None = None,
                   headroom: Headroom = NONE_LEFT) -> Trial:
        """Change the phase, or where its KV is; or change nothing, and return what was lacking, which is false.
        place: of triggers that say where, see `lifecycle.PLACED`."""
        source = r.state
        target = self.edges.get((r.phase, trigger))
        says = (trigger in lifecycle.PLACED) is (place is not None)
        if target is None or not says or (trigger is Trigger.RELOCATE and place not in lifecycle.WAYS[r.place]):
            raise IllegalTransition(f"{source} --{trigger}--> {place}")
        state = State(target, place or lifecycle.settled(r.place))
        for watcher in self.watchers:
            watcher.edge(r, trigger, state.place)
        holds = self.holds[state]
        gains = any(x not in self.holds[source] for x in holds) or target is Phase.PAUSED
        if trigger not in WAYS_IN and r in self.kv.entering:
            self.kv.abandon(r)
        if r.held.booked is not None:
            self.kv.unbook(r)                  # for the phase that it leaves; refused, it goes on without
        if gains and not (trial := self.kv.acquire(r, state, holds, headroom)):
            return trial
        r.phase, r.place = state
        keep = (*holds, *self.may_hold[state])
        if r.read_to is not None and not (r.place.on_host and target in ACTIVE):
            self.kv.pin_resident(r)
        # Whether it gives up its pages in later turns.
        if target in (Phase.DONE, Phase.DROPPED):
            self.kv.return_reserve(r)
        leaves = target in (Phase.DONE, Phase.DROPPED) and self.kv.is_long(r)
        self.kv.release(r, [x for x in Lease if x not in keep and not (leaves and x in PAGES)])
        if target is Phase.LOADING:
            r.origin.shares_pages = bool(r.path) or r.remote.delivered > 0
        if target in (Phase.LOADING, Phase.RECEIVING) and not r.origin.retried:   # then it begins with none
            r.origin.own_from = min(r.origin.own_from, len(r.path))
        if source.phase is Phase.LOADING:      # what the device has may be what does not get to the host
            r.setbacks.failed_saves = r.setbacks.failed_saves + 1 if target is Phase.DROPPED else 0
        if target in (Phase.DROPPED, Phase.DONE):
            r.kv_epoch += 1
            r.moves = set()                    # its pages wait for them behind fences
            if leaves:
                self.kv.freeing.append(r if target is Phase.DONE else r.hand_over(self.kv.tables()))
            else:
                self.kv.forget_path(r, used=True)
        elif trigger is Trigger.RELOCATE:
            self._relocated(r, source.place)
        r.begin()
        self.edges_taken += 1
        self.update_queues(r, source)
        if target in (Phase.FETCHING, Phase.RECEIVING) or (target is Phase.DROPPED and not r.started):
            self.out.append(Entered(r.rid, target.value, r.visit))
        for watcher in self.watchers:
            watcher.taken(r, source, trigger)
        return True

    def _relocated(self, r: Request, source: Place) -> None:
        """The KV of `r` has come to where it was to go, or goes no further."""
        self.counters["spills"] += r.place is Place.TO_HOST
        if source is Place.TO_HOST and r.place is Place.DEVICE:      # its host pages are not complete, nor will they be
            r.setbacks.failed_saves += 1
            moves = self.kv.moves
            moves.cancel_planned([m for m in moves.outbox if moves.flying[m.id].request is r])
            claims.leave_mirrors(self.kv, r)
            self.kv.release(r, [Lease.DRAM])
        elif source is Place.TO_DEVICE and r.place is Place.DEVICE:
            self.counters["promotions"] += 1
            promote.leave_host(self.kv, r)
        elif source is Place.TO_DEVICE:
            promote.stop_reload(self.kv, r)

    def update_runnable(self, r: Request) -> None:
        """Keep the line of those who wait for a row in step with what has changed about one of them."""
        waits = r.leader is None and (r.phase in LINE or (r.phase is Phase.RECEIVING and r.remote.delivered > 0))
        if r.arrived.warms or (self.prefills_only and r.num_output and r.remote.grant is None):
            waits = False                      # it wants no row, or has been computed once and waits for its grant
        if waits is not r.is_runnable:
            (insert if waits else remove)(self.runnable, r)
        if waits or r.is_runnable:
            keep(self.candidates, r, waits and not r.storage.keys)
        r.is_runnable = waits

    def enqueue(self, r: Request) -> None:
        """A request that nothing keeps from being served joins the line, and storage is asked for it."""
        self.update_runnable(r)
        if self.cfg.disk_pages and (r.is_runnable or (r.arrived.warms and self.cfg.dram_pages)):
            self.look_up(r, more=bool(self.cfg.store_root) and self.cfg.prefix_cache)

    def look_up(self, r: Request, more: bool) -> None:
        """Ask storage for pages that the tree does not know; then for what is known to be there."""
        r.storage.keys = listing.keys(self.kv, r) if more else ()
        if r.storage.keys:
            self.out.append(Lookup(r.rid, r.visit, r.storage.keys))
        else:
            insert(self.prefetch_queue, r)
            r.storage.is_due = True
        self.update_runnable(r)

    def release_forks(self, r: Request) -> None:
        """`r` has begun to answer, or never will: its forks wait no more."""
        path = r.path.copy() if r.forks else []      # one for all: `r` gives up its own page by page
        for fork in r.forks:
            fork.leader = None
            mine, other = fork.arrived, r.arrived          # one prompt in an engine, two alike in a replay
            if mine.namespace == other.namespace and (
                    mine.prompt is other.prompt or mine.prompt == other.prompt):
                fork.hint(path)                # pages of outputs are not looked at, see `_name`
            self.enqueue(fork)
        r.forks = []

    def update_queues(self, r: Request, source: State) -> None:
        """Keep the queues and the counters in step with a state that has just changed."""
        self.state_changed(r, source)
        self.update_runnable(r)
        if r.storage.is_due:                       # it was queued, and is no more
            remove(self.prefetch_queue, r)
            r.storage.is_due = False
        if r.phase is Phase.DONE:
            self.release_forks(r)
        r.setbacks.preemptions += source.phase in ACTIVE and r.phase in (Phase.PAUSED, Phase.DROPPED)
        self.counters["pauses"] += r.phase is Phase.PAUSED
        self.counters["drops"] += r.phase is Phase.DROPPED

    def end(self, r: Request, outcome: Outcome) -> None:
        """It has ended, whatever its phase; SENT: the decode engine has it all."""
        # Of one without KV the path is of a trial to get a row: as far as that has come.
        if r.phase not in (Phase.QUEUED, Phase.DROPPED) and not r.arrived.warms:
            self.sessions.retained.used(r.session, r.path)
        moved = self.transition(r, Trigger.SENT if outcome is Outcome.SENT else Trigger.END)
        assert moved, "ending never needs resources"
        self.answers += r.num_output > 0
        self.answered += r.num_output
        del self.live[r.rid]
        if r.arrived.warms:
            self.warming.remove(r)
        self.out.append(Finished(r.rid, outcome))

    def started(self, r: Request) -> None:
        """The first row or the first token of `r`: say what of its prompt was found, and where."""
        r.started = True
        g, disk = self.cfg.page_size, min(r.storage.fetched, r.found.loads)    # not what failed on its way
        unread = min([t.begin(r.computed) * t.unit for t in r.tables]) // g   # all groups are past it
        found = [len(r.path) - unread - r.found.loads, r.found.loads - disk, disk]
        found[next((i for i, n in enumerate(found) if n), 0)] += unread
        hbm, dram, disk = (n * g for n in found)
        self.counters["prefix_queries"] += r.num_prompt
        self.counters["prefix_hbm_hits"] += hbm
        self.counters["prefix_dram_hits"] += dram
        self.counters["prefix_disk_hits"] += disk
        for lacking, pages in r.found.lost_by_group.items():
            self.counters[f'prefix_cache_cut_total{{group="{self.cfg.groups[lacking].name}"}}'] += pages * g
        self.counters["prefix_recomputed"] += self.kv.recomputed(r)
        self.out.append(Started(r.rid, hbm, dram, disk, r.remote.delivered))
        if self.cfg.store_root and (keys := tuple([node.digest for node in r.path if node.digest])):
            self.out.append(Used(keys))
        if self.cfg.store_reused:
            sealing.reuse(self.kv, r)
