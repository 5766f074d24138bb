"""Seeded bugs of fences, copies and ownership."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.core import Core
from penstock.core.holdings import Holdings
from penstock.core.ledger import Fence, Pool
from penstock.core.lifecycle import Lease, Phase
from penstock.core.plan import Moved, Outcome, StepId, Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.tree import Node, Tree
from penstock.sim.mutants.registry import become, mutant


# ---------------------------------------------------------------- fences
class _Unfenced(Pool):
    __slots__ = ()

    def release(self, units: Sequence[int], fence: Fence) -> None:
        Pool.release(self, units, Fence(StepId(0)))


class _NoMoves(Pool):
    __slots__ = ()

    def release(self, units: Sequence[int], fence: Fence) -> None:
        Pool.release(self, units, Fence(fence.step))


@mutant()
class UnfencedRelease(Core):
    """Pages are free at once, while steps in flight still read and write them."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.hbm, _Unfenced)


@mutant()
class AbortForgetsTheFence(Core):
    """Only the abort path releases at once."""

    def _end(self, r: Request, outcome: Outcome) -> None:
        if outcome is Outcome.ABORT:
            r.last_issue = StepId(0)
        super()._end(r, outcome)


@mutant()
class FenceIgnoresCopies(Core):
    """Steps are fenced, copies are not."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.hbm, _NoMoves)
        become(self.have.dram, _NoMoves)


class _EvictUnderCopy(Tree):
    __slots__ = ()

    def evictable(self, node: Node, tier: Tier) -> bool:
        copy = node.copies.get(tier)
        if copy is None or not copy.moves:
            return Tree.evictable(self, node, tier)
        moves, ready, copy.moves, copy.ready = copy.moves, copy.ready, 0, True
        try:
            return Tree.evictable(self, node, tier)
        finally:
            copy.moves, copy.ready = moves, ready

    def forget(self, node: Node, tier: Tier) -> None:
        node.copies[tier].moves = 0
        Tree.forget(self, node, tier)


@mutant()
class PageFreedUnderACopy(Core):
    """Eviction does not look at the copies that read or fill a page."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _EvictUnderCopy)


class _NoUse(Holdings):
    __slots__ = ()

    def _release_table(self, r: Request) -> None:
        before = {id(c): c.used for c in r.table}
        shared = [c for c in r.table if c.node is not None]
        Holdings._release_table(self, r)
        for copy in shared:
            copy.used = before[id(copy)]


@mutant()
class SharedPageFreedUnderAStep(Core):
    """A shared page forgets which step used it last, so its eviction is not fenced."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _NoUse)


@mutant(200)
class HostPageFreedUnderACopy(Core):
    """The host copy of an open page is given up while the copy that fills it flies."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.dram, _NoMoves)


# ---------------------------------------------------------------- copies between tiers
class _SealsComputed(Holdings):
    __slots__ = ()

    def seal(self, r: Request) -> None:
        settled, r.settled = r.settled, r.computed
        Holdings.seal(self, r)
        r.settled = settled


@mutant(200)
class UnsealedPageWrittenThrough(Core):
    """Pages enter the tree, and their copies start, when they are planned, not when computed."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _SealsComputed)


class _WrongOnFailure(Core):
    """Takes a failed Move into `tier` for a good one."""

    tier = Tier.HBM

    def _landed(self, event: Moved) -> None:
        if self.have.flights[event.id].dst is self.tier:
            event = Moved(event.id, True)
        super()._landed(event)


@mutant()
class FailedWriteThroughVisible(_WrongOnFailure):
    """A host copy that is torn is found by the next prefix hit."""

    tier = Tier.DRAM


@mutant(200)
class FailedLoadTakenAsGood(_WrongOnFailure):
    """A torn load is decoded from."""

    tier = Tier.HBM


class _ReadyAtOnce(Holdings):
    __slots__ = ()

    def _move_nodes(self, nodes: list[Node], src: Tier, dst: Tier) -> None:
        Holdings._move_nodes(self, nodes, src, dst)
        for node in nodes:
            if dst is Tier.HBM:
                node.copies[dst].ready = True


@mutant()
class LoadInProgressReadAsResident(Core):
    """A request starts on pages whose load still runs."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _ReadyAtOnce)


# ---------------------------------------------------------------- who owns what
class _EvictInUse(Tree):
    __slots__ = ()

    def evictable(self, node: Node, tier: Tier) -> bool:
        copy = node.copies.get(tier)
        if copy is None or not copy.pins:
            return Tree.evictable(self, node, tier)
        pins, copy.pins = copy.pins, 0
        refs, node.refs = node.refs, 0
        try:
            return Tree.evictable(self, node, tier)
        finally:
            copy.pins, node.refs = pins, refs


@mutant()
class EvictionOfAPageInUse(Core):
    """Eviction does not look at who runs on a page."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _EvictInUse)


class _ParkWithoutPins(Holdings):
    __slots__ = ()

    def park(self, r: Request) -> None:
        Holdings.park(self, r)
        for copy in r.parked:
            copy.pins -= 1
        r.parked = []


@mutant(400)
class LeaseDroppedByAPause(Core):
    """A paused request's host pages may be evicted."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _ParkWithoutPins)


@mutant()
class LeakWhenAPausedRequestIsAborted(Core):
    """The abort of a paused request forgets its host pages."""

    def _end(self, r: Request, outcome: Outcome) -> None:
        if outcome is Outcome.ABORT and r.phase is Phase.PAUSED:
            r.parked, r.reserve, r.open_copy = [], [], None
        super()._end(r, outcome)


class _OneRoot(Tree):
    __slots__ = ()

    def root(self, namespace: int) -> Node:
        return Tree.root(self, 0)

    def match(self, namespace: int, tokens: Sequence[int], page_size: int, *,
              stored: bool = False) -> list[Node]:
        return Tree.match(self, 0, tokens, page_size, stored=stored)


@mutant()
class NamespaceLeftOutOfTheKey(Core):
    """Tenants share pages."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _OneRoot)


class _MatchAll(Tree):
    __slots__ = ()

    def match(self, namespace: int, tokens: Sequence[int], page_size: int, *,
              stored: bool = False) -> list[Node]:
        return Tree.match(self, namespace, (*tokens, -1), page_size, stored=stored)


@mutant()
class NothingLeftToCompute(Core):
    """A prefix hit covers a whole prompt that ends on a page edge."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _MatchAll)




class _SealReplaces(Holdings):
    __slots__ = ()

    def seal(self, r: Request) -> None:
        before = len(r.path)
        Holdings.seal(self, r)
        for i in range(before, len(r.path)):
            mine, shared = r.table[i], r.path[i].copies[Tier.HBM]
            if mine is not shared:
                r.path[i].copies[Tier.HBM], mine.node = mine, r.path[i]


@mutant(200)
class SealReplacesASharedPage(Core):
    """Two requests compute the same page; the second throws the first one's out of the tree."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _SealReplaces)


class _OpenPageShort(Holdings):
    __slots__ = ()

    def _move_open(self, r: Request, src: Tier, src_page: int, dst: Tier, dst_page: int,
                   tokens: int) -> None:
        Holdings._move_open(self, r, src, src_page, dst, dst_page, max(1, tokens - 1))


@mutant()
class OpenPageCopiedShort(Core):
    """The last token of an open page is not copied when its request pauses."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _OpenPageShort)


class _OpenPageForgotten(Holdings):
    __slots__ = ()

    def _find(self, r: Request) -> int:
        computed, settled = r.computed, r.settled
        if r.phase is Phase.PAUSED:
            self._drop_open(r)
        missing = Holdings._find(self, r)
        if r.phase is Phase.PAUSED:
            r.computed, r.settled = computed, settled
        return missing


@mutant()
class OpenPageForgotten(Core):
    """A pause keeps only sealed pages, a resume believes that it kept them all."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _OpenPageForgotten)


class _KeepsRows(Holdings):
    __slots__ = ()

    def release(self, r: Request, leases: Iterable[Lease]) -> None:
        if r.phase is Phase.DROPPED:
            r.row = None
        Holdings.release(self, r, leases)


@mutant()
class RowLostByADrop(Core):
    """A dropped request forgets its row instead of giving it back."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have, _KeepsRows)
