"""Where a request goes: device pages or host pages, and what can ever fit.

A request that fits nowhere alone is refused; one that fits for a while has its output clipped. Host
pages are for requests that select, when the device has no room; they come back when there is room and what
they miss is more than what that loads.
"""
from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from functools import cache

from penstock.core.kv.pages import Headroom
from penstock.core.kv.pool import Arena
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import Arrived, Tier
from penstock.core.policy.demand import PageCounts, add, at_end
from penstock.core.policy.demand import hot_units as hot_units
from penstock.core.policy.demand import needs as needs
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.core.state import CoreState

LONG = 4_096         # entries of a page table


def may_host(cfg: CoreConfig, a: Arrived) -> bool:
    return cfg.sparse and a.selects


def draft_units(cfg: CoreConfig, r: Request, drafts: int) -> int:
    """The hot buffer that holds whatever `r` and so many drafts of it select, or the largest it may have."""
    budget = cfg.budget or cfg.hot_pages * cfg.page_size
    return max(r.hot.least, min(r.hot.most, -(-(1 + drafts) * budget // cfg.page_size)))


def _slabs(groups: Iterable[CacheGroup], pages: list[int], place: Place) -> int:
    """Slabs that hold them at worst: what comes and goes may lie one page to a slab."""
    return sum(n if group.reach or (place is Place.HOST and group.hosted) else -(-n // group.slab_pages)
               for group, n in zip(groups, pages, strict=True))


def fits(cfg: CoreConfig, place: Place, tokens: int) -> bool:
    """Whether a request that is alone can have this many positions."""
    device, host = needs(cfg, place, tokens)
    if len(cfg.groups) == 1:
        return device[0] <= cfg.hbm_pages and host[0] <= cfg.host_units - cfg.store_pages
    per = cfg.groups[0].slab_pages
    host_slabs = sum(-(-n // group.slab_pages) for group, n in zip(cfg.groups, host, strict=True))
    return (_slabs(cfg.groups, device, place) <= cfg.hbm_pages // per
            and host_slabs <= max(0, cfg.host_units - cfg.store_pages))


@cache
def largest(cfg: CoreConfig, hosted: bool) -> int:
    """Positions that a request, which may be hosted or not, can have when it is alone, up to the context
    length."""
    places = [Place.HOST] if hosted else []
    if not (places and cfg.always_hosted):
        places.append(Place.DEVICE)
    return max(bisect.bisect_left(range(1, cfg.max_len + 1), True,
                                  key=lambda n: not fits(cfg, place, n)) for place in places)


def refusal(cfg: CoreConfig, a: Arrived, longest: int) -> str:
    """Why `a` can never run, with the numbers; `longest` tokens of prompt would."""
    if len(a.prompt) <= longest:
        return "a prefill engine serves requests that name a transfer to a decode engine"
    where = f"the device pool holds {cfg.hbm_pages} pages of {cfg.page_size} tokens"
    if may_host(cfg, a):
        where += f", the host pool {cfg.dram_pages}, a hot buffer takes up to {cfg.hot_pages} of the device's"
        where += f", storage keeps {cfg.store_pages} of the host's" if cfg.store_pages else ""
    return (f"the prompt has {len(a.prompt)} tokens, at most {longest} can be served: the context length is "
            f"{cfg.max_len} and {where}")


def ways_in(core: CoreState, r: Request) -> tuple[Trigger, tuple[Place, ...]]:
    """What to try for a request that waits, and with its KV where, in this order."""
    trigger = Trigger.ADMIT if r.phase in (Phase.QUEUED, Phase.FETCHING, Phase.RECEIVING) else Trigger.RESUME
    if (r.phase, Trigger.RECEIVE) in core.edges and r.remote.is_asked:
        trigger = Trigger.RECEIVE
    if not r.may_host:
        return trigger, (Place.DEVICE,)
    if core.cfg.always_hosted or not fits(core.cfg, Place.DEVICE, min(r.num_tokens, r.compute_limit)):
        return trigger, (Place.HOST,)
    return trigger, (Place.DEVICE, Place.HOST)


def _demand(core: CoreState, *, grown: bool = False) -> PageCounts:
    """What all that run need at their ends, where they are now; `grown`: with the largest hot buffers."""
    device, host = core.demand[grown]
    return device.copy(), host.copy()


def _all_fit(core: CoreState, total: PageCounts) -> bool:
    device, host = total
    return _total(core.cfg, core.kv.arenas[Tier.HBM], device, _pushed(core, Tier.HBM)) and (
        not any(host) or _total(core.cfg, core.kv.arenas[Tier.DRAM], host,
                                core.cfg.store_pages + _pushed(core, Tier.DRAM)))


def _pushed(core: CoreState, tier: Tier) -> int:
    """Cached pages of `tier` that pushes of requests that have ended still read: as good as away."""
    pushes = [f for f in core.kv.moves.pushes_of_ended() if f.src.tier is tier]
    return sum([source.node is not None and not source.pins for f in pushes for source, _ in f.pairs])


def all_end(core: CoreState, r: Request, place: Place) -> bool:
    """Whether all that run, and `r`, who waits, in `place`, can go on to their ends without a victim."""
    total = _demand(core)
    add(total, at_end(core.cfg, r, place))
    return _all_fit(core, total)


def is_crowded(core: CoreState) -> bool:
    """Whether all that run cannot end beside each other with the largest hot buffers."""
    return not _all_fit(core, _demand(core, grown=True))


def _total(cfg: CoreConfig, arena: Arena, pages: list[int], kept: int) -> bool:
    """Pages that another engine may write, and those `kept` for storage or by pushes, count as gone, and
    each of them as a slab. A group has at least the slabs in which somebody has something now: what ends
    leaves holes, and no other group can use them (storm 1014 of `tests/sim/test_sim_waiting.py`)."""
    if len(cfg.groups) == 1:
        return pages[0] <= arena.pools[0].capacity - arena.away - kept
    slabs = [max(_slabs((group,), [n], Place.DEVICE), len(pool.fixed_in) - pool.evictable_slabs)
             for group, n, pool in zip(cfg.groups, pages, arena.pools, strict=True)]
    return sum(slabs) <= arena.slabs - arena.away - kept


def worth(core: CoreState, r: Request) -> float:
    """Tokens that `r` would still miss on the host, for each that a promotion loads. It has as many steps
    left as it may take, but no more than those that have ended took."""
    step, load, left = 0, 0, r.num_prompt + r.max_new - r.num_tokens
    if core.answers:
        left = min(left, -(-core.answered // core.answers))
    for t in r.tables:
        if t.hosted:
            step += min(core.cfg.budget or len(t.hot) * t.unit, len(t.device) * t.unit)
            long = len(t.device) > LONG        # then a count of the others takes longer than a turn may
            load += (len(t.device) if long else t.device.count(None)) * t.unit
    return left * step * r.hot.missed / load if load else math.inf


def growing(core: CoreState) -> Headroom:
    """Those that run, by where they grow: who is promoted does so on both sides, and counts there."""
    host = core.num_growing_host
    return Headroom(len(core.running) - host, host)


def promote(core: CoreState) -> bool:
    """Bring back the hosted row that is worth it most, if any is, and all that run could then end with the
    largest hot buffers: a page of these saves more than one of a whole row. Returns whether that failed
    because pages are still in use."""
    if core.cfg.always_hosted or core.by_place[Place.TO_DEVICE]:
        return False                           # one at a time
    total, best, price = _demand(core, grown=True), None, 1.0
    for r in core.hosted:
        if r.promotion.undone_at >= core.kv.issued:
            continue
        add(total, at_end(core.cfg, r, Place.HOST, grown=True), -1)
        add(total, at_end(core.cfg, r, Place.DEVICE))
        # Its tables are long: what it is worth is asked where there may be room.
        if _all_fit(core, total) and (ratio := worth(core, r)) > price:
            best, price = r, ratio
        add(total, at_end(core.cfg, r, Place.DEVICE), -1)
        add(total, at_end(core.cfg, r, Place.HOST, grown=True))
    device, host = growing(core)
    return best is not None and not core.transition(
        best, Trigger.RELOCATE, Place.TO_DEVICE, Headroom(device + 1, host - 1))
