"""Pools and mover against plain dicts of tensors; fences, lateness, tearing, failures."""
from __future__ import annotations

import logging

import pytest
import torch

from penstock.core.plan import DramPage, Group, HbmPage, Move, MoveId, StepId, Tier
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Latest, Shuffled
from penstock.memory.mover import Mover
from penstock.memory.pool import PageShape

SHAPE = PageShape(num_layers=3, num_kv_heads=2, page_size=4, head_dim=5)
DOWN, UP = (Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)


def pools(shape: PageShape = SHAPE) -> tuple[HbmPool, DramPool]:
    hbm, dram = HbmPool(shape, 6, base=100), DramPool(shape, 6, base=1000)
    hbm.fill(float("nan"))
    dram.fill(float("nan"))
    return hbm, dram


def move(n: int, way, src, dst, tokens: int, after: int = 0) -> Move:
    kinds = {Tier.HBM: HbmPage, Tier.DRAM: DramPage}
    return Move(MoveId(n), Group(0), way[0], tuple(kinds[way[0]](p) for p in src), way[1],
                tuple(kinds[way[1]](p) for p in dst), tokens, StepId(after))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))


def test_layouts_are_what_kernels_and_disks_expect():
    hbm, dram = pools()
    assert len(hbm.k) == len(hbm.v) == 3
    assert all(t.shape == (6, 4, 2, 5) and t.is_contiguous() for t in (*hbm.k, *hbm.v))
    assert dram.page(1003).is_contiguous()
    assert dram.page(1003).nbytes == SHAPE.page_bytes
    assert dram.page(1001).data_ptr() - dram.page(1000).data_ptr() == SHAPE.page_bytes
    hbm.k[1][2, 3, 1, 4] = 5.0
    hbm.v[2][2, 0, 0, 1] = 6.0
    assert hbm.page(102)[1, 1, 0, 3, 4] == 5.0
    assert hbm.page(102)[2, 0, 1, 0, 1] == 6.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", range(5, 13))
def test_a_round_trip_moves_exactly_the_named_tokens(dtype, tokens):
    hbm, dram = pools(PageShape(num_layers=3, num_kv_heads=2, page_size=4, head_dim=5,
                                dtype=dtype))
    n = -(-tokens // 4)
    src, mid, dst = [105, 100, 103][:n], [1004, 1000, 1002][:n], [101, 104, 102][:n]
    for i, page in enumerate(src):
        hbm.page(page).copy_(torch.randn(3, 2, 2, 4, 5))
        hbm.page(page)[0, 0, 0, 0, 0] = i
    mover = Mover([hbm, dram])
    mover.add([move(1, DOWN, src, mid, tokens), move(2, UP, mid, dst, tokens)])
    assert [(m.id, m.ok) for m in mover.run(StepId(0), idle=False)] == [(1, True), (2, True)]
    for i, (a, b) in enumerate(zip(src, dst, strict=True)):
        t = min(4, tokens - 4 * i)
        assert torch.equal(hbm.page(a)[..., :t, :], hbm.page(b)[..., :t, :])
        assert hbm.page(b)[..., t:, :].isnan().all()
    untouched = {100 + i for i in range(6)} - {*src, *dst}
    assert all(hbm.page(p).isnan().all() for p in untouched)
    for way in (DOWN, UP):
        assert mover.traffic[way].moves == 1
        assert mover.traffic[way].bytes == tokens * SHAPE.token_bytes * dtype.itemsize // 4


@pytest.mark.parametrize("bad", [
    move(1, DOWN, [1000], [1000], 4),           # ids of the wrong tier
    move(1, DOWN, [100], [100], 4),
    move(1, UP, [1000], [99], 4),
    move(1, UP, [1000], [106], 4),
    move(1, UP, [1000, 1001], [100], 8),
    move(1, UP, [1000], [100], 5),
    move(1, UP, [1000, 1001], [100, 101], 4),
    move(1, UP, [], [], 0),
    move(1, (Tier.HBM, Tier.HBM), [100], [101], 4),
])
def test_malformed_moves_fail_at_once(bad):
    mover = Mover(pools())
    with pytest.raises(AssertionError):
        mover.add([bad])


def test_wrong_tier_message_names_the_page_and_the_range():
    with pytest.raises(AssertionError, match=r"page 1000 is not a page of HBM.*100 \.\. 105"):
        pools()[0].page(1000)


def test_a_copy_waits_for_its_fence():
    hbm, dram = pools()
    mover = Mover([hbm, dram])
    mover.add([move(1, DOWN, [100], [1000], 4, after=3), move(2, DOWN, [101], [1001], 4, after=2)])
    assert mover.run(StepId(1), idle=True) == []
    hbm.page(100).fill_(1.0)
    hbm.page(101).fill_(2.0)
    assert [m.id for m in mover.run(StepId(2), idle=False)] == [2]
    assert len(mover) == 1
    hbm.page(100).fill_(3.0)
    assert [m.id for m in mover.run(StepId(3), idle=False)] == [1]
    assert (dram.page(1000) == 3.0).all()
    assert (dram.page(1001) == 2.0).all()
    assert mover.run(StepId(4), idle=True) == [] and len(mover) == 0


def test_latest_reads_the_source_only_when_nothing_else_is_left():
    hbm, dram = pools()
    mover = Mover([hbm, dram], Latest())
    mover.add([move(n, DOWN, [100 + n], [1000 + n], 4) for n in range(3)])
    assert mover.run(StepId(5), idle=False) == []
    hbm.page(100).fill_(9.0)
    assert [m.id for m in mover.run(StepId(5), idle=True)] == [0]
    assert (dram.page(1000) == 9.0).all()
    assert [m.id for m in mover.run(StepId(5), idle=True)] == [1]


def test_shuffled_reports_every_move_once_and_tears_some():
    hbm, dram = pools()
    hbm.fill(1.0)
    mover = Mover([hbm, dram], Shuffled(4, torn=0.3))
    ways = [move(n, DOWN, [100 + n % 6], [1000 + n % 6], 4) for n in range(60)]
    mover.add(ways)
    events = []
    while len(mover):
        events += mover.run(StepId(1), idle=True)
    assert sorted(e.id for e in events) == list(range(60))
    assert [e.id for e in events] != list(range(60))
    assert 5 < sum(not e.ok for e in events) == mover.traffic[DOWN].failed < 35


def test_a_torn_copy_wrote_a_part():
    hbm, dram = pools()
    hbm.fill(1.0)
    mover = Mover([hbm, dram], Shuffled(0, torn=1.0))
    mover.add([move(1, DOWN, [100, 101], [1000, 1001], 7)])
    assert [e.ok for e in mover.run(StepId(0), idle=True)] == [False]
    assert (dram.page(1000)[..., :3, :] == 1.0).all()
    assert dram.page(1000)[..., 3:, :].isnan().all()
    assert dram.page(1001).isnan().all()


def test_whatever_a_copy_raises_is_a_failed_move_and_is_logged(caplog):
    class Broken(DramPool):
        def page(self, page):
            raise OSError("the disk is gone")

    mover = Mover([pools()[0], Broken(SHAPE, 6, base=1000)])
    mover.add([move(1, DOWN, [100], [1000], 4), move(2, DOWN, [101], [1001], 4)])
    with caplog.at_level(logging.ERROR):
        assert [(e.id, e.ok) for e in mover.run(StepId(0), idle=False)] == [(1, False), (2, False)]
    assert "the disk is gone" in caplog.text
    assert mover.traffic[DOWN].failed == 2 and mover.traffic[DOWN].bytes == 0


def test_an_unused_host_pool_costs_no_resident_memory():
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    before = resident()
    shape = PageShape(num_layers=30, num_kv_heads=3, page_size=16, head_dim=64)
    dram, hbm = DramPool(shape, 1000), HbmPool(shape, 1000)
    assert dram.nbytes == hbm.nbytes > 700e6
    dram.page(999).fill_(1.0)
    assert resident() - before < 60e6
