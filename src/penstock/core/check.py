"""The invariants that can be seen from inside the core (RELIABILITY I1, I2 and the lease tables)."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.core.kv.allocate import KVCache
from penstock.core.kv.page_table import Column
from penstock.core.kv.prefix_tree import ENTRY_BITS, Copy, Node, TierGroup, place
from penstock.core.lifecycle import ACTIVE, Lease, Phase, Place
from penstock.core.pair.bridge import Pairing
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.prefill_side import SendState
from penstock.core.plan import PeerId, Tier
from penstock.core.request import PREEMPTIONS_MAX, Request
from penstock.core.state import CoreState

REFS = "refs differ from the requests that name a page"
PINS = "pins differ from holders"
MOVES = "a page has other moves than those that fly"
PROMISED = "pages are promised to nobody"
LOOSE = "pages that can be had differ from those that are counted"
READ = "readers differ from those who read"
ORDER = "an eviction order differs from the copies that can be had"
INNER = "states that only lead to another differ from those said to"


def check(core: CoreState, pairs: Mapping[PeerId, Pairing]) -> None:
    """Raises AssertionError. Walks everything but pools in which nothing has changed: for tests, the
    simulator and `--debug-check`."""
    kv = core.kv
    kv.rows.check()
    for arena in kv.arenas.values():
        arena.check()
    pinned: list[Copy] = []                    # once for each pin,
    read: list[Copy] = []                      # for each reader,
    named: list[Node] = []                     # and for each path
    promised = {tier: [0] * len(kv.device) for tier in kv.arenas}
    pages: dict[TierGroup, list[int]] = {space: [] for space in kv.tree.spaces}
    running = set(core.running)
    assert all([r.phase in (Phase.QUEUED, Phase.DROPPED, Phase.PAUSED) for r in kv.entering])
    for entry in kv.entering.values():
        pinned += entry.pins + entry.optional
    for back in kv.returned:
        pinned += back.pins
        named += back.path
    twice = Counter(pinned) if pinned else {}  # who is paused pins what it has once more for its row
    for r in core.live.values():
        _leases(core, r, running)
        _columns(kv, r, pinned, read, pages, twice)
        named += r.path
        assert r.phase in (Phase.LOADING, Phase.PREFILL) or not any(r.held.reserved), PROMISED
        assert (r in kv.softening) == (r.read_to is not None), (r.rid, "who still pins what it reads")
        if r.held.booked is not None:
            assert r.phase is Phase.PAUSED or r.place in (Place.TO_HOST, Place.TO_DEVICE), (r.rid, r.state)
            for g, n in enumerate(r.held.booked[1]):
                promised[r.held.booked[0]][g] += n
        for g, t in enumerate(r.tables):
            promised[Tier.DRAM if r.place.on_host and t.hosted else Tier.HBM][g] += r.held.reserved[g]
    assert all([arena.reserved == promised[tier] and arena.num_reserved == sum(promised[tier])
                for tier, arena in kv.arenas.items()]), PROMISED
    for r in kv.freeing:
        assert r.phase in (Phase.DONE, Phase.DROPPED) and r.row is None
        assert not (r.moves or any(r.held.reserve) or any(t.hot for t in r.tables))
        _columns(kv, r, pinned, read, pages, twice)
        named += r.path
    moved = [copy for flight in kv.moves.flying.values() for pair in flight.pairs for copy in pair]
    _tree(core, Counter(pinned) if pinned else {}, Counter(named) if named else {},
          Counter(moved) if moved else {}, Counter(read) if read else {}, pages)
    _kept_promises(core)
    for copy, home in kv.moves.detached.items():
        assert copy.node is None and (copy.moves or copy.pins), "an orphan stays"
        pages[home].append(copy.page)
    for space, owned in pages.items():
        held = space.pool.held
        assert len(owned) == len(held) and held == set(owned), f"{space}: pages without an owner"
    if core.cfg.disk_pages:
        stored = [len(f.pairs) for f in kv.moves.flying.values() if Tier.DISK in (f.src.tier, f.dst.tier)]
        assert sum(stored) <= core.cfg.store_pages, "storage holds more of the host than it may"
    _queues(core)
    for pair in pairs.values():
        _pair(core, pair)


def _columns(kv: KVCache, r: Request, pinned: list[Copy], read: list[Copy],
             pages: dict[TierGroup, list[int]], twice: Mapping[Copy, int]) -> None:
    for t, device, host, reserve in zip(r.tables, kv.device, kv.host, r.held.reserve, strict=True):
        for space, column in ((device, t.device), (device, t.hot), (host, t.host)):
            if column:
                copies = [copy for copy in column if copy is not None]
                if column is t.device and t.hosted and r.place.on_host and r.phase in ACTIVE:
                    _check_reads(r, column)
                    read += [copy for copy in copies if r in copy.readers]
                    pinned += [copy for copy in copies if r not in copy.readers]
                else:
                    pinned += copies
                for copy in copies:
                    if copy.node is None and copy not in kv.moves.detached:
                        assert copy.pins == 1 + twice.get(copy, 0), f"request {r.rid}: a private page of two"
                        pages[space].append(copy.page)
        pages[host] += reserve
        assert all([(copy.evictable_in is None) == (i < r.hot.least) for i, copy in enumerate(t.hot)]), LOOSE


def _check_reads(r: Request, column: Column) -> None:
    """Who decodes from host pages, or will, can do without what it has on the device; who is promoted
    cannot. Either comes about over turns."""
    promoted = r.place is Place.TO_DEVICE
    end = r.promotion.reload_at if promoted else r.read_to
    assert all([copy is None or (r in copy.readers) is not promoted for copy in column[:end]]), (
        r.rid, "what it reads, or has pinned")


def _tree(core: CoreState, pins: dict[Copy, int], refs: dict[Node, int], moves: dict[Copy, int],
          read: dict[Copy, int], pages: dict[TierGroup, list[int]]) -> None:
    orders: Counter[tuple[TierGroup, bool]] = Counter()
    evictable = Counter([copy.evictable_in for r in core.kv.grown for t in r.tables for copy in t.hot[r.hot.least:]])
    stack = list(core.kv.tree.roots.values())
    while stack:
        parent = stack.pop()
        for key, node in parent.children.items():
            assert node.parent is parent and (node.key is key or node.key == key)
            assert node.banished or not parent.banished, "a good page that builds on a damaged one"
            if node.refs:
                assert node.refs == refs.pop(node, 0), REFS
            assert node.first or node.refs or node.children, "an empty node stays"
            assert node.serves == core.kv.tree.is_serving(node), "who can go on behind a page is forgotten"
            late = core.kv.tree.retained.late(node)
            for space, copy in node.copies.items():
                assert copy.node is node
                assert copy.inner == (space.states and core.kv.tree.is_inner(node, space)), INNER
                if copy.pins:
                    assert copy.pins == pins.pop(copy, 0), PINS
                if copy.moves:
                    assert copy.moves == moves.pop(copy, 0), MOVES
                assert copy.ready or copy.moves or copy.pins, f"{space}: a page that nothing will fill"
                assert not (copy.ready and copy.bad), f"{space}: a page that failed is in place"
                pages[space].append(copy.page)
                assert len(copy.readers) == (read.pop(copy, 0) if copy.readers else 0), READ
                can_be_had = copy.ready and not (copy.moves or copy.pins)
                assert (copy.evictable_in is not None) == can_be_had, LOOSE
                evictable[space.pool] += can_be_had
                if can_be_had:
                    order = space.read if copy.readers else space.order
                    assert copy.order is order and copy.number >> ENTRY_BITS == place(node, copy, late), ORDER
                    orders[space, bool(copy.readers)] += 1
            if node.children:
                stack.append(node)
    # What is left is private, or its node says that there is less of it.
    assert not refs, REFS
    assert not read, READ
    assert all(copy.node is None for copy in pins), PINS
    assert all(copy.node is None for copy in moves), MOVES
    for space in core.kv.tree.spaces:
        assert space.pool.num_evictable == evictable[space.pool], f"{space}: {LOOSE}"
        for reads, order in enumerate((space.order, space.read)):
            assert len(order) == orders[space, bool(reads)], f"{space}: {ORDER}"


def _queues(core: CoreState) -> None:
    rows = [r.row for r in core.live.values() if r.row is not None]
    assert len(rows) == len(core.kv.rows.held) and core.kv.rows.held == set(rows)
    assert len(core.running) + len(core.waiting) == len(core.live)
    core.check_queues()
    line = sorted([r for r in core.live.values() if r.is_runnable], key=lambda r: r.key)
    assert core.runnable == line and core.candidates == [r for r in line if not r.storage.keys]


def _kept_promises(core: CoreState) -> None:
    """What is promised can be had, but for what copies that fly keep from being evicted, what who has ended
    or waits has not given up yet, and what who has just paused keeps until all is saved: he could do
    without, and the host has it (sim seed 15194).
    Pages of several groups may lie scattered over slabs when they are wanted: then somebody gives way."""
    kv = core.kv
    for tier, arena in kv.arenas.items() if len(kv.device) == 1 else ():
        if arena.num_reserved and (short := arena.lacks([0] * len(arena.pools))):
            busy = {id(copy) for flight in kv.moves.flying.values() for pair in flight.pairs
                    for space, copy in zip((flight.src, flight.dst), pair, strict=True)
                    if space.tier is tier and not copy.pins}
            busy |= {id(copy) for r in (*kv.freeing, *kv.softening) for t in r.tables
                     for copy in (t.device if tier is Tier.HBM else t.host) if copy is not None}
            space = (kv.device if tier is Tier.HBM else kv.host)[0]
            waits = [back.pins for back in kv.returned] + [e.pins + e.optional for e in kv.entering.values()]
            busy |= {id(copy) for pins in waits for copy in pins
                     if copy.node is not None and copy.node.find(space) is copy}
            if tier is Tier.HBM:
                busy |= {id(up) for r in core.live.values() if r.phase is Phase.PAUSED and not r.saving.is_done
                         for t in r.tables if t.hosted for up, down in zip(t.device, t.host, strict=False)
                         if up is not None and down is not None and down.ready}
            assert short <= len(busy), f"{short} of what is promised of {tier.value} cannot be had"


def _leases(core: CoreState, r: Request, running: set[Request]) -> None:
    """What a request has is what its phase requires and allows."""
    where = (r.rid, r.state)
    holds = core.holds[r.state]
    either = (*holds, *core.may_hold[r.state])
    assert (r in running) == (r.phase in ACTIVE), where
    assert (r.row is not None) == (Lease.ROW in holds), where
    for t in r.tables:
        device = Lease.HBM if t.hosted else Lease.DEVICE_ONLY
        assert device in either or not any(t.device), where
        assert Lease.DRAM in either or not any(t.host), where
        least, most = (r.hot.least, r.hot.most) if t.hosted and Lease.HOT in holds else (0, 0)
        assert least <= len(t.hot) <= most, (where, "a hot buffer of another size")
        assert (len(t.hot) > least) == (t.hosted and r in core.kv.grown), (where, "who has grown")
    if Lease.DRAM not in holds:
        assert not any(r.held.reserve), where
    if r.row is not None:
        _tables(core, r)
    assert r.phase in (Phase.PAUSED, Phase.RECEIVING) or r.place is Place.TO_HOST or not r.saving.is_done
    assert r.place is Place.TO_DEVICE or not r.promotion.loading, where
    assert r.setbacks.preemptions - r.setbacks.forced <= PREEMPTIONS_MAX, (where, "gave way too often")


def _tables(core: CoreState, r: Request) -> None:
    """A row has a page for every position that it may read or write, in each group."""
    kv, where = core.kv, (r.rid, r.state)
    assert r.capacity == kv.covered(r, r.place) >= max(r.computed, 1), where
    for g, t in enumerate(r.tables):
        hosted = r.place.on_host and t.hosted
        column, space = (t.host, kv.host[g]) if hosted else (t.device, kv.device[g])
        for i in range(max(t.begin(r.retired), t.first), t.end(r.capacity)):
            copy = column[i]
            assert copy is not None, (where, t.group.name, i)
            assert copy.ready or r.phase is Phase.LOADING or copy.filled_by in r.step_depends_on, where
            if copy.node is not None:          # else it is private
                node = kv.node(r, t, i)
                assert node is not None and node.find(space) is copy, (where, i)
        if r.phase is Phase.LOADING:
            arriving = [(below, c) for below in (False, True) for c in (t.host if below else t.device)
                      if c is not None and not c.ready and (below or not hosted)]
            assert all([late in r.found.arriving for late in arriving]), (where, "pages that it does not wait for")
        if r.place is Place.TO_DEVICE and t.hosted:
            device = t.device[:r.promotion.reload_at]
            coming = [(g, i) for i, copy in enumerate(device) if copy is None or not copy.ready]
            assert coming == [entry for entry in r.promotion.loading if entry in coming], where
        if r.state == (Phase.DECODE, Place.DEVICE) and t.hosted:
            assert not any(t.host[:len(r.path) * core.cfg.page_size // t.unit]), (where, "sealed mirrors")


def _pair(core: CoreState, pair: Pairing) -> None:
    """Both halves agree: the protocol knows which requests are at it."""
    side = pair.side
    for transfer, r in pair.requests.items():
        assert core.live.get(r.rid) is r, f"transfer {transfer}: its request has ended"
    if isinstance(side, DecodeSide):
        assert set(pair.granted) == set(side.table), "grants differ from the protocol's"
        for transfer in side.asked:
            early = pair.requests.get(transfer)
            assert early is not None and early.phase in (Phase.QUEUED, Phase.FETCHING), f"transfer {transfer}"
        for transfer, receiving in side.table.items():
            live = pair.requests.get(transfer)
            waits = live is not None and live.phase is Phase.RECEIVING and not live.saving.is_done
            assert waits or receiving.closing, f"transfer {transfer}: its Cancel was forgotten"
        return
    for transfer, sending in side.table.items():
        assert (sending.state is not SendState.DRAINING) == (transfer in pair.requests), (
            f"transfer {transfer}: its end was not told")
