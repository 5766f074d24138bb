"""What hosted rows get of the device: who comes back to it, and how large hot buffers are.

Sizes follow what the device has counted: a row that misses grows, by its least at a time, of pages that are
free, that are cached and on the host too, or that hosted rows have on loan: as hot buffers they serve more of
what is selected. Where these are not enough a row with all of its KV on the device goes on from the host: a
page of a hot buffer saves more than one of a whole row, which comes back when all have their largest.
Everybody else comes first: `Pages.make_free` takes back what buffers have beyond their least before it evicts
anything.

What a row's drafts need it gets as soon as it is hosted, of all that is cached, as long as so many rows draft
at all. That is taken back when nothing cached is left, so no row evicts for what it has just lost.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.kv import promote
from penstock.core.lifecycle import Place
from penstock.core.plan import RequestId, Tier
from penstock.core.policy import capacity, reclaim
from penstock.core.policy.queue import Admission
from penstock.core.request import PREEMPTIONS_MAX, Request
from penstock.core.state import CoreState


class Residency:
    """Of one engine's hosted rows."""

    def __init__(self, core: CoreState, admission: Admission) -> None:
        self._core, self._admission = core, admission
        self._stay: tuple[int, ...] = ()       # when nobody could be promoted
        self._is_short = False                 # somebody would then have been, but for pages in use
        self._uses = 0                         # HotUse so far, while somebody was hosted,
        self._seen = 0                         # and when buffers last grew, but for who
        self._waits = False                    # waits for fences
        self._grown = 0                        # times that one did
        self._draws = core.cfg.sparse and min(core.cfg.draft_tokens, core.cfg.draft_positions) > 0
        self._drafted = -1, -1                 # edges and `_uses` when rows were given what drafts need,
        self._is_late = False                  # and somebody waits for a step or for fences
        self._keeps = False                    # somebody's drafts need more than the least

    def hear(self, rows: Iterable[tuple[RequestId, int, int]]) -> None:
        """A HotUse. What is absurd in it is left out."""
        self._uses += bool(self._core.hosted)
        for rid, selected, missed in rows:
            r = self._core.live.get(rid)
            if r is not None and 0 <= missed <= selected and selected:
                r.hot.missed, r.hot.has_news = missed / selected, True

    def progress(self) -> None:
        """Bring back who is worth it, and give what then lies idle to hot buffers."""
        if self._stay != self._promotable():
            self._is_short = not self._admission.needs_pages() and capacity.promote(self._core)
            self._stay = self._promotable()
        if self._draws and not self._is_short and (
                self._is_late or self._drafted != (self._core.edges_taken, self._uses)):
            self._drafted, self._is_late = (self._core.edges_taken, self._uses), False
            self._draft()
        if self._core.kv.grown:
            self._core.kv.trim_hot_buffers(self._reserve(0))
            if self._keeps:
                self._core.kv.reclaim(Tier.HBM, self._headroom(0))
        if not self._is_late and (self._seen != self._uses or self._waits):
            self._seen, self._waits = self._uses, False
            self._grow()

    def _promotable(self) -> tuple[int, ...]:
        """As long as this is the same, it is of no use to try again to promote somebody."""
        core = self._core
        loose = core.kv.arenas[Tier.HBM].num_evictable if self._is_short else 0
        return core.edges_taken, core.kv.freed, len(core.runnable), self._uses, loose

    def _reserve(self, more: int) -> Sequence[int]:
        """Pages of each group that stay free: one for each row that runs, so that none waits for a fence when
        it grows, and what is promised; and so many `more` of hosted ones."""
        promised = self._core.kv.arenas[Tier.HBM].reserved
        return [n + pages for n, pages in zip(promised, self._headroom(more), strict=True)]

    def _headroom(self, more: int) -> Sequence[int]:
        """The same without what is promised, which can be evicted for when it is taken."""
        return [len(self._core.running) + group.hosted * more for group in self._core.cfg.groups]

    def _draft(self) -> None:
        """Hosted rows get a hot buffer for the drafts that each may have while all run, or for fewer."""
        core = self._core
        most = core.cfg.draft_positions * core.cfg.pp_size // len(core.running) - 1
        if most < 1 and not self._keeps:
            return
        for r in core.hosted:
            drafts = min(r.drafts, most)
            r.hot.drafts = capacity.draft_units(core.cfg, r, drafts) if drafts > 0 else 0
        self._keeps = any([r.hot.drafts > r.hot.least for r in core.hosted])
        if self._admission.lacks(Tier.HBM) or core.by_place[Place.TO_HOST]:
            return                             # they would take it back
        rows = [r for r in core.by_place[Place.HOST] if r.num_hot < r.hot.drafts]
        resized = any([r.hot.is_resized for r in rows])            # what comes would be taken for what went
        for r in rows:
            for drafts in range(min(r.drafts, most) if not r.hot.is_resized else 0, 0, -1):
                n = capacity.draft_units(core.cfg, r, drafts) - r.num_hot
                if n <= 0 or self._gets(r, n):
                    break
                if self._is_late:              # for fences: what comes then is for this one
                    return
        self._is_late = resized

    def _gets(self, r: Request, n: int) -> bool:
        """Whether `r` has `n` pages more for what its drafts select. Counts first: what would not be enough
        stays, and so does what others have for theirs."""
        kv, want = self._core.kv, self._headroom(n)
        arena = kv.arenas[Tier.HBM]
        kept = sum([min(q.num_hot, q.hot_kept) - q.hot.least for q in kv.grown])
        if kv.lacks(Tier.HBM, self._headroom(n + kept)):
            return False
        kv.reclaim(Tier.HBM, want, drafts=False)
        if arena.short(want, promised=False):
            self._is_late |= not arena.short(want, promised=True)
            return False
        promote.grow_hot_buffer(kv, r, n)
        self._grown += 1
        return True

    def _grow(self) -> None:
        core, kv = self._core, self._core.kv
        arena = kv.arenas[Tier.HBM]
        if self._admission.needs_pages() and any([pool.in_limbo > pool.away for pool in arena.pools]):
            return                             # the head of the line may be about to get these
        for r in sorted(filter(_may_grow, core.by_place[Place.HOST]), key=lambda r: (-r.hot.missed / r.num_hot, r.key)):
            n = min(r.hot.least, r.hot.most - r.num_hot)
            want = self._reserve(n)
            kv.evict_redundant(want)
            if arena.short(want, promised=False) and not arena.short(want, promised=True):
                self._waits = True
                continue
            while n and arena.short(self._reserve(n), promised=False):
                n //= 2
            if n:
                promote.grow_hot_buffer(kv, r, n)
                self._grown += 1
            else:
                return self._spill()

    def _spill(self) -> None:
        """Hot buffers want more than there is: the youngest row that has all of its KV on the device goes on
        from the host, if all that run cannot have both."""
        core = self._core
        if self._waits or reclaim.reserved_will_come(core) or not capacity.is_crowded(core):
            return
        for r in reversed(core.running):
            if r.setbacks.preemptions < PREEMPTIONS_MAX - 1 and reclaim.spillable(core, r) and (
                    reclaim.spill(core, r)):
                return

    def stats(self) -> dict[str, float]:
        """Gauges and counters for metrics."""
        sizes = [r.num_hot for r in self._core.running]
        return {"hot_buffer_pages": sum(sizes), "hot_buffer_pages_max": max(sizes, default=0),
                "hot_buffers_grown": self._grown}


def _may_grow(r: Request) -> bool:
    """Whether a larger hot buffer would save `r` something, as far as the device has told. One that has just
    become smaller is told so first: what comes would be taken for what went."""
    return r.hot.has_news and r.hot.missed > 0 and r.num_hot < r.hot.most and not r.hot.is_resized
