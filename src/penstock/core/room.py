"""Who gives way when device pages are short: cached pages, then pauses, then drops.

Promised units are counted first: while what is already on its way to the free list covers the
shortage, nobody else is disturbed.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Tier
from penstock.core.request import Request

GAVE_WAY_MAX = 3

if TYPE_CHECKING:
    from penstock.core.core import Core


def promised(core: Core) -> int:
    """Device pages that will become free or evictable without a further victim."""
    have = core.have
    pages = have.hbm.in_limbo
    for flight in have.flights.values():
        for node in flight.nodes if Tier.HBM in (flight.src, flight.dst) else ():
            copy = node.copies.get(Tier.HBM)
            pages += copy is not None and copy.pins == 0
    for r in core.waiting:
        if r.phase is Phase.PAUSED:            # its steps or its copies are not finished
            pages += len(r.table)
    return pages


def headroom(core: Core, r: Request) -> int:
    """Device pages that must stay free when `r` gets a row: one for every row that runs. Who has
    given way twice returns only when all that run, and it, can end without another victim; those
    admitted later are younger and give way first. So nobody gives way more than three times."""
    if r.gave_way < GAVE_WAY_MAX - 1 or not core.running:
        return len(core.running)
    g = core.cfg.page_size
    ends = sum(-(-(q.num_prompt + q.max_new - 1) // g) for q in (*core.running, r))
    later = ends - sum(len(q.table) for q in core.running) - -(-len(r.tokens) // g)
    return max(later, len(core.running))


def for_growth(core: Core, r: Request, taken: list[Request]) -> None:
    """`r` runs and needs one more page: the youngest running request gives up its own, possibly `r`
    itself. Rows already in the step being planned are out of reach, they are older."""
    if promised(core):
        return
    victim = next(v for v in reversed(core.running) if v not in taken and v.phase is not Phase.LOADING)
    if victim is r and r is not core.running[-1]:
        return                                 # the younger ones still load: wait for them (sim seed 210)
    if victim is r and _drop_paused(core, r):
        return                                 # somebody who does not even run was in the way
    yield_device(core, victim)


def for_admission(core: Core, r: Request) -> None:
    """`r` waits. Nobody who runs is disturbed for it, but pages that a paused request could not
    copy to the host must not block the engine for ever."""
    if not core.running and not promised(core) and not core.have.rows.in_limbo:
        _drop_paused(core, r)


def yield_device(core: Core, victim: Request) -> None:
    """Pause if the host has room for the KV, else drop it. Fetched pages that nobody has used yet
    are worth less than computed ones."""
    if (victim.phase, Trigger.PAUSE) in core.edges:
        while not core._go(victim, Trigger.PAUSE):
            fetching = [r for r in core.waiting if r.phase is Phase.FETCHING]
            if not fetching:
                break
            core._go(fetching[-1], Trigger.DROP)
        else:
            return
    core._go(victim, Trigger.DROP)


def _drop_paused(core: Core, but: Request) -> bool:
    """The youngest paused request that still needs device pages, because their copies failed."""
    for victim in reversed(core.waiting):
        if victim.phase is Phase.PAUSED and victim is not but and any(
                Tier.HBM in node.copies and not node.ready(Tier.DRAM) for node in victim.path):
            return core._go(victim, Trigger.DROP)
    return False
