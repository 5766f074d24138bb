"""Whether the core does what the design says is best, where anything else would be correct too.

A core that drops instead of pausing, never hosts a row or reads no cached prefix answers every
request rightly. Here every edge is asked whether there was a better one. Room and prefixes are
computed anew, from pools and tree; how much a row has to save is the core's own count.
"""
from __future__ import annotations

from collections import Counter

from penstock.core import staying
from penstock.core.core import Core
from penstock.core.lifecycle import ACTIVE, WAITING, Phase, Place, Trigger
from penstock.core.plan import Event, Expired, Rates, Tier
from penstock.core.request import STUCK_MAX, Request
from penstock.core.room import GAVE_WAY_MAX, landing, leaving
from penstock.core.tree import Node

GIVING_WAY = (Trigger.PAUSE, Trigger.DROP)
HOSTED_MAX = 3         # steps that a row goes on from the host though it could come back
LINE_MAX = 8          # and that somebody waits for device pages that rows could do without


class Policy:
    """Asked before each edge and after each event."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.rates: Rates | None = None
        self.longest = -1
        self.pausing = -1, -1                   # who was to pause last: it gives up device pages
        self.hosted = 0                         # steps since somebody could come back from the host
        self.line = 0                           # and since the first of the line could have its pages
        self.refused = False                    # something says no where there is room: nothing is judged

    # ---------------------------------------------------------------- before an edge
    def edge(self, r: Request, trigger: Trigger, *, pressure: bool) -> None:
        """`pressure`: the core wants it, because pages are short."""
        if self.refused:
            return
        if trigger is Trigger.PAUSE:
            self.pausing = r.rid, r.visit
        if trigger is Trigger.FETCH:
            self._pays(r)
        elif trigger in (Trigger.ADMIT, Trigger.RESUME) and r.phase in (Phase.QUEUED, Phase.DROPPED):
            self.longest = self._known(r)
        elif pressure and trigger in GIVING_WAY and r.phase in ACTIVE:
            self._last_resort(r, trigger)

    def gives_way(self, r: Request, trigger: Trigger) -> None:
        """Pages are short. A row that goes on from the host may do so for somebody who waits: then it is
        enough that what is promised does not cover what is lacked."""
        have, running = self.core.have, self.core.running
        for_host = r.phase in WAITING or (r.place is Place.HOST and trigger is Trigger.DROP)
        tier = have.lacks if for_host else Tier.HBM
        arena, lack = have.arenas[tier], have.lack
        short = lack is not None and lack.tier is tier and arena.short(lack.want, promised=True) > 0
        if trigger is not Trigger.SPILL or not short:
            assert not any(pool.in_limbo > pool.away for pool in arena.pools), (
                f"request {r.rid} gives way to a promised page")
        alone = len(running) < 2 and not arena.away
        assert trigger is Trigger.SPILL or alone or r not in running[:1], "the oldest gives way"

    def taken(self, r: Request, source: Phase) -> None:
        """`r` has got a row: it begins behind the longest prefix that anybody has computed."""
        if r.row is not None and source in (Phase.QUEUED, Phase.DROPPED) and (
                r.place is Place.DEVICE and not self.refused):
            assert r.computed == self.longest, (
                f"request {r.rid} begins at {r.computed}, and {self.longest} positions are cached")

    def _pays(self, r: Request) -> None:
        rates = self.rates
        assert rates is None or rates.disk_page_us < self.core.cfg.page_size * rates.prefill_token_us, (
            f"request {r.rid} is fetched for, and computing is faster")

    def _last_resort(self, r: Request, trigger: Trigger) -> None:
        """Spill before pause before drop, and first of all who does not even run."""
        core = self.core
        if r.place is Place.HOST and trigger is Trigger.DROP and self.pausing != (r.rid, r.visit):
            idle = [q.rid for q in core.waiting if q.phase in (Phase.FETCHING, Phase.PAUSED) and any(
                any(t.host) for t in q.tables)]
            assert not idle, f"request {r.rid} is dropped for host pages, and {idle} do not run"
            return
        if trigger is Trigger.DROP and (r.phase, Trigger.PAUSE) in core.edges:
            fetching = [q.rid for q in core.waiting if q.phase is Phase.FETCHING]
            assert not fetching, f"request {r.rid} is dropped, and pages of {fetching} are not used yet"
            assert not self._fits_host(r, Phase.PAUSED), f"request {r.rid} is dropped, and could pause"
        if self._may_spill(r) and (r is not core.running[0] or len(core.running) == 1):
            assert not self._fits_host(r, Phase.STAGING), f"request {r.rid} gives way, and could spill"

    def _may_spill(self, r: Request) -> bool:
        """Whether it could decode from host pages, and device pages would become free."""
        return r.phase is Phase.RESIDENT and r.may_host and r.stuck < STUCK_MAX and self._own_slabs(r) > 0

    def _own_slabs(self, r: Request) -> int:
        """What nobody else reads of `r` and a hot buffer does not keep; of a single group in pages."""
        cfg = self.core.cfg
        own = [(sum(c is not None and c.pins == 1 for c in t.device) - r.hot)
               // (t.group.slab_pages if len(cfg.groups) > 1 else 1) for t in r.tables if t.group.hosted]
        return sum(n for n in own if n > 0)

    def _fits_host(self, r: Request, phase: Phase) -> bool:
        """Whether what `r` has not saved fits into host pages that are free now or can be evicted, and are
        not what it has saved."""
        have = self.core.have
        want, arena = staying.unsaved(have, r, phase), have.arenas[Tier.DRAM]
        if not any(want):
            return True
        if len(arena.pools) > 1:
            return not arena.short(want, promised=False)
        mine = {id(node) for node in r.path}
        others = [node for node in have.tree.nodes() if id(node) not in mine]
        idle = sum(have.tree.evictable(node, have.host[0]) for node in others)
        return want[0] <= arena.pools[0].free + idle

    # ---------------------------------------------------------------- back from the host
    def step(self) -> None:
        """A step was planned. Nobody stays on the host for long whom the device could serve to the end, nor
        on the device with pages that would let the first of the line in."""
        core = self.core
        if not core.cfg.sparse:
            return
        self.line = self.line + 1 if self._could_make_way() and not self.refused else 0
        assert self.line <= LINE_MAX, f"request {core.line[0].rid} waits, and rows could go on from the host"
        away = [r for r in core.running if r.phase is Phase.HOSTED and r.put_back < core.have.issued]
        busy = core.waiting or core.cfg.always_hosted or self.refused or any(
            r.phase is Phase.PROMOTING for r in core.running)
        # Whomever the core chooses, there is room for it now.
        could = away and not busy and all(map(self._is_room, away)) and any(map(self._may_end, away))
        self.hosted = self.hosted + 1 if could else 0
        assert self.hosted <= HOSTED_MAX, f"request {away[0].rid} stays on the host, and the device has room"

    def _could_make_way(self) -> bool:
        """Whether rows that can go on from the host would leave the first of the line what it lacked, and
        none is on the way there."""
        core = self.core
        if any(r.phase is Phase.STAGING for r in core.running) or leaving(core):
            return False
        first = next((r for r in core.line if core.admission.may_start(r)), None)
        lacks = [lack for lack in core.admission.lacks_of(first) if lack.tier is Tier.HBM]
        short = min([core.have.arenas[Tier.HBM].short(lack.want, promised=True) for lack in lacks], default=0)
        rows = [r for r in core.running[1:] or core.running
                if self._may_spill(r) and r.gave_way < GAVE_WAY_MAX - 1 and self._fits_host(r, Phase.STAGING)]
        own = sum(self._own_slabs(r) for r in rows)
        return 0 < short - sum(1 for _ in landing(core, Tier.HBM)) <= own

    def _is_room(self, r: Request) -> bool:
        """Whether free device pages hold what only the host has of `r`, and a page more for each row. Of
        several groups, one to a slab: that is more than it can take."""
        arena, rows = self.core.have.arenas[Tier.HBM], len(self.core.running)
        want = [sum(c is None for c in t.device) for t in r.tables if t.group.hosted]
        free = len(arena.free) if len(arena.pools) > 1 else arena.pools[0].free
        return sum(n + rows for n in want if n) <= free

    def _may_end(self, back: Request) -> bool:
        """Whether all that run fit to their ends with `back` on the device, one page to a slab."""
        cfg, have, need = self.core.cfg, self.core.have, Counter[Tier]()
        for r in self.core.running:
            for group in cfg.groups:
                unit = group.page_tokens or cfg.page_size
                pages = -(-(r.num_prompt + r.max_new - 1) // unit)
                if group.reach:
                    pages = min(pages, -(-group.reach // unit) + 1)
                below = group.hosted and r.place is Place.HOST and r is not back
                need[Tier.HBM] += r.hot if below else pages
                need[Tier.DRAM] += pages if below else 0
        room = {tier: (arena.slabs if len(arena.pools) > 1 else arena.pools[0].capacity) - arena.away
                for tier, arena in have.arenas.items()}
        room[Tier.DRAM] -= cfg.store_pages
        return all(need[tier] <= max(0, room[tier]) for tier in (Tier.HBM, Tier.DRAM))

    # ---------------------------------------------------------------- prefixes
    def _known(self, r: Request) -> int:
        """Positions with KV that somebody may start from, walked for page by page: as far as groups go that
        keep all, then back to where the others have what the next step reads."""
        core, size = self.core, self.core.cfg.page_size
        path: list[Node] = []
        whole = [g for g, group in enumerate(core.cfg.groups) if not group.reach]
        node = core.have.tree.roots.get(r.arrived.namespace)
        while node is not None and (len(path) + 1) * size < len(r.tokens):
            node = node.children.get(r.page_key(len(path), size))
            if node is None or not all(self._here(node, g) for g in whole):
                break
            path.append(node)
        return next((n * size for n in range(len(path), 0, -1) if self._serves(path[:n])), 0)

    def _serves(self, path: list[Node]) -> bool:
        """Whether groups that keep a part have each of the positions behind these pages that they show."""
        size, end = self.core.cfg.page_size, len(path) * self.core.cfg.page_size
        for g, group in enumerate(self.core.cfg.groups):
            unit = group.page_tokens or size
            for at in range(max(0, end - group.reach), end if group.reach else 0):
                last = (at // unit + 1) * unit               # where its page ends
                if last > end or not self._here(path[last // size - 1], g):
                    return False
        return True

    def _here(self, node: Node, g: int) -> bool:
        have = self.core.have
        device, host = (node.copies.get(space) for space in (have.device[g], have.host[g]))
        return bool((device is not None and not device.bad) or (host is not None and host.ready))

    # ---------------------------------------------------------------- after an event
    def saw(self, event: Event) -> None:
        if isinstance(event, Rates):
            self.rates = event

    def effect(self, event: Event, r: Request, before: tuple[Phase, int]) -> None:
        """A deadline that counts has an effect."""
        if isinstance(event, Expired) and not r.is_parked:
            ends = r.phase in (Phase.QUEUED, Phase.FETCHING, Phase.RECEIVING) or (
                r.phase is Phase.DROPPED and not r.started)
            assert (r.phase, r.visit) != before or not ends, f"request {r.rid}: its deadline is over"
