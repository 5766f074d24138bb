"""Fifteen faults of an executor that decodes through host pages: a scene that the right one passes sees it.

A fault is put into a `Worker` after it was made. Its scene is the cheapest that sees it.
"""
from __future__ import annotations

from collections.abc import Callable

import hosted
import pytest
import torch
from hosted import LATENESS, Engine, kind, play, resizing, sizes

from penstock.core.plan import (
    NO_DRAM,
    NO_HBM,
    Bind,
    DramPage,
    Group,
    HbmPage,
    Hot,
    HotResize,
    Paused,
    Promoted,
    Remap,
    RequestId,
    Row,
    Spilled,
    StepId,
    StepPlan,
)
from penstock.exec.worker import Stepped

pytestmark = pytest.mark.usefixtures("told_each_step")
NEW = 12
TAIL = 2            # f32 values of 8 bytes


def host_pages_at_the_wrong_entry(e: Engine) -> None:
    """A row that goes on from host pages takes each for the next."""
    table = e.rank._tables.groups[0]
    right = table.remap
    table.remap = lambda row, entries, pages, host: right(row, entries, pages, host[1:] + host[:1])


def grow_without_the_host_column(e: Engine) -> None:
    table = e.rank._tables.groups[0]
    right = table.append
    table.append = lambda row, first, pages, host: right(row, first, pages, host if not first else ())


def unmap_ignored(e: Engine) -> None:
    """Pages that were given to others are read."""
    table = e.rank._tables.groups[0]
    right = table.remap

    def remap(row: int, entries: tuple[int, ...], pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        if max(pages) >= 0:
            right(row, entries, pages, host)
    table.remap = remap


def mapped_at_the_wrong_entry(e: Engine) -> None:
    """Of pages that have come, two are mixed up."""
    table = e.rank._tables.groups[0]
    right = table.remap

    def remap(row: int, entries: tuple[int, ...], pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        right(row, entries, pages if min(pages) < 0 else pages[1:] + pages[:1], host)
    table.remap = remap


def hot_units_outlive_a_bind(e: Engine) -> None:
    """The pages of the hot buffer are those of the bind, the map is that of before."""
    hot = e.rank._attending.rows.hot
    right = hot.bind

    def bind(row: int, pages: list[int], keeps: list[int]) -> None:
        slots, units = hot._slot_LRKM[:, row].clone(), hot._unit_LRKS[:, row].clone()
        right(row, pages, keeps)
        hot._slot_LRKM[:, row], hot._unit_LRKS[:, row] = slots, units
    hot.bind = bind


def summaries_accumulate(e: Engine) -> None:
    """Bounds go on from what the slot held."""
    def fault(right):
        def store(values, at, device, host, hot, bounds):
            before = bounds.clone()
            right(values, at, device, host, hot, bounds)
            low, high = bounds[:, :, 0], bounds[:, :, 1]
            low.copy_(torch.minimum(low, before[:, :, 0]))
            high.copy_(torch.maximum(high, before[:, :, 1]))
        return store
    of_layers(e, "_write_kv", fault)


def stores_skip_the_host(e: Engine) -> None:
    of_layers(e, "_write_kv", lambda right: lambda values, at, device, host, hot, bounds: right(
        values, at, device, host.clone(), hot, bounds))


def misses_are_cut(e: Engine) -> None:
    of_layers(e, "_gather", lambda right: lambda host, pool, miss, num, *, unit, beside=False: right(
        host, pool, miss, (num - 1).clamp(0), unit=unit))


def the_wrong_head(e: Engine) -> None:
    def fault(right):
        def gather(host, pool, miss, num, *, unit, beside=False):
            right(host.flip(1), pool, miss, num, unit=unit)
        return gather
    of_layers(e, "_gather", fault)


def a_unit_is_hot_after_its_eviction(e: Engine) -> None:
    def fault(right):
        def resolve(chosen, row, device, host, hot, now, **more):
            before = hot.slot_RKM.clone()
            found = right(chosen, row, device, host, hot, now, **more)
            lost = (before >= 0) & (hot.slot_RKM < 0)
            hot.slot_RKM[lost] = before[lost]
            return found
        return resolve
    of_layers(e, "_resolve", fault)


def the_tail_is_lost(e: Engine) -> None:
    """The last 8 bytes of a row do not come along."""
    def fault(right):
        def gather(host, pool, miss, num, *, unit, beside=False):
            tail = pool[..., -TAIL:].clone()
            right(host, pool, miss, num, unit=unit)
            pool[..., -TAIL:] = tail
        return gather
    of_layers(e, "_gather", fault)


def the_tail_of_a_shrunk_buffer_is_still_hot(e: Engine) -> None:
    """The pages of a smaller hot buffer are known, and what was hot in others is hot."""
    hot = e.rank._attending.rows.hot
    right = hot.resize

    def resize(row: int, pages: list[int]) -> None:
        slots, units = hot._slot_LRKM[:, row].clone(), hot._unit_LRKS[:, row].clone()
        right(row, pages)
        hot._slot_LRKM[:, row], hot._unit_LRKS[:, row] = slots, units
    hot.resize = resize


def pages_of_a_shrunk_buffer_stay_in_use(e: Engine) -> None:
    """Hot buffers only grow."""
    rows = e.rank._attending.rows
    right, most = rows.resize, {}

    def resize(resize: HotResize) -> None:
        if len(resize.pages) > most.get(resize.row, kind().hot_pages):
            most[resize.row] = len(resize.pages)
            right(resize)
    rows.resize = resize


def of_layers(e: Engine, op: str, fault: Callable) -> None:
    """Put `fault` around an op of all layers."""
    layers = e.rank._attending._layers
    setattr(layers, op, fault(getattr(layers, op)))


def readers_of_one_entry_share_a_stamp(e: Engine) -> None:
    """What the first has read cannot be evicted for the second, whose selection is another."""
    hot = e.rank._attending.rows.hot
    right = hot.tick
    hot.tick = lambda rounds: (right(rounds)[0],) * 3


def a_reader_has_the_entries_of_another(e: Engine) -> None:
    layers = e.rank._attending._layers
    right = layers.attend
    layers.attend = lambda layer, *given: right(0 if given[-1] == 2 else layer, *given)


# ---------------------------------------------------------------- scenes
def alone(put: Callable[[Engine], None]) -> None:
    """One request, longer than the device."""
    e = Engine(step_tokens=200)
    put(e)
    play(e, new=NEW, prompts={1: kind().prompts[1]}, arrive=lambda rid: 0)


def shared(put: Callable[[Engine], None]) -> None:
    """One request, of a model whose last entries three layers read."""
    before, hosted.KIND[0] = hosted.KIND[0], "shared"
    try:
        alone(put)
    finally:
        hosted.KIND[0] = before


def moved(put: Callable[[Engine], None]) -> None:
    """One request that goes to the host and comes back."""
    e = Engine(hbm_pages=80, step_tokens=200, lateness=LATENESS["latest"]())
    put(e)
    play(e, lambda turn: {4: [Spilled(RequestId(1))], 10: [Promoted(RequestId(1))],
                          14: [Spilled(RequestId(1))]}.get(turn, ()),
         new=20, prompts={1: kind().prompts[1]}, arrive=lambda rid: 0)
    assert e.core.stats()["spills"] >= 1


def returned(put: Callable[[Engine], None]) -> None:
    """One request that goes to the host and stays on the device when it has come back."""
    e = Engine(hbm_pages=80, step_tokens=200)
    put(e)
    play(e, lambda turn: {4: [Spilled(RequestId(1))], 6: [Promoted(RequestId(1))]}.get(turn, ()),
         new=30, prompts={1: kind().prompts[1]}, arrive=lambda rid: 0)
    assert e.core.stats()["promotions"] == 1


def paused(put: Callable[[Engine], None]) -> None:
    """A request that decodes from the host pauses, and comes back with another hot buffer."""
    e = Engine(step_tokens=200, lateness=LATENESS["latest"]())
    put(e)
    play(e, lambda turn: [Paused(RequestId(1))] if turn == 8 else (), new=NEW, prompts={1: kind().prompts[1]},
         arrive=lambda rid: 0)
    assert e.core.stats()["pauses"] == 1


def crowded(put: Callable[[Engine], None]) -> None:
    """Rows on the host make room for newcomers: pages that they had on the device as well."""
    e = Engine(hbm_pages=60, step_tokens=150)
    put(e)
    play(e, new=NEW, arrive=lambda rid: 0)
    assert any(-1 in remap.device for plan in e.plans for remap in plan.remaps)


def resized(put: Callable[[Engine], None]) -> None:
    """Hot buffers grow and shrink."""
    e = Engine(hbm_pages=60, hot_pages_max=3 * kind().hot_pages, step_tokens=150, always=True)
    put(e)
    play(e, resizing(e, 3), new=NEW)
    assert len({*sizes(e)}) > 1


FAULTS = {
    host_pages_at_the_wrong_entry: moved,
    mapped_at_the_wrong_entry: returned,
    grow_without_the_host_column: alone,
    unmap_ignored: crowded,
    hot_units_outlive_a_bind: paused,
    summaries_accumulate: alone,
    stores_skip_the_host: alone,
    misses_are_cut: alone,
    the_wrong_head: alone,
    a_unit_is_hot_after_its_eviction: alone,
    the_tail_is_lost: alone,
    the_tail_of_a_shrunk_buffer_is_still_hot: resized,
    pages_of_a_shrunk_buffer_stay_in_use: resized,
    readers_of_one_entry_share_a_stamp: shared,
    a_reader_has_the_entries_of_another: shared,
}


@pytest.mark.parametrize("scene", [alone, shared, moved, returned, paused, crowded, resized],
                         ids=lambda f: f.__name__)
def test_the_right_executor_passes(scene):
    scene(lambda e: None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_seen(fault):
    with pytest.raises((AssertionError, IndexError)):
        FAULTS[fault](fault)


def bound(e: Engine) -> tuple[Bind, Callable[[int | None], Row]]:
    """The first bind with a hot buffer; and the row at a table index, None: its own."""
    e.add(1, kind().prompts[1], NEW)
    while not e.plans or not any(bind.hot for plan in e.plans for bind in plan.binds):
        assert e.turn()
    bind = next(bind for plan in e.plans for bind in plan.binds if bind.hot)
    base = bind.row - e.rank._tables.index(bind.row)
    return bind, lambda i: bind.row if i is None else Row(base + i)


def hand(e: Engine, **messages) -> None:
    """To the rank, in a plan without rows."""
    step = StepId(e.plans[-1].step + 1)
    e.plans.append(StepPlan(step, (), (), (), (), (), (), (), (), (), **messages))
    e.rank.start(e.plans[-1])
    while not any(isinstance(report, Stepped) and report.step == step
                  for report in e.rank.collect(block=True)):
        pass


@pytest.mark.parametrize(("change", "says"), [
    ({"row": 3}, "no hot buffer for"),                      # no request has it
    ({"row": 4}, "row .* is not in"),                       # no such row
    ({"group": Group(1)}, "no hot buffer for"),
    ({"page": 24}, "is not a page of"),
    ({"moved": True}, "hot pages .* become"),
    ({"keeps": 0}, "holds what it held"),
    ({"more": 20}, "hot pages of at most"),
])
def test_a_resize_that_cannot_be_applied_stops_the_rank(change, says):
    """With what was wrong."""
    e = Engine(step_tokens=200)
    bind, row = bound(e)
    hot = list(bind.hot[0])
    first = e.rank._tables.groups[0]._pools[0].base
    hot += [Hot(HbmPage(first + change.get("page", 0)))] * ("page" in change or change.get("more", 0))
    hot = hot[::-1] if "moved" in change else [Hot(h.page, change.get("keeps", -1)) for h in hot]
    hand(e, resizes=(HotResize(bind.row, Group(0), bind.hot[0]),))
    with pytest.raises(AssertionError, match=says):
        hand(e, resizes=(HotResize(row(change.get("row")), change.get("group", Group(0)), tuple(hot)),))


@pytest.mark.parametrize(("change", "says"), [
    ({"row": 3}, "row 3 has None pages"),                   # no request has it
    ({"row": 4}, "row .* is not in"),                       # no such row
    ({"group": 2}, "no table entries for"),          # no such group
    ({"entries": ()}, "no table entries for"),
    ({"entries": (0, 900)}, "entry 0 or 900 is not one of them"),
    ({"entries": (-1, 0)}, "entry -1 or 0 is not one of them"),
    ({"page": 24}, "is not a page of"),
    ({"on_host": 400}, "is not a page of"),
    ({"more": 1}, "not a page for each of 2"),
])
def test_a_remap_that_cannot_be_applied_stops_the_rank(change, says):
    """With what was wrong."""
    e = Engine(step_tokens=200)
    bind, row = bound(e)
    device, host = (pool.base for pool in e.rank._tables.groups[0]._pools)

    def remap(row: Row, group: int = 0, entries: tuple[int, ...] = (0, 1), page: int = 0, on_host: int = 0,
              more: int = 0) -> Remap:
        return Remap(row, Group(group), entries, (HbmPage(device + page), NO_HBM, *[NO_HBM] * more),
                     (NO_DRAM, DramPage(host + on_host)))
    hand(e, remaps=(remap(bind.row),))
    with pytest.raises(AssertionError, match=says):
        hand(e, remaps=(remap(**change | {"row": row(change.get("row"))}),))
