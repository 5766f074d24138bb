"""Which sealed pages go on to storage: all that the host has, however they came there."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.core import Core
from penstock.core.kv.prefix_tree import Node, unpack
from penstock.core.plan import Aborted, Arrived, Event, Moved, RequestId, Retired, Tier
from penstock.core.settings import CacheGroup, CoreConfig


@pytest.mark.parametrize("hot, always", [(0, False), (1, False), (1, True)],
                         ids=["written through", "twins", "computed in host pages"])
def test_what_the_host_has_is_stored(hot: int, always: bool) -> None:
    core = Core(CoreConfig(page_size=2, rows=2, hbm_pages=40, dram_pages=40, disk_pages=64, hot_pages=hot,
                           always_hosted=always))
    events: list[Event] = [Arrived(RequestId(0), tuple(range(9)), 12, selects=True)]
    while events:
        advance = core.advance(events)
        core.check()
        events = []
        if advance.plan is not None:
            events = [Moved(m.id, True) for m in advance.plan.moves]
            events.append(Retired(advance.plan.step, tuple((100,) for s in advance.plan.samples if s)))
    sealed = list(core.kv.tree.nodes())
    assert len(sealed) == 10 and not core.live
    assert all(node.ready(core.kv.host[0]) and node.ready(core.kv.disk[0]) for node in sealed)
    assert not [f for f in core.kv.moves.flying.values() if f.dst.tier is Tier.DISK]


@pytest.mark.parametrize("disk", [0, 64])
def test_what_was_sealed_when_the_host_was_full_follows_when_it_has_room(disk: int) -> None:
    d = Driver(page_size=2, hbm_pages=40, dram_pages=16, disk_pages=disk, hot_pages=1, always_hosted=True)
    host, disks = d.core.kv.host[0], d.core.kv.disk[0]
    d.arrive(1, range(21), max_new=5, selects=True)       # 13 of the host's pages
    d.arrive(2, range(100, 113), max_new=5)

    def sealed() -> list[Node]:
        return [n for n in d.core.kv.tree.nodes() if unpack(n.key)[0] >= 100]

    while not sealed():
        d.retire()
    assert [host in n.copies for n in sealed()] == [True] * 5 + [False], "the host was never full"
    d.tell(Aborted(RequestId(1)))
    while d.plans:
        d.retire()
    d.run()
    assert len(sealed()) == 8 and all(n.ready(host) for n in sealed())
    assert not disk or all(n.ready(disks) for n in sealed())


@pytest.mark.parametrize("groups", [1, 2])
def test_of_those_that_store_what_is_used_again_only_that_goes_on(groups: int) -> None:
    more = {} if groups == 1 else {"groups": tuple(CacheGroup(name=n, page_bytes=0) for n in "ab"),
                                   "hbm_pages": 80, "dram_pages": 80}
    d = Driver(page_size=2, **{"hbm_pages": 40, "dram_pages": 40, **more}, disk_pages=64, store_reused=True)

    def stored() -> list[int]:
        nodes, disks = d.core.kv.tree.nodes(), d.core.kv.disk
        return sorted(unpack(n.key)[0] for n in nodes for disk in disks if n.ready(disk))

    d.arrive(1, range(9), max_new=5)
    d.run()
    assert stored() == [] and len(list(d.core.kv.tree.nodes())) == 6
    d.arrive(2, [*range(5), 50, 51, 52], max_new=1)
    d.run()
    assert stored() == sorted([0, 2] * groups), "what it began with, and nothing of its own"
    d.arrive(3, [*range(5), 50, 51, 52], max_new=1)
    d.run()
    assert stored() == sorted([0, 2, 4] * groups)


def test_a_page_that_is_used_again_before_the_host_has_it_is_stored_when_it_has() -> None:
    d = Driver(page_size=2, hbm_pages=40, dram_pages=40, disk_pages=64, store_reused=True)
    d.arrive(1, range(5), max_new=9)
    d.retire()
    d.retire()
    late = [m for m in d.moves if m.dst is Tier.DRAM]
    assert late
    d.arrive(2, [*range(5), 50], max_new=1)
    while d.plans:
        d.retire()
    assert not [m for m in d.moves if m.dst is Tier.DISK]
    d.run()
    assert sorted(unpack(n.key)[0] for n in d.core.kv.tree.nodes() if n.ready(d.core.kv.disk[0])) == [0, 2]
