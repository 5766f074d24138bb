"""The invariants that can be seen from inside the core (RELIABILITY I1, I2 and the lease tables)."""
from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.core.lifecycle import ACTIVE, Lease, Phase
from penstock.core.plan import Tier
from penstock.core.tree import Copy

if TYPE_CHECKING:
    from penstock.core.core import Core


def check(core: Core) -> None:
    """Raises AssertionError. Walks everything: for tests, the simulator and `--check`."""
    have = core.have
    for pool in (*have.pools.values(), have.disk):
        pool.check()
    _leases(core)
    pins: Counter[int] = Counter()
    refs: Counter[int] = Counter()
    private: list[int] = []
    for r in core.live.values():
        for copy in r.table:
            pins[id(copy)] += 1
            if copy.node is None:
                private.append(copy.page)
        for copy in r.parked:
            pins[id(copy)] += 1
        for node in r.path:
            refs[id(node)] += 1
    moves: Counter[int] = Counter()
    for flight in have.flights.values():
        for node in flight.nodes:
            moves[id(node.copies[flight.src])] += 1
            moves[id(node.copies[flight.dst])] += 1
    pages: dict[Tier, list[int]] = {Tier.HBM: private, Tier.DRAM: [], Tier.DISK: []}
    for r in core.live.values():
        pages[Tier.DRAM] += [*r.reserve, *([r.open_copy] if r.open_copy is not None else [])]
    for node in have.tree.nodes():
        assert node.parent is not None and node.parent.children[node.key] is node
        assert node.refs == refs.pop(id(node), 0), "refs differ from the requests that name a page"
        assert node.copies or node.refs or node.children, "an empty node stays"
        for tier, copy in node.copies.items():
            assert copy.node is node
            assert copy.pins == pins[id(copy)], f"{tier} pins differ from holders"
            assert copy.moves == moves[id(copy)]
            pages[tier].append(copy.page)
    assert not refs, "a request names a page that left the tree"
    assert sorted(pages[Tier.HBM]) == sorted(have.hbm.held), "device pages without an owner"
    assert sorted(pages[Tier.DRAM]) == sorted(have.dram.held), "host pages without an owner"
    assert sorted(pages[Tier.DISK]) == sorted(have.disk.held), "storage slots without an owner"


def _leases(core: Core) -> None:
    rows = [r.row for r in core.live.values() if r.row is not None]
    assert len(rows) == len(set(rows)) and set(rows) == core.have.rows.held
    assert sorted(core.running, key=lambda r: r.key) == core.running
    assert len(core.running) + len(core.waiting) == len(core.live)
    for r in core.live.values():
        holds, may = core.holds[r.phase], core.may_hold[r.phase]
        assert (r in core.running) == (r.phase in ACTIVE)
        assert (r.row is not None) == (Lease.ROW in holds), (r.rid, r.phase)
        if Lease.HBM in holds:
            g = core.cfg.page_size
            assert len(r.table) * g >= max(r.computed, 1), (r.rid, r.phase, "too few pages")
            assert r.phase is Phase.LOADING or all(c.ready for c in r.table)
            for i, node in enumerate(r.path):
                assert _serves(r.table[i], node.copies.get(Tier.HBM)), (r.rid, i)
        elif Lease.HBM not in may:
            assert not r.table, (r.rid, r.phase)
        if Lease.DRAM not in holds:
            assert not r.parked and not r.reserve and r.open_copy is None
        assert r.phase is Phase.PAUSED or not r.is_parked


def _serves(mine: Copy, shared: Copy | None) -> bool:
    """A table entry is the node's own copy, or a private twin."""
    return mine is shared or mine.node is None
