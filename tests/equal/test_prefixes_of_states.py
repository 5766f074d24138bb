"""Prefixes of any length of a model with states, found by tensor-parallel ranks on the device, on the host and in
storage, have the tokens of one process that finds nothing. So have those of states that are larger than a frame."""
from __future__ import annotations

import pytest
from pair_engines import engines
from pipeline_engine import STATES, checkpoint

from penstock.engine.wire import Flush
from penstock.transfer import session

INTERVAL = 16
MODEL = {**STATES, "linear_num_key_heads": 3, "linear_num_value_heads": 6}     # 2 + 1 on two ranks
BASE = [(7 * i * i + 3 * i) % 97 for i in range(70)]
LENGTHS = sorted({n + more for n in range(INTERVAL, len(BASE), INTERVAL) for more in (-1, 0, 1)})
ASKED = [([*BASE[:n], *((96 - 5 * n - i * i) % 97 for i in range(9))], 6) for n in LENGTHS]
OPTIONS = {"state_interval": INTERVAL, "kv_cache_memory_bytes": "1M"}
PASSES = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("states"), MODEL)


@pytest.fixture(scope="module")
def want(model, tmp_path_factory):
    with engines(model, tmp_path_factory.getbasetemp(), ({},), **OPTIONS, kv_offloading_size="0",
                 enable_prefix_caching=False) as one:
        return [one.say([asked])[0] for asked in ASKED]


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param(
    {"tp": 3, "pp": 2, "kv_cache_memory_bytes": "300K"}, marks=pytest.mark.sweep)], ids=["tp2", "tp3.pp2"])
def test_any_prefix_is_found_up_to_the_last_boundary(model, want, layout, tmp_path):
    storage = {"kv_storage": f"file://{tmp_path}/store", "kv_storage_policy": "wait_complete"}
    with engines(model, tmp_path, (layout,), **OPTIONS, **storage, kv_offloading_size="8M") as ranks:
        ranks.say([(BASE, 1)])
        for n, asked, tokens in zip(LENGTHS, ASKED, want, strict=True):
            assert ranks.say([asked]) == [tokens], n
            assert ranks.cached("hbm", "dram") == n // INTERVAL * INTERVAL, n
        for number in range(30):                # others, until the device has none of these
            ranks.say([([(number + i * i) % 97 for i in range(120)], 1)])
        found = 0
        for asked, tokens in zip(ASKED, want, strict=True):
            assert ranks.say([asked]) == [tokens]
            found += ranks.cached("dram")
        assert found > 0, "the host"
        ranks.settle()
    with engines(model, tmp_path, ({},), **OPTIONS, **storage, kv_offloading_size="8M") as one:
        for number, tokens in enumerate(want):          # out of storage, by one process
            for _ in range(PASSES):
                one.settle()
                one.asked.loop.handle(Flush())
                assert one.say([ASKED[number]]) == [tokens]
                if one.cached("disk"):
                    break
            else:
                raise AssertionError(f"nothing of {LENGTHS[number]} tokens in storage")


@pytest.mark.parametrize("after", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_states_that_are_larger_than_a_frame_arrive_by_heads(model, want, after, tmp_path, monkeypatch):
    """A part of a state has 432 bytes, a layer's three."""
    monkeypatch.setattr(session, "PAYLOAD_MAX", 900)
    with engines(model, tmp_path, ({"tp": 3}, {"tp": after}), **OPTIONS, kv_offloading_size="8M") as pair:
        assert pair.say(ASKED) == want
        pair.settle()
        frames = pair.ends[0].loop.stats()
        assert pair.asked.loop.stats()["pair_delivered_total"] >= len(ASKED), frames
