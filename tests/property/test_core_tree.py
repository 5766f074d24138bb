"""Prefix tree against a dict model: every page has one owner, and eviction takes only what nobody
needs, oldest first."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.kv.page_table import pin, unpin
from penstock.core.kv.pool import Pool
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree, unmark_evictable
from penstock.core.plan import Group, StepId, Tier

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
NAMESPACE = st.integers(0, 1)


class TreeMachine(RuleBasedStateMachine):
    """`users` stand for requests: each holds a path and pins its device copies."""

    def __init__(self) -> None:
        super().__init__()
        self.device = TierGroup(Tier.HBM, Group(0), Pool("hbm", 10, 100))
        self.host = TierGroup(Tier.DRAM, Group(0), Pool("dram", 6, 200))
        self.tree = Tree([self.device, self.host])
        self.users: list[list[tuple[Node, Copy]]] = []
        self.flying: list[Node] = []
        self.banished: set[Node] = set()

    @rule(namespace=NAMESPACE, tokens=TOKENS)
    def seal(self, namespace: int, tokens: tuple[int, ...]) -> None:
        """A request computes whole pages of `tokens` and gives them to the tree."""
        node, path = self.tree.root(namespace), []
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            child = self.tree.child(node, tokens[at:at + SIZE])
            if self.device not in child.copies:
                if not self.device.pool.free:
                    self.tree.update_evictable(child)
                    break
                self.tree.attach(child, self.device, Copy(self.device.pool.acquire(1)[0]))
            node = child
            self.tree.ref(node)
            pin(node.copies[self.device])
            path.append((node, node.copies[self.device]))
        if path:
            self.users.append(path)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def unref(self, data: st.DataObject) -> None:
        path = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        for _, copy in path:
            unpin(copy)
        self.tree.unref([node for node, _ in path])

    @rule(data=st.data())
    def write_through(self, data: st.DataObject) -> None:
        nodes = [n for n in self.tree.nodes()
                 if n.ready(self.device) and self.host not in n.copies]
        if nodes and self.host.pool.free:
            node = data.draw(st.sampled_from(nodes))
            copy = Copy(self.host.pool.acquire(1)[0], ready=False, moves=1)
            self.tree.attach(node, self.host, copy)
            node.copies[self.device].moves += 1
            unmark_evictable(node.copies[self.device])  # as `Moves` does
            self.flying.append(node)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), ok=st.booleans())
    def land(self, data: st.DataObject, ok: bool) -> None:
        node = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        node.copies[self.device].moves -= 1
        copy = node.copies[self.host]
        copy.moves -= 1
        if ok:
            copy.ready = True
            self.tree.update_evictable(node)
        else:
            self.tree.forget(node, self.host)
            self.tree.update_evictable(node)

    @rule(data=st.data())
    def banish(self, data: st.DataObject) -> None:
        if nodes := list(self.tree.nodes()):
            node = data.draw(st.sampled_from(nodes))
            self.tree.banish(node)
            self.banished.add(node)

    @rule(on_device=st.booleans(), n=st.integers(1, 4))
    def evict(self, on_device: bool, n: int) -> None:
        space = self.device if on_device else self.host
        before = {node: node.copies[space] for node in self.tree.nodes() if space in node.copies}
        could = [node for node in before if self.tree.evictable(node, space)]
        needed = {id(copy) for path in self.users for _, copy in path}
        gone = self.tree.evict(space, n)
        lost = [node for node in before if space not in node.copies]
        assert len(lost) == gone <= n
        assert gone == n or not [x for x in before if self.tree.evictable(x, space)]
        for node in lost:
            assert id(before[node]) not in needed, "a page in use was evicted"
            assert node not in self.flying, "a page that a copy touches was evicted"
        stays = [x.last_used for x in could if space in x.copies and self.tree.evictable(x, space)]
        leaves = [x.last_used for x in lost if x in could]
        assert max(leaves, default=0) <= min(stays, default=1 << 99), "not the oldest went"
        space.pool.drain(StepId(0), ())

    @invariant()
    def owned(self) -> None:
        nodes = list(self.tree.nodes())
        for space in self.tree.spaces:
            space.pool.check()
            pages = [node.copies[space].page for node in nodes if space in node.copies]
            assert sorted(pages) == sorted(space.pool.held), "a page without a node, or with two"
        for node in nodes:
            assert node.copies or node.children or node.refs, "a node with nothing left"
            assert node.refs == sum(node is n for path in self.users for n, _ in path)


    @invariant()
    def nobody_finds_what_is_banished(self) -> None:
        nodes = [root for key, root in self.tree.roots.items() if key >= 0]
        while nodes:
            node = nodes.pop()
            assert node not in self.banished
            nodes += node.children.values()


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTree = TreeMachine.TestCase
