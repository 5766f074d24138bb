"""Who of the waiting gets a row: in order, and the first that does not fit blocks the rest.

Asks `capacity` for the ways in and `Core` for the edge. Room is counted, but a trial also matches and pins a
prefix: who did not fit is not tried again before as much has come as it lacked, or those that it waits for
have changed. Else a turn next to a head of which 30,000 tokens are cached takes 5 ms, not .04 (ADR 0108).
"""
from __future__ import annotations

from typing import NamedTuple

from penstock.core.kv import prefetch
from penstock.core.kv.listing import UNDERWAY, Shortage, SourceNotReady
from penstock.core.kv.pages import Headroom
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import StepId, Tier
from penstock.core.policy import capacity, reclaim
from penstock.core.request import PREEMPTIONS_MAX, Request
from penstock.core.state import CoreState

MORE = 2             # times `cfg.admissions` that a turn admits at most,
PAGES = 128          # and page table entries for each of these, after which it admits nobody more
LOOK_STEPS = 4       # so long nobody looks again for rows that could make way, if they had too little


class Blocked(NamedTuple):
    """Why a request got no row: it needs that fewer run, that they change, pages, or a copy that ends."""

    request: Request
    visit: int
    is_asked: bool                         # it has, or had, another way in
    running: int
    state: tuple[int, ...] | None          # of those that run, see `_state`; None: only pages count
    shortages: list[Shortage]
    early: list[Copy]                      # were still being filled


class Round(NamedTuple):
    """How far the trial of a request has come that goes on in the next turn."""

    request: Request
    visit: int
    place: Place                           # the way in that is under way,
    running: int                           # and why those before it led nowhere, see `Blocked`
    state: tuple[int, ...] | None
    shortages: list[Shortage]
    early: list[Copy]


class Admission:
    """The head of one engine's queue, and why it waits."""

    def __init__(self, core: CoreState) -> None:
        self.core = core
        self._blocked: Blocked | None = None   # the head of the queue, when it last did not fit
        self._skipped: Request | None = None   # the same, if it was not tried in this turn
        self._round: Round | None = None
        self._waits = False
        self.is_underway = False               # a trial of this turn goes on in the next
        self.begin_turn()
        # Edges and steps when nobody could make way for it, and what those lacked who would have.
        self._vain = -1, StepId(0), list[Shortage]()

    def admit(self) -> None:
        """Give rows and pages to the waiting, in order; the first that does not fit blocks the rest,
        so that nobody starves behind smaller requests."""
        self._skipped, self._waits, passed, self.is_underway = None, False, False, False
        at, line = 0, self.core.candidates
        if not self.core.runnable:
            self._blocked = None
        while at < len(line):
            r = line[at]
            if r.phase is Phase.FETCHING and not self.core.cfg.fetch_waits and self.core.kv.rows.free:
                self.core.transition(r, Trigger.DROP)      # it goes on with what has come
            if not self.may_start(r):
                at += 1
                continue
            if self.is_full:
                return
            if self._is_blocked(r):
                self._skipped = r
                self._make_way(r)
                return
            if self._enter(r):
                if passed:
                    return
                self._count(r)
            elif self.is_underway:
                return
            elif reclaim.for_admission(self.core, r):
                passed, at = True, at + 1      # others need not wait as well: one of them goes on
            else:
                self._make_way(r)
                return

    def begin_turn(self) -> None:
        """A new turn has admitted nobody yet."""
        self._entered, self._pages, self._backlog = 0, 0, -1
        self.step = self.core.kv.issued        # the last step before this turn

    @property
    def is_full(self) -> bool:
        """Whether this turn has admitted enough: `cfg.admissions` at least, and more while the step being
        planned has positions left for them, as long as the turn stays short."""
        n = self.core.cfg.admissions
        if self._pages >= PAGES * n:
            return True
        if self._entered < n:
            return False
        if self._backlog < 0:                  # decoding rows take one position each
            self._backlog = len(self.core.running) + sum([r.todo - 1 for r in self.core.transient])
        return self._backlog >= self.core.cfg.step_tokens or self._entered >= MORE * n

    def _count(self, r: Request) -> None:
        """`r` was admitted in this turn."""
        self._entered += 1
        self._pages += sum([len(t.device) + len(t.host) for t in r.tables])
        if self._backlog >= 0 and r.row is not None:
            self._backlog += r.todo

    def _is_blocked(self, r: Request) -> bool:
        """Whether `r` did not fit, and less has come since than it lacked. Its tables are long: it is
        not tried for nothing. If nobody runs it is, for then somebody who waits may have to give way."""
        b = self._blocked
        return (b is not None and b.request is r and (b.visit, b.is_asked) == (r.visit, r.remote.is_asked)
                and 0 < b.running <= len(self.core.running) and b.state in (None, self._state())
                and all([copy.moves and not copy.ready for copy in b.early])
                and all([self.core.kv.is_short(r, shortage) for shortage in b.shortages]))

    def _state(self) -> tuple[int, ...]:
        """As long as this is the same, as many can run to their ends beside each other."""
        kv = self.core.kv
        return self.core.edges_taken, len(kv.moves.to_peer), *[arena.away for arena in kv.arenas.values()]

    def shortages_of(self, r: Request | None) -> list[Shortage]:
        """What `r` lacked, if it is the head of the queue and did not fit."""
        b = self._blocked
        return b.shortages if b is not None and b.request is r else []

    def lacks(self, tier: Tier) -> bool:
        """Whether pages of `tier` are what the head of the queue lacked."""
        b = self._blocked
        return b is not None and b.request.is_runnable and any([s.tier is tier for s in b.shortages])

    def needs_pages(self) -> bool:
        """Whether somebody in line does. Who is RECEIVING has them, mostly."""
        b, core = self._blocked, self.core
        return len(core.runnable) > len(core.delivered) or (
            b is not None and b.request.is_runnable and bool(b.shortages))

    def is_due(self) -> bool:
        """Whether planning has made room for somebody who was not tried, or what `_make_way` waited for has
        gone: pages that others were giving up (sim seed 8457)."""
        if self._waits and not self.core.kv.gives_up:
            return True
        return self._skipped is not None and not self._is_blocked(self._skipped)

    def _enter(self, r: Request) -> bool:
        state, no_row = None, False
        shortages: list[Shortage] = []
        early: list[Copy] = []
        trigger, places = capacity.ways_in(self.core, r)
        at, self._round, running = self._round, None, len(self.core.running)
        resumes = (at is not None and (at.request, at.visit) == (r, r.visit) and at.place in places
                   and running > 0)        # alone, every way takes one turn: it begins with the first
        if at is not None and resumes:
            places, state, shortages, early = places[places.index(at.place):], at.state, at.shortages, at.early
            running = max(running, at.running)
        for place in places:
            left = headroom(self.core, r, place)
            if left is None:
                state = self._state()          # until the others that run have changed
                continue
            trial = self.core.transition(r, trigger, place, left)
            if trial:
                return True
            if trial is UNDERWAY:
                self._see(shortages)
                self._round = Round(r, r.visit, place, running, state, shortages, early)
                self._blocked, self.is_underway = None, True
                return False
            if isinstance(trial, SourceNotReady):
                early.append(trial.source)
            elif isinstance(trial, Shortage):
                shortages.append(trial)
            else:
                no_row = True                  # that is soon seen
        self._see(shortages)
        self._blocked = Blocked(r, r.visit, r.remote.is_asked, running, () if no_row else state, shortages, early)
        # The ways before the one that went on were tried in an earlier turn: what they lacked may have come.
        return resumes and not self._is_blocked(r) and self._enter(r)

    def _see(self, shortages: list[Shortage]) -> None:
        """Note what has come until now, where that is not known of an earlier turn."""
        for shortage in shortages:
            shortage.capacity_version = shortage.capacity_version or self.core.kv.capacity_version(shortage.tier)

    def _make_way(self, r: Request) -> None:
        """`r` lacks device pages that nobody was promised: the youngest that runs goes on from the host, if
        all that may would leave it enough. The first of all stays, unless it is alone, and so does who has
        given way twice: what keeps a row from the host may make it give way."""
        core, kv = self.core, self.core.kv
        shortages = [s for s in self.shortages_of(r) if s.tier is Tier.HBM and core.cfg.sparse]
        self._waits = bool(shortages) and kv.gives_up
        if not shortages or kv.gives_up or reclaim.pages_will_come(core) or core.by_place[Place.TO_HOST]:
            return
        short = min([kv.arenas[s.tier].short(s.want, promised=True) for s in shortages])
        taken, step, lacked = self._vain       # looking again walks the ends of tables, and some whole
        waits = kv.issued < step + LOOK_STEPS if not lacked else all(
            [kv.arenas[s.tier].lacks(s.want) for s in lacked])
        if short <= 0 or (waits and taken == core.edges_taken):
            return
        short -= sum(1 for _ in reclaim.landing(core, Tier.HBM))
        rows = [q for q in core.running[1:] or core.running
                if reclaim.may_spill(core, q) and q.setbacks.preemptions < PREEMPTIONS_MAX - 1]
        lacked = []
        self._vain = core.edges_taken, kv.issued, lacked
        if short <= 0 or sum([reclaim.spillable(core, q, short) for q in rows]) < short:
            return
        for q in reversed(rows):
            if trial := reclaim.spills(core, q):
                return
            if isinstance(trial, Shortage):
                lacked.append(trial)

    def may_start(self, r: Request) -> bool:
        """Whether nothing that `r`, who is in line, waits for by itself keeps it from getting a row."""
        if r.moves or r.storage.keys or self.core.kv.in_flight(r):
            return False
        if r.phase is Phase.PAUSED and not r.saving.is_done:
            return False
        return r.phase is not Phase.FETCHING or prefetch.is_fetched(self.core.kv, r)


def headroom(core: CoreState, r: Request, place: Place) -> Headroom | None:
    """Which rows must still be able to grow by a page when `r` gets a row: all that run. None: it has
    to wait. Who has given way twice returns only when all that run, and it, can end without another
    victim. Those admitted later give way before it, or, if they come first in the order of service,
    leave it room to its end (`>` below: `test_core_room` has the one that would else give way for ever). So
    nobody gives way more than three times."""
    tired = r.setbacks.preemptions >= PREEMPTIONS_MAX - 1 or bool(core.tired and core.tired[-1].key > r.key)
    if tired and (core.running or reclaim.is_away(core)) and not capacity.all_end(core, r, place):
        return None
    if tired and not core.running and not _is_clear(core, r):
        return None
    return capacity.growing(core)


def _is_clear(core: CoreState, r: Request) -> bool:
    """Nobody runs: make all slabs whole, also of what others than `r` have pinned. Pages of several groups that lie
    scattered over them are more than was counted. False: some are still behind fences, and whoever came now would
    have to lie around them."""
    kv = core.kv
    if len(core.cfg.groups) == 1:
        return True
    for other in [q for q, entering in kv.entering.items() if q is not r and (entering.pins or entering.optional)]:
        kv.abandon(other)
    kv.tree.evict_all((*kv.device, *kv.host))
    kv.drain()
    return not any(pool.in_limbo > pool.away for tier in (Tier.HBM, Tier.DRAM)
                   for pool in kv.arenas[tier].pools)
