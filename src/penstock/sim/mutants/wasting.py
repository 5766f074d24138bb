"""Seeded bugs that only waste, in ways that no seed of a sweep is asked about: counters see them."""
from __future__ import annotations

from dataclasses import replace

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv import promote, sealing
from penstock.core.kv.cache import KVCache
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.pair.prefill_side import PrefillSide
from penstock.core.plan import StepId, Tier
from penstock.core.policy import reclaim
from penstock.core.request import Request, ScheduledRow
from penstock.sim.mutants.registry import Real, holding, instead_of

COPIED, IDLE = "pages copied per sealed page", "stage slots idle"
UNSERVED = "transfers not served after a restart"
# Many wait with host pages, and rows that decode from the host need some.
CROWDED = ("pair=0,model=1,hot_pages=1,hbm_pages=8,dram_pages=12,rows=12,page_size=2,prompt_max=2,new_max=40,"
           "requests=24,span=60,copy=0.1,fail=0,step_tokens=16,steps=4000")


@instead_of(sealing, "_share", counter=COPIED)
def full_twin_copied_again(real: Real, tree: Tree, node: Node, space: TierGroup, copy: Copy) -> None:
    """A page that was written on the host as well is copied there when it is sealed."""
    if space.tier is not Tier.DRAM:
        real(tree, node, space, copy)


@instead_of(promote, "take_hot_buffer", counter=COPIED)
def hot_buffer_keeps_the_oldest_pages(real: Real, have: KVCache, r: Request) -> bool:
    """What the next step reads has to be loaded."""
    own = [[copy for copy in t.device if copy is not None and copy.pins == 1 and not copy.moves]
           for t in r.tables if t.hosted]
    hidden = [copy for copies in own for copy in copies[r.hot:]]
    for copy in hidden:
        copy.moves += 1
    try:
        return bool(real(have, r))
    finally:
        for copy in hidden:
            copy.moves -= 1


@instead_of(schedule, "_of_turn", counter=IDLE)
def every_row_in_one_step(real: Real, core: Core, free: StepId) -> tuple[list[ScheduledRow], int]:
    """All rows that may decode do so at once, and the other stages have none."""
    with holding(core, "cfg", replace(core.cfg, pp_size=1)):
        chosen: tuple[list[ScheduledRow], int] = real(core, free)
        return chosen


@instead_of(PrefillSide, "_heard", counter=UNSERVED)
def floor_outlives_a_restart(real: Real, side: PrefillSide, epoch: int) -> None:
    """Generations of the dead engine are taken for those of the one that came after it."""
    floor = side.floor
    real(side, epoch)
    side.floor = floor


@instead_of(reclaim, "_drop_paused", mode=CROWDED)
def oldest_of_the_paused_is_dropped(real: Real, core: Core, but: Request | None, *, bare: bool) -> bool:
    """Who comes next computes again, and who comes last keeps its host pages."""
    for victim in core.waiting if not bare else ():
        if victim.phase is Phase.PAUSED and victim is not but:
            return core.transition(victim, Trigger.DROP)
    return bool(real(core, but, bare=bare))
