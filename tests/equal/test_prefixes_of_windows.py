"""Prefixes of any length of a model with windows have the tokens of one process that finds nothing: those that end with
a page, at a multiple of --window-interval, a page before and behind it, and where prompts have parted."""
from __future__ import annotations

import pytest
from pair_engines import engines
from pipeline_engine import SINKS, checkpoint

PAGE, INTERVAL = 16, 48              # the window has 21 tokens: two pages, or three
BASE = [(7 * i * i + 3 * i) % 97 for i in range(170)]
LENGTHS = sorted({n + more for n in range(PAGE, len(BASE) - PAGE, PAGE) for more in (-1, 0, 1)})
ASKED = [([*BASE[:n], *((96 - 5 * n - i * i) % 97 for i in range(9))], 6) for n in LENGTHS]
OPTIONS = {"kv_cache_memory_bytes": "4M", "page_size": PAGE}


def window(end: int) -> range:
    """Pages of BASE that a prompt reads which goes on there."""
    return range(max(0, end - SINKS["sliding_window"]) // PAGE, end // PAGE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("windows"), SINKS)


@pytest.fixture(scope="module")
def want(model, tmp_path_factory):
    with engines(model, tmp_path_factory.getbasetemp(), ({},), **OPTIONS, kv_offloading_size="0",
                 enable_prefix_caching=False) as one:
        return [one.say([asked])[0] for asked in ASKED]


@pytest.mark.parametrize(("interval", "host"), [(0, "0"), (INTERVAL, "0"), (INTERVAL, "8M")])
def test_a_prefix_is_found_up_to_a_multiple_or_to_where_prompts_have_parted(model, want, interval, host, tmp_path):
    with engines(model, tmp_path, ({},), **OPTIONS, kv_offloading_size=host, window_interval=interval) as one:
        one.say([(BASE, 1)])
        kept = {page for end in ((len(BASE) - 1) // PAGE * PAGE, *range(0, len(BASE), interval or PAGE))
                for page in window(end)}
        for n, asked, tokens in zip(LENGTHS, ASKED, want, strict=True):
            pages = n // PAGE * PAGE
            assert one.say([asked]) == [tokens], n
            assert one.cached("hbm", "dram") == max(
                end for end in range(0, pages + 1, PAGE) if kept.issuperset(window(end))), n
            kept.update(window(pages))          # where it parted from BASE
        for n, asked, tokens in zip(LENGTHS, ASKED, want, strict=True):
            assert one.say([asked]) == [tokens], n
            assert one.cached("hbm", "dram") == (len(asked[0]) - 1) // PAGE * PAGE, n
