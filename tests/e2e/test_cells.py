"""Each kind of request, from either place, on each layout of ranks, with every tier at once: what one rank
says that reads it all from its device.

A test is five cells of docs/reference/compatibility.md: alone, with a host tier, out of the cache, paused, stored.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pair_engines import End, PairOfEnds
from pipeline_engine import CONFIG, GLM, PROMPTS, STATES, checkpoint

from penstock.engine.wire import Flush

MOE = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5,
       "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
       "tie_word_embeddings": False}
MODELS = {"ordinary": CONFIG, "selecting": CONFIG, "latent": GLM, "experts": MOE, "states": STATES}
SELECTS: dict[str, dict[str, object]] = {
    "ordinary": {}, "selecting": {"sparse_top_k": 96}, "latent": {}, "experts": {"sparse_top_k": 96},
    "states": {"sparse_top_k": 96}}
LAYOUTS: dict[str, tuple[dict[str, object], ...]] = {      # of one engine, or of both ends
    "one": ({},), "pp": ({"pp": 2},), "tp": ({"tp": 2},), "nodes": ({"pp": 2, "nnodes": 2},),
    "pair": ({}, {}), "both": ({"pp": 2}, {"tp": 2})}
ASKED = tuple(PROMPTS[rid] for rid in (1, 3, 4))
NEW, ATTEMPTS = 12, 20
# Proven there at once; the others of `across` by the sweep.
QUICK = {("ordinary", "resident", "pair"), ("ordinary", "resident", "nodes"), ("latent", "hosted", "one"),
         ("experts", "hosted", "one")}
CELLS = [(kind, place, across) for kind in MODELS for place in ("resident", "hosted") for across in LAYOUTS
         if (kind, place) != ("ordinary", "hosted") and (kind != "states" or across in ("one", "pp", "pair"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cells")
    return {kind: checkpoint(folder / kind, config) for kind, config in MODELS.items()}


class Engines:
    """One engine, or both ends of a pair: who is asked, and everybody's turn."""

    def __init__(self, asked: End, turn: Callable[[], None], ends: tuple[End, ...]) -> None:
        self.asked, self.turn, self.ends = asked, turn, ends

    def say(self, pauses: bool = False) -> list[list[int]]:
        """What is said to the prompts, all at once. pauses: each pauses after every third token."""
        paused = {self.asked.submit(prompt, NEW): 0 for prompt in ASKED}
        while self.asked.open:
            for rid in paused.keys() & self.asked.open if pauses else ():
                if (said := len(self.asked.got[rid])) >= paused[rid] + 3:
                    self.asked.pause(rid)
                    paused[rid] = said
            self.turn()
        return [self.asked.got[rid] for rid in paused]

    def cached(self, tier: str) -> int:
        """Tokens of the last prompts that were found there."""
        newest = sorted(self.asked.cached)[-len(ASKED):]
        return sum(self.asked.cached[rid].cached_by_tier[tier] for rid in newest)


@contextmanager
def engines(model: str, folder: Path, layout: tuple[dict[str, object], ...],
            options: dict[str, object]) -> Iterator[Engines]:
    if len(layout) == 2:
        with PairOfEnds(model, folder, prefill=layout[0], decode=layout[1], **options) as pair:
            yield Engines(pair.decode, pair.turn, (pair.prefill, pair.decode))
        return
    end = End(model, **options, **layout[0])
    try:
        yield Engines(end, end.turn, (end,))
    finally:
        end.close()


@pytest.fixture(scope="module")
def wanted(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    @functools.cache
    def says(kind: str, selects: bool) -> list[list[int]]:
        more = {**SELECTS[kind], "host_decode": "off"} if selects else {}
        with engines(models[kind], tmp_path_factory.getbasetemp(), ({},), {"kv_cache_memory_bytes": "4M",
                                                                           **more}) as one:
            return one.say()
    return says


@pytest.mark.parametrize(("kind", "place", "across"), [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.sweep) for cell in CELLS])
def test_with_every_tier_it_says_what_one_rank_says_from_its_device(
        models: dict[str, str], wanted: Callable[..., object], tmp_path: Path, kind: str, place: str,
        across: str) -> None:
    selects = place == "hosted" or kind in ("selecting", "latent")
    want = wanted(kind, selects)
    options = {"kv_cache_memory_bytes": "1M", "kv_offloading_size": "8M", "kv_storage": f"file://{tmp_path}/store",
               "kv_storage_policy": "wait_complete", **(SELECTS[kind] if selects else {}),
               **({"host_decode": "always" if place == "hosted" else "off"} if selects else {}),
               **({"state_interval": 32} if kind == "states" else {})}
    with engines(models[kind], tmp_path, LAYOUTS[across], options) as tried:
        assert tried.say() == want, "computed"
        assert tried.say() == want, "cached"
        assert tried.cached("hbm") + tried.cached("dram") > 0
        assert tried.say(pauses=True) == want, "paused"
        stats = tried.asked.core.stats()
        assert stats["pauses"] >= 3
        reads = [chunk.kv_reads for chunk in tried.asked.ended.values()]
        assert any(r["hot_misses"] for r in reads if r) == (place == "hosted")
        for _ in range(ATTEMPTS):                       # storage that is slow, as here, costs hits
            while any(end.loop.moves_in_flight or end.core.live for end in tried.ends):
                tried.turn()                            # until all is written
            for end in tried.ends:
                end.loop.handle(Flush())
            assert tried.say() == want, "stored"
            assert tried.cached("hbm") == tried.cached("dram") == 0
            if tried.cached("disk"):
                break
        else:
            raise AssertionError("nothing was found in storage")
