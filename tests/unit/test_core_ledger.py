"""Pools: conservation, fences, and ids that come back only when nothing can touch them."""
from __future__ import annotations

import pytest

from penstock.core.kv.pool import Arena, Fence, Pool
from penstock.core.plan import MoveId, StepId


def test_units_come_back_only_after_the_fence() -> None:
    pool = Pool("hbm", 4, base=100)
    units = pool.acquire(4)
    assert units == [100, 101, 102, 103]
    pool.release(units[:2], Fence(StepId(3)))
    pool.release(units[2:], Fence(StepId(0), frozenset({MoveId(7)})))
    assert pool.free == 0 and pool.in_limbo == 4
    assert pool.drain(StepId(2), {MoveId(7)}) == 0
    assert pool.drain(StepId(3), {MoveId(7)}) == 2
    assert pool.drain(StepId(3), set()) == 2
    assert pool.free == 4
    pool.check()


@pytest.mark.parametrize("change", ["acquire", "release", "drain", "gain", "lose"])
def test_a_pool_is_checked_again_when_units_have_changed_hands(change: str) -> None:
    pool = Pool("hbm", 0 if change in ("gain", "lose") else 4, per_slab=2)
    if pool.capacity == 0:
        Arena(4, (pool, Pool("index", 0, base=100, per_slab=2)))     # it is what both are carved from
    units = pool.acquire(2)
    if change in ("drain", "lose"):
        pool.release(units, Fence(StepId(1)))
    pool.check()
    match change:
        case "acquire" | "gain":
            pool.acquire(2)
        case "release":
            pool.release(units, Fence(StepId(1)))
        case "drain" | "lose":
            assert pool.drain(StepId(1), ()) == 2
    pool.num_held += 1
    for _ in range(2):                         # what was found once is found again
        with pytest.raises(AssertionError):
            pool.check()


def test_double_release_is_our_bug() -> None:
    pool = Pool("hbm", 2)
    units = pool.acquire(1)
    pool.release(units, Fence(StepId(0)))
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(units, Fence(StepId(0)))


def test_asking_for_too_much_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="3 of 2 free"):
        Pool("hbm", 2).acquire(3)


def test_neighbour_is_preferred_so_that_pages_form_runs() -> None:
    pool = Pool("hbm", 8)
    first, other = pool.acquire(2), pool.acquire(2)
    pool.release(other, Fence(StepId(0)))
    pool.drain(StepId(0), ())
    assert pool.acquire(1, near=first[-1]) == [2]
    assert pool.acquire(3, near=4) == [5, 6, 7]


def test_lowest_ids_first_after_reuse() -> None:
    pool = Pool("hbm", 4)
    pool.release(pool.acquire(4), Fence(StepId(0)))
    pool.drain(StepId(0), ())
    assert pool.acquire(4) == [0, 1, 2, 3]


def test_slabs_of_one_unit_leave_nothing_behind() -> None:
    """They come and go whole: no unit of such a pool is ever free."""
    pool = Pool("full", 0)
    Arena(400, (pool, Pool("index", 0, base=1_000, per_slab=8)))
    units = [pool.acquire(1)[0] for _ in range(300)]
    for _ in range(1_000):
        pool.release([units.pop(0)], Fence(StepId(0)))
        pool.drain(StepId(0), ())
        units += pool.acquire(1, units[-1])
        pool.check()
    assert len(set(units)) == 300 and pool.free == 0
