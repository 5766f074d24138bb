"""KV heads in fp8 on both tiers: tokens are those of a device that holds all of a request in the same format, whatever
happens to it."""
from __future__ import annotations

import hosted
import pytest
import ranks
import torch
from hosted import LATENESS, Engine, hosted_work, kind, play

from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Paused, RequestId, Spilled
from penstock.exec.sparse.prompts import HostedPrompts
from penstock.kernels.types import fp8

CODES = KVConfig(kv_cache_dtype="fp8_e4m3")


@pytest.fixture(autouse=True)
def codes(monkeypatch):
    monkeypatch.setattr(hosted, "FORMAT", [CODES])


def pauses(turn: int) -> list[Paused]:
    return [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 60 else []


@pytest.mark.covers(kind="fp8kv", place="resident hosted", feature="tier paused")
@pytest.mark.parametrize("of", [
    "bounds", "windowed", "sinks", "states", pytest.param("blocks", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.sweep)], ids=["whole", "stages"])
def test_codes_on_both_tiers_with_pauses(of, num, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [of])
    monkeypatch.setattr(ranks, "NUM", [num])
    engine = Engine(hbm_pages=60, step_tokens=150, lateness=LATENESS["shuffled"]())
    play(engine, pauses, arrive=lambda rid: 0)
    hosted_work(engine)
    assert engine.core.stats()["pauses"] >= 1
    widths = {group.name: layout.head_dim for group, layout in
              zip(engine.core.cfg.groups, (pool.layout for pool in engine.device), strict=False)}
    assert widths["full"] == 32 and widths.get("window", 32) == 32 and widths.get("bounds", 16) == 16


@pytest.mark.parametrize("kept", ["fp8_e4m3", "bfloat16"])
def test_codes_beside_bounds_of_other_types(kept, monkeypatch):
    monkeypatch.setattr(hosted, "FORMAT", [KVConfig(kv_cache_dtype="fp8_e4m3", sparse_metadata_dtype=kept)])
    engine = Engine(hbm_pages=60, step_tokens=150, lateness=LATENESS["shuffled"]())
    play(engine, lambda turn: [(Paused, Spilled)[turn % 2](RequestId(1 + turn % 4))] if turn % 5 == 4 else (),
         arrive=lambda rid: 0)
    hosted_work(engine)


@pytest.mark.parametrize("chunk", [5, pytest.param(37, marks=pytest.mark.sweep)])
def test_prompts_longer_than_the_device_in_chunks(chunk):
    engine = Engine(hbm_pages=46, step_tokens=chunk, overlap=True)      # bounds are as large as pages of codes
    play(engine)
    hosted_work(engine)
    assert engine.total("hot_window_pages") > 0


def test_a_chunk_sees_its_own_keys_as_the_next_one_does(monkeypatch):
    """What windows and the chunk itself give are values that codes stand for."""
    found, through = [], HostedPrompts.attend

    def attend(self, layer, chunk, windows, q, k, v, sinks=None):
        found.append((k.dtype, v.dtype))
        return through(self, layer, chunk, windows, q, k, v, sinks)
    monkeypatch.setattr(HostedPrompts, "attend", attend)
    engine = Engine(hbm_pages=46, always=True, step_tokens=37)
    engine.add(1, kind().prompts[1], 2)
    engine.drain()
    assert set(found) == {(torch.uint8, torch.uint8)}


def test_each_bound_holds_the_decoded_keys_of_its_unit():
    """Wherever a row's pages are, and however its tokens came: a key outside of its bounds could be missed."""
    engine = Engine(hbm_pages=200, dram_pages=0, hot_pages=0, step_tokens=37)
    engine.add(1, kind().prompts[1], 60)
    while len(engine.got[1]) < 40:
        engine.turn()
    kv, bounds = engine.device[:2]
    tables = engine.ex._ranks[0]._tables.groups
    units, size = kv.layout.page_size // bounds.layout.unit, kv.layout.page_size
    checked = 0
    for p in range((len(kind().prompts[1]) + 30) // size):
        keys_LKGH = fp8.decode_heads(kv.pages[int(tables[0].device_RM[0, p]), :, :, 0])
        low, high = bounds.pages[int(tables[1].device_RM[0, p])].unbind(2)
        for u in range(units):
            own = keys_LKGH[:, :, u * bounds.layout.unit:(u + 1) * bounds.layout.unit]
            assert torch.equal(low[:, :, u], own.amin(2)) and torch.equal(high[:, :, u], own.amax(2)), (p, u)
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("fault", ["neighbour's scale", "padding"])
def test_a_fault_in_what_is_read_shows(fault, monkeypatch):
    """The scale of the token before, or bytes behind a vector that are taken for it."""
    engine = Engine(hbm_pages=200, dram_pages=0, hot_pages=0, step_tokens=37)
    want = hosted.resident(kind().prompts[1], hosted.NEW)
    encode = fp8.encode_heads

    def wrong(kv_TCKH):
        kept = encode(kv_TCKH)
        dim = kv_TCKH.shape[-1]
        if fault == "padding":
            kept[..., dim:dim + 4] = kept[..., dim + 4:dim + 8]
        else:
            kept[1:, ..., dim:dim + 4] = kept[:-1, ..., dim:dim + 4].clone()
        return kept
    monkeypatch.setattr(fp8, "encode_heads", wrong)
    engine.add(1, kind().prompts[1], hosted.NEW)
    engine.drain()
    assert tuple(engine.got[1]) != want
