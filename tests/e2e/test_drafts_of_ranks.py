"""A layer drafts on the last of several stages, and in lanes: what is said is what one rank says without."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pipeline_engine import CONFIG, GLM, PROMPTS, Pipeline, checkpoint
from safetensors.torch import save_file

from penstock.kernels.fused import layer
from penstock.model.eagle3 import Eagle3, read_eagle
from penstock.model.registry import read_spec_of

LATENT = {**GLM, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "n_routed_experts": 4,
          "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2}
EAGLE = {**CONFIG, "num_hidden_layers": 1, "draft_vocab_size": 40}
# States in front of the last stage and on it, of which one is kept every 64 tokens.
STATES = {**{key: value for key, value in CONFIG.items() if "num_k" not in key}, "model_type": "qwen3_next",
          "architectures": ["Qwen3NextForCausalLM"], "num_key_value_heads": 2, "linear_num_key_heads": 1,
          "layer_types": ["linear_attention", "full_attention"] * 3, "linear_num_value_heads": 2,
          "linear_key_head_dim": 6, "linear_value_head_dim": 4, "num_experts": 0,
          "partial_rotary_factor": 0.5}
METHODS = {"latent": "mtp", "dense": "eagle3", "state": "mtp"}
PLACES = {"resident": {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "8M", "host_decode": "off"},
          "hosted": {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "8M", "host_decode": "always"}}


def eagle(folder: Path) -> str:
    """Of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EAGLE))
    made = Eagle3(read_eagle(EAGLE, read_spec_of(CONFIG), "here"), torch.float32,
                  lambda w_OI, b_O: lambda x_TI: x_TI, layer.OP.use("reference"))
    random = torch.Generator().manual_seed(4)
    tensors = {name: torch.ones(shape) if name.endswith("norm.weight") else
               torch.randn(shape, generator=random) * .3 for name, shape in made.shapes()}
    save_file({**tensors, "d2t": torch.arange(40)}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, object]]]:
    """Folder, and what a start is told of what drafts."""
    folder = tmp_path_factory.mktemp("drafts")
    return {"latent": (checkpoint(folder / "latent", LATENT, drafts=True), {"speculative_method": "mtp"}),
            "state": (checkpoint(folder / "state", STATES, drafts=True), {
                "speculative_method": "mtp", "state_interval": 64}),
            "dense": (checkpoint(folder / "dense", CONFIG), {
                "speculative_method": "eagle3", "speculative_model": eagle(folder / "eagle")})}


def counts(engine: Pipeline, name: str) -> Callable[[str], float]:
    """Of its ranks, which tell them by and by."""
    until = time.monotonic() + 20
    while not engine.ex.stats().get(f'spec_draft_tokens_total{{drafter="{name}"}}'):
        assert time.monotonic() < until, "nothing was drafted"
        time.sleep(0.01)
    return lambda kind: engine.ex.stats().get(f'spec_{kind}_tokens_total{{drafter="{name}"}}', 0)


CELLS = [("latent", "resident", {"pp": 2}), ("dense", "resident", {"pp": 3}), ("latent", "hosted", {"tp": 2}),
         ("dense", "resident", {"tp": 2}), ("state", "resident", {"pp": 3})]
SWEPT = [("latent", "hosted", {"pp": 3}), ("latent", "resident", {"pp": 2, "tp": 2}),
         ("dense", "resident", {"pp": 2, "tp": 3}), ("latent", "resident", {"nnodes": 2, "pp": 2}),
         ("dense", "resident", {"nnodes": 2, "tp": 2}), ("state", "resident", {"nnodes": 2, "pp": 2})]


@pytest.mark.parametrize("family, place, layout", [
    *CELLS, *(pytest.param(*cell, marks=pytest.mark.sweep) for cell in SWEPT)], ids=str)
def test_speculation_by_a_layer_of_several_ranks(models, family, place, layout):
    """As misses, as hits, with pauses."""
    model, drafts = models[family]
    more = PLACES[place] if family == "latent" else {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "8M"}
    prompts = {rid: PROMPTS[rid] for rid in (1, 3, 4)}
    again = {10 + rid: prompt for rid, prompt in prompts.items()}
    with Pipeline(model, **{**more, "host_decode": "off"} if family == "latent" else more) as one:
        want = [*one.play(prompts=prompts).values()]
    with Pipeline(model, **more, **layout, **drafts) as several:
        assert [*several.play(prompts=prompts).values()] == want
        assert [*several.play(prompts=again, pauses=lambda turn: (
            [list(again)[turn // 3 % 3]] if turn % 3 == 2 and turn < 40 else ())).values()] == want
        told = counts(several, METHODS[family])
        assert several.core.stats()["pauses"] > 0 == told("dropped") and told("draft") > 20
