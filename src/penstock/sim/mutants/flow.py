"""Seeded bugs of tables, streams, order and progress."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv.cache import KVCache
from penstock.core.kv.pages import Shortage, Trial
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Event,
    Finished,
    Moved,
    Outcome,
    StepId,
    Tier,
    Token,
)
from penstock.core.policy import reclaim
from penstock.core.policy.queue import Admission
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.sim.mutants.registry import Real, instead_of, mutant


# ---------------------------------------------------------------- tables on the device
@mutant()
class NoRebindAfterResume(Core):
    """The device keeps the page table of the row's previous tenant."""

    def transition(self, r: Request, trigger: Trigger, spare: int = 0) -> Trial:
        ok = super().transition(r, trigger, spare)
        if ok and trigger is Trigger.RESUME:
            r.bound, r.device_capacity = True, r.capacity
            r.device_len = [len(t.device) for t in r.tables]
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
class BudgetExceeded(Core):
    """Prompts do not see what the decoding rows took of the budget."""

    def __init__(self, cfg: CoreConfig) -> None:
        super().__init__(replace(cfg, step_tokens=cfg.step_tokens + 1))


# ---------------------------------------------------------------- streams
@mutant()
class DoubleFinish(Core):
    """A request that ends with an answer in flight ends again when it arrives."""

    def _retire(self, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
        for row in self.in_flight[step]:
            if row.request.phase is Phase.DONE and row.samples:
                self.out.append(Finished(row.request.rid, Outcome.STOP))
        super()._retire(step, tokens)


@mutant()
class TokensAgainAfterResume(Core):
    """A resumed request starts its stream again."""

    def transition(self, r: Request, trigger: Trigger, spare: int = 0) -> Trial:
        ok = super().transition(r, trigger, spare)
        if ok and trigger is Trigger.RESUME and r.num_output:
            self.out.append(Token(r.rid, r.num_output - 1, r.tokens[-1]))
        return ok


@instead_of(Admission, "may_start")
def fork_waits_for_a_dead_leader(real: Real, admission: Admission, r: Request) -> bool:
    """A fork whose leader was aborted waits for ever."""
    leader = r.arrived.leader
    dead = leader is not None and leader not in admission.core.live and not r.started
    return not dead and bool(real(admission, r))


@mutant()
class EndsTwiceOnASecondAbort(Core):
    """An abort of something unknown is answered with an end."""

    def _apply(self, event: Event) -> None:
        if isinstance(event, Aborted) and event.rid not in self.live:
            self.out.append(Finished(event.rid, Outcome.ABORT))
        super()._apply(event)


@mutant()
class AbortHitsAnother(Core):
    """Requests are matched by a prefix of their id."""

    def _apply(self, event: Event) -> None:
        if isinstance(event, Aborted):
            for rid in self.live:
                if str(rid).startswith(str(event.rid)):
                    event = Aborted(rid)
        super()._apply(event)


@mutant()
class PriorityIgnored(Core):
    """First come, first served, whatever was asked."""

    def _arrive(self, a: Arrived) -> None:
        super()._arrive(replace(a, priority=0))


@mutant()
class ForkDoesNotWait(Core):
    """A fork starts beside its leader and computes the prompt again."""

    def _arrive(self, a: Arrived) -> None:
        super()._arrive(replace(a, leader=None))


# ---------------------------------------------------------------- progress and victims
@mutant(40, first=400)
class NoFixedPoint(Core):
    """What planning frees is looked at when the next event comes, if one comes."""

    def advance(self, events: Sequence[Event]) -> Advance:
        self.out = []
        self._hear(events)
        self.kv.drain()
        self._progress()
        return Advance(schedule.plan(self), tuple(self.out))


@instead_of(KVCache, "make_free")
def waits_instead_of_evicting(real: Real, kv: KVCache, tier: Tier, want: Sequence[int]) -> Trial:
    """Admission and resume wait for free pages that only an eviction would give."""
    return not kv.arenas[tier].short(want, promised=False) or Shortage(tier, want, False)


@instead_of(reclaim, "promised", 200)
def second_victim_for_the_same_page(real: Real, core: Core, tier: Tier = Tier.HBM) -> bool:
    """Promised pages are not counted before somebody else is disturbed."""
    return False


@instead_of(reclaim, "for_growth", 200)
def oldest_gives_way(real: Real, core: Core, r: Request, tier: Tier, taken: list[Request]) -> None:
    """Memory pressure takes the pages of the request that has waited longest."""
    if not reclaim.promised(core):
        reclaim.yield_device(core, next(v for v in core.running if v not in taken
                                     and v.phase is not Phase.LOADING))


@mutant(200)
class FailedLoadWaitsForEver(Core):
    """Nobody tells the requests that wait for a load that it failed."""

    def _landed(self, event: Moved) -> None:
        if not event.ok and self.kv.moves.flying[event.id].dst.tier is Tier.HBM:
            return
        super()._landed(event)
