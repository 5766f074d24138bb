"""Who gives way when pages are short: cached pages, loans of hosted rows, then spills, pauses, drops.

Promised units are counted first: while something is already on its way to the free list, nobody
else is disturbed.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator

from penstock.core.kv import claims, offload
from penstock.core.kv.listing import Shortage, Trial, TrialRefused
from penstock.core.kv.page_table import is_own
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import Tier
from penstock.core.request import FAILED_SAVES_MAX, Request, ScheduledRow
from penstock.core.state import CoreState

AWAY_STEPS = 8       # so long a peer may take to say that it writes no more, before the next must ask it


class PlannedRows:
    """The rows of a step that is being planned. They are out of reach of who needs pages: they are older,
    mostly. Remembers what was found out about all others, until one of them takes an edge."""

    def __init__(self, core: CoreState, *rows: list[ScheduledRow]) -> None:
        """rows: lists that grow while the step is planned."""
        self._core, self._rows = core, rows
        self._read = [0] * len(rows)           # so many of each list are in `_requests`
        self._requests: set[Request] = set()
        self._edges = -1
        self._found: dict[Hashable, bool] = {}
        self._skipped: dict[int, int] = {}     # by queue: so many at its end are of no use

    def __bool__(self) -> bool:
        return any(self._rows)

    def __contains__(self, r: Request) -> bool:
        for k, rows in enumerate(self._rows):
            if len(rows) > self._read[k]:
                self._requests.update([row.request for row in rows[self._read[k]:]])
                self._read[k] = len(rows)
        return r in self._requests

    def once(self, question: Hashable, look: Callable[[], bool]) -> bool:
        """The answer to a question that needs a walk, which is taken once as long as no edge is."""
        self._check()
        if question not in self._found:
            self._found[question] = look()
        return self._found[question]

    def forget(self) -> None:
        """Pages were given up without an edge."""
        self._edges = -1

    def youngest(self, queue: list[Request]) -> Request | None:
        """The last of a queue of running requests that is not taken, and does not load."""
        self._check()
        skipped = self._skipped.get(id(queue), 0)
        while skipped < len(queue) and ((r := queue[-1 - skipped]).phase is Phase.LOADING or r in self):
            skipped += 1
        self._skipped[id(queue)] = skipped
        return queue[-1 - skipped] if skipped < len(queue) else None

    def _check(self) -> None:
        if self._edges != self._core.edges_taken:
            self._edges = self._core.edges_taken
            self._found.clear()
            self._skipped.clear()


def reserved_will_come(core: CoreState, tier: Tier = Tier.HBM, taken: PlannedRows | None = None) -> bool:
    """Whether pages of `tier` will become free or evictable without a further victim. What a store reads
    or writes does not count, it may hang; nor does what another engine writes, or reads for a request
    that has ended: that takes as long as it takes. taken: of the step that is being planned, in which the
    walks over copies and windows are taken once."""
    kv = core.kv
    if kv.gives_up or any([pool.in_limbo > pool.away for pool in kv.arenas[tier].pools]):
        return True
    if tier is Tier.HBM and (core.by_place[Place.TO_HOST] or pages_will_come(core)):
        return True

    def will_end() -> bool:
        return any(landing(core, tier)) or (tier is Tier.HBM and _windows_move(core))

    return will_end() if taken is None else taken.once(("promised", tier), will_end)


def _windows_move(core: CoreState) -> bool:
    """Whether steps or copies of a row are not finished that leave pages of a window behind."""
    return any([group.reach for group in core.cfg.groups]) and any(
        core.kv.in_flight(r) and any([t.reach and t.begin(r.computed) > t.first for t in r.tables])
        for r in core.running)


def pages_will_come(core: CoreState) -> bool:
    """Whether somebody who has no row is about to give up device pages."""
    return core.num_pushed > 0 or bool(core.kv.softening) or any(
        r.phase is Phase.PAUSED and any([t.device for t in r.tables]) for r in core.saving)


def landing(core: CoreState, tier: Tier) -> Iterator[Copy]:
    """Pages of `tier` that can be evicted when copies that surely end have landed."""
    for flight in core.kv.moves.flying.values():
        ends = flight.src.tier, flight.dst.tier
        if tier not in ends or Tier.DISK in ends or Tier.PEER is ends[0] or (
                Tier.PEER is ends[1] and flight.request is not None and flight.request.phase is Phase.DONE):
            continue
        side = ends.index(tier)
        yield from (pair[side] for pair in flight.pairs if pair[side].pins == 0)


def for_growth(core: CoreState, r: Request, tier: Tier, taken: PlannedRows) -> None:
    """`r` runs and needs one more page of `tier`: somebody gives up theirs, possibly `r` itself."""
    if reserved_will_come(core, tier, taken):
        return
    if tier is Tier.DRAM:
        _for_host_pages(core, taken)
        return
    if core.prefills_only and _drop_sending(core, r):
        return
    for q in reversed(core.by_place[Place.TO_DEVICE]):
        if q not in taken:
            undo_promotion(core, q)              # it decodes without the pages that it was promised
            return
    if _revoke_grant(core, Tier.HBM, taken):
        return
    # A spill may end in a pause, if there is no hot buffer to be had: the oldest goes last of all.
    if core.cfg.sparse and not taken.once(
            ("no spill", _changes(core)), lambda: not _spill_youngest(core, taken)):
        return
    victim = taken.youngest(core.running)
    assert victim is not None, "who needs a page is not in the step yet"
    if victim is r and r is not core.running[-1]:
        return                                 # the younger ones still load: wait for them (sim seed 210)
    if victim is r and core.kv.in_flight(r) and any(t.group.reach for t in r.tables):
        return                                 # its steps leave window pages behind (sim seed 287)
    if victim is r and _drop_stranded(core, r):
        return                                 # somebody who does not even run was in the way
    if victim is core.running[0] and len(core.running) > 1:
        return                                 # all others are in this very step
    if victim is core.running[0] and core.kv.arenas[tier].away:
        return                                 # what the peer still has comes back
    yield_device(core, victim)
    taken.forget()


def _spill_youngest(core: CoreState, taken: PlannedRows) -> bool:
    return any(victim not in taken and spills(core, victim)
               for victim in reversed(core.by_place[Place.DEVICE]))


def _changes(core: CoreState) -> int:
    """As long as this is the same, no page of the device or of the host has changed hands."""
    return sum([pool.changes for tier in (Tier.HBM, Tier.DRAM) for pool in core.kv.arenas[tier].pools])


def may_spill(core: CoreState, r: Request) -> bool:
    """Whether `r` frees device pages when it goes on from the host, and copies to there do not always
    fail it."""
    return (r.state == (Phase.DECODE, Place.DEVICE) and r.may_host and r.setbacks.failed_saves < FAILED_SAVES_MAX
            and any(t.hosted and len(t.device) > r.hot.least for t in r.tables))


def spillable(core: CoreState, r: Request, most: int = 1) -> int:
    """Slabs (of a single group pages), counted to about `most`, that nobody has any more when `r` goes on
    from the host: what it shares stays, which is how its tables begin, and of its own a hot buffer."""
    if not may_spill(core, r):
        return 0
    free, hot = 0, r.hot.least
    for t in r.tables:
        if t.hosted:
            own = itertools.takewhile(lambda c: c is not None and is_own(c), reversed(t.device))
            per = t.group.slab_pages if len(r.tables) > 1 else 1
            free += max(0, sum(1 for _ in itertools.islice(own, hot + most * per)) - hot) // per
    return free


def spills(core: CoreState, victim: Request) -> bool | TrialRefused:
    """Let it go on from host pages, if that helps and there is room. The first of all only when alone."""
    last = victim is core.running[0] and len(core.running) > 1
    return not last and spillable(core, victim) > 0 and spill(core, victim)


def spill(core: CoreState, r: Request) -> Trial:
    """Let a resident row go on from host pages: at once, if they are complete."""
    if trial := core.transition(r, Trigger.RELOCATE, Place.TO_HOST):
        stage(core, r)
    return trial


def undo_promotion(core: CoreState, r: Request) -> None:
    """It goes on from the host, and is not the next to come back."""
    r.promotion.undone_at = core.kv.issued
    core.transition(r, Trigger.RELOCATE, Place.HOST)


def stage(core: CoreState, r: Request) -> None:
    """`r` is on its way to the host: what it can do by itself."""
    if not r.saving.is_done and not offload.save(core.kv, r):
        core.is_saving = True
        return
    if not offload.is_copied(r):
        r.blocked_on = offload.coming(r)
        if not (r.moves or r.blocked_on or not r.saving.unsaved):
            yield_device(core, r)     # the host has no room any more
        return
    trial = core.transition(r, Trigger.RELOCATE, Place.HOST)
    if not (trial or (isinstance(trial, Shortage) and trial.waits_for_fence)):
        yield_device(core, r)         # no hot buffer to be had, nor is one on its way


def _for_host_pages(core: CoreState, taken: PlannedRows) -> None:
    """Mirrors, which no step reads, go first, of one row, then who does not run gives way, then the youngest
    that runs from host pages."""
    if not taken.once(("no mirrors", _changes(core)), lambda: not _drop_mirrors(core)):
        taken.forget()
        return
    if drop_fetching(core) or _drop_paused(core, None) or _revoke_grant(core, Tier.DRAM, taken):
        return
    victim = taken.youngest(core.on_host)
    if victim is None:
        return
    # The first of all waits for what loads, or is away.
    others = victim is core.running[0] and any(r is not victim and r not in taken for r in core.on_host)
    if victim is not core.running[0] or not (
            core.kv.arenas[Tier.DRAM].away or others or reserved_will_come(core, Tier.DRAM, taken)):
        core.transition(victim, Trigger.DROP)


def _drop_mirrors(core: CoreState, but: Request | None = None) -> bool:
    return core.cfg.sparse and any(
        claims.drop_mirrors(core.kv, r) for r in reversed(core.running) if r is not but)


def is_away(core: CoreState) -> bool:
    """Whether pages wait for another engine: to say that it writes them no more, or to have read them for a
    request that has ended."""
    return any(arena.away for arena in core.kv.arenas.values()) or bool(core.kv.moves.pushes_of_ended())


def _revoke_grant(core: CoreState, tier: Tier, taken: PlannedRows) -> bool:
    """Decode role: the youngest request that has pages and no row computes its prompt itself, one whose
    KV has come before others. Pages that the other engine may still write come back when it says so:
    it is given some steps for that, or, if nobody can go on, until the next event. Returns whether to wait
    for the pages."""
    kv = core.kv

    def has_pages(r: Request) -> bool:
        return any([t.device if tier is Tier.HBM else t.host for t in r.tables])

    victim = next(filter(has_pages, reversed(core.delivered)), None)
    if victim is not None:
        return bool(core.transition(victim, Trigger.DROP))
    if kv.arenas[tier].away:
        goes_on = core.in_flight or taken or any(q.computed < q.unchanged_until for q in core.running)
        if kv.issued < core.last_revoke_step + AWAY_STEPS if goes_on else core.revoke_pending:
            return True
    victim = next(filter(has_pages, reversed(core.by_phase[Phase.RECEIVING])), None)
    if victim is not None:
        core.last_revoke_step, core.revoke_pending = kv.issued, True
        return bool(core.transition(victim, Trigger.DROP))
    return False


def _drop_youngest(core: CoreState, queue: list[Request], but: Request | None = None) -> bool:
    """Of those who wait; it computes again, later, what it gives up."""
    victim = next((q for q in reversed(queue) if q is not but), None)
    return victim is not None and bool(core.transition(victim, Trigger.DROP))


def _drop_sending(core: CoreState, but: Request | None) -> bool:
    """Prefill role: one that was computed and has no grant."""
    return _drop_youngest(core, core.ungranted, but)


def _drop_delivered(core: CoreState, but: Request | None = None) -> bool:
    """Decode role: one whose KV has arrived and that has no row."""
    return _drop_youngest(core, core.delivered, but)


def for_admission(core: CoreState, r: Request) -> bool:
    """`r` waits. Nobody who runs gives way to it, but pages of those who wait behind it must not block the
    engine for ever. Returns whether nothing can be done: another engine still has pages that it was granted
    and that were given up, and nobody knows when they come back."""
    kv = core.kv
    if core.running or kv.rows.in_limbo or reserved_will_come(core) or reserved_will_come(core, Tier.DRAM):
        return False
    if _drop_sending(core, r) or _drop_delivered(core, r) or _drop_stranded(core, r):
        return False
    if drop_fetching(core, r) or _drop_paused(core, r):
        return False
    if r.phase in (Phase.PAUSED, Phase.FETCHING, Phase.RECEIVING):
        core.transition(r, Trigger.DROP)              # what it kept is in its own way
        return False
    # What is cached may lie one page to a slab.
    return not (kv.tree.evict_all(kv.device) or kv.tree.evict_all(kv.host)) and is_away(core)


def yield_device(core: CoreState, victim: Request) -> None:
    """Pause if the host has room for the KV, else drop it. Fetched pages that nobody has used yet
    are worth less than computed ones."""
    if (victim.phase, Trigger.PAUSE) in core.edges:
        while not core.transition(victim, Trigger.PAUSE):
            if reserved_will_come(core, Tier.DRAM):
                return                         # it can pause when they have come
            if not (_drop_mirrors(core, victim) or drop_fetching(core)):
                break
            if spills(core, victim):
                return                         # now there is room for that
        else:
            return
    core.transition(victim, Trigger.DROP)


def drop_fetching(core: CoreState, but: Request | None = None) -> bool:
    """One whose pages come from storage."""
    return _drop_youngest(core, core.by_phase[Phase.FETCHING], but)


def _drop_paused(core: CoreState, but: Request | None) -> bool:
    return _drop_youngest(core, core.by_phase[Phase.PAUSED], but)


def _drop_stranded(core: CoreState, but: Request | None) -> bool:
    """A paused one that still needs device pages, because their copies failed."""
    return _drop_youngest(core, core.stranded, but)
