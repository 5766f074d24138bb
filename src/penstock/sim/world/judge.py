"""What must hold after every advance or step: the streams, the plan's own sanity, and who owns what.

Streams are judged by outputs alone. Plans are judged against page tables rebuilt from binds and
grows, and against the pools. Sees the core through its view, calls nothing of it but `check`.
"""
from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.core.core import Core
from penstock.core.lifecycle import Phase, Place, State, Trigger
from penstock.core.plan import (
    NO_DRAM,
    Cached,
    DramPage,
    Entered,
    Event,
    Finished,
    HbmPage,
    HotResize,
    Lookup,
    Move,
    Moved,
    Outcome,
    Output,
    Remap,
    RequestId,
    Row,
    Say,
    Started,
    StepId,
    StepPlan,
    Tier,
    Token,
    Unstore,
    Used,
)
from penstock.sim.ranks.executor import SimExecutor
from penstock.sim.world import states
from penstock.sim.world.events import Folded
from penstock.sim.world.policy import Policy, Windows
from penstock.sim.world.scenario import Scenario
from penstock.sim.world.sessions import Owners
from penstock.sim.world.view import Live, Pages, Sealed, View, Watcher
from penstock.sim.world.workload import Expect

Edge = tuple[str, str]                  # see `states.edge`
Met = tuple[str, str, str]              # state, event, state directly after it
Column = tuple[list[HbmPage], list[DramPage]]      # a row's pages of one group: device, host
HEIGHT = {Tier.PEER: 0, Tier.DISK: 1, Tier.DRAM: 2, Tier.HBM: 3}


class Asked(NamedTuple):
    """What was known of a request when an edge was asked for."""

    pressure: bool                          # the core wants it, because pages are short
    better: AssertionError | None           # there was a better one
    computed: int


class Judge(Watcher):
    """`blind` leaves only what a user could see: streams, outcomes, progress."""

    def __init__(self, sc: Scenario, core: Core, executor: SimExecutor,
                 made: list[Expect], *, blind: bool) -> None:
        self.cfg, self.core, self.executor, self.made = sc.cfg, core, executor, made
        self.view = View(core)
        self.blind = blind
        self.stats: Counter[str] = Counter()
        self.view.on_acquire(self._acquired)
        if not blind:
            executor.busy.update({tier: set() for tier in self.view.tiers})
        self.longest = list(map(self.view.longest, range(len(self.cfg.groups))))
        self.units = [group.page_tokens or self.cfg.page_size for group in self.cfg.groups]
        self.tables: dict[Row, tuple[RequestId, list[Column]]] = {}
        self.hot: dict[Row, list[list[int]]] = {}      # pages of the hot buffer, of each group
        self.writer: dict[int, RequestId] = {}          # page -> whose tokens it receives
        self.written: dict[int, StepId] = {}            # page -> last step that writes it
        self.sampled: dict[Row, StepId] = {}            # step whose sample the row has
        self.stepped: dict[Row, StepId] = {}            # last step that computes it
        self.retired = 0
        self.issued = 0
        self.moves: dict[int, Move] = {}                # flying
        self.torn: set[int] = set()                     # pages that a failed copy has left as they are
        self.suspect: set[int] = set()                  # pages that a failed load has read
        self.distrusted: set[Sealed] = set()            # pages of requests that are damaged
        self.parked: set[RequestId] = set()             # paused, and copied to the host
        self.gave_way: Counter[RequestId] = Counter()   # how often paused or dropped
        self.forced: set[RequestId] = set()             # asked to pause or drop in this advance
        self.edges: Counter[Edge] = Counter()
        self.met: Counter[Met] = Counter()
        self._seen: tuple[int, dict[Tier, int]] = -1, {}     # edges taken, changes of units, when last asked
        self.failing = False                            # a copy has just failed
        self.folded = Folded(self.cfg)                  # what readers of KV events know
        self._used: tuple[tuple[bytes, ...], int] = (), 0    # pages of who has just started, stored ones
        self._about: list[tuple[Live, State, int]] = []             # whom the event is about, where they were
        self._asked: dict[RequestId, Asked] = {}
        self.policy = Policy(self.view)
        self.owners = None if sc.damages or not sc.sessions else Owners(
            self.view, self.cfg.sessions_max, self.cfg.retained_pages)
        core.watchers += [] if self.owners is None else [self.owners]
        self.windows = Windows(self.view)
        core.watchers += [] if sc.damages or not any([group.keep for group in self.cfg.groups]) else [self.windows]
        core.watchers.append(self)

    # ---------------------------------------------------------------- what users see
    def output(self, out: Output) -> None:
        if isinstance(out, Used) and not self.blind:
            self._told(out.keys)
        if isinstance(out, Say | Lookup | Unstore | Used):
            return
        e = self.made[out.rid]
        assert e.finished is None, f"request {out.rid}: {out} after the end"
        match out:
            case Token(rid, index, token):
                assert e.cached >= 0, f"request {rid}: a token before Started"
                assert index == len(e.got), f"request {rid}: token {index}, not {len(e.got)}"
                assert index < len(e.truth), f"request {rid}: token {index} after its stop"
                assert token == e.truth[index], f"request {rid}: wrong token {index}"
                e.got.append(token)
            case Started(rid, hbm, dram, disk, peer):
                assert e.cached < 0, f"request {rid}: started twice"
                e.cached = hbm + dram + disk + peer
                assert min(hbm, dram, disk, peer) >= 0
                assert e.cached < len(e.arrived.prompt) + (peer > 0), f"request {rid}: {out}"
                self.stats["delivered by the peer"] += peer > 0
                self._started(e)
                assert not self._used[1], "storage is not told that its pages are used"
                if self.cfg.store_root and not self.blind:
                    num = (hbm + dram + disk) // self.cfg.page_size
                    self._used = self.view.names(e.arrived, num), self.view.num_stored(rid, num)
                self.stats["prefix hits"] += e.cached > 0
                self.stats["prefix hits from host"] += dram > 0
                self.stats["prefix hits from storage"] += disk > 0
            case Entered():
                pass
            case Finished(rid, outcome, reason):
                e.finished = outcome
                self._outcome(e, outcome, reason)

    def published(self, cached: Cached | None) -> None:
        """After every advance, readers of KV events know exactly what the tree has, or, while some of it is to be
        told in later turns, nothing else."""
        if self.cfg.published_tiers and not self.blind:
            self.stats["pages published"] += self.folded.take(cached)
            found, late = self.view.published(), self.view.publishes_later
            self.stats["turns with pages published later"] += late
            assert self.folded.pages == found or (late and all(
                [known <= found[tier] for tier, known in self.folded.pages.items()])), self.folded.differs(found)

    def _told(self, keys: tuple[bytes, ...]) -> None:
        names, least = self._used
        assert least <= len(keys) <= len(names), f"{len(keys)} pages are used, not {least} to {len(names)}"
        assert keys == names[:len(keys)], "other pages are used than those it begins with"
        self._used = (), 0
        self.stats["uses told to storage"] += 1

    def _started(self, e: Expect) -> None:
        a, size = e.arrived, self.cfg.page_size
        leader = self.view.get(a.leader) if a.leader is not None else None
        simple = self.cfg.role == "unified" and len(self.cfg.groups) == 1
        if (leader is None or not simple or leader.rid in self.gave_way
                or not self.distrusted.isdisjoint(leader.path)):
            return
        (t,) = leader.tables
        if t.host or any(page is None or page.node is None for page in t.device[:len(leader.path)]):
            return    # a private twin of a page that others had computed first is not shared (seed 52887)
        # A fork waits until its leader's prompt is sealed, then shares all whole pages.
        shared = (len(a.prompt) - 1) // size * size
        assert e.cached == shared, f"request {a.rid}: {e.cached} of {shared} tokens shared"
        self.stats["forks shared"] += 1

    def _outcome(self, e: Expect, outcome: Outcome, reason: str) -> None:
        rid, got = e.arrived.rid, len(e.got)
        self.stats[f"ended {outcome.value}"] += 1
        if outcome in (Outcome.SENT, Outcome.LOST):
            assert self.cfg.role == "prefill" and got == 0
        elif outcome is Outcome.REFUSED and self.cfg.role == "prefill":
            pass                                   # its pool may be smaller
        elif outcome is Outcome.WARMED:
            assert e.arrived.warms and e.cached < 0, f"request {rid}: it asked for tokens"
        elif outcome is Outcome.ABORT:
            assert e.aborted, f"request {rid}: nobody aborted it"
        elif outcome is Outcome.EXPIRED:
            assert e.expired and not got, f"request {rid}: no deadline, or {got} tokens"
        elif outcome is Outcome.STOP and e.stop_at and got < len(e.truth):
            assert got >= e.stop_at, f"request {rid}: stopped before its stop string"
        else:
            assert got == len(e.truth), f"request {rid}: {outcome} after {got} tokens"
            assert outcome is e.outcome or (e.stop_at and outcome is Outcome.STOP), (
                f"request {rid}: {outcome}, not {e.outcome}")
            self.stats["cut by a limit"] += e.cut and outcome is Outcome.LENGTH
        if outcome is Outcome.REFUSED:
            n, longest = [int(word) for word in reason.split() if word.isdigit()][:2]
            assert n == len(e.arrived.prompt) > longest, f"request {rid}: no numbers: {reason!r}"

    # ---------------------------------------------------------------- the plan alone
    def plan(self, p: StepPlan) -> None:
        self.issued += 1
        assert p.step == self.issued, f"step {p.step} after {self.issued - 1}"
        if self.blind:
            return
        for id in [m.id for m in self.moves.values() if m.src is Tier.PEER]:
            if not self.view.is_flying(id):                  # no event says how a grant ends
                del self.moves[id]
        assert self.issued - self.retired <= self.cfg.depth, "too many plans in flight"
        n = len(p.rows)
        assert len(p.rids) == len(p.start) == len(p.count) == len(p.samples) == n
        assert len(set(p.rows)) == n, "a row twice in one plan"
        assert n == 0 or min(p.count) >= 1
        assert sum(p.count) == len(p.tokens) <= self.cfg.step_tokens
        assert n or p.binds or p.grows or p.moves, "an empty plan"
        self._tables(p)
        self._rows(p)
        for move in p.moves:
            self._move(p, move)

    def _tables(self, p: StepPlan) -> None:
        for b in p.binds:
            assert len(b.pages) == len(self.cfg.groups)
            live = self.view.get(b.rid)
            assert live is not None
            host = b.host or tuple((NO_DRAM,) * len(pages) for pages in b.pages)
            columns = [(list(pages), list(below)) for pages, below in zip(b.pages, host, strict=True)]
            assert b.emitted == live.num_output, f"request {b.rid}: {b.emitted} emitted"
            assert self.stepped.get(b.row, 0) <= self.retired, f"row {b.row}: its last tenant computes"
            self.sampled.pop(b.row, None)
            self.tables[b.row] = b.rid, columns
            self.hot[b.row] = [[h.page for h in units] for units in b.hot or ((),) * len(self.units)]
        for g in p.grows:
            assert g.pages and len(g.host) in (0, len(g.pages))
            pages, below = self.tables[g.row][1][g.group]
            assert g.index == len(pages), f"row {g.row} has {len(pages)} pages and grows at {g.index}"
            pages.extend(g.pages)
            below.extend(g.host or (NO_DRAM,) * len(g.pages))
        for y in p.remaps:
            self._remap(y)
        for z in p.resizes:
            self._resize(z)

    def _remap(self, y: Remap) -> None:
        pages, below = self.tables[y.row][1][y.group]
        for i, page, host in zip(y.entries, y.device, y.host, strict=True):
            assert page >= 0 or host >= 0, "nothing to read it from"
            self.stats["unmaps"] += pages[i] >= 0 > page
            self.stats["maps"] += page >= 0 > pages[i]
            pages[i], below[i] = page, host

    def _resize(self, z: HotResize) -> None:
        pages, before = [h.page for h in z.pages], self.hot[z.row][z.group]
        both = min(len(pages), len(before))
        assert pages[:both] == before[:both], "a hot page has moved"
        assert not both or max([h.keeps for h in z.pages]) < 0, "a hot buffer that goes on holds what it held"
        self.hot[z.row][z.group] = list(pages)
        if both:
            self.stats["hot buffer grows" if len(pages) > len(before) else "hot buffer shrinks"] += 1

    def _rows(self, p: StepPlan) -> None:
        at = 0
        for row, rid, start, count, samples in zip(p.rows, p.rids, p.start, p.count, p.samples,
                                                   strict=True):
            owner, _ = self.tables[row]
            live = self.view.get(rid)
            assert live is not None
            gone = live.phase is Phase.SENDING         # it gave up its row with this very step
            assert owner == rid and (gone or live.row == row), f"row {row} is not bound to request {rid}"
            assert live.phase in (Phase.PREFILL, Phase.SENDING) or live.decodes, f"request {rid}: {live.state}"
            left = self.cfg.chunk_multiple - start % self.cfg.chunk_multiple
            assert live.phase is not Phase.PREFILL or count < left or (count - left) % self.cfg.chunk_multiple == 0, (
                f"request {rid}: a chunk ends at {start + count}, and its prompt does not")
            known = [t >= 0 for t in p.tokens[at:at + count]]
            if not all(known):
                asked = self.made[rid].arrived.drafts
                most = self.cfg.draft_tokens if asked is None else min(asked, self.cfg.draft_tokens)
                assert samples and sum(known) <= 1 and count <= 1 + most
                self.stats["drafts declined"] += most < self.cfg.draft_tokens
                assert known == sorted(known, reverse=True), f"row {row}: a token after a draft"
            assert not (known[0] and row in self.sampled), f"row {row}: the device has its token"
            if not known[0]:
                assert row in self.sampled, f"row {row}: nothing sampled"
                assert (self.sampled[row] <= self.retired + self.cfg.overlap
                        or p.step - self.sampled[row] >= self.cfg.pp_size), "cadence"
                self.stats["ahead of its token"] += self.sampled[row] > self.retired
            self.stats["drafts"] += count - sum(known) - (not known[0])
            at += count
            e = self.made[rid]
            if not e.planned and rid not in self.gave_way:
                assert start == e.cached, f"request {rid}: starts at {start}, {e.cached} cached"
            e.planned = True
            self.stats["hosted rows"] += live.place.on_host
            for group, t in enumerate(live.tables):
                self._pages(p, live, row, group, t, start, count)
            self.stepped[row] = p.step
            if samples:
                self.sampled[row] = p.step

    def _pages(self, p: StepPlan, live: Live, row: Row, group: int, t: Pages, start: int,
               count: int) -> None:
        """One group of one row: its device tables are its leases, and what it writes is its own."""
        pages, below = self.tables[row][1][group]
        hot = self.hot[row][group]
        assert live.phase is Phase.SENDING or hot == [c.page for c in t.hot], (
            f"request {live.rid}: hot buffer is not its lease")
        most = min(self.cfg.largest_hot, t.end(live.num_prompt + live.max_new - 1))
        least = 1 if self.cfg.role == "prefill" else min(self.cfg.hot_pages, most)     # that has prompts only
        assert not hot or least <= len(hot) <= most, "a hot buffer of no such size"
        view, rid, end, unit = self.view, live.rid, start + count, self.units[group]
        hosted, first = live.place.on_host, start // unit
        sides = ((pages, t.device, view.held(Tier.HBM, group)), (below, t.host, view.held(Tier.DRAM, group)))
        # Who goes on from the host is told of its pages there over turns, and reads the others on the device.
        told = 0 if live.place is Place.TO_DEVICE else len(pages) if live.read_to is None else live.read_to
        assert len(pages) * unit >= end, f"request {rid}: too few pages"
        self.stats["rows in both places"] += hosted and max(pages) >= 0
        self.stats["longer than the device"] += len(pages) > self.longest[group]
        for i in range(t.begin(min(start, live.retired)), -(-end // unit)):
            assert pages[i] >= 0 or below[i] >= 0, f"request {rid}: page {i} is nowhere"
            for table, column, held in sides:
                page, copy = table[i], column[i] if i < len(column) else None
                if page < 0 or (i < first and table is below and pages[i] >= 0 and (copy is None or i >= told)):
                    continue                   # a twin of a page that is sealed now: never read
                if copy is None and hosted and live.phase is Phase.SENDING:
                    continue                   # given up behind this very step
                assert copy is not None and copy.page == page, f"request {rid}: table is not its lease"
                assert page in held, f"request {rid}: a page that is not held"
                assert page not in self.suspect, f"request {rid}: reads what a failed load has read"
                if i >= first:
                    assert copy.node is None, f"request {rid} writes a shared page"
                    assert self.writer.setdefault(page, rid) == rid, f"page {page}: two writers"
                    self.written[page] = p.step

    def _move(self, p: StepPlan, m: Move) -> None:
        assert m.id not in self.moves
        self.moves[m.id] = m
        if Tier.PEER in (m.src, m.dst):
            assert m.transfer and m.generation and m.tokens >= 1, f"{m}: nothing to move"
        else:
            assert len(m.src_pages) == len(m.dst_pages) >= 1 and m.src is not m.dst
            size = self.units[m.group]
            assert (len(m.src_pages) - 1) * size < m.tokens <= len(m.src_pages) * size
        assert 0 <= m.after <= p.step and 0 <= m.group < len(self.cfg.groups)
        assert len(set(m.dst_pages)) == len(m.dst_pages)
        assert self.torn.isdisjoint(m.src_pages), f"{m}: reads what a failed copy has left"
        # One that was planned before the failure ends as a failed one.
        assert not self.view.reads_poison(m.id, self.suspect), f"{m}: reads what a failed load has read"
        if m.src is not Tier.DISK:
            seen = max(m.after, self.retired)
            assert all(self.written.get(page, 0) <= seen for page in m.src_pages), (
                f"{m}: reads what is still being written")
        busy = {(f.dst, page) for f in self.moves.values() if f is not m for page in f.dst_pages}
        for tier, pages in ((m.src, m.src_pages), (m.dst, m.dst_pages)):
            if not pages:
                continue                                     # the peer's
            assert self.view.kept(tier, m.group, m.id) >= set(pages), f"{m}: a page that nothing keeps"
            assert busy.isdisjoint((tier, page) for page in pages), f"{m}: a page being filled"

    # ---------------------------------------------------------------- who changes phase
    def event(self, event: Event) -> None:
        self._about = [(r, r.state, r.visit) for r in states.met(self.view, event)]
        if isinstance(event, Moved):
            move, good = self.moves.pop(event.id, None), event.good
            self.failing = not event.ok or self.view.is_tainted(event.id)
            if not event.ok and move is not None and move.dst is not Tier.PEER:
                self.torn.update(move.dst_pages[good:])
                if HEIGHT[move.dst] > HEIGHT[move.src]:
                    self.suspect.update(move.src_pages[good:])

    def applied(self, event: Event) -> None:
        self.failing = False
        self.policy.saw(event)
        name = states.name(event) if self._about else ""
        for r, state, visit in self._about:
            self.met[state.name, name, r.state.name] += 1
            if not self.blind:
                self.policy.effect(event, r, (state.phase, visit))

    def edge(self, live: Live, trigger: Trigger, place: Place) -> None:
        lost = self.failing or (live.phase is Phase.PAUSED and not self.view.is_complete(live))
        spills = live.decodes and trigger is Trigger.RELOCATE and place in (Place.TO_HOST, Place.HOST)
        pressure = ((spills or trigger in (Trigger.PAUSE, Trigger.DROP)) and live.rid not in self.forced
                    and not lost and live.place is not Place.TO_HOST
                    and live.phase not in (Phase.LOADING, Phase.RECEIVING, Phase.SENDING))
        better: AssertionError | None = None
        if not self.blind:
            if pressure:
                self.policy.gives_way(live, trigger)
            try:
                self.policy.edge(live, trigger, place, pressure=pressure, failed=self._has_failed())
            except AssertionError as error:
                better = error                 # an edge that waits for promised pages is not taken
        self._asked[live.rid] = Asked(pressure, better, live.computed)

    def taken(self, live: Live, source: State, trigger: Trigger) -> None:
        asked = self._asked[live.rid]
        if asked.better is not None:
            raise asked.better
        self.edges[states.edge(source, trigger, live.state)] += 1
        self.stats["promoted by itself"] += live.place is Place.TO_DEVICE and live.rid not in self.forced
        if source.phase in (Phase.QUEUED, Phase.FETCHING, Phase.DROPPED) and trigger is not Trigger.END:
            assert self.distrusted.isdisjoint(live.path), f"request {live.rid} starts from damaged pages"
        if not self.blind:
            self.policy.taken(live, source.phase)
            if source.phase is Phase.PAUSED and live.row is not None:
                assert self._has_failed() or live.computed == asked.computed, (
                    f"request {live.rid}: a pause lost its KV")
            if source.phase in (Phase.QUEUED, Phase.FETCHING) and live.row is not None:
                self._admitted(live)
        if trigger in (Trigger.PAUSE, Trigger.DROP):
            self.gave_way[live.rid] += 1
            self.stats["computed here after all"] += source.phase is Phase.RECEIVING
        if asked.pressure:
            self.stats["spill by pressure" if trigger is Trigger.RELOCATE else f"{trigger.value} by pressure"] += 1

    def _has_failed(self) -> bool:
        """Whether any copy of this engine has."""
        return any([n for name, n in self.executor.stats.items() if name.endswith("failed")])

    def _admitted(self, r: Live) -> None:
        mine = self.made[r.rid].arrived.priority, r.key[1]
        if len(self.view.running) == 1 and self.view.is_owed():
            return                             # nobody else ran, and a peer may keep its pages for ever
        for w in self.view.waiting:
            a = self.made[w.rid].arrived
            if w.phase is Phase.QUEUED and a.leader is None and not (w.storage.keys or a.warms):
                assert (a.priority, w.key[1]) > mine, f"request {r.rid} overtook {w.rid}"

    # ---------------------------------------------------------------- who owns what
    def _acquired(self, tier: Tier, pages: list[int]) -> None:
        """New owner: what the pages hold is poison, and the first to write one is its writer."""
        for page in pages:
            for device in self.executor.devices:
                device.poison(tier, page)
            self.writer.pop(page, None)
            self.written.pop(page, None)
            self.torn.discard(page)
            self.suspect.discard(page)
            if tier is Tier.DISK:
                self.executor.store.taken(page)

    def state(self, *, planned: bool) -> None:
        """After every advance: what became free, and who waits. After every step, and every advance in which
        a phase has changed, also the invariants of the core: the others are more than half of all, and what
        they break shows with the next step, or at the end."""
        if self.blind:
            return
        assert not self._used[1], "storage is not told that its pages are used"
        view, taken = self.view, self.view.num_edges
        changes = {tier: view.changes(tier) for tier in view.tiers}
        if planned or taken != self._seen[0]:
            self.core.check()
            if self.owners is not None:
                self.stats["pages of ended sessions"] += self.owners.check()
                self.stats["retained pages"] = self.owners.retained
            self.stats["pages of windows left out"] = self.windows.num_left_out
        for tier in view.tiers:
            if changes[tier] != self._seen[1].get(tier):
                self.executor.busy[tier] = view.in_use(tier)
        self._seen = taken, changes
        waiting, parked = view.waiting, self.parked
        self.stats["back-pressure"] += any([r.phase is Phase.QUEUED for r in waiting])
        self.stats["window left behind"] += sum([any([t.first for t in r.tables]) for r in view.live])
        self.parked = {r.rid for r in waiting if r.saving.is_done}
        for r in waiting:
            if r.saving.is_done and r.rid not in parked:              # its DRAM lease begins here
                assert view.is_complete(r), f"request {r.rid}: lost"

    def still(self, in_flight: int) -> None:
        """Nothing happens without an event of the peer. It is waited for with nothing that somebody
        here could use: not with a row, and not while another request could give way."""
        view = self.view
        if self.blind or in_flight or self.cfg.role == "unified":
            return
        # It was just asked for pages, and will answer: the next event finds another victim.
        asked, running = view.is_closing(), view.running
        away = any(map(view.away, view.tiers))
        assert not running or (away and (asked or len(running) == 1)), (
            f"request {running[0].rid} has a row, and waits for the peer")
        for r in view.waiting if not (asked or running) and view.head() is not None else ():
            idle = r.phase in (Phase.PAUSED, Phase.FETCHING) or (
                r.saving.is_done if r.phase is Phase.RECEIVING else r.phase is Phase.SENDING and r.remote.grant is None)
            assert not idle, f"request {r.rid} could give way, and waits for the peer"

    def end(self) -> None:
        """Nothing is left to happen, and the cache was flushed: every unit is free (I1, I2, I7)."""
        for e in self.made:
            assert e.finished is not None or not e.sent, f"request {e.arrived.rid} never finished"
        assert not self.view.live, "finished requests are still live"
        counts = self.core.stats()
        for tier in self.view.tiers:
            self.stats[f"evicted {tier.value}"] += int(counts[f"{tier.value}_evictions"])
        assert not self.view.leaks(), f"leak: {self.view.leaks()}"
        self.stats.update(self.executor.devices[0].stats)
