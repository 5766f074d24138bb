"""Prefixes of any length of models that select by an indexer, on the device and from host memory, have the tokens of
one process that finds nothing: those that end with a block, with a page, and a token before and behind them."""
from __future__ import annotations

from pathlib import Path

import pytest
from pair_engines import engines
from pipeline_engine import checkpoint
from test_same_tokens import LATENT, MINIMAX_M3

MODELS = {"minimax-m3": (MINIMAX_M3, 12, 24), "latent": (LATENT, 16, 16)}         # its blocks, and pages of whole ones
BASE = [(7 * i * i + 3 * i) % 97 for i in range(130)]
RESIDENT = {"host_decode": "off", "kv_offloading_size": "0"}
HOSTED = {"host_decode": "always", "kv_offloading_size": "8M"}


@pytest.mark.parametrize("more", [RESIDENT, HOSTED], ids=["resident", "hosted"])
@pytest.mark.parametrize("name", MODELS)
def test_any_prefix_is_found_up_to_the_last_page(name: str, more: dict[str, object], tmp_path: Path) -> None:
    config, block, page = MODELS[name]
    model, options = checkpoint(tmp_path / "model", config), {"kv_cache_memory_bytes": "4M", "page_size": page}
    lengths = sorted({n + m for n in range(block, len(BASE) - block, block) for m in (-1, 0, 1)})
    asked = [([*BASE[:n], *((96 - 5 * n - i * i) % 97 for i in range(9))], 8) for n in lengths]
    with engines(model, tmp_path, ({},), **options, **RESIDENT, enable_prefix_caching=False) as one:
        want = [one.say([each])[0] for each in asked]
        longer = [([*prompt, *tokens, 5], 4) for (prompt, _), tokens in zip(asked, want, strict=True)]
        then = [one.say([each])[0] for each in longer]
    with engines(model, tmp_path, ({},), **options, **more) as one:
        one.say([(BASE, 1)])
        for n, each, tokens in zip(lengths, asked, want, strict=True):
            assert one.say([each]) == [tokens], n
            assert one.cached("hbm", "dram") == n // page * page, n
        for n, each, tokens in zip(lengths, longer, then, strict=True):         # behind an answer
            assert one.say([each]) == [tokens], n
            assert one.cached("hbm", "dram") == (n + 9 + 7) // page * page, n
        reads = [chunk.kv_reads for chunk in one.asked.ended.values() if chunk.kv_reads]
        assert any(read["hot_misses"] for read in reads) == (more is HOSTED)
