"""One table: each kind of request, from either place, on each layout of ranks, has the tokens of one rank that reads
all from its device.

An engine, or both ends of a pair, is asked for all features: prompts as misses, as hits of the prefix cache, with
preemptions, and out of storage.
"""
from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import where
from packers import FORMATS, packed_checkpoint, stacked_checkpoint
from pair_engines import End, Engines, engines
from pipeline_engine import (
    CONFIG,
    GLM,
    PROMPTS,
    SINKS,
    STATES,
    checkpoint,
    eagle_checkpoint,
    fp8_checkpoint,
    gguf_checkpoint,
    large_checkpoint,
)
from recall_engine import FOLDER, ids

from penstock.core.plan import Dropped, Paused
from penstock.engine.wire import Flush
from penstock.eval import tasks, words
from penstock.model import registry

Options = dict[str, object]
Models = Callable[[str], tuple[str, str]]
Asked = Sequence[tuple[Sequence[int], int]]         # prompts, and how many tokens are to follow
# Nine query and three KV heads are 6 + 3 and 2 + 1 on two ranks. Biases are added by one rank.
ODD = {**CONFIG, "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": True,
       "mlp_bias": True}
# Two KV heads, which ranks share where there are more.
SHARED = {**CONFIG, "num_hidden_layers": 4}
MOE = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4,
       "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
# A layer without an indexer attends to what the one before it selected.
LATENT = {**GLM, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
          "n_shared_experts": 1, "num_experts_per_tok": 2}
# States in front of the last stage and on it.
STATES_6 = {**STATES, "num_hidden_layers": 6, "layer_types": STATES["layer_types"][:2] * 3}
# Three key heads of two heads each: 2 + 1 on two ranks, by files of Qwen3.5; one key head of six, which all ranks have,
# and experts, by those of Granite; two key heads of two, and experts
# of fewer dims, in single layers.
STATES_3 = {**STATES, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "linear_num_key_heads": 3,
            "linear_num_value_heads": 6}
GRANITE = {**CONFIG, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
           "num_hidden_layers": 4, "layer_types": STATES["layer_types"], "mamba_n_heads": 6, "mamba_n_groups": 1,
           "mamba_d_state": 6, "mamba_expand": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
           "intermediate_size": 24, "shared_intermediate_size": 32, "position_embedding_type": "rope"}
NEMOTRON = {**CONFIG, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mamba_num_heads": 4,
            "hybrid_override_pattern": "M*EM-*", "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 16, "moe_latent_size": 20, "tie_word_embeddings": False}
# Three KV heads of layers with a window, one of the others; the last four layers are of one stage.
GEMMA_4 = {**CONFIG, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 6,
           "num_attention_heads": 6, "num_key_value_heads": 3, "global_head_dim": 32, "num_global_key_value_heads": 1,
           "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
           "vocab_size_per_layer_input": 97, "sliding_window": 21, "enable_moe_block": True, "num_experts": 5,
           "top_k_experts": 2, "moe_intermediate_size": 24, "hidden_activation": "gelu_pytorch_tanh",
           "layer_types": ["sliding_attention", "full_attention"] * 3}
# Queries grow three times within the prompts; experts by softmax in groups.
MISTRAL_4 = {**LATENT, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "n_group": 2,
             "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32,
                                 "rope_theta": 1e4, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}}
del MISTRAL_4["indexer_types"]
# Three KV heads select blocks of 12 tokens, but in the first layer; a page has two, as --page-size is not given.
MINIMAX_M3 = {**CONFIG, "architectures": ["MiniMaxM3ForCausalLM"], "model_type": "minimax_m3",
              "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "rotary_dim": 8,
              "intermediate_size": 24, "dense_intermediate_size": 48, "shared_intermediate_size": 24,
              "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 3, "index_head_dim": 16,
              "index_block_size": 12, "index_topk_blocks": 4, "tie_word_embeddings": False,
              "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
              "mlp_layer_types": ["dense", *["sparse"] * 3]}
# Shapes of real models, with random weights: SmolLM2-135M, and experts of a billion.
DEMO = {**CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
        "rope_theta": 100000.0}
BILLION = {**MOE, "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16,
           "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
           "num_experts_per_tok": 4, "moe_intermediate_size": 512, "max_position_embeddings": 32768, "rope_theta": 1e6}
FEW = {"temperature": 1.0, "seed": 3, "logit_bias": dict.fromkeys((5, 6, 7), 60.0)}     # words that repeat


def of_config(config: dict[str, object], **more: bool) -> Callable[[Path], tuple[str, str]]:
    return lambda folder: (checkpoint(folder, config, **more),) * 2


def recall() -> Asked:
    questions = tasks.in_words("tracking", tasks.Size(contexts=(640,), samples=2, questions=2, seed=3,
                                                      tokens_of=lambda text: len(text.split())))
    return [(ids(one.prompt), len(ids(one.answer))) for one in questions]


def runs_of_words() -> Asked:
    """Distinct words, and a few of them again: what comes next are the words that followed these. Of 128, 256 and 512
    words; some prompts end with a page."""
    dice, found = random.Random(5), []
    for number in range(32):
        context = dice.sample(range(words.KEY, words.VALUE + words.NUM_VALUES), (128, 256, 512)[number % 3])
        first, known = dice.randrange(len(context) - 20), 8 - number % 4
        found.append((context + context[first:first + known], 12))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model and its requests. make: it, and one whose tokens it has. covers: its word in tools/cells.py, by place;
    family: the `model_type` of which only this kind shows what it alone does. selects: the options with which decode
    selects; always: from the device too."""

    make: Callable[[Path], tuple[str, str]]
    covers: tuple[str, str] | None = None
    family: str = ""
    weights: str = "float32"
    options: Options = field(default_factory=dict)
    hosted: Options = field(default_factory=dict)
    selects: Options | None = None
    always: bool = False
    asked: Callable[[], Asked] = lambda: [(PROMPTS[rid], 12) for rid in (1, 3, 4)]
    rounds: tuple[str, ...] = ("computed", "cached", "paused")
    turns: int = 0                      # between preemptions of one request after the other
    drafts: Options = field(default_factory=dict)
    right: float = 0                    # of what is drafted, and what is said, at least


TOPK = {"sparse_top_k": 96}
RECALL = {"kv_cache_memory_bytes": "16M", "max_model_len": 1024}
WORDS = {"kv_cache_memory_bytes": "32M", "kv_offloading_size": "16M", "step_tokens": 256}
MTP = {"speculative_method": "mtp"}
EXPERTS_IN = "int4 asymmetric", "awq", "gptq", "modelopt nvfp4"          # alone too
KINDS = {
    "ordinary": Kind(make=of_config(ODD), covers=("ordinary", "ordinary")),
    "selecting": Kind(make=of_config(ODD), covers=("selecting", "selecting"), selects=TOPK, always=True),
    "fp8kv": Kind(make=of_config({**ODD, "head_dim": 16}), covers=("fp8kv", "fp8kv"), selects=TOPK, always=True,
                  options={"kv_cache_dtype": "fp8_e4m3"}),
    "shared": Kind(make=of_config(SHARED), covers=("ordinary", "selecting"), selects=TOPK),
    "latent": Kind(make=of_config(LATENT), covers=("latent", "latent"), selects={}, always=True),
    "experts": Kind(make=of_config(MOE), covers=("experts", "experts"), selects=TOPK),
    "windows": Kind(make=of_config(SINKS), covers=("windows", "windows"), family="gpt_oss", selects=TOPK),
    "windows-interval": Kind(make=of_config(SINKS), selects=TOPK, options={"window_interval": 48}),
    "states": Kind(make=of_config(STATES), covers=("states", "states"), selects=TOPK, options={"state_interval": 32}),
    "states-3": Kind(make=of_config(STATES_3), selects=TOPK, options={"state_interval": 32}),
    "granite": Kind(make=of_config(GRANITE), options={"state_interval": 32}),
    "nemotron": Kind(make=of_config(NEMOTRON), options={"state_interval": 32}),
    "mistral4": Kind(make=of_config(MISTRAL_4)),
    "minimax-m3": Kind(make=of_config(MINIMAX_M3), covers=("minimax-m3", "minimax-m3"), family="minimax_m3",
                       selects={}, always=True),
    "gemma4": Kind(make=of_config(GEMMA_4), covers=("windows", "windows"), family="gemma4_text", selects=TOPK),
    "blocks": Kind(make=lambda folder: (fp8_checkpoint(folder, ODD),) * 2, covers=("ordinary", "ordinary"),
                   weights="fp8"),
    "blocks-experts": Kind(make=lambda folder: (fp8_checkpoint(folder, MOE),) * 2, covers=("experts", "experts"),
                           weights="fp8"),
    "packed": Kind(make=lambda folder: (gguf_checkpoint(folder / "tiny.gguf", {
        **ODD, "intermediate_size": 96}),) * 2, covers=("ordinary", "ordinary"), weights="packed",
        options={"dtype": "gguf"}),
    "recall": Kind(make=lambda folder: (str(FOLDER),) * 2, selects={}, always=True, options=RECALL,
                   hosted={"kv_cache_memory_bytes": "3M", "kv_offloading_size": "64M",
                           "hot_buffer_tokens": 256 + 16}, asked=recall, rounds=("paused",), turns=5),
    "recall-mtp": Kind(make=lambda folder: (str(FOLDER),) * 2, selects={}, always=True, options=WORDS, hosted=WORDS,
                       asked=runs_of_words, rounds=("computed",), drafts={**MTP, "speculative_tokens": 3}, right=.9),
    "latent-mtp": Kind(make=of_config({**LATENT, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
                                      drafts=True), selects={}, always=True, drafts=MTP),
    "states-mtp": Kind(make=of_config(STATES_6, drafts=True), options={"state_interval": 64}, drafts=MTP),
    "eagle3": Kind(make=of_config(SHARED), drafts={"speculative_method": "eagle3"}),
    "demo-shape": Kind(make=lambda folder: (large_checkpoint(folder, DEMO),) * 2, selects=TOPK),
    "billion": Kind(make=lambda folder: (large_checkpoint(folder, BILLION),) * 2, selects=TOPK),
    "codes": Kind(make=lambda folder: (packed_checkpoint(folder, {
        **MOE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 4,
        "intermediate_size": 96}, "int4 asymmetric")[0],) * 2, rounds=("computed",), options={"dtype": "gguf"}),
    **{form: Kind(make=lambda folder, form=form: packed_checkpoint(folder, {**CONFIG, "num_hidden_layers": 2}, form),
                  rounds=("computed",)) for form in FORMATS},
    **{f"{form}, experts": Kind(make=lambda folder, form=form: packed_checkpoint(folder, {
        **MOE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 4}, form),
        rounds=("computed",)) for form in FORMATS},
    "packed, experts": Kind(make=lambda folder: (gguf_checkpoint(folder / "tiny.gguf", {
        **MOE, "intermediate_size": 96, "moe_intermediate_size": 32, "hidden_size": 64}),) * 2,
        rounds=("computed",), options={"dtype": "gguf"}),
    "gpt-oss mxfp4": Kind(make=lambda folder: stacked_checkpoint(folder, {**SINKS, "intermediate_size": 64}),
                          rounds=("computed",)),
}

# For each kind and place: layouts of the test, of the sweep, of the soak. A layout has counts of ranks, `n` machines,
# `l` the layers of each stage, `g` a page size, `>` between both ends of a pair. After `+`: `ngram` drafts by look-up,
# `serial` steps without overlap, `untiered` no host tier, so that preemption drops KV. Of drafts, layouts, overlap and
# tiers each value meets each other one in test or sweep; the rest is in the soak.
TABLE: dict[tuple[str, str], tuple[str, str, str]] = {
    ("ordinary", "resident"): (
        "pp2.n2 one>one tp2+ngram pp3+ngram",
        "one pp2 tp2 pp2>tp2 pp3 tp3 tp3.n2 pp3+serial one+serial+untiered pp2+untiered",
        "tp2.pp2 tp3.pp2 pp2+serial one+serial one+untiered pp2+serial+untiered pp3+untiered pp3+serial+untiered "
        "one>one+ngram"),
    ("selecting", "resident"): (
        "", "one pp2 tp2 pp2.n2 one>one pp2>tp2 pp3+untiered one+serial+untiered",
        "one+untiered pp2+untiered pp2+serial+untiered pp3+serial+untiered"),
    ("selecting", "hosted"): (
        "pp2 tp2.pp2 tp2.pp2.n2 one>one+ngram",
        "one tp2 pp2.n2 one>one pp2>tp2 pp3 tp2.pp2+ngram one+serial", "tp3 tp3.pp2 pp2+serial pp3+serial pp3+ngram"),
    ("fp8kv", "resident"): ("one>one", "one pp2 tp2 pp2.n2 pp2>tp2", "tp3.pp2"),
    ("fp8kv", "hosted"): ("tp2", "one pp2 one>one pp2>tp2 one>one+ngram", "tp2.pp2.n2"),
    ("shared", "resident"): ("", "tp3 tp4 tp2.g64>pp2 g64>tp3 tp3.g64>tp2.pp2 pp2.n2.g64>tp3.n2 pp2.l31.g64>pp2",
                             "pp2.l31.g64>one g64>pp2"),
    ("shared", "hosted"): ("tp2.g64>tp2", "tp3 tp4.n2 pp2.g64>tp2 tp2.n2.g64>pp2.n2 pp2.l31.g64>one g64>pp2",
                           "pp2.l31.g64>pp2"),
    ("latent", "resident"): ("", "one pp2 tp2 pp2.n2 one>one pp2>tp2 tp3.pp2 pp3.n3 pp2.l13", "tp3 tp2.pp2"),
    ("latent", "hosted"): (
        "one tp2", "pp2 pp2.n2 one>one pp2>tp2 tp2.n2 tp2+ngram tp2.ep0 tp3.ep3.pp2 tp4.ep2 pp2.l31",
        "tp2.pp2 tp3 tp3.pp2"),
    ("experts", "resident"): ("", "one pp2 tp2 pp2.n2 one>one pp2>tp2 pp3 tp3 tp3+ngram tp4.ep2", "tp2.pp2 tp3.pp2"),
    ("experts", "hosted"): ("one", "pp2 tp2 pp2.n2 one>one pp2>tp2 tp3.pp2 tp2.pp2.n4 tp2.ep0 tp3.ep3.pp2 tp4.ep2",
                            "tp2.pp2 tp3"),
    ("windows", "resident"): ("pp2", "one>one pp3 tp3 tp4.ep2", ""),
    ("windows", "hosted"): ("one>one", "one pp2", ""),
    ("windows-interval", "resident"): ("one", "one>one tp2.pp2 one+ngram one+untiered", ""),
    ("windows-interval", "hosted"): ("", "one pp2", ""),
    ("states", "resident"): ("pp2+ngram tp2", "one pp2 one>one pp3>pp3+ngram pp2>tp2 tp2.n2", "pp2>pp2 tp2.pp2+ngram"),
    ("states", "hosted"): ("one", "pp2 one>one tp2 pp2>tp2", "pp2>pp2 tp2.n2"),
    ("states-3", "resident"): ("tp3>tp2", "tp2.pp2+ngram tp2>one", "tp3.pp2"),
    ("states-3", "hosted"): ("", "tp2.pp2", ""),
    ("granite", "resident"): ("tp2", "tp3>tp2", "tp3.pp2+ngram"),
    ("nemotron", "resident"): ("", "tp2 tp2>pp2", "tp2.pp2+ngram"),
    ("mistral4", "resident"): ("", "tp2.pp2 tp2>pp2", ""),
    ("minimax-m3", "resident"): ("", "one tp2.pp2 tp2>pp2", ""),
    ("minimax-m3", "hosted"): ("tp2", "one pp2.l13 tp2.pp2 one>one tp2>pp2", "pp2 tp3 tp4"),
    ("gemma4", "resident"): ("pp2.l24 tp2", "one>one tp3 pp3.l114 tp2>pp2.l24 tp2.pp2.l24", ""),
    ("gemma4", "hosted"): ("one", "tp2 pp2.l24 one>one tp2>pp2.l24", ""),
    ("blocks", "resident"): ("", "tp2", ""),
    ("blocks-experts", "resident"): ("", "tp2 tp3", ""),
    ("packed", "resident"): ("pp2.l31", "tp2 tp3.pp2", ""),
    ("recall", "resident"): ("", "pp3.l211 one>one one>pp2", ""),
    ("recall", "hosted"): ("pp2", "tp2 one>one one>pp2", "tp2.pp2.n2"),
    ("recall-mtp", "resident"): ("one pp2", "tp2.pp2 one>one pp2>tp2 one>pp2", ""),
    ("recall-mtp", "hosted"): ("one", "pp2 tp2", ""),
    ("latent-mtp", "resident"): ("pp2", "tp2.pp2 pp2.n2", ""),
    ("latent-mtp", "hosted"): ("tp2", "pp3", ""),
    ("states-mtp", "resident"): ("pp3", "pp2.n2 tp2.pp2", ""),
    ("eagle3", "resident"): ("pp3 tp2", "tp3.pp2 tp2.n2", ""),
    ("demo-shape", "resident"): ("", "tp2", ""),
    ("demo-shape", "hosted"): ("", "tp2", ""),
    ("billion", "resident"): ("", "tp2", ""),
    ("billion", "hosted"): ("", "tp2", ""),
    ("codes", "resident"): ("tp2", "pp2 tp2.ep2", ""),
    **{(form, "resident"): ("", "tp2 pp2", "") for form in FORMATS},        # one: tests/e2e/test_quantised.py
    **{(f"{form}, experts", "resident"): ("one" if form in EXPERTS_IN else "", "tp2.ep2", "") for form in FORMATS},
    ("packed, experts", "resident"): ("", "tp2.ep2", ""),
    ("gpt-oss mxfp4", "resident"): ("one", "tp2 tp2.ep2 pp2", ""),
}
# Long on a CPU, and run by `make gpu`.
ALSO_GPU = {f"{kind}-{place}-{layout}" for kind, place, layouts in (
    ("ordinary", "resident", "one pp2 tp2 pp2>tp2"), ("selecting", "resident", "one pp2 tp2 pp2.n2 one>one pp2>tp2"),
    ("selecting", "hosted", "one tp2 pp2.n2 one>one pp2>tp2 tp2.pp2+ngram"),
    ("fp8kv", "resident hosted", "one tp2 one>one"),
    ("experts", "resident", "one pp2 tp2 pp2.n2 one>one pp2>tp2 tp3+ngram"),
    ("experts", "hosted", "pp2 tp2 pp2.n2 one>one pp2>tp2 tp2.ep0 tp3.ep3.pp2 tp4.ep2"),
    ("latent", "resident", "one pp2 tp2 pp2.n2 one>one pp2>tp2"),
    ("latent", "hosted", "pp2 pp2.n2 one>one pp2>tp2 tp2.n2 tp2+ngram tp2.ep0 tp3.ep3.pp2 tp4.ep2"),
    ("minimax-m3", "resident", "one tp2>pp2"), ("minimax-m3", "hosted", "one pp2.l13 one>one tp2>pp2"),
    ("states", "resident", "one pp2 one>one"), ("states", "hosted", "pp2 one>one"),
    ("recall", "hosted", "tp2 one>one one>pp2"),
    *((form, "resident", "tp2 pp2") for form in ("int4", "gptq", "nvfp4", "fp8", "int8")),
    *((form, "resident", "one tp2.ep2") for form in ("awq, experts", "modelopt nvfp4, experts")),
    ("blocks", "resident", "tp2"), ("blocks-experts", "resident", "tp2 tp3"), ("demo-shape", "resident hosted", "tp2"),
    ("billion", "resident hosted", "tp2")) for place in place.split() for layout in layouts.split()}
STORED = {"one", "pp2", "tp2", "pp2.n2", "one>one", "pp2>tp2", "pp2>pp2", "tp3>tp2"}        # that ask storage too
ATTEMPTS = 20


def read(layout: str) -> tuple[list[Options], set[str]]:
    """Options of each end, and what is behind `+`."""
    names, *more = layout.split("+")
    flags = {"pp": "pp", "tp": "tp", "ep": "ep", "n": "nnodes", "g": "page_size", "l": "pp_layers"}
    ends = []
    for end in names.split(">"):
        parts = [re.fullmatch(r"([a-z]+)(\d+)", part).groups() for part in end.split(".") if part != "one"]
        ends.append({flags[name]: list(number) if name == "l" else int(number) for name, number in parts})
    return ends, set(more)


def across(ends: Sequence[Options]) -> str:
    """The layout's word in tools/cells.py."""
    if len(ends) == 2:
        return "both" if any(end.keys() & {"pp", "tp"} for end in ends) else "pair"
    return next((word for flag, word in (("nnodes", "nodes"), ("tp", "tp"), ("pp", "pp")) if flag in ends[0]), "one")


def stored(kind: str, layout: str) -> bool:
    return layout in STORED and kind in (
        "ordinary", "selecting", "fp8kv", "latent", "experts", "states", "states-3", "granite", "nemotron", "gemma4",
        "windows-interval", "minimax-m3")


def row(kind: str, place: str, layout: str, marks: Sequence[pytest.MarkDecorator]) -> Any:
    """The case, with its marks."""
    one, (ends, more), name = KINDS[kind], read(layout), f"{kind}-{place}-{layout}"
    marks = [*marks, *([pytest.mark.also_gpu] if name in ALSO_GPU else ())]
    if one.covers and not more:
        rounds = {"computed": "plain", "cached": "cache", "paused": "tier paused"}
        features = " ".join([*(rounds[one] for one in one.rounds), *(["stored"] if stored(kind, layout) else ())])
        marks.append(pytest.mark.covers(kind=one.covers[place == "hosted"], place=place, weights=one.weights,
                                        feature=features if "plain" in features else f"plain {features}",
                                        across=across(ends), **({"family": one.family} if one.family else {})))
    return pytest.param(kind, place, layout, marks=marks, id=name)


ROWS = [row(kind, place, layout, marks) for (kind, place), columns in TABLE.items()
        for layouts, marks in zip(columns, ((), [pytest.mark.sweep], [pytest.mark.soak]), strict=True)
        for layout in layouts.split()]
assert ALSO_GPU <= {row.id for row in ROWS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(kind: str) -> tuple[str, str]:
        (folder / kind).mkdir()
        return KINDS[kind].make(folder / kind)
    return made


def pools(kind: Kind, place: str, selects: bool) -> Options:
    options = {"kv_cache_memory_bytes": "1M", "kv_offloading_size": "8M", **kind.options}
    if selects:
        options |= {**(kind.selects or {}), "host_decode": "always" if place == "hosted" else "off"}
    return options | (kind.hosted if place == "hosted" else {})


@pytest.fixture(scope="module")
def wanted(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """What one rank says from its device."""
    @functools.cache
    def says(name: str, selects: bool, few: bool = False) -> list[list[int]]:
        kind = KINDS[name]
        options = {"kv_cache_memory_bytes": "4M", **kind.options, "kv_offloading_size": "0",
                   **({**(kind.selects or {}), "host_decode": "off"} if selects else {})}
        if name in ("demo-shape", "billion"):
            options["kv_cache_memory_bytes"] = "96M"
        if models(name)[0] != models(name)[1]:
            options.pop("dtype", None)
        with engines(models(name)[1], tmp_path_factory.getbasetemp(), ({},), **options) as one:
            return one.say([(prompt, 60) for prompt, _ in kind.asked()], **FEW) if few else one.say(kind.asked())
    return says


def drafted(end: End) -> tuple[int, int]:
    """Tokens proposed, and said."""
    assert not any(n for key, n in end.built.executor.stats().items() if key.startswith("spec_dropped_tokens_total"))
    found = [chunk.drafts for chunk in end.ended.values() if chunk.drafts]
    return sum(one for one, _ in found), sum(right for _, right in found)


def from_storage(tried: Engines, asked: Asked, want: list[list[int]], **more: object) -> None:
    """Out of storage that may be slow, which costs hits."""
    for _ in range(ATTEMPTS):
        tried.settle()
        for end in tried.ends:
            end.loop.handle(Flush())
        assert tried.say(asked, **more) == want, "stored"
        assert tried.cached("hbm", "dram") == 0
        if tried.cached("disk"):
            return
    raise AssertionError("nothing was found in storage")


@pytest.mark.parametrize(("kind", "place", "layout"), ROWS)
def test_tokens_are_those_of_one_rank(models: Models, wanted: Callable[..., list[list[int]]], tmp_path: Path,
                                      kind: str, place: str, layout: str) -> None:
    one, (ends, more), asked = KINDS[kind], read(layout), KINDS[kind].asked()
    if where.DEVICE == "cpu" and kind in ("demo-shape", "billion"):
        pytest.skip("a CPU takes minutes")
    if where.DEVICE == "cuda" and ("dtype" in one.options or "g64" in layout):
        pytest.skip("--dtype gguf, which is bfloat16 on a GPU, and stages of the ends of a pair, on a CPU only so far")
    if where.DEVICE == "cuda" and "tp2.n2" in layout and torch.cuda.device_count() < 2:
        pytest.skip("two nodes with one rank each have a GPU each: NCCL takes no two ranks of one")
    selects = place == "hosted" or one.always
    options, decode = {**pools(one, place, selects), **one.drafts}, {}
    if kind == "eagle3":
        options["speculative_model"] = eagle_checkpoint(tmp_path / "eagle", SHARED)
    if kind in ("demo-shape", "billion"):
        options |= {"kv_cache_memory_bytes": "96M", "kv_offloading_size": "256M"}
    if "untiered" in more:
        options["kv_offloading_size"] = "0"
    if "serial" in more:
        options["overlap"] = False
    if "ngram" in more:
        decode = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    if stored(kind, layout):
        options |= {"kv_storage": f"file://{tmp_path}/store", "kv_storage_policy": "wait_complete"}
    want = wanted(kind, selects)
    with engines(models(kind)[0], tmp_path, ends, decode, **options) as tried:
        if kind == "recall-mtp" and layout == "one":        # as on a GPU: no further than hot buffers hold
            [rank] = tried.asked.built.executor._ranks
            rank._drafts.host._at_once = rank._drafts.at_once
        for what in one.rounds:
            kinds = {"paused": Dropped if "untiered" in more else Paused}
            assert tried.say(asked, kinds.get(what), one.turns) == want, what
            if what == "cached":
                assert tried.cached("hbm", "dram") > 0
        check(tried, kind, place, ends, more)
        if "ngram" in more:
            assert tried.say([(prompt, 60) for prompt, _ in asked], **FEW) == wanted(kind, selects, True), "few words"
        if one.drafts or "ngram" in more:
            proposed, said = drafted(tried.asked)
            print(f"{said} of {proposed} drafted tokens")
            assert proposed > (100 if one.right else 20) and said >= one.right * proposed
            assert said or "ngram" not in more
        if stored(kind, layout):
            from_storage(tried, asked, want)
            if layout != "one":                             # and of one rank, by each other
                with engines(models(kind)[0], tmp_path / "one", ({},), **options) as single:
                    from_storage(single, asked, want)
                    assert single.say(asked, namespace=1) == want
                    single.settle()
                from_storage(tried, asked, want, namespace=1)
        if len(ends) == 2:
            assert tried.asked.loop.stats()["pair_delivered_total"] >= len(asked)
        tried.settle()


def check(tried: Engines, kind: str, place: str, ends: Sequence[Options], more: set[str]) -> None:
    """What was to happen has happened."""
    one, stats, info = KINDS[kind], tried.asked.core.stats(), tried.asked.built.info
    if "paused" in one.rounds and not (kind == "recall" and len(ends) == 2):       # answers of two tokens
        assert stats["drops" if "untiered" in more else "pauses"] >= 3
    reads = [chunk.kv_reads for chunk in tried.asked.ended.values() if chunk.kv_reads]
    assert any(read["hot_misses"] for read in reads) == (place == "hosted")
    if kind == "recall" and place == "hosted":
        told = tried.asked.built.executor.stats().items()
        windows = [n for key, n in told if key.startswith("hot_window_pages_total")]
        assert len(ends) == 2 or (windows and min(windows) > 0), "prompts of every layer came through windows"
    if one.weights == "fp8":        # a CPU dequantises them
        ranks = int(ends[0]["tp"])
        kept = sum(int(info[f"rank_{i}_weight_bytes"]) for i in range(ranks))
        floats = 4 * sum(math.prod(shape) for name, shape in registry.tensor_shapes(MOE if "experts" in kind else ODD)
                         if name.endswith("_proj.weight"))
        assert (kept < floats) == (where.DEVICE == "cuda")


def test_one_rank_answers_what_was_asked_of_the_recall_model(wanted: Callable[..., list[list[int]]]) -> None:
    questions = tasks.in_words("tracking", tasks.Size(contexts=(640,), samples=2, questions=2, seed=3,
                                                      tokens_of=lambda text: len(text.split())))
    assert wanted("recall", True) == [list(ids(one.answer)) for one in questions]


BF16_BOUND = 0.1            # of a forced token's logprob: ranks round apart, .03 was seen


@pytest.mark.sweep
def test_logprobs_of_forced_tokens_in_bfloat16_are_within_a_bound(models: Models, tmp_path: Path) -> None:
    """Tokens do not stay equal there; what each says of the same tokens, those of a prompt, is near."""
    def scores(layout: str) -> list[float]:
        with engines(models("ordinary")[0], tmp_path, read(layout)[0], dtype="bfloat16",
                     kv_cache_memory_bytes="4M") as tried:
            tried.say([(PROMPTS[4], 1)], prompt_logprobs=0)
            return [own for own, _, _ in tried.asked.prompts[tried.newest[0]].rows()]

    whole = scores("one")
    for layout in ("tp2", "tp3.pp2"):
        apart = [abs(a - b) for a, b in zip(whole, scores(layout), strict=True)]
        assert 0 < max(apart) < BF16_BOUND, (layout, max(apart), sum(apart) / len(apart))
