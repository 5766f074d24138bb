"""Seeded bugs of the core, each switchable by name. The simulator must catch every one.

A mutant is a Core whose methods, or whose ledger's, tree's or holdings', are replaced by wrong
ones. Each is a mistake that somebody made: in a peer, in a draft of this core, or in its sim.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from penstock.core.core import Core
from penstock.core.holdings import Holdings
from penstock.core.ledger import Fence, Pool
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import (
    Advance,
    Event,
    Finished,
    Moved,
    Outcome,
    Started,
    StepId,
    Tier,
    Token,
)
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.tree import Node, Tree
from penstock.sim.programs import sweep

MUTANTS: dict[str, Callable[[CoreConfig], Core]] = {}
BUDGET: dict[str, int] = {}          # seeds within which the default test must catch it


def mutant(budget: int = 60) -> Callable[[type[Core]], type[Core]]:
    def enter(cls: type[Core]) -> type[Core]:
        name = "".join("-" + c.lower() if c.isupper() else c for c in cls.__name__)[1:]
        MUTANTS[name], BUDGET[name] = cls, budget
        return cls
    return enter


def hunt(name: str, seeds: Iterable[int], *, blind: bool = False) -> tuple[int, str | None]:
    """Seeds until `name` was caught, and the line that replays it; None if it was not."""
    report = sweep(seeds, make=MUTANTS[name], blind=blind, first_only=True,
                   extra=f" --mutant {name}")
    return report.runs, report.failures[0] if report.failures else None


def become(thing: object, wrong: type) -> None:
    """Make an existing ledger, tree or holdings behave as a subclass that adds no fields."""
    assert wrong.__base__ is type(thing)
    thing.__class__ = wrong


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


# ---------------------------------------------------------------- tables on the device
@mutant()
class NoRebindAfterResume(Core):
    """The device keeps the page table of the row's previous tenant."""

    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        ok = super()._go(r, trigger, spare)
        if ok and trigger is Trigger.RESUME:
            r.bound = len(r.table)
        return ok


@mutant()
class GrowForgotten(Core):
    """A mirrored table is not updated on one path: rare, but silent."""

    def advance(self, events: Sequence[Event]) -> Advance:
        adv = super().advance(events)
        if adv.plan is not None and adv.plan.step % 7 == 0:
            return replace(adv, plan=replace(adv.plan, grows=()))
        return adv


@mutant()
class SamplingStateReset(Core):
    """A resumed row starts its sampling state at zero."""

    def advance(self, events: Sequence[Event]) -> Advance:
        adv = super().advance(events)
        if adv.plan is not None and adv.plan.binds:
            binds = tuple(replace(b, emitted=0) for b in adv.plan.binds)
            return replace(adv, plan=replace(adv.plan, binds=binds))
        return adv


@mutant()
class CadenceIgnoresTheStages(Core):
    """A row decodes again before its last token has left the pipeline."""

    def advance(self, events: Sequence[Event]) -> Advance:
        cfg = self.cfg
        self.cfg = replace(cfg, pp_size=1, overlap=cfg.depth > 1)
        try:
            return super().advance(events)
        finally:
            self.cfg = cfg


@mutant()
class OnePlanTooMany(Core):
    """An off-by-one in the depth."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(replace(cfg, pp_size=cfg.pp_size + 1))


@mutant()
class BudgetExceeded(Core):
    """Prompts do not see what the decoding rows took of the budget."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(replace(cfg, step_tokens=cfg.step_tokens + 1))


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

    def match(self, namespace: int, tokens: Sequence[int], page_size: int) -> list[Node]:
        return Tree.match(self, 0, tokens, page_size)


@mutant()
class NamespaceLeftOutOfTheKey(Core):
    """Tenants share pages."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _OneRoot)


class _MatchAll(Tree):
    __slots__ = ()

    def match(self, namespace: int, tokens: Sequence[int], page_size: int) -> list[Node]:
        return Tree.match(self, namespace, (*tokens, -1), page_size)


@mutant()
class NothingLeftToCompute(Core):
    """A prefix hit covers a whole prompt that ends on a page edge."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(cfg)
        become(self.have.tree, _MatchAll)


# ---------------------------------------------------------------- streams
@mutant()
class DoubleFinish(Core):
    """A request that ends with an answer in flight ends again when it arrives."""

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        for row in self.in_flight[step]:
            if row.request.phase is Phase.DONE and row.samples:
                self._out.append(Finished(row.request.rid, Outcome.STOP))
        super()._retire(step, tokens)


@mutant()
class TokenAfterTheStop(Core):
    """The step that was issued before the stop was known emits its token."""

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        results = iter(tokens)
        for row in self.in_flight[step]:
            new = next(results) if row.samples else ()
            if row.request.phase is Phase.DONE and new:
                self._out.append(Token(row.request.rid, row.request.num_output, new[0]))
        super()._retire(step, tokens)


@mutant()
class TokensAgainAfterResume(Core):
    """A resumed request starts its stream again."""

    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        ok = super()._go(r, trigger, spare)
        if ok and trigger is Trigger.RESUME and r.num_output:
            self._out.append(Token(r.rid, r.num_output - 1, r.tokens[-1]))
        return ok


@mutant()
class StartedTwice(Core):
    """A resumed request is announced again."""

    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        ok = super()._go(r, trigger, spare)
        if ok and trigger is Trigger.RESUME:
            self._out.append(Started(r.rid, 0, 0))
        return ok


@mutant()
class LateResultOfAnEarlierLife(Core):
    """A step issued before a drop settles pages of the life after it."""

    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        ok = super()._go(r, trigger, spare)
        if ok and trigger is Trigger.DROP:
            r.life -= 1
        return ok


@mutant()
class ForkWaitsForADeadLeader(Core):
    """A fork whose leader was aborted waits for ever."""

    def _may_start(self, r: Request) -> bool:
        leader = r.arrived.leader
        if leader is not None and leader not in self.live and not r.started:
            return False
        return super()._may_start(r)
