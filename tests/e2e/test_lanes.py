"""Lanes of stages (`--tp`) as processes say what one rank says, in float32 and greedy, token for token."""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import where
from pair_server import serving
from pipeline_engine import (
    CONFIG,
    GLM,
    PROMPTS,
    Pipeline,
    checkpoint,
    fp8_checkpoint,
    gguf_checkpoint,
    large_checkpoint,
)

from penstock.exec.start.build import Info
from penstock.model import registry

# Nine query and three KV heads are 6 + 3 and 2 + 1 on two lanes. Biases are added by one lane.
DENSE = {**CONFIG, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3,
         "attention_bias": True, "mlp_bias": True}
MOE = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3,
       "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
       "tie_word_embeddings": False}
LATENT = {**GLM, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
          "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2,
          "indexer_types": ["full", "shared", "full"]}
MODELS = {"dense": DENSE, "experts": MOE, "latent": LATENT}
SELECTS = {"dense": {"sparse_top_k": 96}, "experts": {"sparse_top_k": 96}, "latent": {}}
NEW = 12
SWEEP, SOAK = pytest.mark.sweep, pytest.mark.soak


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lanes")
    return {name: checkpoint(folder / name, config) for name, config in MODELS.items()}


def numbered(base: int) -> dict[int, tuple[int, ...]]:
    return {base + rid: PROMPTS[rid] for rid in (1, 3, 4)}


def rounds(engine: Pipeline) -> Iterator[list[list[int]]]:
    """The prompts as misses, then as hits of the prefix cache, then with requests paused again and again."""
    yield list(engine.play(NEW, prompts=numbered(0)).values())
    yield list(engine.play(NEW, prompts=numbered(10)).values())
    busy = numbered(20)
    yield list(engine.play(NEW, prompts=busy, pauses=lambda turn: (
        [list(busy)[turn // 3 % 3]] if turn % 3 == 2 and turn < 40 else ())).values())


@pytest.fixture(scope="module")
def wanted(models: dict[str, str]) -> Callable[[str, str], list[list[int]]]:
    """What one rank says, from its device."""
    @functools.cache
    def says(family: str, place: str) -> list[list[int]]:
        # A model that selects by itself would else have a host tier, of half of what memory there is.
        more = {**SELECTS[family], "host_decode": "off"} if place == "hosted" or family == "latent" else {}
        with Pipeline(models[family], kv_cache_memory_bytes="4M", **more) as one:
            return next(rounds(one))
    return says


def check(model: str, want: list[list[int]], place: str, family: str, **layout: object) -> Info:
    """What the engine says of itself."""
    more: dict[str, object] = {**SELECTS[family], "host_decode": "always"} if place == "hosted" else {}
    with Pipeline(model, **{"kv_cache_memory_bytes": "1M", "kv_offloading_size": "8M", **more, **layout}) as engine:
        for got, what in zip(rounds(engine), ("miss", "hit", "paused"), strict=True):
            assert got == want, what
        told, stats = engine.core.stats(), engine.ex.stats()
        assert told["pauses"] >= 3 and told["prefix_hbm_hits"] + told["prefix_dram_hits"] > 0
        if place == "hosted":
            assert sum(reads.get("hot_misses", 0) for reads in engine.reads.values()) > 0
        assert stats["executor_queued_plans"] == 0
        if "speculative_method" in layout:
            drafted, accepted = engine.drafts()
            assert accepted < drafted
        return engine.built.info


QUICK = [("dense", "hosted", 2, 2), ("latent", "hosted", 2, 1)]
# With those, each value of two columns meets each of the other; what is left meets in test_cells.py as well.
SWEPT = [("dense", "resident", 3, 1), ("experts", "resident", 2, 1), ("experts", "hosted", 3, 2),
         ("latent", "resident", 3, 2)]
REST = sorted({*itertools.product(MODELS, ("resident", "hosted"), (2, 3), (1, 2))} - {*QUICK, *SWEPT})


@pytest.mark.parametrize("family, place, tp, pp", [        # one lane: test_pipeline.py
    *QUICK, *(pytest.param(*cell, marks=SWEEP) for cell in SWEPT),
    *(pytest.param(*cell, marks=SOAK) for cell in REST)])
def test_lanes_and_stages_say_what_one_rank_says(models, wanted, family, place, tp, pp):
    check(models[family], wanted(family, place), place, family, tp=tp, pp=pp)


@pytest.mark.parametrize("family, place, layout", [
    ("dense", "hosted", {"nnodes": 2, "tp": 2, "pp": 2}),               # whole stages on a machine
    *(pytest.param(*cell, marks=pytest.mark.sweep) for cell in (
        ("latent", "hosted", {"nnodes": 2, "tp": 2}),                   # lanes of one stage on two
        ("dense", "resident", {"nnodes": 2, "tp": 3}),
        ("experts", "hosted", {"nnodes": 4, "tp": 2, "pp": 2}),
        ("latent", "resident", {"nnodes": 3, "pp": 3})))], ids=str)
def test_several_machines_say_what_one_rank_says(models, wanted, family, place, layout):
    check(models[family], wanted(family, place), place, family, **layout)


@pytest.mark.parametrize("family, place, tp, pp", [
    ("dense", "resident", 2, 1), *(pytest.param(*cell, marks=pytest.mark.sweep) for cell in (
        ("dense", "hosted", 2, 2), ("experts", "resident", 3, 1), ("latent", "hosted", 2, 1)))])
def test_lanes_with_drafts_say_what_one_rank_says(models, wanted, family, place, tp, pp):
    check(models[family], wanted(family, place), place, family, tp=tp, pp=pp,
          speculative_method="ngram", prompt_lookup_min=1)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 0}, {"tp": 3, "ep": 3, "pp": 2},
                                    {"tp": 4, "ep": 2}], ids=str)
@pytest.mark.parametrize("family", ["experts", "latent"])
def test_experts_in_ranges_over_the_lanes(models, wanted, family, layout):
    check(models[family], wanted(family, "hosted"), "hosted", family, **layout)


@pytest.mark.sweep
@pytest.mark.parametrize("place, layout", [
    ("resident", {"tp": 3}), ("resident", {"tp": 4}), ("hosted", {"tp": 3}),
    ("hosted", {"tp": 4, "nnodes": 2})], ids=str)
def test_lanes_that_share_a_kv_head(tmp_path, place, layout):
    """Two KV heads on three lanes: the first is on two of them, of which one writes it where all read it, and
    both choose of it by all queries to it."""
    model = checkpoint(tmp_path / "shared", {**CONFIG, "num_hidden_layers": 2})
    more = {**SELECTS["dense"], "host_decode": "off"} if place == "hosted" else {}
    with Pipeline(model, kv_cache_memory_bytes="4M", **more) as one:
        want = next(rounds(one))
    check(model, want, place, "dense", **layout)


@pytest.mark.sweep
@pytest.mark.parametrize("family, tp", [("dense", 2), ("experts", 2), ("experts", 3)])
def test_weights_in_blocks_of_fp8(tmp_path, family, tp):
    """Blocks of 16. A CPU dequantises them as it reads, and so does a GPU for the three lanes, of which one
    begins inside of 16 columns; else lanes of GPUs keep them."""
    model = fp8_checkpoint(tmp_path / "fp8", MODELS[family])
    with Pipeline(model, kv_cache_memory_bytes="4M") as one:
        want = next(rounds(one))
    info = check(model, want, "resident", family, tp=tp)
    kept = sum(int(info[f"rank_{i}_weight_bytes"]) for i in range(tp))
    floats = 4 * sum(math.prod(shape) for name, shape in registry.tensor_shapes(MODELS[family])
                     if name.endswith("_proj.weight"))
    assert (kept < floats) == (where.DEVICE == "cuda" and tp == 2)


# Shapes of real models, with random weights: SmolLM2-135M, `penstock serve demo`, and experts of a billion.
DEMO = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "rope_theta": 100000.0, "hidden_act": "silu"}
BILLION = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
           "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
           "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
           "moe_intermediate_size": 512, "norm_topk_prob": True, "max_position_embeddings": 32768,
           "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu"}


@pytest.mark.skipif("config.getoption('--device') == 'cpu'", reason="a CPU takes minutes")
@pytest.mark.sweep
@pytest.mark.parametrize("place", ["resident", "hosted"])
@pytest.mark.parametrize("shape", ["dense", "experts"])
def test_two_lanes_of_a_real_shape(tmp_path, shape, place):
    """With one GPU both share it: by gloo, kernel by kernel. With two by NCCL, captured."""
    config = {"dense": DEMO, "experts": BILLION}[shape]
    model, pools = large_checkpoint(tmp_path / shape, config), {"kv_cache_memory_bytes": "96M",
                                                                "kv_offloading_size": "256M"}
    more = {**SELECTS[shape], "host_decode": "off"} if place == "hosted" else {}
    with Pipeline(model, kv_cache_memory_bytes="96M", kv_offloading_size="0", **more) as one:
        want = next(rounds(one))
    assert len({token for said in want for token in said}) > NEW, "a word again and again"
    check(model, want, place, shape, **pools, tp=2)


@pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="codes are multiplied on a CPU")
@pytest.mark.sweep
@pytest.mark.parametrize("tp, pp", [(2, 1), (3, 2)])
def test_codes_of_a_gguf_file(tmp_path, tp, pp):
    config = {**CONFIG, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96,
              "num_hidden_layers": 2}
    file = gguf_checkpoint(tmp_path / "tiny.gguf", config)
    with Pipeline(file, dtype="gguf", kv_cache_memory_bytes="4M") as one:
        want = next(rounds(one))
    check(file, want, "resident", "dense", dtype="gguf", tp=tp, pp=pp)


BF16_BOUND = 0.1            # of a forced token's logprob: lanes round apart, .03 was seen


@pytest.mark.sweep
def test_logprobs_of_forced_tokens_in_bfloat16_are_within_a_bound(models, tmp_path):
    """Tokens do not stay equal there; what each says of the same tokens, those of a prompt, is near."""
    def scores(*flags: str) -> list[float]:
        with serving(models["dense"], tmp_path, "--dtype", "bfloat16", "--kv-cache-memory-bytes", "4M",
                     *flags) as server:
            told = server.ask(list(PROMPTS[4]), prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
            return [next(iter(one.values()))["logprob"] for one in told if one]

    whole = scores()
    for flags in (("--tp", "2"), ("--tp", "3", "--pp", "2")):
        apart = [abs(a - b) for a, b in zip(whole, scores(*flags), strict=True)]
        assert 0 < max(apart) < BF16_BOUND, (flags, max(apart), sum(apart) / len(apart))
