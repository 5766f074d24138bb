"""A prefill and a decode engine say what one engine says, and outlive each other."""
from __future__ import annotations

from pathlib import Path

import pytest
import where
from pair_engines import End, PairOfEnds, whole
from pipeline_engine import checkpoint

from penstock.engine.pd import remote as peer
from penstock.engine.wire import Flush

PROMPT = tuple((i * i * 7 + 3 * i) % 97 for i in range(150))
PLACES = {
    "resident": {"kv_cache_memory_bytes": "4M"},
    "hosted": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "sparse_top_k": 96, "host_decode": "always"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("pair"))


Line = tuple[list[int], list[float]]


def lines(end: End, rid: int) -> Line:
    """Tokens, and logprobs of each and of its best, in one list."""
    found = end.logprobs[rid]
    return end.got[rid], [x for p in found for x in (p.logprob, *(value for _, value in p.top))]


def said(one: End, pair: PairOfEnds, prompt: tuple[int, ...]) -> tuple[Line, Line]:
    """`lines` of one engine and of the pair."""
    rids = [end.submit(prompt, 12, logprobs=3) for end in (one, pair.decode)]
    while one.open:
        one.turn()
    pair.finish()
    return lines(one, rids[0]), lines(pair.decode, rids[1])


def approximately(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-5 if where.DEVICE == "cpu" else 1e-3)


def test_logprobs_of_a_prompt_come_from_the_engine_that_computes_it(model: str, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss; a hit, of which it is computed again; from a token on; in messages of two tokens."""
    monkeypatch.setattr(peer, "PROMPTED_BYTES", 2 * 8 * 4)
    one = End(model, kv_cache_memory_bytes="4M")
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M") as pair:
        for start in (0, 0, 100, len(PROMPT)):
            rids = [end.submit(PROMPT, 4, prompt_logprobs=3, prompt_logprobs_start=start)
                    for end in (one, pair.decode)]
            while one.open:
                one.turn()
            pair.finish()
            want, got = list(one.prompts[rids[0]].rows()), list(pair.decode.prompts[rids[1]].rows())
            assert len(got) == len(PROMPT) - max(1, start) and one.got[rids[0]] == pair.decode.got[rids[1]]
            for (own, rank, best), (other, place, others) in zip(want, got, strict=True):
                assert [own, *(p for _, p in best)] == approximately([other, *(p for _, p in others)])
                assert rank == place
        assert all(chunk.peer_tokens for chunk in pair.decode.cached.values())


@pytest.mark.covers(kind={"resident": "ordinary", "hosted": "selecting"}, feature="plain cache", across="pair")
@pytest.mark.parametrize("pages", [(16, 16), (64, 16), (16, 64)])
@pytest.mark.parametrize("place", PLACES)
def test_a_pair_says_what_one_engine_says(model: str, tmp_path: Path, place: str,
                                          pages: tuple[int, int]) -> None:
    """A miss, the same again, one that begins with it, one that ends with a page."""
    options = PLACES[place]
    prompts = [PROMPT, PROMPT, PROMPT + (5, 6, 7) * 9, PROMPT[:128]]
    one = whole(model, [], page_size=pages[1], **options)
    with PairOfEnds(model, tmp_path, prefill={"page_size": pages[0]}, decode={"page_size": pages[1]},
                    **options) as pair:
        for prompt in prompts:
            (tokens, want), (got, has) = said(one, pair, prompt)
            assert got == tokens
            # Prompts are summed up in the pages of the engine that computes them.
            assert has == (want if pages[0] == pages[1] and where.DEVICE == "cpu" else approximately(want))
        sent = [chunk.peer_tokens for chunk in pair.decode.cached.values()]
        assert all(sent) and sent[0] == len(PROMPT) and sent[1] < 16 + pages[1], sent
        cached = [sum(chunk.cached_by_tier.values()) for chunk in pair.decode.cached.values()]
        assert [a + b for a, b in zip(sent, cached, strict=True)] == [len(p) for p in prompts]
        pair.decode.loop.handle(Flush())        # what the other engine still has counts as cached
        rid = pair.decode.submit(PROMPT, 12)
        pair.finish()
        told = pair.decode.cached[rid]
        there = {"hbm": 0, "dram": 0, "hbm" if place == "resident" else "dram": 149 // pages[0] * pages[0]}
        assert told.cached_by_tier == there
        assert told.peer_tokens == 150 - told.cached_tokens
        stats = pair.decode.loop.stats()
        assert stats["pair_delivered_total"] == len(prompts) + 1 and stats["pair_received_bytes_total"] > 0
        pair.settle()


def test_a_hot_buffer_of_a_delivered_request_that_is_not_bound_is_seen(model: str, tmp_path: Path) -> None:
    """One row: the second request goes on with the pages and the map of the first one's hot buffer. The engine stops,
    or says something else."""
    options = {**PLACES["hosted"], "max_num_seqs": 1}
    prompts = [PROMPT, tuple((3 * i + i // 7) % 97 for i in range(150))]
    one, bound = whole(model, [], **options), []

    def pair_says_the_same(binds: int) -> None:
        bound.clear()
        (folder := tmp_path / str(binds)).mkdir()
        with PairOfEnds(model, folder, **options) as pair:
            [rank] = pair.decode.built.executor._ranks
            hot = rank._attending.rows.hot
            real = hot.bind

            def bind(row: int, pages: list[int], keeps: list[int]) -> None:
                bound.append(row)
                if len(bound) <= binds:
                    real(row, pages, keeps)
            hot.bind = bind
            for prompt in prompts:
                (tokens, want), (got, has) = said(one, pair, prompt)
                assert got == tokens and has == approximately(want)
            assert pair.decode.loop.stats()["pair_delivered_total"] == len(prompts)

    pair_says_the_same(2)
    assert bound == [0, 0]
    with pytest.raises(AssertionError):
        pair_says_the_same(1)
    assert bound == [0, 0]


def test_what_the_prefill_instance_finds_in_storage_counts_as_cached(model: str, tmp_path: Path) -> None:
    """Which alone has storage. A client of the decode instance is told, as of any other tier."""
    stored = {"kv_offloading_size": "4M", "kv_storage": f"file://{tmp_path}/store",
              "kv_storage_policy": "wait_complete"}
    with PairOfEnds(model, tmp_path, prefill=stored, kv_cache_memory_bytes="4M") as pair:
        want = pair.decode.submit(PROMPT)
        pair.finish()
        while pair.prefill.loop.moves_in_flight or pair.prefill.core.live:
            pair.turn()                                     # until all is written
        pair.decode.loop.handle(Flush())
        pair.prefill.loop.handle(Flush())
        rid = pair.decode.submit(PROMPT)
        pair.finish()
        told = pair.decode.cached[rid]
        assert pair.decode.got[rid] == pair.decode.got[want]
        assert told.cached_by_tier == {"hbm": 0, "dram": 0, "disk": 144}
        assert (told.cached_tokens, told.peer_tokens) == (144, 6)
        assert pair.prefill.loop.stats()["prefix_disk_hits"] == 144


SHARED = {
    "off": {"kv_cache_memory_bytes": "4M", "host_decode": "off"},
    "always": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "host_decode": "always"},
    "auto": {"kv_cache_memory_bytes": "800K", "kv_offloading_size": "8M", "host_decode": "auto"},
}


@pytest.mark.covers(kind="selecting", place={"off": "resident", "always": "hosted", "auto": "resident hosted"},
                    feature="plain tier", across="pair")
@pytest.mark.parametrize("place", SHARED)
def test_requests_that_select_and_that_read_all_share_a_pair(model: str, tmp_path: Path, place: str) -> None:
    """At once, with one beginning: budgets of their own, dense ones, one that is too short to select. Host
    pages are for those that select, with `auto` for some: the device holds two of them."""
    work = [(PROMPT, None), (PROMPT, 96), (PROMPT, 0), (PROMPT + (5, 6, 7) * 9, 112), (PROMPT[:128], 0),
            (PROMPT[:128], None), (PROMPT[:60], None)]
    sampling, options = {"temperature": 1.0, "seed": 5, "logprobs": 2}, {"sparse_top_k": 128, **SHARED[place]}
    one = End(model, **options)
    for prompt, budget in work:
        rid = one.submit(prompt, 40, sparse_top_k=budget, **sampling)
        while one.open:
            one.turn()
    with PairOfEnds(model, tmp_path, **options) as pair:
        rids = [pair.decode.submit(prompt, 40, sparse_top_k=budget, **sampling) for prompt, budget in work]
        pair.finish()
        for rid in rids:
            (tokens, want), (got, has) = lines(one, rid), lines(pair.decode, rid)
            assert got == tokens
            assert has == approximately(want)
        assert len({tuple(pair.decode.got[rid]) for rid in rids[:3]}) == 3, "a budget changes what is said"
        reads = [pair.decode.ended[rid].kv_reads for rid in rids]
        assert [r is not None for r in reads] == [True, True, False, True, False, True, False]
        hosted = [r["hot_hits"] > 0 for r in reads if r is not None]
        assert all(hosted) if place == "always" else any(hosted) == (place == "auto")
        assert place != "auto" or not all(hosted), "nothing was on the device"
        stats = pair.decode.loop.stats()
        assert stats["pair_delivered_total"] == len(work) and stats["pair_lost_total"] == 0
        pair.settle()


def test_each_position_is_sent_once_and_to_the_host_without_a_device_page(model: str,
                                                                          tmp_path: Path) -> None:
    with PairOfEnds(model, tmp_path, **PLACES["hosted"]) as pair:
        rid = pair.decode.submit(PROMPT, 12)
        pair.until(lambda: any(r.tables[0].host for r in pair.decode.core.live.values()))
        (r,) = pair.decode.core.live.values()
        assert not any(r.tables[0].device) and not r.tables[0].hot, "device pages for what goes to the host"
        assert any(r.tables[1].device), "bounds have their own place"
        pair.finish()
        pair.settle()
        sent = pair.prefill.loop.stats()
        kv, bounds = pair.decode.built.caches.layouts
        whole_units = len(PROMPT) // bounds.unit
        want = len(PROMPT) * kv.unit_bytes + whole_units * bounds.unit_bytes
        assert sent["pair_sent_bytes_total"] == want == pair.decode.loop.stats()["pair_received_bytes_total"]
        assert 0 < sent["pair_tail_bytes_total"] < want, "nothing left before the last chunk"
        # Only what decoding has completed is copied down: full pages came into both tiers.
        down = pair.decode.loop.stats()['moved_bytes_total{src="hbm",dst="dram",group="bounds"}']
        assert down == bounds.page_bytes * ((len(PROMPT) + 11) // 16 - len(PROMPT) // 16) > 0
        pair.decode.submit(PROMPT, 12)
        pair.finish()
        pair.settle()
        again = pair.prefill.loop.stats()["pair_sent_bytes_total"] - want
        assert 0 < again <= kv.page_bytes + bounds.page_bytes, "what was cached was sent"
        assert pair.decode.got[rid] == pair.decode.got[2]


@pytest.mark.parametrize("when", ["asked", "granted", "half"])
def test_without_the_prefill_engine_the_prompt_is_computed_here(model: str, tmp_path: Path,
                                                                when: str) -> None:
    one = whole(model, [PROMPT], kv_cache_memory_bytes="4M")
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M", step_tokens=16) as pair:
        pair.decode.submit(PROMPT)
        if when != "asked":
            pair.until(lambda: pair.decode.core.live and pair.decode.peer._waits[1].generation)
        if when == "half":
            pair.until(lambda: pair.prefill.loop.stats()["pair_sent_bytes_total"])
        pair.prefill.close()
        while pair.decode.open:
            pair.decode.turn()
        assert pair.decode.got == one.got
        assert not pair.decode.peer.epoch and pair.decode.peer.missing
        stats = pair.decode.core.stats()
        assert stats["hbm_pages_fenced"] == 0


def test_by_policy_a_request_without_a_prefill_engine_is_unavailable(model: str, tmp_path: Path) -> None:
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M", decode={"disaggregation_fallback": "refuse"}) as pair:
        pair.decode.submit(PROMPT)
        pair.until(lambda: pair.decode.peer._waits[1].generation)
        pair.prefill.close()
        pair.until(lambda: not pair.decode.peer.epoch)
        pair.decode.submit(PROMPT)
        while pair.decode.open:
            pair.decode.turn()
        assert {c.finish for c in pair.decode.ended.values()} == {"unavailable"}
        assert all("prefill engine" in c.reason for c in pair.decode.ended.values())


def test_a_connection_that_is_cut_is_made_again(model: str, tmp_path: Path) -> None:
    one = whole(model, [PROMPT], kv_cache_memory_bytes="4M")
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M") as pair:
        for n in range(4):
            rid = pair.decode.submit(PROMPT, namespace=n)
            epoch = pair.decode.peer.epoch
            if n % 2:
                pair.decode.peer.session.cut()
            pair.finish()
            assert pair.decode.got[rid] == one.got[1]
            now = epoch + n % 2
            pair.until(lambda now=now: pair.decode.peer.epoch == pair.prefill.peer.epoch == now)
        pair.settle()
        assert pair.decode.loop.stats()["pair_delivered_total"] >= 2


def test_aborts_at_any_point_leave_nothing_behind(model: str, tmp_path: Path) -> None:
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M", step_tokens=16) as pair:
        for turns in range(40):
            rid = pair.decode.submit(PROMPT, 4, namespace=turns)
            for _ in range(turns):
                pair.turn()
            if rid in pair.decode.open:
                pair.decode.abort(rid)
        pair.finish()
        pair.settle()
        for end in (pair.prefill, pair.decode):
            end.loop.handle(Flush())
        pair.until(lambda: not any(n for end in (pair.prefill,
                                                 pair.decode) for n in end.free().values()))
        assert not pair.decode.peer._waits and not pair.prefill.peer._rids


def test_engines_of_other_weights_do_not_pair_and_say_why(model: str, tmp_path: Path) -> None:
    with PairOfEnds(model, tmp_path, kv_cache_memory_bytes="4M") as pair:
        pair.prefill.close()
        pair.until(lambda: not pair.decode.peer.epoch)
        other = End(model, "prefill", load_format="dummy", kv_cache_memory_bytes="4M",
                    pair_key_file=str(tmp_path / "key"),
                    disaggregation_listen=f"unix:{tmp_path / 'socket'}")
        pair.until(lambda: "weights: " in pair.decode.peer.missing)
        assert "dummy 1 there" in pair.decode.peer.missing and "here" in pair.decode.peer.missing
        other.close()
