"""Who gives way when pages are short: cached pages, loans of hosted rows, then spills, pauses, drops.

Promised units are counted first: while something is already on its way to the free list, nobody
else is disturbed.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from penstock.core.kv import allocate, claims, offload
from penstock.core.kv.page_table import is_own
from penstock.core.kv.pages import Refused, Shortage, Trial
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import Tier
from penstock.core.request import FAILED_SAVES_MAX, Request
from penstock.core.state import CoreState

PREEMPTIONS_MAX = 3
AWAY_STEPS = 8       # so long a peer may take to say that it writes no more, before the next must ask it


def promised(core: CoreState, tier: Tier = Tier.HBM) -> bool:
    """Whether pages of `tier` will become free or evictable without a further victim. What a store reads
    or writes does not count, it may hang; nor does what another engine writes, or reads for a request
    that has ended: that takes as long as it takes."""
    kv = core.kv
    if kv.leaving or any(pool.in_limbo > pool.away for pool in kv.arenas[tier].pools) or any(
            landing(core, tier)):
        return True
    if tier is not Tier.HBM:
        return False
    # Their steps or their copies are not finished, or leave pages of a window behind.
    if any(kv.in_flight(r) and any([t.reach and t.begin(r.computed) > t.first for t in r.tables])
           for r in core.running):
        return True
    return any(r.phase is Phase.STAGING for r in core.running) or leaving(core)


def leaving(core: CoreState) -> bool:
    """Whether somebody who has no row is about to give up device pages."""
    if any(r.phase is Phase.SENDING and r.is_pushed for r in core.waiting):
        return True
    return any(r.phase is Phase.PAUSED and any(t.device for t in r.tables) and not _is_bare(r)
               for r in core.waiting)


def landing(core: CoreState, tier: Tier) -> Iterator[Copy]:
    """Pages of `tier` that can be evicted when copies that surely end have landed."""
    for flight in core.kv.moves.flying.values():
        ends = flight.src.tier, flight.dst.tier
        if tier not in ends or Tier.DISK in ends or Tier.PEER is ends[0] or (
                Tier.PEER is ends[1] and flight.request is not None and flight.request.phase is Phase.DONE):
            continue
        side = ends.index(tier)
        yield from (pair[side] for pair in flight.pairs if pair[side].pins == 0)


def _is_bare(r: Request) -> bool:
    """A parked request whose device pages stay: they could not be copied to the host."""
    return r.is_saved and not r.is_saving and not r.moves


def for_growth(core: CoreState, r: Request, tier: Tier, taken: list[Request]) -> None:
    """`r` runs and needs one more page of `tier`: somebody gives up theirs, possibly `r` itself. Rows already
    in the step being planned are out of reach, they are older."""
    if promised(core, tier):
        return
    if tier is Tier.DRAM:
        _for_host_pages(core, taken)
        return
    if core.prefills_only and _drop_sending(core, r):
        return
    for victim in reversed(core.hosted):
        if victim not in taken and victim.phase is Phase.PROMOTING:
            victim.promotion_undone_at = core.kv.issued
            core.transition(victim, Trigger.SPILL)    # it decodes without the pages that it was promised
            return
    if _revoke_grant(core, Tier.HBM, taken):
        return
    # A spill may end in a pause, if there is no hot buffer to be had: the oldest goes last of all.
    for victim in reversed(core.running):
        if victim not in taken and spills(core, victim):
            return
    victim = next(v for v in reversed(core.running) if v not in taken and v.phase is not Phase.LOADING)
    if victim is r and r is not core.running[-1]:
        return                                 # the younger ones still load: wait for them (sim seed 210)
    if victim is r and core.kv.in_flight(r) and any(t.group.reach for t in r.tables):
        return                                 # its steps leave window pages behind (sim seed 287)
    if victim is r and _drop_paused(core, r, bare=True):
        return                                 # somebody who does not even run was in the way
    if victim is core.running[0] and len(core.running) > 1:
        return                                 # all others are in this very step
    if victim is core.running[0] and core.kv.arenas[tier].away:
        return                                 # what the peer still has comes back
    yield_device(core, victim)


def may_spill(core: CoreState, r: Request) -> bool:
    """Whether `r` frees device pages when it goes on from the host, and copies to there do not always
    fail it."""
    return (r.phase is Phase.RESIDENT and r.may_host and r.failed_saves < FAILED_SAVES_MAX
            and any(t.hosted and len(t.device) > r.hot_units for t in r.tables))


def spillable(core: CoreState, r: Request, most: int = 1) -> int:
    """Slabs (of a single group pages), counted to about `most`, that nobody has any more when `r` goes on
    from the host: what it shares stays, which is how its tables begin, and of its own a hot buffer."""
    if not may_spill(core, r):
        return 0
    free, hot = 0, r.hot_units
    for t in r.tables:
        if t.hosted:
            own = itertools.takewhile(lambda c: c is not None and is_own(c), reversed(t.device))
            per = t.group.slab_pages if len(r.tables) > 1 else 1
            free += max(0, sum(1 for _ in itertools.islice(own, hot + most * per)) - hot) // per
    return free


def spills(core: CoreState, victim: Request) -> bool | Refused:
    """Let it go on from host pages, if that helps and there is room. The first of all only when alone."""
    last = victim is core.running[0] and len(core.running) > 1
    return not last and spillable(core, victim) > 0 and spill(core, victim)


def spill(core: CoreState, r: Request) -> Trial:
    """Let a resident row go on from host pages: at once, if they are complete."""
    if trial := core.transition(r, Trigger.SPILL):
        stage(core, r)
    return trial


def stage(core: CoreState, r: Request) -> None:
    """`r` is on its way to the host: what it can do by itself."""
    kv = core.kv
    if not r.is_saved and not offload.is_staged(kv, r):
        if kv.in_flight(r):
            return
        offload.save_down(kv, r, all_groups=False)
        r.is_saved = True
    if offload.is_staged(kv, r):
        trial = core.transition(r, Trigger.LANDED)
        if not trial and not _is_heating(core, r, trial):
            yield_device(core, r)     # no hot buffer to be had, nor is one on its way
    elif r.is_saved and not r.moves and not offload.is_coming(r):
        yield_device(core, r)         # the host has no room any more
    elif r.is_saved:
        r.awaits = allocate.last_missing(t.host for t in r.tables if t.hosted)


def _is_heating(core: CoreState, r: Request, refused: Refused) -> bool:
    """Whether pages for the hot buffer of `r`, who was just refused them, are behind fences. It waits
    for the steps that were in flight when it was first refused: others may get those pages."""
    r.hot_wait_until = r.hot_wait_until or core.kv.issued
    return isinstance(refused, Shortage) and refused.behind and core.kv.retired < r.hot_wait_until


def _for_host_pages(core: CoreState, taken: list[Request]) -> None:
    """Mirrors, which no step reads, go first, of one row, then who does not run gives way, then the youngest
    that runs from host pages."""
    if _drop_mirrors(core) or drop_fetching(core) or _drop_paused(core, None, bare=False):
        return
    if _revoke_grant(core, Tier.DRAM, taken):
        return
    rows = [r for r in core.running if r not in taken and (
        r.place is Place.HOST or r.phase is Phase.STAGING)]
    for victim in reversed(rows):
        if victim.phase is Phase.LOADING:
            continue
        if victim is not core.running[0] or not (
                core.kv.arenas[Tier.DRAM].away or rows[1:] or promised(core, Tier.DRAM)):
            core.transition(victim, Trigger.DROP)     # the first of all waits for what loads, or is away
        return


def _drop_mirrors(core: CoreState, but: Request | None = None) -> bool:
    return any(claims.drop_mirrors(core.kv, r) for r in reversed(core.running) if r is not but)


def is_away(core: CoreState) -> bool:
    """Whether pages wait for another engine: to say that it writes them no more, or to have read them for a
    request that has ended."""
    return any(arena.away for arena in core.kv.arenas.values()) or bool(core.kv.moves.pushes_of_ended())


def _revoke_grant(core: CoreState, tier: Tier, taken: list[Request]) -> bool:
    """Decode role: the youngest request that has pages and no row computes its prompt itself, one whose
    KV has come before others. Pages that the other engine may still write come back when it says so:
    it is given some steps for that, or, if nobody can go on, until the next event. Returns whether to wait
    for the pages."""
    kv = core.kv
    with_pages = [r for r in reversed(core.waiting) if r.phase is Phase.RECEIVING and any(
        [any(t.device if tier is Tier.HBM else t.host) for t in r.tables])]
    victim = next((r for r in with_pages if r.is_saved), None)
    if victim is not None:
        return bool(core.transition(victim, Trigger.DROP))
    goes_on = core.in_flight or taken or any([q.computed < q.unchanged_until for q in core.running])
    recent = kv.issued < core.last_revoke_step + AWAY_STEPS
    if kv.arenas[tier].away and (recent if goes_on else core.revoke_pending):
        return True
    if with_pages:
        core.last_revoke_step, core.revoke_pending = kv.issued, True
        return bool(core.transition(with_pages[0], Trigger.DROP))
    return False


def _drop_youngest(core: CoreState, but: Request | None, gives_way: Callable[[Request], bool]) -> bool:
    """Of those who wait; it computes again, later, what it gives up."""
    victim = next((q for q in reversed(core.waiting) if q is not but and gives_way(q)), None)
    return victim is not None and bool(core.transition(victim, Trigger.DROP))


def _drop_sending(core: CoreState, but: Request | None) -> bool:
    """Prefill role: one that was computed and has no grant."""
    return _drop_youngest(core, but, lambda q: q.phase is Phase.SENDING and q.grant is None)


def _drop_delivered(core: CoreState, but: Request | None = None) -> bool:
    """Decode role: one whose KV has arrived and that has no row."""
    return _drop_youngest(core, but, lambda q: q.phase is Phase.RECEIVING and q.is_saved)


def for_admission(core: CoreState, r: Request) -> bool:
    """`r` waits. Nobody who runs gives way to it, but pages of those who wait behind it must not block the
    engine for ever. Returns whether nothing can be done: another engine still has pages that it was granted
    and that were given up, and nobody knows when they come back."""
    kv = core.kv
    if core.running or kv.rows.in_limbo or promised(core) or promised(core, Tier.DRAM):
        return False
    if _drop_sending(core, r) or _drop_delivered(core, r) or _drop_paused(core, r, bare=True):
        return False
    if drop_fetching(core, r) or _drop_paused(core, r, bare=False):
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
            if promised(core, Tier.DRAM):
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
    return _drop_youngest(core, but, lambda q: q.phase is Phase.FETCHING)


def _drop_paused(core: CoreState, but: Request | None, *, bare: bool) -> bool:
    """A paused one; with `bare`, one that still needs device pages, because their copies failed."""
    return _drop_youngest(core, but, lambda q: q.phase is Phase.PAUSED and (
        not bare or (_is_bare(q) and any([any(t.device) for t in q.tables]))))
