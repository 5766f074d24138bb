"""Whether the core does what the design says is best, where anything else would be correct too.

A core that drops instead of pausing, never hosts a row or reads no cached prefix answers every
request rightly. Here edges are asked whether there was clearly a better one: room and prefixes are
computed anew, from pools and tree, and what is judged shares no rule with the core.
"""
from __future__ import annotations

import itertools

from penstock.core.lifecycle import ACTIVE, WAITING, WAYS_IN, Phase, Place, State, Trigger
from penstock.core.plan import Event, Expired, Rates, RequestId, Retired, Tier
from penstock.sim.world.view import Live, Pages, Sealed, View, Watcher

GIVING_WAY = (Trigger.PAUSE, Trigger.DROP)


def _num_own(t: Pages) -> int:
    """Device pages that nobody else reads, behind the last that somebody does. Two who computed the same
    first page can share the second: what lies before a shared page need not count (sim seed 11514). Nor
    what rows in host pages read beside (sim seed 11467)."""
    return sum(1 for _ in itertools.takewhile(lambda page: page is not None and page.pins == 1
                                              and not page.readers, reversed(t.device)))


def _on_device(r: Live) -> bool:
    return any([any(t.device) for t in r.tables])


class Policy:
    """Asked before each edge and after each event."""

    def __init__(self, view: View) -> None:
        self.view, self.cfg = view, view.cfg
        self.rates: Rates | None = None
        self.longest = -1
        self.least: dict[int, int] = {}         # the same, but the least since a second look began, see `taken`
        self.pausing = -1, -1                   # who was to pause last: it gives up device pages
        self.refused = False                    # something says no where there is room: nothing is judged

    # ---------------------------------------------------------------- before an edge
    def edge(self, r: Live, trigger: Trigger, place: Place, *, pressure: bool, failed: bool) -> None:
        """`pressure`: the core wants it, because pages are short. `failed`: some copy has."""
        if self.refused:
            return
        if trigger is Trigger.PAUSE:
            self.pausing = r.rid, r.visit
        if trigger is Trigger.FETCH:
            rates = self.rates
            assert rates is None or rates.disk_page_us < self.cfg.page_size * rates.prefill_token_us, (
                f"request {r.rid} is fetched for, and computing is faster")
        elif trigger in WAYS_IN and place is Place.DEVICE and r.phase in (Phase.QUEUED, Phase.DROPPED):
            self.longest = self._known(r)
            since = self.least.get(r.rid, self.longest) if self.view.looks_again(r) else self.longest
            self.least[r.rid] = min(since, self.longest)
        elif pressure and trigger in GIVING_WAY and r.phase in ACTIVE:
            self._last_resort(r, trigger, failed)
        elif pressure and trigger is Trigger.DROP and r.phase is Phase.PAUSED and not failed:
            younger = [q.rid for q in self.view.waiting
                       if q.phase is Phase.PAUSED and q.key > r.key and q is not self.view.head()
                       and _on_device(q) >= _on_device(r)]        # the host was full: these first
            assert not younger, f"request {r.rid} is dropped, and {younger} are behind it"

    def gives_way(self, r: Live, trigger: Trigger) -> None:
        """Pages are short, of one tier: nobody gives way while pages of it are coming anyway, but a row that
        goes on from the host for somebody who waits, and lacks more than that."""
        view, running = self.view, self.view.running
        for_host = r.phase in WAITING or (r.place.on_host and trigger is Trigger.DROP)
        tiers = [Tier.HBM, Tier.DRAM] if for_host else [Tier.HBM]
        assert (trigger is Trigger.RELOCATE and view.head() is not None) or not all(
            map(view.is_promised, tiers)), f"request {r.rid} gives way to a promised page"
        alone = len(running) < 2 and not all(map(view.away, tiers))
        assert trigger is Trigger.RELOCATE or alone or r not in running[:1], "the oldest gives way"

    def taken(self, r: Live, source: Phase) -> None:
        """A request that has got a row begins behind the longest prefix that has been computed, and with none
        once it has failed. If some groups cannot go on from what others know, and a turn's share was too little
        for a second look at that, what came during this look may be missed (sim seed 11958)."""
        if r.row is not None and source in (Phase.QUEUED, Phase.DROPPED) and (
                r.place is Place.DEVICE and not self.refused):
            assert r.computed == 0 if r.origin.retried else self.least[r.rid] <= r.computed <= self.longest, (
                f"request {r.rid} begins at {r.computed}, and {self.longest} positions are cached")

    def _last_resort(self, r: Live, trigger: Trigger, failed: bool) -> None:
        """Spill before pause before drop, and first of all who does not even run."""
        running, waiting = self.view.running, self.view.waiting
        if r.place.on_host and trigger is Trigger.DROP and self.pausing != (r.rid, r.visit):
            idle = [q.rid for q in waiting if q.phase in (Phase.FETCHING, Phase.PAUSED) and any(
                any(t.host) for t in q.tables)]
            assert not idle, f"request {r.rid} is dropped for host pages, and {idle} do not run"
            return
        if trigger is Trigger.DROP and (r.phase, Trigger.PAUSE) in self.view.edges:
            fetching = [q.rid for q in waiting if q.phase is Phase.FETCHING]
            assert not fetching, f"request {r.rid} is dropped, and pages of {fetching} are not used yet"
            assert not self._fits_host(r), f"request {r.rid} is dropped, and could pause"
        if r.state == (Phase.DECODE, Place.DEVICE) and r.may_host and not failed and self._frees_pages(r) and (
                r.rid != running[0].rid or len(running) == 1):
            assert not self._fits_host(r), f"request {r.rid} gives way, and could spill"

    def _frees_pages(self, r: Live) -> bool:
        """Whether nobody else reads more of `r` than a hot buffer takes; of several groups, in slabs."""
        own = [(_num_own(t) - r.hot.least) // (group.slab_pages if len(self.cfg.groups) > 1 else 1)
               for t, group in zip(r.tables, self.cfg.groups, strict=True) if group.hosted]
        return any([n > 0 for n in own])

    def _fits_host(self, r: Live) -> bool:
        """Whether a free host page is there for each device page that `r` has no twin of; of several groups,
        a slab. It may need less, and find more by evicting."""
        want = sum([page is not None and not (i < len(t.host) and t.host[i])
                    for t in r.tables for i, page in enumerate(t.device)])
        return want <= self.view.free(Tier.DRAM)

    # ---------------------------------------------------------------- prefixes
    def _known(self, r: Live) -> int:
        """Positions with KV that somebody may start from, walked for page by page: as far as groups go that
        keep all, then back to where the others have what the next step reads."""
        view, size = self.view, self.cfg.page_size
        path: list[Sealed] = []
        whole = [g for g, group in enumerate(self.cfg.groups) if not group.reach]
        for sealed in view.sealed(r):
            if (len(path) + 1) * size == len(r.tokens) or not all(view.serves(sealed, g) for g in whole):
                break
            path.append(sealed)
        return next((n * size for n in range(len(path), 0, -1) if self._serves(path[:n])), 0)

    def _serves(self, path: list[Sealed]) -> bool:
        """Whether groups that keep a part have each of the positions behind these pages that they show."""
        size, end = self.cfg.page_size, len(path) * self.cfg.page_size
        for g, group in enumerate(self.cfg.groups):
            unit = group.page_tokens or size
            for at in range(max(0, end - group.reach), end if group.reach else 0):
                last = (at // unit + 1) * unit               # where its page ends
                if last > end or not self.view.serves(path[last // size - 1], g):
                    return False
        return True

    # ---------------------------------------------------------------- after an event
    def saw(self, event: Event) -> None:
        if isinstance(event, Rates):
            self.rates = event

    def effect(self, event: Event, r: Live, before: tuple[Phase, int]) -> None:
        """A deadline that counts has an effect."""
        if isinstance(event, Expired) and not r.saving.is_done:
            ends = r.phase in (Phase.QUEUED, Phase.FETCHING, Phase.RECEIVING) or (
                r.phase is Phase.DROPPED and not r.started)
            assert (r.phase, r.visit) != before or not ends, f"request {r.rid}: its deadline is over"


class Windows(Watcher):
    """Which pages of windows the prefix tree has, judged when they are sealed: those that a prompt reads which goes on
    at a multiple of the group's `keep`, at the end of the prompt, or where paths part; of new pages no others."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._at: dict[RequestId, int] = {}            # pages of requests that were judged, or matched
        self._seen: set[Sealed] = set()
        self._has_ended = False                        # a request, in this event: its path may have parted from another
        self.num_left_out = 0

    def edge(self, live: Live, trigger: Trigger, place: Place) -> None:
        self._seen.update(live.path)                   # who ends has none behind it

    def taken(self, live: Live, source: State, trigger: Trigger) -> None:
        self._at[live.rid] = len(live.path)
        self._seen.update(live.path)
        self._has_ended |= live.phase in (Phase.DONE, Phase.DROPPED)

    def applied(self, event: Event) -> None:
        wanted, idle = set[tuple[Sealed, int]](), list[tuple[Sealed, int]]()
        for live in self._view.live if isinstance(event, Retired) else ():
            had_row = live.row is not None or live.phase in (Phase.PAUSED, Phase.SENDING)      # in that step
            if had_row and len(live.path) > self._at[live.rid]:
                self._sealed(live, wanted, idle)
        for page, g in idle if not self._has_ended else ():
            if (page, g) not in wanted and page not in self._seen:
                assert not self._view.serves(page, g), "the window of a page is cached, and serves nobody"
                self.num_left_out += 1
        for live in self._view.live if isinstance(event, Retired) else ():
            self._seen.update(live.path)               # also of who is paused: it keeps its window there
        self._has_ended = False

    def _sealed(self, live: Live, wanted: set[tuple[Sealed, int]], idle: list[tuple[Sealed, int]]) -> None:
        """Note of each new page of a group whether somebody may read its window."""
        view, size = self._view, self._view.cfg.page_size
        old, new = self._at[live.rid], len(live.path)
        parted = [i * size for i in range(old, new)
                  if (parent := live.path[i].parent) is not None and parent.num_children > 1]
        behind = [-(-live.num_prompt // size) * size] if view.cfg.role == "decode" else []
        ends = [(live.num_prompt - 1) // size * size, *behind, *parted]
        for g, group in enumerate(view.cfg.groups):
            for i in range(live.tables[g].first if parted else old, new) if group.keep else ():
                page, end = live.path[i], i * size + size
                served = parted if i < old else [-(-end // group.keep) * group.keep, *ends]
                if not any([end <= at and at - group.window < end for at in served]):
                    idle += [(page, g)] * (i >= old)
                    continue
                wanted.add((page, g))
                # What a peer sends begins within a page.
                if view.cfg.role != "decode" or i * size >= live.num_prompt - group.window:
                    assert view.serves(page, g), f"request {live.rid}: the window of page {i} is not cached"
        self._at[live.rid] = new
