"""Positions to pieces: every byte once, in its place, for all small page sizes, units and stages."""
from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from penstock.config.streams.frames import ProtocolError
from penstock.core.plan import Group, Tier
from penstock.memory.hbm import HbmPool
from penstock.memory.pool import PageLayout, PoolPart
from penstock.model.parts import TpRank
from penstock.transfer.facts import group_facts
from penstock.transfer.landing import place
from penstock.transfer.layout import GroupProgress, PageSlice, common_layer_spans, page_parts, pieces, whole_units
from penstock.transfer.pages import PoolPages, Span

STAGES = ((3,), (1, 2), (2, 1), (1, 1, 1), (0, 3), (1, 0, 2))


@pytest.mark.parametrize(("first", "tokens", "unit", "units"), [
    (0, 35, 1, range(35)), (16, 19, 1, range(16, 35)), (0, 35, 8, range(4)), (16, 19, 8, range(2, 4)),
    (32, 3, 8, range(4, 4)), (32, 8, 8, range(4, 5)), (64, 64, 4, range(16, 32))])
def test_only_whole_units_are_sent(first: int, tokens: int, unit: int, units: range) -> None:
    assert whole_units(first, tokens, unit) == units
    last = (first + tokens) % unit > 0
    assert whole_units(first, tokens, unit, states=True) == range(units.start, units.stop + last)


@pytest.mark.parametrize(("ours", "theirs"), list(product(STAGES, STAGES)))
def test_rectangles_are_in_one_stage_of_both_and_hold_each_layer_once(ours, theirs) -> None:
    found = common_layer_spans(ours, theirs)
    assert [layer for r in found for layer in r] == [0, 1, 2]
    for r in found:
        assert all(any(r.start >= s.start and r.stop <= s.stop for s in common_layer_spans(end, end))
                   for end in (ours, theirs))
    assert len(found) <= sum(map(bool, ours)) + sum(map(bool, theirs)) - 1


@pytest.mark.parametrize("a", [1, 2, 4])
@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_pieces_hold_each_layer_of_each_unit_once_in_an_order_that_is_taken(a: int, b: int) -> None:
    for first, count, limit, ours, theirs in product(
            (0, 4, 12), range(10), (10, 20, 30, 70, 130, 1000), STAGES[:4], STAGES[:4]):
        units = range(first, first + count)
        seen = []
        here, there = (GroupProgress(units, common_layer_spans(s, s)) for s in (ours, theirs))
        for p in pieces(units, (a, b), common_layer_spans(ours, theirs), 10, limit):
            assert p.layers * p.units * 10 <= limit
            assert not here.done
            here.take(p)                        # neither end finds it across its stages
            there.take(p)
            seen += product(range(p.unit, p.unit + p.units), range(p.layer, p.layer + p.layers))
        assert here.done and there.done
        assert sorted(seen) == sorted(product(units, range(3)))


@pytest.mark.parametrize(("units", "page_units", "layers", "limit", "want"), [
    (range(12), (4, 4), [range(3)], 1000, [PageSlice(0, 3, 0, 12)]),                # all of it fits
    (range(12), (4, 4), [range(3)], 290, [PageSlice(0, 3, 0, 8), PageSlice(0, 3, 8, 4)]),       # two pages fit
    (range(2, 15), (4, 4), [range(3)], 240, [PageSlice(0, 3, 2, 6), PageSlice(0, 3, 8, 7)]),    # parts of pages
    (range(2, 15), (4, 4), [range(3)], 200, [PageSlice(0, 3, 2, 6), PageSlice(0, 3, 8, 4), PageSlice(0, 3, 12, 3)]),
    (range(12), (8, 4), [range(3)], 250, [PageSlice(0, 3, 0, 8), PageSlice(0, 3, 8, 4)]),       # half a page here
    (range(8), (4, 4), [range(1), range(1, 3)], 1000, [PageSlice(0, 1, 0, 8), PageSlice(1, 2, 0, 8)]),
    (range(8), (4, 4), [range(1), range(1, 3)], 100, [PageSlice(0, 1, 0, 4), PageSlice(1, 2, 0, 4),
                                                      PageSlice(0, 1, 4, 4), PageSlice(1, 2, 4, 4)]),
    (range(8), (4, 4), [range(3)], 90, [PageSlice(0, 2, 0, 4), PageSlice(2, 1, 0, 4),   # a page does not fit
                                        PageSlice(0, 2, 4, 4), PageSlice(2, 1, 4, 4)])])
def test_a_piece_is_as_many_pages_as_fit_its_limit(units, page_units, layers, limit: int, want) -> None:
    assert list(pieces(units, page_units, layers, 10, limit)) == want


@pytest.mark.parametrize(("page_units", "want"), [
    ((4, 4), [range(2, 4), range(4, 8), range(8, 11)]), ((4, 16), [range(2, 4), range(4, 8), range(8, 11)]),
    ((16, 16), [range(2, 11)]), ((4, 6), [range(2, 4), range(4, 6), range(6, 8), range(8, 11)])])
def test_parts_of_a_piece_are_in_one_page_of_both_ends(page_units: tuple[int, int], want: list[range]) -> None:
    assert list(page_parts(2, 9, page_units)) == want
    assert list(page_parts(2, 9, page_units[::-1])) == want


def test_a_grant_takes_a_piece_only_when_it_is_next() -> None:
    """Left out, twice, exchanged, taller, or from elsewhere: no other sequence than the one that is."""
    units, stages = range(4, 11), (1, 2)
    order = list(pieces(units, (4, 2), common_layer_spans(stages, (3,)), 10, 40))
    for i, right in enumerate(order):
        for wrong in {p for q in (*order, PageSlice(0, 1, 11, 1), PageSlice(0, 1, 3, 1), PageSlice(3, 1, 4, 1))
                      for p in (q, q._replace(layer=q.layer + 1), q._replace(unit=q.unit + 1),
                                q._replace(unit=q.unit - 1), q._replace(layers=3), q._replace(layers=0),
                                q._replace(units=0), q._replace(units=5), q._replace(units=8))} - {right}:
            progress = GroupProgress(units, common_layer_spans(stages, stages))
            for p in order[:i]:
                progress.take(p)
            try:
                progress.take(wrong)
            except ProtocolError:
                progress.take(right)            # and nothing was counted
                continue
            # Another cut of the same layers and units is as good: what is left out of it comes next.
            assert (wrong.unit, wrong.layer) == (right.unit, right.layer)
            assert wrong.layers <= 2 and wrong.unit + wrong.units <= units.stop


def test_a_cell_that_is_larger_than_a_piece_goes_by_heads() -> None:
    """Five heads of 10 bytes, pieces of 25."""
    order = list(pieces(range(1, 3), (1, 1), [range(1), range(1, 2)], 50, 25, 5))
    assert order == [PageSlice(layer, 1, unit, 1, head, min(2, 5 - head))
                     for unit in (1, 2) for layer in (0, 1) for head in (0, 2, 4)]
    stages = common_layer_spans([1, 1], [1, 1])
    for i, right in enumerate(order):
        for wrong in {p for q in order for p in (q, q._replace(head=q.head + 1), q._replace(heads=6),
                                                 q._replace(units=2), q._replace(layers=2))} - {right}:
            progress = GroupProgress(range(1, 3), stages, 5)
            for p in order[:i]:
                progress.take(p)
            with pytest.raises(ProtocolError):
                progress.take(wrong)
            progress.take(right)                # and nothing was counted
            assert progress.done == (right == order[-1])


def test_a_grant_that_lacks_its_last_piece_is_not_done() -> None:
    order = list(pieces(range(5), (2, 2), [range(3)], 10, 20))
    progress = GroupProgress(range(5), common_layer_spans([3], [3]))
    for p in order[:-1]:
        progress.take(p)
        assert not progress.done
    progress.take(order[-1])
    assert progress.done


def pools(layout: PageLayout, stages: tuple[int, ...], tp: int = 1) -> list[list[HbmPool]]:
    """Of each TP rank of each stage."""
    return [[HbmPool(replace(layout, num_layers=n, num_kv_heads=heads.size), 8, base=50,
                     part=PoolPart(layout, sum(stages[:s]), heads.first))]
            for s, n in enumerate(stages) if n
            for heads in (TpRank(i, tp).kv_heads(layout.num_kv_heads) for i in range(tp))]


def fill(ranks: list[list[HbmPool]], pages: list[int], first: int, value) -> None:
    """Unit `first + n` of head k of layer l is `value(l, k, first + n)`."""
    for [pool] in ranks:
        of_page = pool.layout.page_size // pool.layout.unit
        for (i, page), u, n, k in product(enumerate(pages), range(of_page), range(pool.layout.num_layers),
                                          range(pool.layout.num_kv_heads)):
            unit = first + i * of_page + u
            pool.page(page)[n, k, :, u] = value(pool.part.layer + n, pool.part.head + k, unit)


@pytest.mark.parametrize(("size_a", "size_b"), [(4, 4), (4, 16), (16, 4), (8, 12)])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize(("ours", "theirs"), [((3,), (3,)), ((1, 2), (3,)), ((2, 1), (1, 2)),
                                              ((3,), (1, 1, 1))])
@pytest.mark.parametrize(("tp_a", "tp_b"), [(1, 1), (2, 1), (1, 3), (3, 2), (2, 5), (5, 2)])
@pytest.mark.parametrize("cells", [.7, 5, 50, 1000])        # of a piece: two heads, some layers, two pages, all
def test_bytes_arrive_where_their_position_is(size_a: int, size_b: int, unit: int, ours, theirs, tp_a: int,
                                              tp_b: int, cells: float) -> None:
    """Page sizes, stages, TP ranks and units: what is read at a position there was written at it here, on each
    TP rank that has its head."""
    start, tokens, first = 48, 21, 48 // unit
    a, b = (PageLayout(num_layers=3, num_kv_heads=3, page_size=size, head_dim=3, unit=unit,
                       dtype=torch.int16) for size in (size_a, size_b))
    from_, to = pools(a, ours, tp_a), pools(b, theirs, tp_b)
    source, target = PoolPages(from_), PoolPages(to)
    facts = [group_facts("kv", layout) for layout in (a, b)]
    units = whole_units(start, tokens, unit)
    pages = [list(range(50, 58)), list(range(57, 49, -1))]                 # not in the order of positions
    fill(from_, pages[0], first, lambda layer, head, u: 100 * u + 10 * head + layer)
    fill(to, pages[1], first, lambda layer, head, u: -1)
    for p in pieces(units, (facts[0].page_units, facts[1].page_units), common_layer_spans(ours, theirs),
                    facts[0].cell_bytes, int(cells * facts[0].cell_bytes), 3):
        out = memoryview(bytearray(facts[0].bytes_of(p)))
        source.read(Tier.HBM, Group(0), p.of_layers, place(*facts, start, pages[0], p), out, p.of_heads)
        target.write(Tier.HBM, Group(0), p.of_layers, place(*facts[::-1], start, pages[1], p), out, p.of_heads)
    want = pools(b, theirs, tp_b)
    fill(want, pages[1], first, lambda layer, head, u: 100 * u + 10 * head + layer if u in units else -1)
    for [pool], [right] in zip(to, want, strict=True):
        assert torch.equal(pool.pages, right.pages)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [0, 64], ids=["pages next to one another", "a gap between pages"])
@pytest.mark.parametrize("pages", [[52, 53, 54], [57, 51, 54], [50, 51, 56]])
@pytest.mark.parametrize("pinned", [True, False])
def test_pages_of_a_gpu_are_read_and_written_in_one_call(stride: int, pages: list[int], pinned: bool) -> None:
    """Three whole pages and the beginning of one."""
    layout = PageLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=8, dtype=torch.int16)
    every = [HbmPool(layout, 8, base=50, page_stride=layout.page_bytes + stride, memory=torch.zeros(
        8 * (layout.page_bytes + stride), dtype=torch.uint8, device="cuda")) for _ in range(2)]
    fill([[every[0]]], list(range(50, 58)), 0, lambda layer, head, u: 100 * u + 10 * head + layer)
    spans = [*(Span(page, 0, 4) for page in pages), Span(55, 0, 3)]
    data = torch.zeros(15 * layout.unit_bytes, dtype=torch.uint8, pin_memory=pinned)
    source, target = (PoolPages([[pool]]) for pool in every)
    torch.cuda.synchronize()                # an engine sends a page once it is known to be written
    source.read(Tier.HBM, Group(0), range(3), spans, memoryview(data.numpy()))
    assert torch.equal(data.view(torch.int16).cpu(), torch.cat([
        every[0].page(page)[..., :units, :].cpu().flatten() for page, _, units in spans]))
    target.write(Tier.HBM, Group(0), range(3), spans, memoryview(data.numpy()))
    for page in range(50, 58):
        units = next((span.units for span in spans if span.page == page), 0)
        assert torch.equal(every[1].page(page)[..., :units, :], every[0].page(page)[..., :units, :])
        assert not every[1].page(page)[..., units:, :].any()
