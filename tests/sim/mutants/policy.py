"""Seeded bugs that no client sees in any token: they only make everything slower."""
from __future__ import annotations

import math

from mutants.registry import Real, instead_of
from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv import allocate, promote, sealing
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.claims import GroupAllocation
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.pair.bridge import Pairing
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.plan import Event, Expired, Rates, StepId, Tier
from penstock.core.policy import capacity, reclaim
from penstock.core.request import Request, ScheduledRow


@instead_of(reclaim, "yield_device", mode="pair=0,hbm_pages=24,dram_pages=100,hot_pages=0,rows=6,new_max=40")
def drops_instead_of_pausing(real: Real, core: Core, victim: Request) -> None:
    """Whoever gives way is computed again, though the host had room."""
    core.transition(victim, Trigger.DROP)


@instead_of(reclaim, "may_spill")
def never_spills(real: Real, core: Core, r: Request) -> bool:
    """Rows pause that could go on from host pages."""
    return False


# Rows outgrow the device while others wait for a slow store, and the host is small.
TIGHT = ("pair=0,model=1,page_size=4,disk_pages=400,prefix_cache=1,turns=0.7,again=0.7,disk=100,copy=1,"
         "rows=4,hbm_pages=16,dram_pages=10,requests=24,fail=0,deadline=1000,abort=0,stop=0,hot_pages=0,"
         "max_len=1000,always_hosted=0,prompt_max=12,new_max=20,flushes=0,span=20,steps=4000")


@instead_of(reclaim, "drop_fetching", mode=TIGHT)
def fetched_pages_outrank_computed_ones(real: Real, core: Core, but: Request | None = None) -> bool:
    """Who waits for storage keeps its host pages whoever else needs them."""
    return False


@instead_of(Core, "_apply", 400)
def rates_ignored(real: Real, core: Core, event: Event) -> None:
    """Stored pages are fetched even where computing them is faster."""
    if not isinstance(event, Rates):
        real(core, event)


@instead_of(Core, "_apply", mode="pair=0,deadline=1")
def deadline_ignored(real: Real, core: Core, event: Event) -> None:
    """A fetch may take for ever."""
    if not (isinstance(event, Expired) and event.phase == Phase.FETCHING.value):
        real(core, event)


@instead_of(KVCache, "is_reachable")
def host_hits_never_used(real: Real, kv: KVCache, node: Node, g: int, stored: bool = False) -> bool:
    """A prefix that only the host has is computed again."""
    return bool(node.good(kv.device[g]) or (stored and real(kv, node, g, stored)))


FORCED = ("pair=0,hot_pages=2,model=1,fail=0.5,spills=60,drops=12,copy=0.3,again=0.5,always_hosted=1,"
          "page_size=2,wait_pages=1000,requests=14,hbm_pages=20,dram_pages=104,named=0")


@instead_of(allocate, "_not_ready", 200, first=300, mode=FORCED)
def page_saved_while_its_load_flies(real: Real, ways: list[GroupAllocation]) -> None:
    """A row that goes to the host copies a page down that is still on its way up."""


# ---------------------------------------------------------------- what only counters see, and an order
COPIED, IDLE = "pages copied per sealed page", "stage slots idle"
UNUSED, BROUGHT = "device pages idle beside rows that lack some", "pages brought back for each miss saved"
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
def hot_buffer_keeps_the_oldest_pages(real: Real, kv: KVCache, r: Request) -> object:
    """What the next step reads has to be loaded."""
    own = [[copy for copy in t.device if copy is not None and copy.pins == 1 and not copy.moves]
           for t in r.tables if t.hosted]
    hidden = [copy for copies in own for copy in copies[r.hot.least:]]
    for copy in hidden:
        copy.moves += 1
    try:
        return real(kv, r)
    finally:
        for copy in hidden:
            copy.moves -= 1


@instead_of(capacity, "promote", counter=UNUSED)
def never_promotes(real: Real, core: Core) -> bool:
    """A row that has gone to the host stays there, however empty the device becomes."""
    return False


@instead_of(capacity, "worth", counter=BROUGHT)
def promotion_has_no_price(real: Real, core: Core, r: Request) -> float:
    """The oldest row comes back when there is room, though it has a few tokens left."""
    return math.inf


@instead_of(schedule, "_of_turn", counter=IDLE)
def every_row_in_one_step(real: Real, core: Core, free: StepId, turns: int) -> tuple[list[ScheduledRow], int]:
    """All rows that may decode do so at once, and the other stages have none."""
    chosen: tuple[list[ScheduledRow], int] = real(core, free, 1)
    return chosen


@instead_of(Pairing, "arrived", counter=UNSERVED)
def nobody_is_asked_after_a_restart(real: Real, pair: Pairing, r: Request) -> None:
    """A decode engine that was started again computes all prompts itself."""
    real(pair, r)
    if isinstance(pair.side, DecodeSide) and r.remote.is_asked and r.arrived.transfer >= 8:
        r.remote.is_asked = False
        pair._apply(pair.side.cancel(r.arrived.transfer))


@instead_of(reclaim, "_drop_paused", mode=CROWDED)
def oldest_of_the_paused_is_dropped(real: Real, core: Core, but: Request | None) -> bool:
    """Who comes next computes again, and who comes last keeps its host pages."""
    for victim in core.by_phase[Phase.PAUSED]:
        if victim is not but:
            return bool(core.transition(victim, Trigger.DROP))
    return False


@instead_of(Tree, "is_inner", counter="positions recomputed for want of a state")
def states_that_lead_to_others_are_kept(real: Real, tree: Tree, node: Node, space: TierGroup) -> bool:
    """What is least recently used goes first, be it a state that nobody needs before the next."""
    return False
