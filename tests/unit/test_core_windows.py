"""Windows with `keep`: which of their pages stay in the prefix tree, and where a prompt goes on."""
from __future__ import annotations

import pytest
from driver import Driver

from penstock.core.kv import listing
from penstock.core.kv.page_table import PageTable
from penstock.core.pair.messages import End, Grant
from penstock.core.plan import Listed, Lookup, Moved, Paused, PeerJoined, Received, RequestId, Say, Started
from penstock.core.settings import CacheGroup, CoreConfig

PAGE, WINDOW, KEEP = 4, 8, 16
PROMPT = list(range(1000, 1041))           # ten pages, and a token


def driver(keep: int, **settings: object) -> Driver:
    groups = CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=WINDOW, keep=keep)
    return Driver(page_size=PAGE, hbm_pages=160, groups=groups, **settings)


def asked(d: Driver, rid: int, prompt: list[int]) -> int:
    """Tokens of it that were cached."""
    d.arrive(rid, prompt, max_new=1)
    d.run()
    [found] = [out for out in d.out if isinstance(out, Started) and out.rid == rid]
    return found.hbm_tokens + found.dram_tokens


def windows(d: Driver) -> list[int]:
    """Entries of pages of windows that the tree has on the device."""
    return sorted(node.depth - 1 for node in d.core.kv.tree.nodes() if node.find(d.core.kv.device[1]) is not None)


@pytest.mark.parametrize(("keep", "stay"), [
    (0, [*range(10)]), (4, [*range(10)]), (16, [2, 3, 6, 7, 8, 9]), (64, [8, 9])])
def test_windows_stay_at_multiples_of_keep_and_at_the_prompts_end(keep: int, stay: list[int]) -> None:
    d = driver(keep)
    asked(d, 1, PROMPT)
    assert windows(d) == stay
    assert d.core.stats()['cache_group_pages{tier="hbm",group="window"}'] == len(stay), "the others are free"


@pytest.mark.parametrize(("common", "found"), [(15, 0), (16, 16), (20, 16), (31, 16), (32, 32), (36, 36), (40, 40)])
@pytest.mark.parametrize("chunk", [64, 7])
def test_a_hit_is_cut_to_a_multiple_and_counted_and_where_paths_part_the_next_goes_on(
        common: int, found: int, chunk: int) -> None:
    """36: the windows of 32 and of the prompt's end are one piece."""
    d = driver(KEEP, step_tokens=chunk)
    asked(d, 1, PROMPT)
    assert asked(d, 2, [*PROMPT[:common], *range(60)]) == found
    pages = common // PAGE * PAGE
    assert d.core.counters['prefix_cache_cut_total{group="window"}'] == pages - found
    assert asked(d, 3, [*PROMPT[:common], *range(100, 160)]) == pages, "the window there stays since 2 passed it"


def test_a_paused_request_keeps_its_window_and_goes_on_from_the_host() -> None:
    d = driver(64, dram_pages=160)
    d.arrive(1, PROMPT, max_new=9)
    d.retire()
    for _ in range(5):
        d.retire()
    d.tell(Paused(RequestId(1)))
    d.run()
    assert len(d.finished()) == 1 and d.core.counters["pauses"] == 1 and d.core.counters["drops"] == 0


@pytest.mark.parametrize("group", [
    {"window": 8, "keep": 6}, {"keep": 8}, {"snapshot": True, "page_tokens": 8, "keep": 8}])
def test_only_windows_are_kept_at_multiples_of_whole_pages(group: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="each"):
        CoreConfig(page_size=4, rows=1, hbm_pages=8, groups=(CacheGroup(name="one", page_bytes=0, **group),))


@pytest.mark.parametrize("known", [False, True])
def test_storage_is_asked_on_where_several_questions_find_no_window(
        known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of the prompt, but windows at its end only. known: the device has all but windows."""
    monkeypatch.setattr(listing, "PAGES_MAX", 3)
    d, pages = driver(64, dram_pages=160, disk_pages=160, store_root=b"root"), list[int]()
    for rid in range(1 - known, 2):
        d.arrive(rid, PROMPT, max_new=1)
        while isinstance(lookup := d.out[-1], Lookup):
            first = sum(pages)
            pages += [len(lookup.keys)] * rid
            d.tell(Listed(lookup.rid, lookup.visit, bytes(1 + 2 * (i >= 8) for i in range(first, first + 3)) * rid))
        d.run()
        for space in () if rid else (*d.core.kv.disk, *d.core.kv.host, d.core.kv.device[1]):
            d.core.kv.tree.evict(space, 160)
    [found] = [out for out in d.out if isinstance(out, Started) and out.rid == 1]
    assert pages == [3, 3, 3, 1]
    assert found.hbm_tokens + found.disk_tokens == 40


@pytest.mark.parametrize(("prompt", "start"), [(37, 40), (39, 40), (40, 40)])
def test_a_decode_instance_goes_on_from_the_first_page_end_behind_a_prompt(prompt: int, start: int) -> None:
    """The window that its peer sends begins within a page, so that the page end in front is of no use."""
    d = driver(64, role="decode", hbm_base=1000)
    d.tell(PeerJoined())
    d.arrive(1, PROMPT[:prompt], max_new=9, transfer=1)
    d.tell(Received(End(RequestId(1), 1, prompt, (7,))), *[Moved(move.id, True) for move in d.moves])
    while d.plans:
        d.retire()
    tokens = [7, *range(100, 108)]
    d.arrive(2, [*PROMPT[:prompt], *tokens, *range(20)], max_new=1, transfer=2)
    grants = [out.what for out in d.out if isinstance(out, Say) and isinstance(out.what, Grant)]
    assert [grant.start for grant in grants] == [0, start]


def test_a_path_that_others_leave_at_each_page_is_sealed_in_a_look_at_each_page(
        monkeypatch: pytest.MonkeyPatch) -> None:
    d, looks, real = driver(KEEP), 0, PageTable.begin

    def begin(table: PageTable, tokens: int) -> int:
        nonlocal looks
        looks += 1
        return real(table, tokens)

    pages, prompt = 30, list(range(1000, 1121))
    asked(d, 1, prompt)
    for i in range(1, pages):
        asked(d, 1 + i, [*prompt[:i * PAGE], *range(5)])
    d.core.kv.tree.evict(d.core.kv.device[1], 160)
    monkeypatch.setattr(PageTable, "begin", begin)
    assert asked(d, 100, prompt) == 0
    assert windows(d) == [*range(pages)]
    assert looks < 5 * pages


def test_a_window_that_is_on_the_host_alone_stays_with_a_request_whose_other_pages_were_sent() -> None:
    """Its path parts from another's behind that window, so pages of the window are looked at again."""
    d = driver(64, role="decode", hbm_base=1000, dram_base=2000, dram_pages=160)
    d.tell(PeerJoined())
    for rid, prompt in (1, PROMPT[:32]), (2, [*PROMPT[:32], *range(8)]):
        d.arrive(rid, prompt, max_new=1, transfer=rid)
        d.tell(Received(End(rid, rid, len(prompt), (7,))))
        d.run()
    d.core.kv.tree.evict(d.core.kv.device[1], 160)
    d.arrive(3, PROMPT[:36], max_new=2, transfer=3)
    r = d.core.live[RequestId(3)]
    window = r.tables[1]
    assert (r.retired, window.device[7]) == (32, None) and window.host[7] is not None, "this tests nothing"
    d.core.kv.rows.acquire(d.core.kv.rows.free)           # it waits for one
    d.core.advance((Received(End(3, 3, 36, (7,))),))
    assert r.row is None and d.core.kv.is_complete(r)
