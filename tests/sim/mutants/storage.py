"""Seeded bugs of the storage tier, of deadlines and of ragged results."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mutants.registry import Real, holding, instead_of, mutant, of_ranks
from penstock.core.core import Core
from penstock.core.kv import listing, prefix_tree
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.moves import FlyingMove, Moves
from penstock.core.kv.pages import Pages
from penstock.core.kv.prefix_tree import Copy, Node, Tree, pack
from penstock.core.lifecycle import Lease, Phase
from penstock.core.plan import Advance, Event, Move, Moved, MoveId, StepId, Tier, Unstore, Used
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.sim.ranks.device import Device
from penstock.sim.ranks.executor import SimExecutor
from penstock.sim.ranks.store import SimStore


class _BytesNotVerified(Core):
    way: tuple[Tier, Tier]

    def _landed(self, event: Moved) -> None:
        flight = self.kv.moves.flying[event.id]
        ok = event.ok or (flight.src.tier, flight.dst.tier) == self.way
        super()._landed(Moved(event.id, ok, event.good))


@mutant(400, mode="fail=0.5,again=0.7,turns=0.7")
class StoredBytesNotVerified(_BytesNotVerified):
    """A damaged page from storage is taken for a good one."""

    way = Tier.DISK, Tier.DRAM


@mutant(mode="fail=0.3,again=0.7,turns=0.7,requests=20,hbm_pages=16,dram_pages=12,disk_pages=200,copy=0.1")
class FailedStoreLeftVisible(_BytesNotVerified):
    """Storage keeps the key of a page that it never got."""

    way = Tier.DRAM, Tier.DISK


@instead_of(Moves, "landed")
def what_failed_to_load_is_loaded_again(real: Real, copies: Moves, id: MoveId, ok: bool, good: int
                                        ) -> tuple[FlyingMove, list[Copy]]:
    """Whose bytes were found to be wrong once is asked for them again, perhaps for ever."""
    result: tuple[FlyingMove, list[Copy]] = real(copies, id, ok, good)
    flight, lost = result
    for source, _ in flight.pairs:
        if source.bad and source in lost:
            source.bad, source.ready = False, True
            lost.remove(source)
    return result


@mutant()
class StorageTakesWhatItLikes(Core):
    """A prefix is read in one go, however much of the host that takes from those who run."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        self.kv.moves.__class__ = _Boundless


class _Boundless(Moves):
    @property
    def reads_left(self) -> int:
        return 1 << 30


@instead_of(KVCache, "release", 400, mode="expire=0.3,disk=40,deadline=1")
def deadline_frees_what_is_still_being_filled(real: Real, kv: KVCache, r: Request,
                                              leases: Iterable[Lease]) -> None:
    """Pages released by time-out: the read that hangs lands later."""
    hung = [(kv.host[g], copy) for g, t in enumerate(r.tables) for copy in t.host
            if r.phase is Phase.DROPPED and r.storage.fetched and copy is not None and not copy.ready]
    real(kv, r, leases)
    for space, copy in hung:
        if copy.node is not None and not copy.pins:
            copy.moves = 0
            kv.tree.forget(copy.node, space)


@instead_of(Core, "_retire")
def upper_bound_taken_for_length(real: Real, core: Core, step: StepId, tokens: object) -> None:
    """A row that returned fewer tokens than it might is believed to be as long as planned."""
    for row in core.in_flight[step]:
        if row.width > 1:
            row.request.retired += 1
            row.request.computed += 1
    real(core, step, tokens)


# ---------------------------------------------------------------- what the ranks do for a core that is right
# What only storage has is wanted again, and some of it is not what was stored.
LYING = ("pair=0,model=1,prefix_cache=1,lie=0.5,fail=0,full=0,hang=0,disk=1,copy=0.2,again=0.9,turns=0.9,"
         "requests=20,hbm_pages=16,dram_pages=12,disk_pages=200,deadline=1000,rows=4")


@of_ranks(SimStore, "store", "num_good", mode=LYING)
def checksums_of_storage_not_compared(real: Real, store: SimStore, k: int, device: Device, move: Move) -> int:
    """Whatever is read from storage is taken for what was stored."""
    return len(move.src_pages)


# Storage that knows pages by what they hold: a flush is what a restart is, and the store is asked again.
NAMED = LYING + ",named=1,flushes=6,write=0.5,span=200"


@instead_of(prefix_tree, "key_under", 400, mode=NAMED + ",lie=0,alike=1")
def a_page_named_without_its_parent(real: Real, parent: bytes, key: Sequence[int]) -> bytes:
    """The same tokens behind another beginning are taken for the same page."""
    name: bytes = real(b"", key)
    return name


@instead_of(Tree, "root_digest", 400, mode=NAMED + ",lie=0")
def stored_pages_without_a_namespace(real: Real, tree: Tree, namespace: int) -> bytes:
    """What one tenant has stored, another finds."""
    name: bytes = real(tree, 0)
    return name


@instead_of(Moves, "landed", 400, mode=NAMED + ",gone=0.3")
def a_partial_read_taken_for_a_whole(real: Real, copies: Moves, id: MoveId, ok: bool, good: int
                                     ) -> tuple[FlyingMove, list[Copy]]:
    """Some of its pages have arrived, so all have."""
    result: tuple[FlyingMove, list[Copy]] = real(copies, id, ok or good > 0, good)
    return result


@instead_of(Moves, "landed", 400, mode=NAMED)
def one_page_more_than_has_arrived(real: Real, copies: Moves, id: MoveId, ok: bool, good: int
                                   ) -> tuple[FlyingMove, list[Copy]]:
    """The page that was found to be wrong is taken for the last good one."""
    result: tuple[FlyingMove, list[Copy]] = real(copies, id, ok, good and good + 1)
    return result


@instead_of(Moves, "invalidate", 400, mode=NAMED + ",lie=0,damages=6,abort=0.1")
def storage_not_told_of_damage(real: Real, copies: Moves, path: list[Node]) -> tuple[bytes, ...]:
    """The tree forgets damaged pages, and finds them in storage the next time."""
    real(copies, path)
    return ()


@instead_of(Request, "page_key", 400, mode=NAMED + ",lie=0,hot_pages=2,spills=8,always_hosted=1")
def stored_pages_of_selecting_decode_for_every_prompt(real: Real, r: Request, index: int, page_size: int
                                                      ) -> Sequence[int]:
    """What was computed with a part of its KV is taken for what any prompt computes."""
    return pack(r.between(index * page_size, (index + 1) * page_size))


@instead_of(listing, "listed", 400, mode=NAMED)
def what_was_asked_for_is_taken_for_there(real: Real, kv: Pages, r: Request, present: bytes) -> bool:
    """Host pages are taken for misses."""
    complete: bool = real(kv, r, bytes([(1 << len(kv.disk)) - 1]) * len(r.storage.keys))
    return complete


@mutant(400, mode=NAMED + ",lie=0")
class UsesNotTold(Core):
    """What a request begins with from memory, storage takes for old."""

    def advance(self, events: Sequence[Event]) -> Advance:
        advance = super().advance(events)
        return replace(advance, outputs=tuple([out for out in advance.outputs if not isinstance(out, Used)]))


@mutant(400, mode=NAMED + ",lie=0")
class UsesOfTheLastPageAlone(Core):
    """Storage keeps the end of a prompt and lets its beginning go, without which nobody finds it."""

    def advance(self, events: Sequence[Event]) -> Advance:
        advance = super().advance(events)
        return replace(advance, outputs=tuple([Used(out.keys[-1:]) if isinstance(out, Used) else out
                                               for out in advance.outputs]))


@mutant(counter="pages put again in storage")
class HandlesThatGoDelete(Core):
    """What the core has no room to remember is removed."""

    had: frozenset[bytes] = frozenset()

    def advance(self, events: Sequence[Event]) -> Advance:
        advance = super().advance(events)
        nodes = [node for root in self.kv.tree.roots.values() for node in self.kv.tree.below(root)]
        now = frozenset([n.digest for n in nodes if n.digest
                         and any([space in n.copies for space in self.kv.disk])])
        gone, self.had = tuple(sorted(self.had - now)), now
        return replace(advance, outputs=(*advance.outputs, Unstore(gone))) if gone else advance


@instead_of(listing, "_remember", 400, mode=NAMED + ",lie=0,gone=0,model=3")
def a_page_of_one_group_taken_for_all(real: Real, kv: Pages, node: Node, groups: int) -> bool:
    """Storage has one cache group's page: those of the others are not looked for."""
    remembered: bool = real(kv, node, groups and (1 << len(kv.disk)) - 1)
    return remembered


@of_ranks(SimExecutor, "", "_land", mode="ranks=3,fail=0,lie=0,straggle=0.2")
def moved_when_the_first_rank_has_landed(real: Real, executor: SimExecutor, k: int, move: Move, good: int,
                                         data: list[list[int]]) -> None:
    """The engine hears of the end of a copy that other ranks have not finished."""
    ranks = len(executor.devices)
    told = executor._copies[move.id] < ranks

    def silent(event: Event) -> None:
        """The first rank has said it."""

    with holding(executor, "_event", silent if told else executor._event):
        real(executor, k, move, good, data)
    if not told and ranks > 1:
        executor._event(Moved(move.id, move.id not in executor._torn))
