"""What engines, above all of a pair, hardly ever meet in the simulator, by hand: see `BY_HAND` in
test_sim_states."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.kv import claims
from penstock.core.lifecycle import Phase
from penstock.core.plan import Entered, Expired, Outcome, Paused, Promoted, RequestId, Spilled, Tier
from penstock.core.settings import CacheGroup


def expire_twice(d: Driver, rid: int) -> None:
    """First its fetch takes too long, then the line."""
    assert d.phase(rid) is Phase.FETCHING
    for phase in ("fetching", "dropped"):
        entered = [o for o in d.out if isinstance(o, Entered) and o.rid == rid][-1]
        assert entered.phase == phase
        d.tell(Expired(RequestId(rid), phase, entered.visit))
    assert d.finished()[rid] is Outcome.EXPIRED


def test_who_fetched_in_vain_at_a_prefill_engine_still_has_a_deadline_in_line() -> None:
    d = Driver(role="prefill", page_size=2, hbm_pages=5, dram_pages=4, disk_pages=99, rows=1)
    for rid, first in ((1, 0), (2, 100), (3, 200)):
        d.arrive(rid, range(first, first + 7), transfer=rid)
        d.retire()
        while d.moves:
            d.land()
        d.tell(Expired(RequestId(rid), "sending", 0))
    d.arrive(4, range(300, 308), transfer=4)
    d.arrive(5, range(7), transfer=5)
    expire_twice(d, 5)


def test_who_fetched_in_vain_without_a_pair_still_has_a_deadline_in_line() -> None:
    d = Driver(page_size=2, hbm_pages=9, dram_pages=4, disk_pages=99, rows=1)
    for rid, first in ((1, 0), (2, 100), (3, 200)):
        d.arrive(rid, range(first, first + 7), max_new=1)
        d.retire()
        while d.moves:
            d.land()
    d.arrive(4, range(300, 308), max_new=9)
    d.arrive(5, range(7))
    expire_twice(d, 5)


def decoding(dram_pages: int, *, always_hosted: bool) -> Driver:
    """A row of a decode engine that has read its prompt itself."""
    groups = CacheGroup(name="full", page_bytes=0), CacheGroup(name="selector", page_bytes=0, selector=True)
    d = Driver(role="decode", groups=groups, page_size=2, hbm_pages=40, dram_pages=dram_pages, hot_pages=1,
               max_len=16, always_hosted=always_hosted)
    d.arrive(1, range(9), max_new=7, selects=True)
    d.retire()
    return d


def spilled() -> Driver:
    """A row on its way to the host, which has no room for more."""
    d = decoding(dram_pages=9, always_hosted=False)
    d.tell(Spilled(RequestId(1)))
    assert d.state(1) == "decode.to_host"
    return d


def test_a_pause_without_room_on_the_host_leaves_a_row_where_it_goes() -> None:
    d = spilled()
    d.tell(Paused(RequestId(1)))
    assert d.state(1) == "decode.to_host"


def test_a_pause_without_room_on_the_host_leaves_a_row_that_decodes_from_there() -> None:
    d = decoding(dram_pages=9, always_hosted=True)
    assert d.state(1) == "decode.host"
    d.tell(Paused(RequestId(1)))
    assert d.state(1) == "decode.host"


def test_a_pause_without_room_on_the_host_leaves_a_row_on_its_way_back() -> None:
    d = spilled()
    while d.state(1) == "decode.to_host":
        if d.moves:
            d.land()
        else:
            d.retire()
    d.tell(Promoted(RequestId(1)))
    assert d.state(1) == "decode.to_device"
    d.tell(Paused(RequestId(1)))
    assert d.state(1) == "decode.to_device"


def test_a_load_that_fails_when_the_row_that_waited_for_it_is_on_its_way_to_the_host() -> None:
    """A step has read what never came: all is computed again."""
    d = Driver(hbm_pages=32, dram_pages=32, hot_pages=1, wait_pages=100)
    d.arrive(1, range(17), max_new=1)
    d.run()
    d.core.kv.tree.evict(d.core.kv.device[0], 99)
    d.arrive(2, range(17), max_new=9, selects=True)
    (load,) = d.moves
    r = d.core.live[RequestId(2)]
    assert load.dst is Tier.HBM and load.id in r.step_depends_on and r.state.name == "decode.device"
    assert claims.drop_mirrors(d.core.kv, r)
    d.tell(Spilled(RequestId(2)))
    assert d.state(2) == "decode.to_host"
    d.land(ok=False)
    assert r.phase is not Phase.DECODE and r.kv_epoch == 1
    d.run()
    assert d.finished()[2] is Outcome.LENGTH


@pytest.mark.parametrize("last_tokens, chunks", [
    (0, [40, 40, 20]), (8, [40, 30, 15, 8, 7]), (60, [40, 40, 20])])
def test_chunks_become_short_towards_the_end_of_a_prompt(last_tokens: int, chunks: list[int]) -> None:
    d = Driver(role="prefill", step_tokens=40, hbm_pages=64, last_tokens=last_tokens)
    d.arrive(1, range(100), transfer=5)
    found: list[int] = []
    while d.plans:
        found += d.plans[0].count
        d.retire()
    assert found == chunks
