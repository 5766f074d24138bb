"""Seeded bugs of rows that decode from host pages: binds, hot buffers, staging, promotion, loans."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mutants.registry import Real, holding, instead_of, mutant
from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.kv import allocate, claims, offload, page_table, promote, sealing
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.claims import Claim, GroupAllocation
from penstock.core.kv.listing import Trial
from penstock.core.kv.pages import NONE_LEFT, Headroom
from penstock.core.kv.pool import Pool
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import NO_DRAM, Advance, Event, Grow, HotResize, Moved, Remap, StepId, Tier
from penstock.core.policy import capacity, reclaim
from penstock.core.policy.residency import Residency
from penstock.core.request import Request
from penstock.core.settings import CoreConfig

# Hosted rows read pages that they share, and that others need.
LOANS = ("hot_pages=1,always_hosted=0,span=30,requests=14,rows=6,hbm_pages=24,dram_pages=200,page_size=1"
         ",again=0.9")
# Hot buffers grow while pages lie idle, and give them back.
RESIZES = ("pair=0,hot_pages=1,hot_pages_max=5,always_hosted=0,spills=30,rows=6,requests=10,hbm_pages=30,"
           "dram_pages=200,page_size=1,overlap=1,prompt_max=12,new_max=20")
# Steps wait for loads that fail, and results come from the rank where they did.
TORN = "pair=0,ranks=1,wait_pages=1000,fail=0.5,step_tokens=64,pauses=20,turns=0.7,again=0.7,dram_pages=60"


# ---------------------------------------------------------------- grows, remaps
@instead_of(Core, "transition")
def spill_that_the_device_is_not_told_of(real: Real, core: Core, r: Request, trigger: Trigger,
                                         place: Place | None = None, headroom: Headroom = NONE_LEFT) -> Trial:
    """A row goes on from host pages, and its device pages are others' now: the device is not told."""
    source = r.place
    ok: Trial = real(core, r, trigger, place, headroom)
    if ok and (source, place) == (Place.TO_HOST, Place.HOST):
        r.reported.remapped = [{} for _ in r.tables]
    return ok


@instead_of(promote, "take_hot_buffer")
def hot_units_of_a_spill_hold_other_entries(real: Real, kv: KVCache, r: Request) -> Trial:
    """A row that goes on from the host believes that its hot units hold what is beside it."""
    ok: Trial = real(kv, r)
    for t in r.tables if ok else ():
        t.kept = {page: i ^ 1 if i ^ 1 < len(t.host) else -1 for page, i in t.kept.items()}
    return ok


@mutant(mode="aims=10,hot_pages=1")
class PageMappedBeforeItsLoadHasLanded(Core):
    """A row that comes back is told of device pages while they are being filled."""

    def advance(self, events: Sequence[Event]) -> Advance:
        def all_of_it(r: Request, column: Sequence[Copy | None]) -> Sequence[Copy | None]:
            return column

        with holding(schedule, "_readable", all_of_it):
            for r in self.running:
                for g, i in r.promotion.loading:
                    self.kv.remap(r, g, (i,))
            return super().advance(events)


@instead_of(schedule, "_remaps")
def unmapped_without_a_host_page(real: Real, r: Request) -> list[Remap]:
    """A row loses device pages, and is not told of the host's."""
    return [replace(m, host=(NO_DRAM,) * len(m.entries)) for m in real(r)]


@instead_of(schedule, "_remaps")
def page_that_has_come_is_mapped_a_place_too_late(real: Real, r: Request) -> list[Remap]:
    """Of pages that a row is told of, each is taken for the next."""
    return [replace(m, device=m.device[1:] + m.device[:1]) for m in real(r)]


@instead_of(KVCache, "_free_hot_buffer", 400, mode="spills=60,aims=0,always_hosted=0,page_size=2,fail=0")
def hot_buffer_of_before_goes_on(real: Real, kv: KVCache, r: Request) -> None:
    """A row that came back and goes to the host again in one turn believes that its hot units hold what they
    held before."""
    real(kv, r)
    r.hot.has_ended = False


@instead_of(schedule, "_grows", 300)
def grow_without_the_twin(real: Real, r: Request) -> list[Grow]:
    """A resident row is not told of the host twins of its new pages."""
    return [g._replace(host=()) if not r.place.on_host else g for g in real(r)]


@instead_of(schedule, "_remaps", mode=LOANS)
def device_page_given_back_without_a_remap(real: Real, r: Request) -> list[Remap]:
    """A hosted row goes on reading a device page that was a loan."""
    return [m for m in real(r) if max(m.device) >= 0]


@instead_of(capacity, "hot_units")
def hot_buffer_longer_than_the_request(real: Real, cfg: CoreConfig, _: int, *, grown: bool = False) -> int:
    """A request that is short takes all of a hot buffer."""
    return cfg.largest_hot if grown else cfg.hot_pages


# ---------------------------------------------------------------- hot buffers that grow and shrink
@instead_of(schedule, "_resizes", mode=RESIZES)
def hot_buffer_shrinks_and_the_device_is_not_told(real: Real, r: Request) -> list[HotResize]:
    """A row whose hot buffer is back at its least goes on reading hot pages that are others'."""
    resizes: list[HotResize] = real(r)
    return [z for z in resizes if len(z.pages) != r.hot.least or max([h.keeps for h in z.pages]) >= 0]


@instead_of(KVCache, "trim_hot_buffers", mode=RESIZES)
def hot_buffer_shrinks_below_its_least(real: Real, kv: KVCache, want: Sequence[int], *,
                                       drafts: bool = False) -> None:
    """A row that has lent its hot buffer gets less of it back than a step reads."""
    grown = list(kv.grown)
    for r in grown:
        r.hot.least -= 1
    real(kv, want, drafts=drafts)
    for r in grown:
        r.hot.least += 1


@instead_of(KVCache, "trim_hot_buffers", mode=RESIZES)
def hot_pages_taken_back_without_a_fence(real: Real, kv: KVCache, want: Sequence[int], *,
                                         drafts: bool = False) -> None:
    """What a hot buffer gives up is free while a step in flight brings units there."""
    steps = [(r, r.last_issue) for r in kv.grown]
    for r, _ in steps:
        r.last_issue = StepId(0)
    real(kv, want, drafts=drafts)
    for r, last in steps:
        r.last_issue = last


@instead_of(promote, "mark_evictable", mode=RESIZES)
def page_of_a_grown_buffer_is_not_counted(real: Real, copy: Copy, pool: Pool) -> None:
    """Of the pages that a hot buffer has beyond its least some are not among those that can be had."""
    if copy.page % 4:
        real(copy, pool)


@instead_of(Residency, "_draft", 400, mode=f"{RESIZES},draft_tokens=3,draft_positions=32")
def hot_buffer_grows_again_before_the_device_knows_that_it_shrank(real: Real, residency: Residency) -> None:
    """What drafts get comes where something has just gone, and the device takes the one for the other."""
    resized = [r for r in residency._core.hosted if r.hot.is_resized]
    for r in resized:
        r.hot.is_resized = False
    real(residency)
    for r in resized:
        r.hot.is_resized = True


# ---------------------------------------------------------------- on the way to the host
@instead_of(allocate, "_allocate_group")
def hot_buffer_skipped_on_resume(real: Real, kv: KVCache, r: Request, g: int, place: Place,
                                 claim: Claim, way: GroupAllocation) -> None:
    """One way to host pages forgets the hot buffer."""
    units, r.hot.least = r.hot.least, r.hot.least * (r.phase is not Phase.PAUSED)
    real(kv, r, g, place, claim, way)
    r.hot.least = units


@instead_of(offload, "is_copied")
def spill_with_an_incomplete_host_copy(real: Real, r: Request) -> bool:
    """A spill goes on while the last of its pages is on its way to the host."""
    return bool(real(r)) or len(r.saving.unsaved) == 1


@mutant()
class TwinNotStoredFromItsFirstToken(Core):
    """A page of a resident row gets its host twin when it has some tokens already."""

    def advance(self, events: Sequence[Event]) -> Advance:
        def later(*args: object) -> None:
            """Not now."""

        with holding(claims, "mirror", later), holding(allocate, "mirror", later):
            adv = super().advance(events)
        for r in self.running:
            for g, t in enumerate(r.tables):
                i, may = t.end(r.computed) - 1, self.cfg.sparse and r.arrived.selects and t.group.hosted
                if (may and i >= 0 and r.state == (Phase.DECODE, Place.DEVICE) and self.kv.node(r, t, i) is None
                        and page_table.own(t.host, i) is None and self.kv.host[g].pool.free):
                    page_table.put(t.host, i, Copy(self.kv.host[g].pool.acquire(1)[0]))
        return adv


@instead_of(promote, "take_hot_buffer", 400, first=80, mode="hot_pages=3,spills=60,page_size=2,fail=0")
def hot_buffer_takes_a_shared_page(real: Real, kv: KVCache, r: Request) -> Trial:
    """A page that others read becomes a hot unit."""
    truth = [(c, c.pins) for t in r.tables for c in t.device if c is not None]
    for copy, _ in truth:
        copy.pins = 1
    ok: Trial = real(kv, r)
    for copy, pins in truth:
        copy.pins = pins
    return ok


@instead_of(reclaim, "reserved_will_come", mode=LOANS)
def second_victim_while_a_spill_is_promised(real: Real, core: Core, tier: Tier = Tier.HBM,
                                            taken: reclaim.PlannedRows | None = None) -> bool:
    """While the pages of one spill are behind their fences, the next row is spilled."""
    spilled = any(q.place.on_host for q in core.running)
    return not spilled and bool(real(core, tier, taken))


@instead_of(KVCache, "pin_resident", mode=LOANS)
def page_that_is_needed_again_can_be_had(real: Real, kv: KVCache, r: Request) -> None:
    """A row that is promoted counts on pages that it read, and others may still get them."""


@instead_of(KVCache, "_unmap", mode=LOANS)
def reader_is_forgotten_at_an_eviction(real: Real, kv: KVCache, node: Node, space: TierGroup) -> None:
    """A page that several rows read is taken from the first of them alone."""
    copy = node.copies[space]
    copy.readers = copy.readers[:1]
    real(kv, node, space)


# ---------------------------------------------------------------- from the host
@instead_of(allocate, "missing")
def row_starts_on_host_pages_that_are_coming(real: Real, r: Request) -> list[Copy] | None:
    """A hosted row does not wait until its host pages have been filled."""
    out: list[Copy] | None = real(r)
    return [] if out is None else out


@instead_of(sealing, "seal")
def promotion_without_the_page_that_was_open(real: Real, kv: KVCache, r: Request) -> None:
    """The page that was open when a promotion began is never loaded."""
    for t in r.tables if r.place is Place.TO_DEVICE else ():
        for up in t.device[len(r.path) * kv.cfg.page_size // t.unit:r.retired // t.unit]:
            if up is not None and up.node is None:
                up.ready = True
    real(kv, r)


@instead_of(promote, "_reload_entry")
def promotion_loads_the_open_page_too_early(real: Real, kv: KVCache, r: Request, g: int, i: int) -> bool:
    """The open page is loaded with the others, and what is written to it meanwhile is lost."""
    t, ok = r.tables[g], bool(real(kv, r, g, i))
    source, target = page_table.own(t.host, i), t.device[i]
    if (kv.node(r, t, i) is None and i < t.end(r.computed) and source is not None and target is not None
            and not (target.ready or target.filled_by)):
        kv.moves.move_private(r, kv.host[g], source, kv.device[g], target, min(t.unit, r.computed - i * t.unit))
    return ok


@instead_of(KVCache, "grow", mode="aims=10,hot_pages=1")
def page_begun_during_a_promotion_is_on_the_host_only(real: Real, kv: KVCache, r: Request,
                                                      upto: int) -> Trial:
    """A row that is being promoted grows like any hosted row."""
    place = r.place
    if place is Place.TO_DEVICE:
        r.place = Place.HOST
    ok: Trial = real(kv, r, upto)
    r.place = place
    return ok


# ---------------------------------------------------------------- leases of a hosted row
@instead_of(KVCache, "unpin")
def host_page_released_without_a_fence(real: Real, kv: KVCache, r: Request, space: TierGroup,
                                       copy: Copy) -> None:
    """The host page of a hosted row is free while steps in flight read and write it."""
    last = r.last_issue
    if space.tier is Tier.DRAM:
        r.last_issue = StepId(0)
    real(kv, r, space, copy)
    r.last_issue = last


@instead_of(KVCache, "_free_hot_buffer")
def hot_buffer_released_without_a_fence(real: Real, kv: KVCache, r: Request) -> None:
    """The hot buffer of a row that leaves is free while its steps in flight use it."""
    last, r.last_issue = r.last_issue, StepId(0)
    real(kv, r)
    r.last_issue = last


@instead_of(Core, "transition")
def drop_of_a_paused_request_forgets_a_group(real: Real, core: Core, r: Request, trigger: Trigger,
                                             place: Place | None = None, headroom: Headroom = NONE_LEFT) -> object:
    """A paused request that is dropped gives back the host pages of all groups but one."""
    if r.phase is Phase.PAUSED and trigger is Trigger.DROP:
        page_table.take_all(r.tables[-1].host)
    return real(core, r, trigger, place, headroom)


# ---------------------------------------------------------------- steps that wait for loads
@mutant()
class StepDoesNotListItsWaits(Core):
    """A step runs before the loads that it reads."""

    def advance(self, events: Sequence[Event]) -> Advance:
        adv = super().advance(events)
        return adv if adv.plan is None else replace(adv, plan=replace(adv.plan, waits=()))


@instead_of(Core, "_landed", 60, mode=TORN)
def results_of_a_failed_load_used(real: Real, core: Core, event: Moved) -> None:
    """A step that waited for a load that failed gives its tokens to the user."""
    before = [(r, r.invalid_through) for r in core.live.values()]
    real(core, event)
    for r, invalid_through in before:
        r.invalid_through = invalid_through
