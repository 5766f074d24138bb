"""Prefix tree against a dict model: every page has one owner, and eviction takes only what nobody
needs, oldest first."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.ledger import Pool
from penstock.core.plan import StepId, Tier
from penstock.core.tree import Copy, Node, Tree

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
NAMESPACE = st.integers(0, 1)


class TreeMachine(RuleBasedStateMachine):
    """`users` stand for requests: each holds a path and pins its device copies."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = {Tier.HBM: Pool("hbm", 10, 100), Tier.DRAM: Pool("dram", 6, 200)}
        self.tree = Tree(self.pools)
        self.users: list[list[tuple[Node, Copy]]] = []
        self.flying: list[Node] = []

    def _known(self) -> dict[tuple[int, tuple[int, ...]], Node]:
        """Every node by namespace and whole token chain."""
        known = {}
        stack = [(ns, (), root) for ns, root in self.tree.roots.items()]
        while stack:
            ns, tokens, node = stack.pop()
            if node.parent is not None:
                known[ns, tokens] = node
            stack += [(ns, tokens + tuple(key), child) for key, child in node.children.items()]
        return known

    @rule(namespace=NAMESPACE, tokens=TOKENS)
    def seal(self, namespace: int, tokens: tuple[int, ...]) -> None:
        """A request computes whole pages of `tokens` and gives them to the tree."""
        node, path = self.tree.root(namespace), []
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            child = self.tree.child(node, tokens[at:at + SIZE])
            if Tier.HBM not in child.copies:
                if not self.pools[Tier.HBM].free:
                    self.tree.settle(child)
                    break
                self.tree.attach(child, Tier.HBM, Copy(self.pools[Tier.HBM].acquire(1)[0]))
            node = child
            self.tree.use(node)
            node.copies[Tier.HBM].pins += 1
            path.append((node, node.copies[Tier.HBM]))
        if path:
            self.users.append(path)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        path = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        for _, copy in path:
            copy.pins -= 1
        self.tree.leave([node for node, _ in path])

    @rule(data=st.data())
    def write_through(self, data: st.DataObject) -> None:
        nodes = [n for n in self.tree.nodes()
                 if n.ready(Tier.HBM) and Tier.DRAM not in n.copies]
        if nodes and self.pools[Tier.DRAM].free:
            node = data.draw(st.sampled_from(nodes))
            copy = Copy(self.pools[Tier.DRAM].acquire(1)[0], ready=False, moves=1)
            self.tree.attach(node, Tier.DRAM, copy)
            node.copies[Tier.HBM].moves += 1
            self.flying.append(node)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), ok=st.booleans())
    def land(self, data: st.DataObject, ok: bool) -> None:
        node = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        node.copies[Tier.HBM].moves -= 1
        copy = node.copies[Tier.DRAM]
        copy.moves -= 1
        if ok:
            copy.ready = True
            self.tree.settle(node)
        else:
            self.tree.forget(node, Tier.DRAM)
            self.tree.settle(node)

    @rule(tier=st.sampled_from((Tier.HBM, Tier.DRAM)), n=st.integers(1, 4))
    def evict(self, tier: Tier, n: int) -> None:
        before = {node: node.copies[tier] for node in self.tree.nodes() if tier in node.copies}
        could = [node for node in before if self.tree.evictable(node, tier)]
        needed = {id(copy) for path in self.users for _, copy in path}
        gone = self.tree.evict(tier, n)
        lost = [node for node in before if tier not in node.copies]
        assert len(lost) == gone <= n
        assert gone == n or not [x for x in before if self.tree.evictable(x, tier)]
        for node in lost:
            assert id(before[node]) not in needed, "a page in use was evicted"
            assert node not in self.flying, "a page that a copy touches was evicted"
            assert node.copies or not node.refs, "the last copy of a page in use went"
        stays = [x.last_used for x in could if tier in x.copies and self.tree.evictable(x, tier)]
        leaves = [x.last_used for x in lost if x in could]
        assert max(leaves, default=0) <= min(stays, default=1 << 99), "not the oldest went"
        self.pools[tier].drain(StepId(0), ())

    @rule(namespace=NAMESPACE, tokens=TOKENS)
    def match(self, namespace: int, tokens: tuple[int, ...]) -> None:
        known, best = self._known(), []
        for end in range(SIZE, len(tokens), SIZE):
            node = known.get((namespace, tokens[:end]))
            if node is None or not self.tree.usable(node):
                break
            best.append(node)
        assert self.tree.match(namespace, tokens, SIZE) == best

    @invariant()
    def owned(self) -> None:
        nodes = list(self.tree.nodes())
        for tier, pool in self.pools.items():
            pool.check()
            pages = [node.copies[tier].page for node in nodes if tier in node.copies]
            assert sorted(pages) == sorted(pool.held), "a page without a node, or with two"
        for node in nodes:
            assert node.copies or node.children or node.refs, "a node with nothing left"
            assert node.refs == sum(node is n for path in self.users for n, _ in path)


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTree = TreeMachine.TestCase
