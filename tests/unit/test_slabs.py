"""Cache groups that share one memory: strides, waste, and copies that keep to their group."""
from __future__ import annotations

import itertools

import pytest
import torch

from penstock.core.plan import Group, Move, MoveId, StepId, Tier
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.memory.lateness import Promptly
from penstock.memory.mover import Mover
from penstock.memory.pool import PageLayout
from penstock.memory.slabs import share
from penstock.model.base import CacheShape

LATENT = CacheShape(name="latent", layers=(0, 1), num_kv_heads=1, head_dim=288, planes=1)
INDEX = CacheShape(name="index", layers=(0, 1), num_kv_heads=1, head_dim=33, planes=1, unit=4,
                   selector=True)
CFG = CoreConfig(page_size=16, rows=1, hbm_pages=3, dram_pages=2, hbm_base=10, dram_base=70,
                 group_base=1000)


def test_a_slab_is_the_largest_page_and_what_is_unused_is_told():
    """Rows of 1,152 bytes, and 132 for every 4 tokens."""
    caches = caches_of((LATENT, INDEX), 16, torch.float32)
    assert [layout.page_bytes for layout in caches.layouts] == [36864, 1056]
    assert (caches.slabs.slab_bytes, caches.slabs.slab_pages) == (36864, (1, 32))
    lines: list[str] = []
    caches.tell(lines.append)
    assert lines.pop(0) == "kv: latent: 2 layers, 2304 bytes a token; index: 2 layers, 66 bytes a token"
    assert lines == ["kv: slabs of 36864 bytes: 1 page of latent (0% unused), "
                     "32 pages of index (8% unused)"]
    assert [g.slab_pages for g in caches.groups] == [1, 32]
    assert [g.selector for g in caches.groups] == [False, True]


@pytest.mark.parametrize("page_bytes", [(4096,), (4096, 4096), (36864, 4224), (1000, 990, 130, 8)])
def test_strides_divide_the_slab_and_hold_a_page(page_bytes):
    slabs = share([PageLayout(num_layers=1, num_kv_heads=1, page_size=1, head_dim=n // 2, planes=1,
                              dtype=torch.bfloat16) for n in page_bytes])
    for g, n in enumerate(page_bytes):
        stride = slabs.page_stride(g)
        assert stride >= n and stride * slabs.slab_pages[g] == slabs.slab_bytes
        assert len(page_bytes) == 1 or stride % 64 == 0
        assert slabs.unused(g) == pytest.approx(1 - n / stride)
    assert max(page_bytes) <= slabs.slab_bytes <= 1.125 * max(page_bytes) + 64


def test_the_longest_context_counts_the_slabs_of_every_group():
    caches = caches_of((LATENT, INDEX), 16, torch.float32)
    slab = caches.slabs.slab_bytes
    assert caches.bytes_for(1) == 2 * slab and caches.bytes_for(33) == 35 * slab
    for slabs, pages in ((1, 0), (2, 1), (33, 32), (34, 32), (35, 33)):
        assert caches.context_pages(slabs * slab + 5) == pages
        assert caches.num_pages(slabs * slab + 5) == slabs


@pytest.mark.parametrize("lateness", [None, Promptly()])
def test_copies_keep_to_their_group_and_round_up_to_units(lateness):
    caches = caches_of((LATENT, INDEX), 16, torch.float32)
    hbm, dram = caches.pools(CFG)
    assert [(p.num_pages, p.base) for p in (*hbm, *dram)] == [(3, 10), (96, 1010), (2, 70), (64, 1070)]
    for pool, value in zip((*hbm, *dram), (1.0, 2.0, 0.0, 0.0), strict=True):
        pool.fill(value)
    hbm[0].page(10).fill_(7.0)          # slab 0 is the latents', slab 1 the index's
    hbm[1].page(1042).fill_(8.0)
    dram[0].page(70).fill_(0.0)
    mover = Mover([*hbm, *dram], lateness)
    mover.add([Move(MoveId(1), Group(0), Tier.HBM, (10,), Tier.DRAM, (70,), 16, StepId(0)),
               Move(MoveId(2), Group(1), Tier.HBM, (1042,), Tier.DRAM, (1104,), 5, StepId(0))])
    moved = list(itertools.chain.from_iterable(iter(lambda: mover.run(StepId(0), idle=True), [])))
    assert [(m.id, m.ok) for m in moved] == [(1, True), (2, True)]
    assert (dram[0].page(70) == 7.0).all()
    page = dram[1].page(1104)           # [L, K, C, U, H]: 5 tokens are 2 units of 4
    assert (page[..., :2, :] == 8.0).all() and (page[..., 2:, :] == 0.0).all()
    assert mover.traffic[Tier.HBM, Tier.DRAM, Group(1)].bytes == 2 * 2 * 33 * 4
    with pytest.raises(AssertionError, match="page 10 is not a page of HBM"):
        mover.add([Move(MoveId(3), Group(1), Tier.HBM, (10,), Tier.DRAM, (1104,), 5, StepId(0))])
