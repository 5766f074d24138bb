"""Seeded bugs of what the ranks do for a core that is right. The simulator's ranks stand in for the real
ones, and show that such a bug would be seen."""
from __future__ import annotations

from penstock.core.plan import Event, Move, Moved
from penstock.sim.device import Device
from penstock.sim.executor import SimExecutor
from penstock.sim.mutants.registry import Real, holding, of_ranks
from penstock.sim.store import Store

# What only storage has is wanted again, and some of it is not what was stored.
LYING = ("pair=0,model=1,prefix_cache=1,lie=0.5,fail=0,full=0,hang=0,disk=1,copy=0.2,again=0.9,turns=0.9,"
         "requests=20,hbm_pages=16,dram_pages=12,disk_pages=200,deadline=1000,rows=4")


@of_ranks(Store, "store", "is_good", mode=LYING)
def checksums_of_storage_not_compared(real: Real, store: Store, k: int, device: Device, move: Move) -> bool:
    """Whatever is read from storage is taken for what was stored."""
    return True


@of_ranks(SimExecutor, "", "_land", mode="ranks=3,fail=0,lie=0,straggle=0.2")
def moved_when_the_first_rank_has_landed(real: Real, executor: SimExecutor, k: int, move: Move, bad: int,
                                         data: list[list[int]]) -> None:
    """The engine hears of the end of a copy that other ranks have not finished."""
    ranks = len(executor.devices)
    told = executor._copies[move.id] < ranks

    def silent(event: Event) -> None:
        """The first rank has said it."""

    with holding(executor, "_event", silent if told else executor._event):
        real(executor, k, move, bad, data)
    if not told and ranks > 1:
        executor._event(Moved(move.id, move.id not in executor._torn))
