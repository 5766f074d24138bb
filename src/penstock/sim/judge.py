"""What must hold after every advance: the streams, the plan's own sanity, and who owns what.

Streams are judged by outputs alone. Plans are judged against page tables rebuilt from binds and
grows, and against the pools. Never calls into the core except for `check` and reads.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.core.core import Core
from penstock.core.ledger import Pool
from penstock.core.lifecycle import Lease, Phase, Trigger
from penstock.core.plan import (
    Entered,
    Event,
    Finished,
    Move,
    Outcome,
    Output,
    RequestId,
    Row,
    Started,
    StepId,
    StepPlan,
    Tier,
    Token,
)
from penstock.core.request import Request
from penstock.sim.executor import SimExecutor
from penstock.sim.scenario import Scenario
from penstock.sim.workload import Expect

Edge = tuple[Phase, Trigger]
Pair = tuple[Phase, type[Event]]


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
        self.every = {tier: set(range(pool.base, pool.base + pool.capacity))
                      for tier, pool in core.have.tree.pools.items()}
        for tier in self.every:
            watch(core.have.tree.pools[tier], partial(self._acquired, tier))
        if not blind:
            executor.free.update({tier: set(pages) for tier, pages in self.every.items()})
        self.tables: dict[Row, tuple[RequestId, list[list[int]]]] = {}
        self.writer: dict[int, RequestId] = {}          # HBM page -> whose tokens it receives
        self.written: dict[int, StepId] = {}            # HBM page -> last step that writes it
        self.sampled: dict[Row, StepId] = {}            # step whose sample the row has
        self.retired = 0
        self.issued = 0
        self.moves: dict[int, Move] = {}                # flying
        self.parked: set[RequestId] = set()             # paused, and copied to the host
        self.gave_way: Counter[RequestId] = Counter()   # how often paused or dropped
        self.forced: set[RequestId] = set()             # asked to pause or drop in this advance
        self.edges: Counter[Edge] = Counter()
        self.pairs: Counter[Pair] = Counter()
        self.steps: dict[StepId, tuple[RequestId, ...]] = {}      # in flight: whose rows
        self._go = core._go
        core._go = self._watch_go    # type: ignore[method-assign]

    # ---------------------------------------------------------------- what users see
    def output(self, out: Output) -> None:
        e = self.made[out.rid]
        assert e.finished is None, f"request {out.rid}: {out} after the end"
        match out:
            case Token(rid, index, token):
                assert e.cached >= 0, f"request {rid}: a token before Started"
                assert index == len(e.got), f"request {rid}: token {index}, not {len(e.got)}"
                assert index < len(e.truth), f"request {rid}: token {index} after its stop"
                assert token == e.truth[index], f"request {rid}: wrong token {index}"
                e.got.append(token)
            case Started(rid, hbm, dram, disk):
                assert e.cached < 0, f"request {rid}: started twice"
                e.cached = hbm + dram + disk
                assert min(hbm, dram, disk) >= 0 and e.cached < len(e.arrived.prompt)
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
        if leader is not None and leader.rid not in self.gave_way and all(
                leader.table[i].node is not None for i in range(len(leader.path))):
            # A fork waits until its leader's prompt is sealed, then shares all whole pages; but a
            # private twin of a page that others had computed first cannot be shared (seed 52887).
            shared = (len(a.prompt) - 1) // size * size
            assert e.cached == shared, f"request {a.rid}: {e.cached} of {shared} tokens shared"
            self.stats["forks shared"] += 1

    def _outcome(self, e: Expect, outcome: Outcome, reason: str) -> None:
        rid, got = e.arrived.rid, len(e.got)
        self.stats[f"ended {outcome.value}"] += 1
        if outcome is Outcome.ABORT:
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
            assert str(len(e.arrived.prompt)) in reason, f"request {rid}: no numbers: {reason!r}"

    # ---------------------------------------------------------------- the plan alone
    def plan(self, p: StepPlan) -> None:
        self.issued += 1
        assert p.step == self.issued, f"step {p.step} after {self.issued - 1}"
        self.steps[p.step] = p.rids
        if self.blind:
            return
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
            live = self.core.live[b.rid]
            assert b.emitted == live.num_output, f"request {b.rid}: {b.emitted} emitted"
            self.tables[b.row] = b.rid, [list(pages) for pages in b.pages]
            self.sampled.pop(b.row, None)
        for g in p.grows:
            assert g.pages
            self.tables[g.row][1][g.group].extend(g.pages)

    def _rows(self, p: StepPlan) -> None:
        size, held, at = self.cfg.page_size, self.core.have.pools[Lease.HBM].held, 0
        for row, rid, start, count, samples in zip(p.rows, p.rids, p.start, p.count, p.samples,
                                                   strict=True):
            owner, tables = self.tables[row]
            live = self.core.live[rid]
            assert owner == rid and live.row == row, f"row {row} is not bound to request {rid}"
            assert live.phase in (Phase.PREFILL, Phase.RESIDENT), f"request {rid}: {live.phase}"
            known = [t >= 0 for t in p.tokens[at:at + count]]
            if not all(known):
                assert samples and sum(known) <= 1 and count <= 1 + self.cfg.draft_tokens
                assert known == sorted(known, reverse=True), f"row {row}: a token after a draft"
            if not known[0]:
                assert row in self.sampled, f"row {row}: nothing sampled"
                assert (self.sampled[row] <= self.retired
                        or p.step - self.sampled[row] >= self.cfg.pp_size), "cadence"
                assert not self.made[rid].arrived.host_token, f"request {rid}: its token is out"
                self.stats["ahead of its token"] += 1
            self.stats["drafts"] += count - sum(known) - (not known[0])
            at += count
            e = self.made[rid]
            if not e.planned and rid not in self.gave_way:
                assert start == e.cached, f"request {rid}: starts at {start}, {e.cached} cached"
            e.planned = True
            leased = [copy.page for copy in live.table]
            for pages in tables:
                assert pages == leased[:len(pages)], f"request {rid}: table is not its lease"
                assert len(pages) * size >= start + count, f"request {rid}: too few pages"
                assert held.issuperset(pages), f"request {rid}: a page that is not held"
            for i in range(start // size, -(-(start + count) // size)):
                assert live.table[i].node is None, f"request {rid} writes a shared page"
                page = leased[i]
                assert self.writer.setdefault(page, rid) == rid, f"page {page}: two writers"
                self.written[page] = p.step
            if samples:
                self.sampled[row] = p.step

    def _move(self, p: StepPlan, m: Move) -> None:
        assert m.id not in self.moves
        self.moves[m.id] = m
        assert len(m.src_pages) == len(m.dst_pages) >= 1 and m.src is not m.dst
        size = self.cfg.page_size
        assert (len(m.src_pages) - 1) * size < m.tokens <= len(m.src_pages) * size
        assert 0 <= m.after <= p.step and 0 <= m.group < len(self.cfg.groups)
        assert len(set(m.dst_pages)) == len(m.dst_pages)
        if m.src is Tier.HBM:
            seen = max(m.after, self.retired)
            assert all(self.written.get(page, 0) <= seen for page in m.src_pages), (
                f"{m}: reads what is still being written")
        busy = {(f.dst, page) for f in self.moves.values() if f is not m for page in f.dst_pages}
        for tier, pages in ((m.src, m.src_pages), (m.dst, m.dst_pages)):
            pool = self.core.have.tree.pools[tier]
            fenced = {u for fence, units in pool.limbo if m.id in fence.moves for u in units}
            assert pool.held | fenced >= set(pages), f"{m}: a page that nothing keeps"
            assert busy.isdisjoint((tier, page) for page in pages), f"{m}: a page being filled"

    # ---------------------------------------------------------------- who changes phase
    def meets(self, event: Event, rid: RequestId) -> None:
        """`event` is about to reach a request in whatever phase it is."""
        live = self.core.live.get(rid)
        self.pairs[live.phase if live is not None else Phase.DONE, type(event)] += 1

    def _watch_go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        source, computed = r.phase, r.computed
        pressure = (trigger in (Trigger.PAUSE, Trigger.DROP) and source is not Phase.LOADING
                    and r.rid not in self.forced)
        if pressure and not self.blind:
            have, running = self.core.have, self.core.running
            assert not have.hbm.in_limbo, f"request {r.rid} gives way to a promised page"
            assert len(running) < 2 or r is not running[0], "the oldest gives way"
        if not self._go(r, trigger, spare):
            return False
        self.edges[source, trigger] += 1
        if source is Phase.PAUSED and trigger is Trigger.RESUME and not self.blind:
            failed = any(n for name, n in self.executor.stats.items() if name.endswith("failed"))
            assert failed or r.computed == computed, f"request {r.rid}: a pause lost its KV"
        if trigger is Trigger.ADMIT and not self.blind:
            self._admitted(r)
        if trigger in (Trigger.PAUSE, Trigger.DROP):
            self.gave_way[r.rid] += 1
        if pressure:
            self.stats[f"{trigger.value} by pressure"] += 1
        return True

    def _admitted(self, r: Request) -> None:
        mine = self.made[r.rid].arrived.priority, r.seq
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
            if tier is Tier.HBM:
                self.writer.pop(page, None)
                self.written.pop(page, None)

    def state(self) -> None:
        """After every advance: invariants of the core, and what became free."""
        if self.blind:
            return
        self.core.check()
        for tier, every in self.every.items():
            pool = self.core.have.tree.pools[tier]
            free = every - pool.held
            for _, units in pool.limbo:
                free.difference_update(units)
            self.executor.free[tier].clear()
            self.executor.free[tier] |= free
        self.stats["back-pressure"] += any(r.phase is Phase.QUEUED for r in self.core.waiting)
        for r in self.core.waiting:
            if r.is_parked and r.rid not in self.parked:        # its DRAM lease begins here
                for node in r.path:
                    host = node.copies.get(Tier.DRAM)
                    assert host is None or host.pins, f"request {r.rid}: its host pages may go"
        self.parked = {r.rid for r in self.core.waiting if r.is_parked}

    def end(self) -> None:
        """Nothing is left to happen, and the cache was flushed: every unit is free (I1, I2, I7)."""
        for e in self.made:
            assert e.finished is not None, f"request {e.arrived.rid} never finished"
        assert not self.core.live, "finished requests are still live"
        counts = self.core.stats()
        for tier in self.every:
            self.stats[f"evicted {tier.value}"] += int(counts[f"{tier.value}_evictions"])
        for pool in self.core.have.pools.values():
            assert pool.free == pool.capacity, f"leak: {pool.capacity - pool.free} {pool.name}"
