"""Pools and mover against plain dicts of tensors; fences, lateness, tearing, failures."""
from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading

import pytest
import torch
from late_copies import Latest, Shuffled

from penstock.core.plan import DramPage, Group, HbmPage, Move, Moved, MoveId, StepId, Tier
from penstock.memory.across import rows_of
from penstock.memory.copying import _runs
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Promptly
from penstock.memory.mover import Mover
from penstock.memory.pool import PageLayout, PoolPart

SHAPE = PageLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=5)
DOWN, UP = (Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)
FULL = Group(0)


def pools(shape: PageLayout = SHAPE) -> tuple[HbmPool, DramPool]:
    hbm, dram = HbmPool(shape, 6, base=100), DramPool(shape, 6, base=1000)
    hbm.fill(float("nan"))
    dram.fill(float("nan"))
    return hbm, dram


def move(n: int, way, src, dst, tokens: int, after: int = 0) -> Move:
    kinds = {Tier.HBM: HbmPage, Tier.DRAM: DramPage}
    return Move(MoveId(n), Group(0), way[0], tuple(kinds[way[0]](p) for p in src), way[1],
                tuple(kinds[way[1]](p) for p in dst), tokens, StepId(after))


def finish(mover: Mover, executed: int) -> list[Moved]:
    """Run to the end, as an engine without steps does."""
    events: list[Moved] = []
    while found := mover.run(StepId(executed), idle=True):
        events += found
    assert len(mover) == 0
    return events


@pytest.fixture(params=["thread", "inline"])
def lateness(request):
    return None if request.param == "thread" else Promptly()


def test_a_page_is_one_block_with_the_same_bytes_in_every_tier():
    """[layer, head, plane, token, dim], whatever the stride from page to page."""
    for stride in (SHAPE.page_bytes, SHAPE.page_bytes + 96):
        for cls in (HbmPool, DramPool):
            pool = cls(SHAPE, 6, base=100, page_stride=stride)
            pool.fill(0.0)
            page = pool.page(103)
            assert page.shape == (3, 2, 2, 4, 5) and page.is_contiguous()
            assert page.nbytes == SHAPE.page_bytes
            assert page.data_ptr() - pool.page(102).data_ptr() == stride
            pool.pages[3, 1, 1, 0, 2, 4] = 7.0
            assert page.flatten()[4 + 5 * (2 + 4 * (0 + 2 * (1 + 2 * 1)))] == 7.0


WHOLE = PageLayout(num_layers=3, num_kv_heads=4, page_size=4, head_dim=5, dtype=torch.bfloat16)


def spread(heads: int, layers: int, device: str = "cpu") -> tuple[HbmPool, DramPool]:
    """A rank's own pages, and its part of whole pages of the host."""
    own = PageLayout(num_layers=layers, num_kv_heads=heads, page_size=4, head_dim=5, dtype=torch.bfloat16)
    slab = 6 * WHOLE.page_bytes
    memory = torch.zeros(slab, dtype=torch.uint8, pin_memory=device == "cuda")
    hbm = HbmPool(own, 6, base=100, memory=torch.zeros(6 * own.page_bytes, dtype=torch.uint8, device=device))
    return hbm, DramPool(own, 6, base=1000, memory=memory, page_stride=WHOLE.page_bytes,
                         part=PoolPart(WHOLE, layer=3 - layers, head=4 - heads))


@pytest.mark.parametrize(("heads", "layers", "units", "count"), [
    (4, 3, 4, 1), (4, 2, 4, 1), (2, 3, 4, 1), (1, 3, 4, 1), (4, 3, 3, 1), (2, 3, 3, 3), (2, 1, 3, 1), (1, 2, 1, 2)])
def test_a_copy_with_gaps_is_few_rectangles_of_bytes(heads, layers, units, count):
    """A rank's heads or layers of a host page, and its first tokens: each rectangle is one call of CUDA's driver."""
    hbm, dram = spread(heads, layers)
    hbm.pages.copy_(torch.randn(hbm.pages.shape))
    source, target = hbm.page(102)[..., :units, :], dram.page(1003)[..., :units, :]
    found = list(rows_of(target, source))
    assert len(found) == count
    for rows in found:
        for i in range(rows.height):
            ctypes.memmove(rows.target + i * rows.target_pitch, rows.source + i * rows.source_pitch, rows.width)
    assert torch.equal(target, source) and dram.pages.count_nonzero() == source.count_nonzero()


def test_pages_that_follow_each_other_in_both_pools_are_one_copy():
    hbm, dram = pools()
    for pairs, runs in (([(100, 1000), (101, 1001), (102, 1003)], [(0, 2), (2, 1)]),
                        ([(100, 1001), (101, 1000), (102, 1001)], [(0, 1), (1, 2)]),
                        ([(105, 1000), (100, 1001)], [(0, 1), (1, 1)])):
        one = move(1, DOWN, [a for a, _ in pairs], [b for _, b in pairs], 4 * len(pairs))
        assert list(_runs(one, hbm, dram, len(pairs))) == runs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 7, 8, 9, 12])
@pytest.mark.parametrize(("heads", "layers"), [(4, 3), (4, 2), (2, 3), (1, 1)])
def test_pages_of_a_gpu_go_into_parts_of_host_pages_and_back(heads, layers, tokens):
    hbm, dram = spread(heads, layers, "cuda")
    hbm.pages.copy_(torch.randn(hbm.pages.shape))
    torch.cuda.synchronize()
    mover, n = Mover([hbm, dram]), -(-tokens // 4)
    mover.add([move(1, DOWN, [105, 100, 101][:n], [1004, 1000, 1001][:n], tokens)])
    assert [m.ok for m in finish(mover, 0)] == [True]
    mover.add([move(2, UP, [1004, 1000, 1001][:n], [102, 103, 104][:n], tokens)])
    assert [m.ok for m in finish(mover, 0)] == [True]
    copied = 0
    for i, (a, b, c) in enumerate(zip([105, 100, 101], [1004, 1000, 1001], [102, 103, 104], strict=True)):
        units = max(0, min(4, tokens - 4 * i))
        want = hbm.page(a)[..., :units, :]
        assert torch.equal(dram.page(b)[..., :units, :], want.cpu()) and torch.equal(hbm.page(c)[..., :units, :], want)
        copied += int(want.count_nonzero())
    memory = dram.pages.as_strided((6 * WHOLE.page_bytes // 2,), (1,), 0)
    assert int(memory.count_nonzero()) == copied, "heads and layers of other ranks are as they were"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", range(5, 13))
def test_a_round_trip_moves_exactly_the_named_tokens(dtype, tokens, lateness):
    hbm, dram = pools(PageLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=5,
                                dtype=dtype))
    n = -(-tokens // 4)
    src, mid, dst = [105, 100, 103][:n], [1004, 1000, 1002][:n], [101, 104, 102][:n]
    for i, page in enumerate(src):
        hbm.page(page).copy_(torch.randn(3, 2, 2, 4, 5))
        hbm.page(page)[0, 0, 0, 0, 0] = i
    mover = Mover([hbm, dram], lateness)
    mover.add([move(1, DOWN, src, mid, tokens), move(2, UP, mid, dst, tokens)])
    assert [(m.id, m.ok) for m in finish(mover, 0)] == [(1, True), (2, True)]
    for i, (a, b) in enumerate(zip(src, dst, strict=True)):
        t = min(4, tokens - 4 * i)
        assert torch.equal(hbm.page(a)[..., :t, :], hbm.page(b)[..., :t, :])
        assert hbm.page(b)[..., t:, :].isnan().all()
    untouched = {100 + i for i in range(6)} - {*src, *dst}
    assert all(hbm.page(p).isnan().all() for p in untouched)
    for way in (DOWN, UP):
        assert mover.traffic[*way, FULL].moves == 1
        assert mover.traffic[*way, FULL].bytes == tokens * SHAPE.unit_bytes * dtype.itemsize // 4


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


def test_a_copy_waits_for_its_fence(lateness):
    hbm, dram = pools()
    mover = Mover([hbm, dram], lateness)
    mover.add([move(1, DOWN, [100], [1000], 4, after=3), move(2, DOWN, [101], [1001], 4, after=2)])
    assert mover.run(StepId(1), idle=True) == []
    hbm.page(100).fill_(1.0)
    hbm.page(101).fill_(2.0)
    assert [m.id for m in mover.run(StepId(2), idle=True)] == [2]
    assert len(mover) == 1
    hbm.page(100).fill_(3.0)
    assert [m.id for m in mover.run(StepId(3), idle=True)] == [1]
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
    assert 5 < sum(not e.ok for e in events) == mover.traffic[*DOWN, FULL].failed < 35


def test_a_torn_copy_wrote_a_part():
    hbm, dram = pools()
    hbm.fill(1.0)
    mover = Mover([hbm, dram], Shuffled(0, torn=1.0))
    mover.add([move(1, DOWN, [100, 101], [1000, 1001], 7)])
    assert [e.ok for e in mover.run(StepId(0), idle=True)] == [False]
    assert (dram.page(1000)[..., :3, :] == 1.0).all()
    assert dram.page(1000)[..., 3:, :].isnan().all()
    assert dram.page(1001).isnan().all()


class Broken(DramPool):
    """Pages that cannot be reached, or only once `gate` opens."""

    fault: Exception = OSError("the disk is gone")
    gate: threading.Event | None = None

    def block(self, page, count):
        if self.gate is None:
            raise self.fault
        self.gate.wait()
        return super().block(page, count)


@pytest.mark.parametrize("fault", [OSError("the disk is gone"), torch.OutOfMemoryError("the disk is gone")])
def test_a_copy_that_fails_is_a_failed_move_and_is_logged(caplog, lateness, fault):
    dram = Broken(SHAPE, 6, base=1000)
    dram.fault = fault
    mover = Mover([pools()[0], dram], lateness)
    mover.add([move(1, DOWN, [100], [1000], 4), move(2, DOWN, [101], [1001], 4)])
    with caplog.at_level(logging.ERROR):
        assert [(e.id, e.ok) for e in finish(mover, 0)] == [(1, False), (2, False)]
    assert "the disk is gone" in caplog.text
    assert mover.traffic[*DOWN, FULL].failed == 2 and mover.traffic[*DOWN, FULL].bytes == 0


@pytest.mark.parametrize("bug", [AssertionError("our bug"), RuntimeError("our bug: shapes differ")])
def test_our_bug_in_a_copy_reaches_the_caller_and_nobody_hangs(lateness, bug):
    dram = Broken(SHAPE, 6, base=1000)
    dram.fault = bug
    mover = Mover([pools()[0], dram], lateness)
    mover.add([move(1, DOWN, [100], [1000], 4), move(2, DOWN, [101], [1001], 4)])
    with pytest.raises((AssertionError, RuntimeError)) as seen:
        mover.run(StepId(0), idle=True)
    assert "our bug" in f"{seen.value} {seen.value.__cause__}"
    if lateness is None:                        # the thread has gone: that does not heal
        with pytest.raises(RuntimeError, match="copy thread died with 2"):
            mover.run(StepId(1), idle=True)


def held() -> tuple[HbmPool, Broken, Mover]:
    """Pools and a mover whose copies wait for `dram.gate`."""
    hbm, dram = HbmPool(SHAPE, 6, base=100), Broken(SHAPE, 6, base=1000)
    hbm.fill(1.0)
    dram.gate = threading.Event()
    return hbm, dram, Mover([hbm, dram])


def test_a_copy_does_not_hold_the_caller():
    _hbm, dram, mover = held()
    mover.add([move(1, DOWN, [100], [1000], 4), move(2, DOWN, [101], [1001], 4, after=9)])
    assert mover.run(StepId(0), idle=False) == mover.run(StepId(1), idle=False) == []
    assert len(mover) == 2
    dram.gate.set()
    assert mover.run(StepId(2), idle=True) == [Moved(MoveId(1), True)]
    assert mover.run(StepId(8), idle=True) == []        # none due: blocking would be for ever
    assert mover.run(StepId(9), idle=True) == [Moved(MoveId(2), True)]
    assert (dram.page(1001) == 1.0).all()


def test_the_thread_ends_with_its_mover():
    threads = torch.get_num_threads()
    before = set(threading.enumerate())
    _hbm, dram, mover = held()
    mover.add([move(n, DOWN, [100 + n], [1000 + n], 4) for n in range(3)])
    assert set(threading.enumerate()) <= before         # none before the first copy is due
    mover.run(StepId(0), idle=False)
    [thread] = set(threading.enumerate()) - before
    assert torch.get_num_threads() == threads
    dram.gate.set()
    del mover
    gc.collect()
    assert not thread.is_alive()


def test_an_exit_in_the_middle_of_copies_is_clean():
    """A daemon thread inside torch would abort the process: at exit, it is stopped first."""
    code = """
from penstock.core.plan import Group, Move, MoveId, StepId, Tier
from penstock.memory import dram, hbm, mover, pool
shape = pool.PageLayout(num_layers=8, num_kv_heads=4, page_size=64, head_dim=64)
m = mover.Mover([hbm.HbmPool(shape, 16), dram.DramPool(shape, 16)])
pages = tuple(range(16))
m.add([Move(MoveId(n), Group(0), Tier.HBM, pages, Tier.DRAM, pages, 1024, StepId(0))
       for n in range(2000)])
m.run(StepId(0), idle=False)
m.run(StepId(0), idle=True)
print(len(m) > 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")


def test_an_unused_host_pool_costs_no_resident_memory():
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    before = resident()
    shape = PageLayout(num_layers=30, num_kv_heads=3, page_size=16, head_dim=64)
    dram, hbm = DramPool(shape, 1000), HbmPool(shape, 1000)
    assert dram.nbytes == hbm.nbytes > 700e6
    dram.page(999).fill_(1.0)
    assert resident() - before < 60e6


def test_a_step_starts_the_copies_it_waits_for_and_no_others(lateness):
    """It is not put off, waits for no step that carries it, and is told once, with what else has ended."""
    hbm, dram = pools()
    for page in range(6):
        dram.page(1000 + page).fill_(page)
    mover = Mover([hbm, dram], Latest() if lateness else None)
    mover.add([move(1, UP, [1001], [101], 4, after=3), move(2, UP, [1002], [102], 4, after=9)])
    carried = [move(3, UP, [1003, 1004], [103, 104], 8), move(4, UP, [1005], [105], 4)]
    mover.start_now([MoveId(1), MoveId(3), MoveId(77)], carried, StepId(3))      # 77 has ended long ago
    mover.wait_for([MoveId(1), MoveId(3)])
    assert [hbm.page(p).unique().tolist() for p in (101, 103, 104)] == [[1.0], [3.0], [4.0]]
    assert hbm.page(102).isnan().all() and hbm.page(105).isnan().all() and len(mover) == 3
    assert mover.finish([MoveId(1)]) == [Moved(MoveId(1), True), Moved(MoveId(3), True)]
    mover.add(carried[1:])
    assert finish(mover, 9) == [Moved(MoveId(2), True), Moved(MoveId(4), True)]
    with pytest.raises(AssertionError, match="waits for move 5, whose source step 8 writes"):
        mover.start_now([MoveId(5)], [move(5, UP, [1001], [101], 4, after=8)], StepId(7))


def test_a_step_waits_for_what_the_thread_has_in_hand():
    hbm, dram = pools()
    dram.fill(2.0)
    mover = Mover([hbm, dram])
    mover.add([move(n, UP, [1000 + n], [100 + n], 4) for n in range(6)])
    told = mover.run(StepId(0), idle=False)
    mover.start_now([MoveId(5)], [], StepId(0))
    told += mover.finish([MoveId(5)])
    assert told == [Moved(MoveId(n), True) for n in range(6)] and (hbm.page(105) == 2).all()
