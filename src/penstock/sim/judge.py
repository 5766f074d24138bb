"""What must hold after every advance or step: the streams, the plan's own sanity, and who owns what.

Streams are judged by outputs alone. Plans are judged against page tables rebuilt from binds and
grows, and against the pools. Never calls into the core except for `check` and reads.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.core import staying
from penstock.core.copies import UP
from penstock.core.core import Core
from penstock.core.ledger import Pool
from penstock.core.lifecycle import DECODING, Phase, Place, Trigger
from penstock.core.messages import Grant
from penstock.core.pairing import Pairing
from penstock.core.plan import (
    NO_DRAM,
    NO_HBM,
    Arrived,
    DramPage,
    Entered,
    Event,
    Finished,
    HbmPage,
    Move,
    Moved,
    Outcome,
    Output,
    Received,
    RequestId,
    Row,
    Say,
    Started,
    StepId,
    StepPlan,
    Tier,
    Token,
)
from penstock.core.receiving import DecodeSide
from penstock.core.request import Request, Table
from penstock.core.sending import PrefillSide, Stage
from penstock.core.tree import Node
from penstock.sim import states
from penstock.sim.executor import SimExecutor
from penstock.sim.policy import GIVING_WAY, Policy
from penstock.sim.scenario import Scenario
from penstock.sim.workload import Expect

Edge = tuple[Phase, Trigger]
Met = tuple[str, str, str]              # phase, event, phase directly after it
Column = tuple[list[HbmPage], list[DramPage]]      # a row's pages of one group: device, host


def watch(pool: Pool, acquired: Callable[[list[int]], None]) -> None:
    """Call `acquired` with the units of every acquisition. A page may be freed and taken again
    within one advance, so looking at the pool in between is not enough."""

    real = type(pool)

    def acquire(self: Pool, n: int, near: int | None = None) -> list[int]:
        units = real.acquire(self, n, near)
        acquired(units)
        return units

    pool.__class__ = type("Watched", (real,), {"__slots__": (), "acquire": acquire})


class Judge:
    """`blind` leaves only what a user could see: streams, outcomes, progress."""

    def __init__(self, sc: Scenario, core: Core, executor: SimExecutor,
                 made: list[Expect], *, blind: bool) -> None:
        self.cfg, self.core, self.executor, self.made = sc.cfg, core, executor, made
        self.blind = blind
        self.stats: Counter[str] = Counter()
        for space in core.have.tree.spaces:
            watch(space.pool, partial(self._acquired, space.tier))
        if not blind:
            executor.busy.update({tier: set() for tier in core.have.arenas})
        self.longest = [arena.slabs * pool.per_slab if pool.arena else pool.capacity
                        for arena in (core.have.arenas[Tier.HBM],) for pool in arena.pools]
        self.tables: dict[Row, tuple[RequestId, list[Column]]] = {}
        self.writer: dict[int, RequestId] = {}          # page -> whose tokens it receives
        self.written: dict[int, StepId] = {}            # page -> last step that writes it
        self.sampled: dict[Row, StepId] = {}            # step whose sample the row has
        self.came: dict[int, float] = {}                # transfer -> when its request came
        self.retired = 0
        self.issued = 0
        self.moves: dict[int, Move] = {}                # flying
        self.torn: set[int] = set()                     # pages that a failed copy has left as they are
        self.suspect: set[int] = set()                  # pages that a failed load has read
        self.distrusted: set[Node] = set()              # pages of requests that are damaged
        self.parked: set[RequestId] = set()             # paused, and copied to the host
        self.gave_way: Counter[RequestId] = Counter()   # how often paused or dropped
        self.forced: set[RequestId] = set()             # asked to pause or drop in this advance
        self.edges: Counter[Edge] = Counter()
        self.met: Counter[Met] = Counter()
        self._seen: tuple[int, dict[Tier, int]] = -1, {}     # edges taken, changes of units, when last asked
        self.failing = False                            # a copy has just failed
        self.policy = Policy(core)
        self._real_landed = core._landed
        core._landed = self._landed  # type: ignore[method-assign]
        self._apply = core._apply
        core._apply = self._watch_apply  # type: ignore[method-assign]
        self._go = core._go
        core._go = self._watch_go    # type: ignore[method-assign]

    # ---------------------------------------------------------------- what users see
    def output(self, out: Output) -> None:
        if isinstance(out, Say):
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
                self.stats["prefix hits"] += e.cached > 0
                self.stats["prefix hits from host"] += dram > 0
                self.stats["prefix hits from storage"] += disk > 0
            case Entered():
                pass
            case Finished(rid, outcome, reason):
                e.finished = outcome
                self._outcome(e, outcome, reason)

    def _started(self, e: Expect) -> None:
        a, size = e.arrived, self.cfg.page_size
        leader = self.core.live.get(a.leader) if a.leader is not None else None
        simple = self.cfg.role == "unified" and len(self.cfg.groups) == 1
        if (leader is None or not simple or leader.rid in self.gave_way
                or not self.distrusted.isdisjoint(leader.path)):
            return
        t = leader.tables[0]
        if t.host or any(c is None or c.node is None for c in t.device[:len(leader.path)]):
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
            if id not in self.core.have.copies.flights:      # no event says how a grant ends
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
        self.policy.step()

    def _tables(self, p: StepPlan) -> None:
        for b in p.binds:
            assert len(b.pages) == len(self.cfg.groups)
            live = self.core.live[b.rid]
            host = b.host or tuple((NO_DRAM,) * len(pages) for pages in b.pages)
            columns = [(list(pages), list(below)) for pages, below in zip(b.pages, host, strict=True)]
            if b.keep:
                assert self.tables[b.row][0] == b.rid, f"row {b.row} keeps what it never had"
            else:
                assert b.emitted == live.num_output, f"request {b.rid}: {b.emitted} emitted"
                self.sampled.pop(b.row, None)
            self.tables[b.row] = b.rid, columns
            for t, units in zip(live.tables, b.hot or ((),) * len(live.tables), strict=True):
                assert live.phase is Phase.SENDING or (
                    [h.page for h in units] == [c.page for c in t.hot]), "hot buffer is not its lease"
                assert len(units) <= t.end(live.num_prompt + live.max_new - 1), "more hot units than pages"
        for g in p.grows:
            assert g.pages and len(g.host) in (0, len(g.pages))
            pages, below = self.tables[g.row][1][g.group]
            assert g.index == len(pages), f"row {g.row} has {len(pages)} pages and grows at {g.index}"
            pages.extend(g.pages)
            below.extend(g.host or (NO_DRAM,) * len(g.pages))
        for y in p.yields:
            for i in y.entries:
                assert self.tables[y.row][1][y.group][1][i] >= 0, "nothing to read it from"
                self.tables[y.row][1][y.group][0][i] = NO_HBM
                self.stats["yields"] += 1

    def _rows(self, p: StepPlan) -> None:
        at = 0
        for row, rid, start, count, samples in zip(p.rows, p.rids, p.start, p.count, p.samples,
                                                   strict=True):
            owner, _ = self.tables[row]
            live = self.core.live[rid]
            gone = live.phase is Phase.SENDING         # it gave up its row with this very step
            assert owner == rid and (gone or live.row == row), f"row {row} is not bound to request {rid}"
            assert live.phase in (Phase.PREFILL, Phase.SENDING, *DECODING), f"request {rid}: {live.phase}"
            known = [t >= 0 for t in p.tokens[at:at + count]]
            if not all(known):
                assert samples and sum(known) <= 1 and count <= 1 + self.cfg.draft_tokens
                assert known == sorted(known, reverse=True), f"row {row}: a token after a draft"
            assert not (known[0] and row in self.sampled) or self.made[rid].arrived.host_token, (
                f"row {row}: the device has its token")
            if not known[0]:
                assert row in self.sampled, f"row {row}: nothing sampled"
                assert (self.sampled[row] <= self.retired
                        or p.step - self.sampled[row] >= self.cfg.pp_size), "cadence"
                assert not self.made[rid].arrived.host_token, f"request {rid}: its token is out"
                self.stats["ahead of its token"] += self.sampled[row] > self.retired
            self.stats["drafts"] += count - sum(known) - (not known[0])
            at += count
            e = self.made[rid]
            if not e.planned and rid not in self.gave_way:
                assert start == e.cached, f"request {rid}: starts at {start}, {e.cached} cached"
            e.planned = True
            self.stats["hosted rows"] += live.place is Place.HOST
            for group, t in enumerate(live.tables):
                self._pages(p, live, row, group, t, start, count)
            if samples:
                self.sampled[row] = p.step

    def _pages(self, p: StepPlan, live: Request, row: Row, group: int, t: Table, start: int,
               count: int) -> None:
        """One group of one row: its device tables are its leases, and what it writes is its own."""
        pages, below = self.tables[row][1][group]
        have, rid, end, first = self.core.have, live.rid, start + count, start // t.unit
        hosted = live.place is Place.HOST
        sides = ((pages, t.device, have.device[group].pool.held), (below, t.host, have.host[group].pool.held))
        assert len(pages) * t.unit >= end, f"request {rid}: too few pages"
        self.stats["rows in both places"] += hosted and max(pages) >= 0
        self.stats["longer than the device"] += len(pages) > self.longest[group]
        for i in range(t.begin(min(start, live.settled)), -(-end // t.unit)):
            assert pages[i] >= 0 or below[i] >= 0, f"request {rid}: page {i} is nowhere"
            for table, column, held in sides:
                page, copy = table[i], column[i] if i < len(column) else None
                if page < 0 or (copy is None and i < first and table is below and pages[i] >= 0):
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
            size = self.core.have.tables()[m.group].unit
            assert (len(m.src_pages) - 1) * size < m.tokens <= len(m.src_pages) * size
        assert 0 <= m.after <= p.step and 0 <= m.group < len(self.cfg.groups)
        assert len(set(m.dst_pages)) == len(m.dst_pages)
        assert self.torn.isdisjoint(m.src_pages), f"{m}: reads what a failed copy has left"
        # One that was planned before the failure ends as a failed one.
        assert all(source.bad for source, _ in self.core.have.copies.flights[m.id].pairs
                   if source.page in self.suspect), f"{m}: reads what a failed load has read"
        if m.src is not Tier.DISK:
            seen = max(m.after, self.retired)
            assert all(self.written.get(page, 0) <= seen for page in m.src_pages), (
                f"{m}: reads what is still being written")
        busy = {(f.dst, page) for f in self.moves.values() if f is not m for page in f.dst_pages}
        for tier, pages in ((m.src, m.src_pages), (m.dst, m.dst_pages)):
            if not pages:
                continue                                     # the peer's
            pool = self.core.have.arenas[tier].pools[m.group]
            fenced = {u for fence, units in pool.limbo if m.id in fence.moves for u in units}
            assert pool.held | fenced >= set(pages), f"{m}: a page that nothing keeps"
            assert busy.isdisjoint((tier, page) for page in pages), f"{m}: a page being filled"

    # ---------------------------------------------------------------- who changes phase
    def _watch_apply(self, event: Event) -> None:
        before = [(r, r.phase, r.visit) for r in states.met(self.core, event)]
        self._apply(event)
        self.policy.saw(event)
        if before:
            name = states.name(event)
            for r, phase, visit in before:
                self.met[phase.value, name, r.phase.value] += 1
                if not self.blind:
                    self.policy.effect(event, r, (phase, visit))

    def _watch_go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        source, computed = r.phase, r.computed
        lost = self.failing or (source is Phase.PAUSED and not self.core.have.is_complete(r))
        pressure = (trigger in (Trigger.PAUSE, Trigger.DROP, Trigger.SPILL) and r.rid not in self.forced
                    and not lost
                    and source not in (Phase.LOADING, Phase.STAGING, Phase.RECEIVING, Phase.SENDING))
        if pressure and not self.blind:
            self.policy.gives_way(r, trigger)
        idle = lost or self.blind or r.rid in self.forced
        if source is Phase.STAGING and trigger in GIVING_WAY and not idle and (
                staying.is_staged(self.core.have, r)):
            lack, retired = self.core.have.lack, self.core.have.retired
            assert lack is None or not lack.behind or retired >= r.heat_by, "pages for it are on their way"
        better: AssertionError | None = None
        try:
            if not self.blind:
                self.policy.edge(r, trigger, pressure=pressure)
        except AssertionError as error:
            better = error                     # an edge that waits for promised pages is not taken
        if not self._go(r, trigger, spare):
            return False
        if better is not None:
            raise better
        self.edges[source, trigger] += 1
        self.stats["promoted by itself"] += trigger is Trigger.PROMOTE and r.rid not in self.forced
        if source in (Phase.QUEUED, Phase.FETCHING, Phase.DROPPED) and trigger is not Trigger.END:
            assert self.distrusted.isdisjoint(r.path), f"request {r.rid} starts from damaged pages"
        if not self.blind:
            self.policy.taken(r, source)
        if source is Phase.PAUSED and r.row is not None and not self.blind:
            failed = any(n for name, n in self.executor.stats.items() if name.endswith("failed"))
            assert failed or r.computed == computed, f"request {r.rid}: a pause lost its KV"
        if source in (Phase.QUEUED, Phase.FETCHING) and r.row is not None and not self.blind:
            self._admitted(r)
        if trigger in (Trigger.PAUSE, Trigger.DROP):
            self.gave_way[r.rid] += 1
            self.stats["computed here after all"] += source is Phase.RECEIVING
        if pressure:
            self.stats[f"{trigger.value} by pressure"] += 1
        return True

    def _admitted(self, r: Request) -> None:
        mine = self.made[r.rid].arrived.priority, r.seq
        copies = self.core.have.copies
        owed = any(arena.away for arena in self.core.have.arenas.values()) or any(
            copies.flights[move].request not in self.core.live.values() for move in copies.wire)
        if len(self.core.running) == 1 and owed:
            return                             # nobody else ran, and a peer may keep its pages for ever
        for w in self.core.waiting:
            a = self.made[w.rid].arrived
            if w.phase is Phase.QUEUED and a.leader is None:
                assert (a.priority, w.seq) > mine, f"request {r.rid} overtook {w.rid}"

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

    def _landed(self, event: Moved) -> None:
        self.failing = not event.ok
        flight = self.core.have.copies.flights.get(event.id)
        if self.failing and flight is not None and flight.dst.tier is not Tier.PEER:
            self.torn.update(target.page for _, target in flight.pairs)
            if UP[flight.dst.tier] < UP[flight.src.tier]:
                self.suspect.update(source.page for source, _ in flight.pairs)
        self._real_landed(event)
        self.failing = False

    def state(self, *, planned: bool) -> None:
        """After every advance: what became free, and who waits. After every step, and every advance in which
        a phase has changed, also the invariants of the core: the others are more than half of all, and what
        they break shows with the next step, or at the end."""
        if self.blind:
            return
        arenas, taken = self.core.have.arenas, self.core.taken
        changes = {tier: sum([pool.changes for pool in arena.pools]) for tier, arena in arenas.items()}
        if planned or taken != self._seen[0]:
            self.core.check()
        for tier, arena in arenas.items():
            if changes[tier] == self._seen[1].get(tier):
                continue
            busy = self.executor.busy[tier]
            busy.clear()
            for pool in arena.pools:
                busy |= pool.held
                for _, units in pool.limbo:
                    busy.update(units)
        self._seen = taken, changes
        self.stats["back-pressure"] += any(r.phase is Phase.QUEUED for r in self.core.waiting)
        for r in self.core.live.values():
            self.stats["window left behind"] += any(t.first for t in r.tables)
        if self.core.pair is not None:
            self._pair(self.core.pair)
        for r in self.core.waiting:
            if r.is_parked and r.rid not in self.parked:        # its DRAM lease begins here
                assert self.core.have.is_complete(r), f"request {r.rid}: lost"
        self.parked = {r.rid for r in self.core.waiting if r.is_parked}

    def _pair(self, pair: Pairing) -> None:
        """Both halves of one engine agree: the protocol knows which requests are at it."""
        side = pair.side
        for transfer, r in pair.requests.items():
            assert self.core.live.get(r.rid) is r, f"transfer {transfer}: its request has ended"
        if isinstance(side, DecodeSide):
            assert set(pair.granted) == set(side.table), "grants differ from the protocol's"
            for transfer, receiving in side.table.items():
                live = pair.requests.get(transfer)
                waits = live is not None and live.phase is Phase.RECEIVING and not live.is_parked
                assert waits or receiving.closing, f"transfer {transfer}: its Cancel was forgotten"
        else:
            for transfer, entry in side.table.items():
                pushing = entry.sending is not None and entry.sending.stage is Stage.PUSHING
                assert (entry.waiting or pushing) == (transfer in pair.requests), (
                    f"transfer {transfer}: its end was not told")

    def noted(self, event: Event) -> None:
        """Prefill role: a Grant that comes after its request, not long after, must find it, or what
        became of it; else the decode engine would learn of that by a time-out."""
        pair, now = self.core.pair, self.executor.clock.now
        if isinstance(event, Arrived) and event.transfer:
            self.came[event.transfer] = now
        elif isinstance(event, Received) and isinstance(event.message, Grant):
            assert pair is not None
            m, side = event.message, pair.side
            if (m.sender, m.receiver) == (side.peer, side.epoch) and (
                    self.came.get(m.transfer, now) < now < self.came.get(m.transfer, now) + 90):
                assert isinstance(side, PrefillSide)
                e = side.table.get(m.transfer)
                assert e is not None and (e.waiting or e.declined or e.sending is not None), (
                    f"transfer {m.transfer}: its request was here, and nobody remembers")

    def still(self, in_flight: int) -> None:
        """Nothing happens without an event of the peer. It is waited for with nothing that somebody
        here could use: not with a row, and not while another request could give way."""
        core = self.core
        if self.blind or in_flight or core.pair is None:
            return
        tier = core.have.lacks
        away = core.have.arenas[tier].away
        # It was just asked for pages, and will be reminded: the next event finds another victim.
        side = core.pair.side
        asked = core.has_asked and isinstance(side, DecodeSide) and any(
            [transfer.closing for transfer in side.table.values()])
        assert not core.running or (away and (asked or len(core.running) == 1)), (
            f"request {core.running[0].rid} has a row, and waits for the peer")
        first = next((r for r in core.line if core.admission.may_start(r)), None) if not asked else None
        for r in core.waiting if first is not None else ():
            idle = r.phase in (Phase.PAUSED, Phase.FETCHING) or (
                r.is_parked if r.phase is Phase.RECEIVING else r.phase is Phase.SENDING and r.grant is None)
            useful = not core.running or any(any(t.device if tier is Tier.HBM else t.host) for t in r.tables)
            assert not (idle and useful), f"request {r.rid} could give way, and waits for the peer"

    def end(self) -> None:
        """Nothing is left to happen, and the cache was flushed: every unit is free (I1, I2, I7)."""
        for e in self.made:
            assert e.finished is not None or not e.sent, f"request {e.arrived.rid} never finished"
        assert not self.core.live, "finished requests are still live"
        counts, have = self.core.stats(), self.core.have
        for tier, arena in have.arenas.items():
            self.stats[f"evicted {tier.value}"] += int(counts[f"{tier.value}_evictions"])
            for pool in arena.pools:
                assert pool.free == pool.capacity, f"leak: {pool.capacity - pool.free} {pool.name}"
            assert len(arena.pools) == 1 or len(arena.free) == arena.slabs, f"leak: slabs of {tier.value}"
        assert have.rows.free == have.rows.capacity, "leak: rows"
        self.stats.update(self.executor.devices[0].stats)
