"""Models with experts through stages, host memory and pairs say what one rank says."""
from __future__ import annotations

from pathlib import Path

import pytest
from pair_engines import PairOfEnds, whole
from pipeline_engine import CONFIG, PROMPTS, Pipeline, checkpoint

MOE = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5,
       "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
       "tie_word_embeddings": False}
# With sinks, and a window that most of each prompt is behind.
OSS = {**CONFIG, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 5,
       "num_experts_per_tok": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5, "sliding_window": 21,
       "tie_word_embeddings": False, "swiglu_limit": 2.0, "rope_parameters": {"rope_type": "default"}}
MODELS = {"qwen3_moe": MOE, "gpt_oss": OSS}
SPARSE: dict[str, object] = {"sparse_top_k": 96}
PLACES: dict[str, dict[str, object]] = {
    "resident": {"kv_cache_memory_bytes": "4M"},
    "hosted": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", **SPARSE, "host_decode": "always"}}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


def every_few(turn: int) -> list[int]:
    return [1 + turn // 5 % 5] if turn % 5 == 0 and turn < 150 else []


@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_two_stages_with_a_host_tier_and_pauses(model: str, pp: int) -> None:
    with Pipeline(model, kv_cache_memory_bytes="4M") as one:
        want = one.play()
    with Pipeline(model, kv_cache_memory_bytes="1M", kv_offloading_size="8M", pp=pp) as more:
        assert more.play(pauses=every_few) == want
        assert more.core.stats()["pauses"] >= 3


def test_a_selection_out_of_host_memory_on_one_rank_and_on_two_stages(model: str) -> None:
    with Pipeline(model, kv_cache_memory_bytes="4M", host_decode="off", **SPARSE) as one:
        want = one.play()
    for pp in (1, 2):
        with Pipeline(model, pp=pp, **{**PLACES["hosted"], "kv_cache_memory_bytes": f"{2 // pp}M"}) as hosted:
            assert hosted.play(pauses=every_few) == want, pp
            assert hosted.core.stats()["pauses"] >= 3
            assert sum(reads["hot_misses"] for reads in hosted.reads.values()) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"tp": 3}, {"tp": 4, "ep": 2}], ids=str)
def test_lanes_of_some_heads_and_some_columns_or_experts(model: str, layout: dict[str, int]) -> None:
    with Pipeline(model, kv_cache_memory_bytes="4M") as one:
        want = one.play()
    with Pipeline(model, kv_cache_memory_bytes="4M", **layout) as lanes:
        assert lanes.play() == want


@pytest.mark.parametrize("place", PLACES)
def test_a_pair(model: str, tmp_path: Path, place: str) -> None:
    """Prompts, and one of them again."""
    prompts = [PROMPTS[rid] for rid in (3, 5, 3)]
    one = whole(model, prompts, **PLACES[place])
    with PairOfEnds(model, tmp_path, **PLACES[place]) as pair:
        for prompt in prompts:
            pair.decode.submit(prompt)
            pair.finish()
        assert list(pair.decode.got.values()) == list(one.got.values())
        assert pair.decode.loop.stats()["pair_delivered_total"] == len(prompts)
        pair.settle()
