"""MLA KV entries that a model's own indexer chose, from the host: a few cells of `test_executor_hosted.py`,
whose whole list runs with them in the sweep."""
from __future__ import annotations

import hosted
import pytest
import ranks
import torch
from hosted import LATENESS, Engine, hosted_work, kind, play
from late_copies import Latest

from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Paused, RequestId
from penstock.exec.sparse.whole import Whole


@pytest.fixture(autouse=True)
def latent(monkeypatch):
    monkeypatch.setattr(hosted, "KIND", ["latent"])


@pytest.mark.covers(kind="latent", place="hosted")
def test_prompts_longer_than_the_device_select_at_each_position():
    engine = Engine(step_tokens=37)
    play(engine, prompts={1: kind().prompts[1], 2: kind().prompts[2]})
    hosted_work(engine)
    assert engine.total("hot_window_pages") > 0


@pytest.mark.covers(kind="latent", place="resident hosted", feature="tier paused")
def test_rows_on_both_tiers_and_pauses():
    engine = Engine(hbm_pages=60, step_tokens=150, lateness=LATENESS["shuffled"]())
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 60 else (),
         arrive=lambda rid: 0)
    hosted_work(engine)
    assert engine.core.stats()["pauses"] >= 1


def test_a_host_page_that_is_zeroed_shows():
    engine = Engine(always=True, lateness=Latest())
    engine.add(1, kind().prompts[1], hosted.NEW)
    while not engine.got[1]:
        engine.turn()
    engine.host[0].pages.nan_to_num_(0.0).zero_()
    engine.drain()
    assert tuple(engine.got[1]) != hosted.resident(kind().prompts[1], hosted.NEW)


@pytest.mark.parametrize("kept", [KVConfig(kv_cache_dtype="fp8_e4m3"), KVConfig(kv_cache_dtype="bfloat16"),
                                  KVConfig(sparse_metadata_dtype="fp8_e4m3")], ids=["fp8", "bfloat16", "fp8 keys"])
@pytest.mark.parametrize("num", [1, 2], ids=["whole", "stages"])
def test_rows_of_other_formats_on_both_tiers_with_pauses(kept, num, monkeypatch):
    """Tokens are those of a device that holds all in the same format, whatever happens to pages of bytes."""
    monkeypatch.setattr(hosted, "FORMAT", [kept])
    monkeypatch.setattr(ranks, "NUM", [num])
    engine = Engine(hbm_pages=60, step_tokens=150, lateness=LATENESS["shuffled"]())
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 60 else (),
         arrive=lambda rid: 0)
    hosted_work(engine)
    assert engine.core.stats()["pauses"] >= 1
    [wide] = {pool.layout.page_bytes // pool.layout.num_layers for pool in engine.device if not pool.group}
    assert wide == 4 * {"fp8_e4m3": 48 + 4 + 32, "bfloat16": 2 * 64, "auto": 4 * 64}[kept.kv_cache_dtype]


def test_chunks_of_codes_read_the_same_bits_on_the_device_and_on_the_host(monkeypatch):
    """Each layer's attention of each chunk of a prompt, by whether all of its row is on the device, as a GPU
    reads it."""
    monkeypatch.setattr(hosted, "FORMAT", [KVConfig(kv_cache_dtype="fp8_e4m3")])
    through, found = Whole.attend, {True: {}, False: {}}

    def seen(self, layer, chunk, *of):
        out = through(self, layer, chunk, *of)
        found[chunk.resident][layer, chunk.start, chunk.end] = out.clone()
        return out
    monkeypatch.setattr(Whole, "attend", seen)
    monkeypatch.setattr(Whole, "together", lambda self, r, end, count: count > 1)
    prompt = kind().prompts[1]
    for engine in (Engine(hbm_pages=200, dram_pages=0, hot_pages=0, step_tokens=37),
                   Engine(always=True, step_tokens=37)):
        engine.add(1, prompt, 2)
        engine.drain()
    assert found[True].keys() == found[False].keys()
    assert [at for at in found[True] if not at[0]] == [
        (0, at, min(at + 37, len(prompt))) for at in range(0, len(prompt), 37)]
    assert all(torch.equal(out, found[False][at]) for at, out in found[True].items())
