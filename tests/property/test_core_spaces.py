"""Two cache groups in two tiers, with real copies between them: pages have one owner whatever moves,
fails or is evicted, and in one space a page never outlives what it builds on."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.kv.moves import FlyingMove, Moves
from penstock.core.kv.page_table import pin, unpin
from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.kv.prefix_tree import ENTRY_BITS, IN_USE, Copy, Node, TierGroup, Tree, place
from penstock.core.plan import Arrived, Group, MoveId, RequestId, StepId, Tier
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=9).map(tuple)
GROUPS = (CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=3))
CFG = CoreConfig(page_size=SIZE, rows=1, hbm_pages=9, dram_pages=6, groups=GROUPS)


def above(node: Node) -> list[Node]:
    """What a page builds on, nearest first; not the root."""
    path, parent = [], node.parent
    while parent is not None and parent.parent is not None:
        path.append(parent)
        parent = parent.parent
    return path


class SpacesMachine(RuleBasedStateMachine):
    """`users` stand for requests: each names a path, and pins copies of some of it in some spaces, as a
    window does that has moved on."""

    def __init__(self) -> None:
        super().__init__()
        pools = {tier: [Pool(f"{tier.value} {g}", n, base + 1_000 * g) for g in range(2)]
                 for tier, n, base in ((Tier.HBM, 9, 100), (Tier.DRAM, 6, 200))}
        self.device, self.host = (
            [TierGroup(tier, Group(g), pool) for g, pool in enumerate(pools[tier])] for tier in pools)
        disk = [TierGroup(Tier.DISK, Group(g), Pool("disk", 0)) for g in range(2)]
        self.tree = Tree([*self.device, *self.host])
        self.copies = Moves(CFG, self.tree, self.device, self.host, disk,
                             Arena(0, [space.pool for space in disk]))
        self.users: list[tuple[list[Node], list[Copy]]] = []
        self.twins: dict[MoveId, tuple[TierGroup, Copy]] = {}
        self.left: dict[Node, int] = {}            # when its last user left
        self.step = 0

    def _space(self, data: st.DataObject) -> TierGroup:
        return data.draw(st.sampled_from(self.tree.spaces))

    # ---------------------------------------------------------------- requests come and go
    @rule(namespace=st.integers(0, 1), tokens=TOKENS, keep=st.integers(0, 4))
    def seal(self, namespace: int, tokens: tuple[int, ...], keep: int) -> None:
        """A request computes pages and gives them to the tree; of the second group it pins the last
        `keep` alone."""
        node, path, pinned = self.tree.root(namespace), [], list[Copy]()
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            node = self.tree.child(node, tokens[at:at + SIZE])
            self.tree.ref(node)
            path.append(node)
        for space, pages in zip(self.device, (path, path[max(0, len(path) - keep):]), strict=True):
            for page in pages:
                copy = page.good(space)
                if copy is None and space not in page.copies and space.pool.free:
                    copy = Copy(space.pool.acquire(1)[0])
                    self.tree.attach(page, space, copy)
                if copy is not None:
                    pin(copy)
                    pinned.append(copy)
        if path:
            self.users.append((path, pinned))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def unref(self, data: st.DataObject) -> None:
        path, pinned = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.transition(path, pinned)

    def transition(self, path: list[Node], pinned: list[Copy]) -> None:
        for copy in pinned:
            self._unpin(copy)
        self.tree.unref(path)
        self.step += 1
        self.left |= dict.fromkeys(path, self.step)

    def _unpin(self, copy: Copy) -> None:
        unpin(copy)
        copy.used = StepId(self.step)
        if copy.node is not None:
            self.tree.update_evictable(copy.node)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A request counts on one more copy of its path."""
        path, pinned = data.draw(st.sampled_from(self.users))
        copy = data.draw(st.sampled_from(path)).good(self._space(data))
        if copy is not None and copy not in pinned:
            pin(copy)
            pinned.append(copy)

    @precondition(lambda self: any(pinned for _, pinned in self.users))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, pinned = data.draw(st.sampled_from([user for user in self.users if user[1]]))
        self._unpin(pinned.pop(data.draw(st.integers(0, len(pinned) - 1))))

    # ---------------------------------------------------------------- copies
    @rule(data=st.data(), g=st.integers(0, 1), up=st.booleans())
    def move(self, data: st.DataObject, g: int, up: bool) -> None:
        src, dst = (self.host[g], self.device[g]) if up else (self.device[g], self.host[g])
        could = [n for n in self.tree.nodes() if n.ready(src) and dst not in n.copies]
        if not could or not dst.pool.free:
            return
        todo = data.draw(st.lists(st.sampled_from(could), unique=True, min_size=1, max_size=3))
        todo = todo[:dst.pool.free]
        for node in todo:
            self.tree.attach(node, dst, Copy(dst.pool.acquire(1)[0], ready=False))
        self.copies.move_nodes(todo, src, dst)

    @rule(data=st.data(), g=st.integers(0, 1), up=st.booleans())
    def move_twin(self, data: st.DataObject, g: int, up: bool) -> None:
        """A request copies a shared page into one of its own: a page may have several readers."""
        src, dst = (self.host[g], self.device[g]) if up else (self.device[g], self.host[g])
        could = [n for n in self.tree.nodes() if n.ready(src)]
        if could and dst.pool.free:
            r = Request(Arrived(RequestId(1), (1,), 1), 0, 1, [1], 1, [], 1)
            mirror = Copy(dst.pool.acquire(1)[0], pins=1)
            self.copies.move_private(r, src, data.draw(st.sampled_from(could)).copies[src], dst, mirror, SIZE)
            (move,) = r.moves
            self.twins[move] = dst, mirror

    @precondition(lambda self: self.copies.flying)
    @rule(data=st.data(), ok=st.booleans())
    def land(self, data: st.DataObject, ok: bool) -> None:
        self._land(data.draw(st.sampled_from(sorted(self.copies.flying))), ok)

    def _land(self, move: MoveId, ok: bool) -> None:
        suspect = [source.bad for source, _ in self.copies.flying[move].pairs]
        flight, lost = self.copies.landed(move, ok, 0)
        self._let_go(lost)
        self.copies.finish(flight)
        if move in self.twins:
            space, mirror = self.twins.pop(move)
            assert mirror.ready == (ok and not suspect[0]), "a copy of a suspect page counts"
            space.pool.release([mirror.page], Fence(mirror.used))
        self._landed(flight, ok, suspect)

    def _let_go(self, lost: list[Copy]) -> None:
        """Whoever counts on a lost copy must not."""
        for _, pinned in self.users:
            for copy in [c for c in pinned if c in lost]:
                pinned.remove(copy)
                unpin(copy)

    def _landed(self, flight: FlyingMove, ok: bool, suspect: list[bool]) -> None:
        load = flight.dst.tier is Tier.HBM
        for (source, target), was in zip(flight.pairs, suspect, strict=True):
            assert source.bad == (was or (load and not ok)), "only a failed load makes its source suspect"
            if (was or not ok) and not target.moves:
                assert target.node is None, "a failed copy stays"
            if source.bad:
                assert not source.ready, "a suspect copy is read again"
                assert source.moves or source.node is None, "a suspect copy outlives its last Move"

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        """A request leaves, and its KV is damaged: nobody finds any of it any more."""
        path, pinned = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.transition(path, pinned)
        self.copies.invalidate(path)
        for node in path:
            assert all(node.refs or c.pins or c.moves for c in node.copies.values()), "a damaged page stays"
        nodes = [root for namespace, root in self.tree.roots.items() if namespace >= 0]
        while nodes:
            node = nodes.pop()
            assert node not in path, "a damaged page is found"
            nodes += node.children.values()

    # ---------------------------------------------------------------- eviction
    @rule(data=st.data(), n=st.integers(1, 4))
    def evict(self, data: st.DataObject, n: int) -> None:
        space = self._space(data)
        could = [x for x in self.tree.nodes() if self.tree.evictable(x, space)]
        pinned = {id(copy) for _, copies in self.users for copy in copies}
        used = {id(node) for path, _ in self.users for node in path}
        before = {x: (x.copies[space], IN_USE if id(x) in used else 0 if x.banished else self.left[x])
                  for x in could}
        assert self.tree.evict(space, n) == min(n, len(could))
        gone = [x for x in could if space not in x.copies]
        assert len(gone) == min(n, len(could))
        for node in gone:
            copy = before[node][0]
            assert id(copy) not in pinned and not copy.moves, "a page that is needed was evicted"
        stays = [x for x in could if space in x.copies]
        assert (max((before[x][1] for x in gone), default=0)
                <= min((before[x][1] for x in stays), default=1 << 99)), "not the oldest went"
        for node in stays:
            assert not set(above(node)) & set(gone), "a page outlives what it builds on"

    @rule(data=st.data())
    def evict_one_by_one(self, data: st.DataObject) -> None:
        """Leaves first, to the end: whatever goes, nothing that builds on it could have gone before."""
        space = self._space(data)
        for _ in range(sum(self.tree.evictable(x, space) for x in self.tree.nodes())):
            could = [x for x in self.tree.nodes() if self.tree.evictable(x, space)]
            assert self.tree.evict(space, 1) == 1
            (gone,) = [x for x in could if space not in x.copies]
            assert not [x for x in could if gone in above(x)], "a page went before one that builds on it"

    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        """To look at a page twice changes nothing but the length of the eviction order, and that has a
        bound."""
        nodes = list(self.tree.nodes())
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            for _ in range(200):
                self.tree.update_evictable(node)
            assert list(self.tree.nodes()) == nodes

    @rule()
    def drain(self) -> None:
        for space in self.tree.spaces:
            space.pool.drain(StepId(self.step), self.copies.flying)

    # ---------------------------------------------------------------- what always holds
    @invariant()
    def owned(self) -> None:
        nodes = list(self.tree.nodes())
        for space in self.tree.spaces:
            space.pool.check()
            pages = [node.copies[space].page for node in nodes if space in node.copies]
            pages += [mirror.page for where, mirror in self.twins.values() if where is space]
            assert sorted(pages) == sorted(space.pool.held), "a page without a node, or with two"
            assert space.pool.num_evictable == sum(self.tree.evictable(x, space) for x in nodes) == sum(
                c.ready and not (c.pins or c.moves) for x in nodes for s, c in x.copies.items() if s is space)
            assert len(space.order) + len(space.read) == space.pool.num_evictable, "a page has one entry"
            for copy in space.order:
                assert copy.number >> ENTRY_BITS == place(copy.node, copy, 0), "an entry has the wrong place"
            assert [c.number for c in space.order] == sorted({c.number for c in space.order})
        for node in nodes:
            assert node.copies or node.children or node.refs, "a node with nothing left"
            assert node.refs == sum(path.count(node) for path, _ in self.users)
            for space, copy in node.copies.items():
                assert copy.node is node
                assert copy.pins == sum(pinned.count(copy) for _, pinned in self.users)
                assert copy.moves == sum(pair.count(copy) for flight in self.copies.flying.values()
                                         for pair in flight.pairs)
                assert copy.ready or copy.moves, f"{space}: nothing will fill it"
                assert not (copy.ready and copy.bad)
            older = [x.last_used for x in above(node)]
            assert older == sorted(older) and (not older or older[0] >= node.last_used), (
                "a page is older than one that builds on it")
        for root in self.tree.roots.values():
            assert root.children or root.refs, "a root of nothing"

    def teardown(self) -> None:
        """Everybody leaves, everything lands: all pages can be had again, and no node is left."""
        while self.users:
            path, pinned = self.users.pop()
            self.transition(path, pinned)
        for move in tuple(self.copies.flying):
            self._land(move, True)
        for space in self.tree.spaces:
            self.tree.evict(space, 1 << 30)
            space.pool.drain(StepId(1 << 30), ())
            assert space.pool.free == space.pool.capacity, "pages are lost"
        assert not self.tree.roots


SpacesMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestSpaces = SpacesMachine.TestCase
