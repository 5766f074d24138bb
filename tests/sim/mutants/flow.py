"""Seeded bugs of tables, streams, order and progress."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mutants.registry import Real, instead_of, mutant
from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.listing import Shortage, Trial
from penstock.core.kv.pages import NONE_LEFT, Headroom
from penstock.core.lifecycle import Phase, Place, Trigger
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


# ---------------------------------------------------------------- tables on the device
@instead_of(Core, "transition")
def no_rebind_after_resume(real: Real, core: Core, r: Request, trigger: Trigger,
                           place: Place | None = None, headroom: Headroom = NONE_LEFT) -> Trial:
    """The device keeps the page table of the row's previous tenant."""
    ok: Trial = real(core, r, trigger, place, headroom)
    if ok and trigger is Trigger.RESUME:
        r.reported.bound, r.reported.capacity = True, r.capacity
        r.reported.lengths = [len(t.device) for t in r.tables]
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
@instead_of(Core, "_retire")
def double_finish(real: Real, core: Core, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
    """A request that ends with an answer in flight ends again when it arrives."""
    for row in core.in_flight[step]:
        if row.request.phase is Phase.DONE and row.samples:
            core.out.append(Finished(row.request.rid, Outcome.STOP))
    real(core, step, tokens)


@instead_of(Core, "transition")
def tokens_again_after_resume(real: Real, core: Core, r: Request, trigger: Trigger, *rest: int) -> Trial:
    """A resumed request starts its stream again."""
    ok: Trial = real(core, r, trigger, *rest)
    if ok and trigger is Trigger.RESUME and r.num_output:
        core.out.append(Token(r.rid, r.num_output - 1, r.tokens[-1]))
    return ok


@instead_of(Admission, "may_start")
def fork_waits_for_a_dead_leader(real: Real, admission: Admission, r: Request) -> bool:
    """A fork whose leader was aborted waits for ever."""
    leader = r.arrived.leader
    dead = leader is not None and leader not in admission.core.live and not r.started
    return not dead and bool(real(admission, r))


@instead_of(Core, "_apply")
def ends_twice_on_a_second_abort(real: Real, core: Core, event: Event) -> None:
    """An abort of something unknown is answered with an end."""
    if isinstance(event, Aborted) and event.rid not in core.live:
        core.out.append(Finished(event.rid, Outcome.ABORT))
    real(core, event)


@instead_of(Core, "_apply")
def abort_hits_another(real: Real, core: Core, event: Event) -> None:
    """Requests are matched by a prefix of their id."""
    if isinstance(event, Aborted):
        for rid in core.live:
            if str(rid).startswith(str(event.rid)):
                event = Aborted(rid)
    real(core, event)


@instead_of(Core, "_arrive")
def priority_ignored(real: Real, core: Core, a: Arrived) -> None:
    """First come, first served, whatever was asked."""
    real(core, replace(a, priority=0))


@instead_of(Core, "_arrive")
def fork_does_not_wait(real: Real, core: Core, a: Arrived) -> None:
    """A fork starts beside its leader and computes the prompt again."""
    real(core, replace(a, leader=None))


@instead_of(schedule, "_width")
def drafts_past_the_end_of_an_answer(real: Real, core: Core, r: Request, budget: int) -> int:
    """A step has positions behind the last token that a request may have."""
    most, r.max_new = r.max_new, r.max_new + r.drafts
    width: int = real(core, r, budget)
    r.max_new = most
    return width


# ---------------------------------------------------------------- progress and victims
@mutant(40, first=400)
class NoFixedPoint(Core):
    """What planning frees is looked at when the next event comes, if one comes."""

    def advance(self, events: Sequence[Event]) -> Advance:
        self.out = []
        self._hear(events)
        self.kv.free_gradually(all=not self.running)
        self.kv.tree.give_up_flushed(self.cfg.take_pages)
        self.kv.drain()
        self._progress()
        return Advance(schedule.plan(self), tuple(self.out))


@instead_of(KVCache, "make_free")
def waits_instead_of_evicting(real: Real, kv: KVCache, tier: Tier, want: Sequence[int], *,
                              has_pinned: bool = False) -> Trial:
    """Admission and resume wait for free pages that only an eviction would give."""
    return not kv.arenas[tier].short(want, promised=False) or Shortage(tier, want, False)


@instead_of(reclaim, "reserved_will_come", 200)
def second_victim_for_the_same_page(real: Real, core: Core, tier: Tier = Tier.HBM,
                                    taken: object = None) -> bool:
    """Promised pages are not counted before somebody else is disturbed."""
    return False


@instead_of(Core, "update_parked")
def pages_of_a_paused_request_are_promised_for_ever(real: Real, core: Core, r: Request) -> None:
    """Nobody takes a paused request off the list of those that still have copies to make."""
    if not (r.phase is Phase.PAUSED and r.saving.is_done):
        real(core, r)


@instead_of(reclaim, "for_growth", 200)
def oldest_gives_way(real: Real, core: Core, r: Request, tier: Tier, taken: reclaim.PlannedRows) -> None:
    """Memory pressure takes the pages of the request that has waited longest."""
    if not reclaim.reserved_will_come(core):
        reclaim.yield_device(core, next(v for v in core.running if v not in taken
                                     and v.phase is not Phase.LOADING))


@instead_of(Core, "_landed", 200)
def failed_load_waits_for_ever(real: Real, core: Core, event: Moved) -> None:
    """Nobody tells the requests that wait for a load that it failed."""
    if not event.ok and core.kv.moves.flying[event.id].dst.tier is Tier.HBM:
        return
    real(core, event)


@mutant(mode="save_pages=1")
class SleepsOverHalfAPause(Core):
    """A pause that takes several turns waits for an event, and none comes."""

    @property
    def is_saving(self) -> bool:
        return False

    @is_saving.setter
    def is_saving(self, value: bool) -> None:
        pass


@instead_of(Admission, "may_start")
def half_saved_request_gets_a_row(real: Real, admission: Admission, r: Request) -> bool:
    """A pause that takes several turns may end between two of them, with the rest of its reserve."""
    return bool(real(admission, r)) or (r.saving.at is not None and not (r.moves or r.storage.keys))
