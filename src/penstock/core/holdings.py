"""Who holds what: pools, tree and flying copies behind one acquire and one release.

`Core` says which leases a phase needs; this takes them all or none, and gives them up behind fences.
Also the copies between device and host pages that belong to holding: write-through of sealed pages,
parking of a paused request, loading. Knows no policy: who must give way is decided in `room`.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from penstock.core.ledger import Fence, Pool
from penstock.core.lifecycle import Lease, Phase
from penstock.core.plan import DiskPage, DramPage, Group, HbmPage, Move, MoveId, Page, Row, StepId, Tier
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.tree import Copy, Node, Tree

ONLY = Group(0)      # the one cache group of today's models
UP = {Tier.HBM: 0, Tier.DRAM: 1, Tier.DISK: 2}


@dataclass(slots=True, eq=False)
class Flight:
    """A Move that was planned and has not been answered."""

    src: Tier
    dst: Tier
    nodes: list[Node] = field(default_factory=list)      # whose copy in `dst` it fills
    request: Request | None = None                       # or: the open page of this request


def _pages(tier: Tier, units: list[int]) -> tuple[Page, ...]:
    if tier is Tier.HBM:
        return tuple(map(HbmPage, units))
    return tuple(map(DramPage if tier is Tier.DRAM else DiskPage, units))


class Holdings:
    """Pools, prefix tree, flying Moves. Every method keeps `check` true."""

    def __init__(self, cfg: CoreConfig) -> None:
        self.cfg = cfg
        self.rows = Pool("row", cfg.rows, cfg.row_base)
        self.hbm = Pool("hbm", cfg.hbm_pages, cfg.hbm_base)
        self.dram = Pool("dram", cfg.dram_pages, cfg.dram_base)
        self.pools = {Lease.ROW: self.rows, Lease.HBM: self.hbm, Lease.DRAM: self.dram}
        self.disk = Pool("disk", cfg.disk_pages, cfg.disk_base)
        self.tree = Tree({Tier.HBM: self.hbm, Tier.DRAM: self.dram, Tier.DISK: self.disk})
        self.flights: dict[MoveId, Flight] = {}
        self.outbox: list[Move] = []                     # planned since the last step
        self.issued = StepId(0)
        self.retired = StepId(0)
        self._next_move = 1
        self.freed = 0                                   # units that came back, in all
        self._storing = 0                                # pages on their way to storage
        self._to_store: deque[Node] = deque(maxlen=cfg.dram_pages)

    # ---------------------------------------------------------------- acquire and release
    def acquire(self, r: Request, leases: Collection[Lease], spare: int = 0) -> bool:
        """Take everything that `leases` mean for this request, or nothing. `spare` HBM pages must be
        left over, so that the rows that run can grow."""
        if Lease.ROW in leases and not self.rows.free:
            return False
        want = dict.fromkeys(Lease, 0)
        for lease in leases:
            if lease is Lease.ROW:
                want[lease] = 1
            elif lease is Lease.DRAM:
                queued = r.phase is Phase.QUEUED
                want[lease] = self._find_stored(r) if queued else self._dram_needed(r)
            elif not r.table:
                want[lease] = self._find(r)
        if not (self._room(Tier.HBM, want[Lease.HBM], spare)
                and self._room(Tier.DRAM, want[Lease.DRAM])):
            if Lease.HBM in leases:
                self._release_table(r)
            if r.phase is Phase.QUEUED:
                self._release_parked(r)
            if r.phase in (Phase.QUEUED, Phase.DROPPED):
                self.forget_path(r)
            return False
        if want[Lease.ROW]:
            r.row = Row(self.rows.acquire(1)[0])
        r.reserve += map(DramPage, self.dram.acquire(want[Lease.DRAM]))
        if r.phase is Phase.QUEUED and Lease.DRAM in leases:
            self._fetch(r)
        if Lease.HBM in leases:
            self._fill(r, want[Lease.HBM])
        return True

    def release(self, r: Request, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease is Lease.ROW and r.row is not None:
                self.rows.release([r.row], Fence(r.last_issue))
                r.row = None
            elif lease is Lease.HBM:
                self._release_table(r)
            elif lease is Lease.DRAM:
                self._release_parked(r)

    def grow(self, r: Request) -> bool:
        """One more device page for the next position."""
        if not self._room(Tier.HBM, 1):
            return False
        near = r.table[-1].page if r.table else None
        r.table.append(Copy(self.hbm.acquire(1, near)[0], pins=1))
        return True

    def forget_path(self, r: Request, keep: int = 0) -> None:
        """The request no longer names the sealed pages from `keep` on."""
        gone = r.path[keep:]
        del r.path[keep:]
        self.tree.leave(gone)
        if not self.cfg.prefix_cache:
            for node in reversed(gone):
                self._discard(node)

    def drain(self) -> int:
        pools = (self.rows, self.hbm, self.dram, self.disk)
        freed = sum(pool.drain(self.retired, self.flights) for pool in pools)
        self.freed += freed
        return freed

    def _room(self, tier: Tier, n: int, spare: int = 0) -> bool:
        """Whether n pages are free now, evicting cached ones if that makes it so."""
        pool = self.tree.pools[tier]
        if n == 0:
            return True
        if pool.free < n + spare:
            self.tree.evict(tier, n + spare - pool.free - pool.in_limbo)
            pool.drain(self.retired, self.flights)
        return pool.free >= n + spare

    # ---------------------------------------------------------------- HBM
    def _find(self, r: Request) -> int:
        """Pin what the device has of the request's known prefix. Returns the pages that are missing."""
        if r.phase in (Phase.PAUSED, Phase.FETCHING):
            usable = next((i for i, n in enumerate(r.path) if not self.tree.usable(n)), len(r.path))
            if usable < len(r.path):              # lost meanwhile: that part is recomputed
                self.forget_path(r, usable)
                self._drop_open(r)
        else:
            self.forget_path(r)
            r.path = self.tree.match(r.arrived.namespace, r.tokens, self.cfg.page_size)
            for node in r.path:
                self.tree.use(node)
        if r.open_copy is None:
            r.computed = r.settled = len(r.path) * self.cfg.page_size
        missing = -(-len(r.tokens) // self.cfg.page_size) - len(r.path)
        for node in r.path:
            copy = node.copies.get(Tier.HBM)
            if copy is None:
                missing += 1
                copy = Copy(-1, node)             # a place holder until `_fill`
                node.copies[Tier.DRAM].pins += 1  # making room must not evict the source
            copy.pins += 1
            r.table.append(copy)
        return missing

    def _fill(self, r: Request, n: int) -> None:
        """Give pages to the place holders and the tail of the table; start the loads."""
        pages = self.hbm.acquire(n)[::-1]
        loads: list[Node] = []
        for i, node in enumerate(r.path):
            if r.table[i].page < 0:
                copy = r.table[i] = Copy(pages.pop(), ready=False, pins=1)
                self.tree.attach(node, Tier.HBM, copy)
                node.copies[Tier.DRAM].pins -= 1
                loads.append(node)
        r.table += [Copy(page, pins=1) for page in reversed(pages)]
        r.loads = len(loads)
        if loads:
            self._move_nodes(loads, Tier.DRAM, Tier.HBM)
        if r.open_copy is not None:
            g = self.cfg.page_size
            self._move_open(r, Tier.DRAM, r.open_copy, Tier.HBM, r.table[len(r.path)].page,
                            r.computed - len(r.path) * g)

    def _release_table(self, r: Request) -> None:
        fence = Fence(r.last_issue, frozenset(r.moves))
        private: list[int] = []
        for i, copy in enumerate(r.table):
            copy.pins -= 1
            if copy.node is None:
                private.append(copy.page)
            elif copy.page < 0:
                r.path[i].copies[Tier.DRAM].pins -= 1     # a place holder: nothing was taken
            else:
                copy.used = max(copy.used, r.last_issue)
        self.hbm.release(private, fence)
        r.table = []
        r.bound = 0
        for node in r.path:
            self.tree.settle(node)

    # ---------------------------------------------------------------- sealing and write-through
    def seal(self, r: Request) -> None:
        """Move pages whose tokens have all retired from the request into the tree."""
        g, new = self.cfg.page_size, list[Node]()
        while (len(r.path) + 1) * g <= min(r.settled, len(r.tokens)):
            i = len(r.path)
            parent = r.path[-1] if r.path else self.tree.root(r.arrived.namespace)
            node = self.tree.child(parent, r.page_key(i, g))
            if Tier.HBM not in node.copies:
                self.tree.attach(node, Tier.HBM, r.table[i])
            self.tree.use(node)
            r.path.append(node)
            if Tier.DRAM not in node.copies and node.ready(Tier.HBM):
                new.append(node)
        if new and self.cfg.dram_pages:
            self.write_through(new, r.reserve)

    def write_through(self, nodes: list[Node], reserve: list[DramPage]) -> None:
        """Copy sealed pages to the host, as far as there is room; reserved pages are used first."""
        todo: list[Node] = []
        for node in nodes:
            if reserve:
                page = reserve.pop()
            elif self._room(Tier.DRAM, 1):
                page = DramPage(self.dram.acquire(1)[0])
            else:
                break
            self.tree.attach(node, Tier.DRAM, Copy(page, ready=False))
            todo.append(node)
        if todo:
            self._move_nodes(todo, Tier.HBM, Tier.DRAM)

    # ---------------------------------------------------------------- DRAM: a paused request
    def _dram_needed(self, r: Request) -> int:
        """Host pages a pause needs at most: sealed pages without a host copy, and the unsealed."""
        bare = sum(Tier.DRAM not in node.copies for node in r.path)
        return bare + -(-r.computed // self.cfg.page_size) - len(r.path)

    def park(self, r: Request) -> None:
        """All steps of a paused request have retired: pin host copies, then let go of the device."""
        for i, node in enumerate(r.path):
            if Tier.HBM not in node.copies and Tier.DRAM not in node.copies:
                self.tree.attach(node, Tier.HBM, r.table[i])   # its twin was evicted: ours serves
        count = r.computed - len(r.path) * self.cfg.page_size
        # Host copies may have been evicted since the pause; the open page goes first, and what the
        # reserve does not cover stays on the device.
        open_page = r.reserve.pop() if count > 0 and r.reserve else None
        bare = [n for n in r.path if Tier.DRAM not in n.copies]
        if bare:
            self.write_through(bare, r.reserve)
        for node in r.path:
            if (copy := node.copies.get(Tier.DRAM)) is not None:
                copy.pins += 1
                r.parked.append(copy)
        r.is_parked = True
        if open_page is not None:
            # The device page stays in the table, pinned, until the copy has landed.
            r.open_copy = open_page
            self._move_open(r, Tier.HBM, r.table[len(r.path)].page, Tier.DRAM, r.open_copy, count)
        self.dram.release(r.reserve, Fence(StepId(0)))
        r.reserve = []
        if not r.moves:
            self._release_table(r)

    def _release_parked(self, r: Request) -> None:
        for copy in r.parked:
            copy.pins -= 1
            if copy.node is not None:
                self.tree.settle(copy.node)
        r.parked, r.is_parked = [], False
        self.dram.release(r.reserve, Fence(StepId(0)))
        r.reserve = []
        self._drop_open(r)

    def _drop_open(self, r: Request) -> None:
        if r.open_copy is not None:
            self.dram.release([r.open_copy], Fence(StepId(0), frozenset(r.moves)))
            r.open_copy = None

    # ---------------------------------------------------------------- storage
    def stored(self, r: Request) -> int:
        """Pages of the known prefix that only storage has."""
        path = self.tree.match(r.arrived.namespace, r.tokens, self.cfg.page_size, stored=True)
        return sum(not self.tree.usable(node) for node in path)

    def _find_stored(self, r: Request) -> int:
        """Take the path as far as storage knows it, pinning host copies. Returns the missing ones."""
        r.path = self.tree.match(r.arrived.namespace, r.tokens, self.cfg.page_size, stored=True)
        missing = 0
        for node in r.path:
            self.tree.use(node)
            if (copy := node.copies.get(Tier.DRAM)) is not None:
                copy.pins += 1
                r.parked.append(copy)
            else:
                missing += Tier.HBM not in node.copies
        return missing

    def _fetch(self, r: Request) -> None:
        nodes = [n for n in r.path if Tier.HBM not in n.copies and Tier.DRAM not in n.copies]
        for node in nodes:
            self.tree.attach(node, Tier.DRAM, Copy(r.reserve.pop(), ready=False, pins=1))
            r.parked.append(node.copies[Tier.DRAM])
        r.fetched = len(nodes)
        if nodes:
            self._move_nodes(nodes, Tier.DISK, Tier.DRAM)

    def is_fetched(self, r: Request) -> bool:
        """Nothing that this request waits for is on its way any more; some of it may have failed."""
        return all(Tier.HBM in n.copies or Tier.DRAM not in n.copies or n.ready(Tier.DRAM)
                   for n in r.path)

    def _store(self, nodes: list[Node]) -> None:
        """Pages whose host copy has landed go on to storage, as far as there is room. A copy that
        is being stored cannot be evicted, so a store that hangs may hold a quarter of the host."""
        self._to_store += nodes
        todo: list[Node] = []
        while self._to_store and 4 * (self._storing + len(todo)) < self.cfg.dram_pages:
            node = self._to_store.popleft()
            if not node.ready(Tier.DRAM) or Tier.DISK in node.copies or not self._room(Tier.DISK, 1):
                continue
            self.tree.attach(node, Tier.DISK, Copy(self.disk.acquire(1)[0], ready=False))
            todo.append(node)
        if todo:
            self._storing += len(todo)
            self._move_nodes(todo, Tier.DRAM, Tier.DISK)

    # ---------------------------------------------------------------- moves
    def _new_move(self, flight: Flight, src: list[int], dst: list[int], tokens: int,
                  after: StepId) -> MoveId:
        """Plan a copy. `after` names the last step that wrote the source; sealed pages have none,
        their producers were seen to retire."""
        move = MoveId(self._next_move)
        self._next_move += 1
        self.flights[move] = flight
        self.outbox.append(Move(move, ONLY, flight.src, _pages(flight.src, src), flight.dst,
                                _pages(flight.dst, dst), tokens, after))
        return move

    def _move_nodes(self, nodes: list[Node], src: Tier, dst: Tier) -> None:
        ends = [(n.copies[src], n.copies[dst]) for n in nodes]
        self._new_move(Flight(src, dst, nodes=nodes), [s.page for s, _ in ends],
                       [d.page for _, d in ends], len(nodes) * self.cfg.page_size, self.retired)
        for s, d in ends:
            s.moves += 1
            d.moves += 1

    def _move_open(self, r: Request, src: Tier, src_page: int, dst: Tier, dst_page: int,
                   tokens: int) -> None:
        r.moves.add(self._new_move(Flight(src, dst, request=r), [src_page], [dst_page], tokens,
                                   r.last_issue))

    def landed(self, id: MoveId, ok: bool) -> list[Copy]:
        """A Move was answered. Returns device copies that will never be filled: requests that count
        on them must drop before `discard`."""
        flight, failed = self.flights.pop(id), list[Copy]()
        for node in flight.nodes:
            source, target = node.copies[flight.src], node.copies[flight.dst]
            source.moves -= 1
            target.moves -= 1
            target.ready = ok and not source.bad
            # A failed load makes its source suspect; a failed copy to a lower tier changes nothing.
            source.bad = source.bad or (not ok and UP[flight.dst] < UP[flight.src])
            if not target.ready and flight.dst is Tier.HBM:
                failed.append(target)
            elif not target.ready:
                self.tree.forget(node, flight.dst)
            if source.bad:
                source.ready = False
                if not source.moves and flight.dst is not Tier.HBM:
                    self.tree.forget(node, flight.src)
            self.tree.settle(node)
            if not self.cfg.prefix_cache:
                self._discard(node)
        if flight.dst is Tier.DISK:
            self._storing -= len(flight.nodes)
            self._store([])
        elif flight.dst is Tier.DRAM and self.cfg.disk_pages and self.cfg.prefix_cache:
            self._store([n for n in flight.nodes if n.ready(Tier.DRAM)])
        if flight.request is not None:
            self._landed_open(flight.request, id, flight.dst, ok)
        return failed

    def _landed_open(self, r: Request, id: MoveId, dst: Tier, ok: bool) -> None:
        r.moves.discard(id)
        if not ok and dst is Tier.DRAM:
            self._drop_open(r)                    # the open page's tokens are recomputed
        elif not ok:
            r.computed = r.settled = len(r.path) * self.cfg.page_size
        if r.phase is Phase.PAUSED and r.is_parked and not r.moves:
            self._release_table(r)

    def distrust(self, path: list[Node]) -> None:
        """The KV of a request that has left is damaged: nobody else may start from its pages."""
        for node in reversed(path):
            for tier, copy in tuple(node.copies.items()):
                if node.refs == 0 and copy.moves:
                    copy.bad, copy.ready = True, False
                elif node.refs == 0 and not copy.pins:
                    self.tree.forget(node, tier)

    def discard(self, copies: list[Copy]) -> None:
        """Loads failed and nobody counts on them: the copies go, and with them their sources."""
        for copy in copies:
            assert copy.pins == 0
            if (node := copy.node) is not None:       # else it went with its last request
                for tier in tuple(node.copies):
                    if not node.copies[tier].moves:
                        self.tree.forget(node, tier)

    def _discard(self, node: Node) -> None:
        """Without a prefix cache a page goes with the last request that names it."""
        for tier in tuple(node.copies):
            copy = node.copies.get(tier)
            if copy is not None and not (node.refs or copy.pins or copy.moves):
                self.tree.forget(node, tier)
