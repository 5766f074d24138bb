"""Seeded bugs that no client sees in any token: they only make everything slower."""
from __future__ import annotations

from penstock.core.core import Core
from penstock.core.kv import allocate
from penstock.core.kv.allocate import Claim
from penstock.core.kv.cache import KVCache
from penstock.core.kv.prefix_tree import Node
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Event, Expired, Rates
from penstock.core.policy import capacity, reclaim
from penstock.core.request import Request
from penstock.sim.mutants.registry import Real, instead_of, mutant


@instead_of(reclaim, "yield_device", mode="pair=0,dram_pages=100,hot_pages=0")
def drops_instead_of_pausing(real: Real, core: Core, victim: Request) -> None:
    """Whoever gives way is computed again, though the host had room."""
    core.transition(victim, Trigger.DROP)


@instead_of(reclaim, "may_spill")
def never_spills(real: Real, core: Core, r: Request) -> bool:
    """Rows pause that could go on from host pages."""
    return False


@instead_of(capacity, "promote", 400,
            mode="pair=0,hot_pages=1,always_hosted=0,spills=30,hbm_pages=60,dram_pages=120")
def never_promotes(real: Real, core: Core) -> bool:
    """A row that has gone to the host stays there, however empty the device becomes."""
    return False


# Rows outgrow the device while others wait for a slow store, and the host is small.
TIGHT = ("pair=0,model=1,page_size=4,disk_pages=400,prefix_cache=1,turns=0.7,again=0.7,disk=100,copy=1,"
         "rows=4,hbm_pages=16,dram_pages=10,requests=24,fail=0,deadline=1000,abort=0,stop=0,hot_pages=0,"
         "max_len=1000,always_hosted=0,prompt_max=12,new_max=20,flushes=0,span=20,steps=4000")


@instead_of(reclaim, "drop_fetching", mode=TIGHT)
def fetched_pages_outrank_computed_ones(real: Real, core: Core, but: Request | None = None) -> bool:
    """Who waits for storage keeps its host pages whoever else needs them."""
    return False


@mutant(400)
class RatesIgnored(Core):
    """Stored pages are fetched even where computing them is faster."""

    def _apply(self, event: Event) -> None:
        if not isinstance(event, Rates):
            super()._apply(event)


@mutant(mode="pair=0,deadline=1")
class DeadlineIgnored(Core):
    """A fetch may take for ever."""

    def _apply(self, event: Event) -> None:
        if not (isinstance(event, Expired) and event.phase == Phase.FETCHING.value):
            super()._apply(event)


@mutant(mode="pair=1,expire=0.7,patience=10,lose=0.4,rows=2,requests=14")
class DeadlineOfDroppedIgnored(Core):
    """Who was dropped before it began waits for its turn as long as that takes."""

    def _expire(self, r: Request) -> None:
        if r.phase is not Phase.DROPPED:
            super()._expire(r)


@instead_of(KVCache, "is_reachable")
def host_hits_never_used(real: Real, have: KVCache, node: Node, g: int, stored: bool = False) -> bool:
    """A prefix that only the host has is computed again."""
    return bool(node.good(have.device[g]) or (stored and real(have, node, g, stored)))


FORCED = ("pair=0,hot_pages=2,model=1,fail=0.5,spills=60,drops=12,copy=0.3,again=0.5,always_hosted=1,"
          "page_size=2,wait_pages=1000,requests=14,hbm_pages=20,dram_pages=104")


@instead_of(allocate, "_early", 200, first=110, mode=FORCED)
def page_saved_while_its_load_flies(real: Real, ways: list[Claim]) -> None:
    """A row that goes to the host copies a page down that is still on its way up."""
