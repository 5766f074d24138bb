"""What every tier promises, for every tier of the package: one that is not listed here fails."""
from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch

import penstock.memory
from penstock.core.plan import Group, Move, MoveId, StepId, Tier
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.mover import Mover
from penstock.memory.pool import PageLayout

SHAPE = PageLayout(num_layers=2, num_kv_heads=3, page_size=4, head_dim=5)
POOLS = {
    HbmPool: lambda shape, n, base: HbmPool(shape, n, base=base),
    DramPool: lambda shape, n, base: DramPool(shape, n, base=base),
}

def test_every_tier_is_covered():
    tiers = set()
    for info in pkgutil.walk_packages(penstock.memory.__path__, "penstock.memory."):
        module = importlib.import_module(info.name)
        tiers |= {c for _, c in inspect.getmembers(module, inspect.isclass)
                  if c.__module__ == info.name and isinstance(getattr(c, "tier", None), Tier)}
    assert tiers == set(POOLS)


@pytest.mark.parametrize("cls", POOLS, ids=lambda c: c.__name__)
def test_a_pool_keeps_what_each_page_was_given(cls):
    """Pages do not overlap, whatever their order; views alias the pool; ids are checked."""
    pool = POOLS[cls](SHAPE, 9, 40)
    assert (pool.num_pages, pool.base, pool.nbytes) == (9, 40, 9 * SHAPE.page_bytes)
    assert SHAPE.page_bytes == 2 * 3 * 2 * 4 * 5 * 4
    values = {page: torch.randn(2, 3, 2, 4, 5) for page in (43, 40, 48, 41, 47, 42, 45, 44, 46)}
    for page, value in values.items():
        pool.page(page).copy_(value)
    for page, value in values.items():
        assert pool.page(page).shape == value.shape
        assert torch.equal(pool.page(page), value)
    for wrong in (39, 49, 0, -1):
        with pytest.raises(AssertionError, match=f"page {wrong} is not a page of {pool.tier.name}"):
            pool.page(wrong)
    with pytest.raises(AssertionError):
        POOLS[cls](SHAPE, 0, 0)


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(POOLS, 2)))
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8])
def test_any_tier_copies_to_any_other(src, dst, tokens):
    a, b = POOLS[src](SHAPE, 3, 10), POOLS[dst](SHAPE, 3, 90)
    a.fill(1.0)
    b.fill(0.0)
    n = -(-tokens // 4)
    mover = Mover([a, b])
    mover.add([Move(MoveId(7), Group(0), src.tier, (12, 10)[:n], dst.tier, (91, 92)[:n], tokens,
                    StepId(2))])
    assert mover.run(StepId(1), idle=True) == []
    [moved] = mover.run(StepId(2), idle=True)
    assert moved.id == 7 and moved.ok
    for i, page in enumerate((91, 92)):
        filled = min(4, max(0, tokens - 4 * i))
        assert (b.page(page)[..., :filled, :] == 1).all()
        assert (b.page(page)[..., filled:, :] == 0).all()
    assert (b.page(90) == 0).all()
