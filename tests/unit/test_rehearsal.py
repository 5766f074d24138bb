"""Which layers a start is rehearsed with, and that it then compiles nothing more."""
from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.exec.start.build import build_engine
from penstock.exec.start.rehearsal import Rehearsal, kinds

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
         "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": True}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
       "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATES = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 0,
          "layer_types": [*["linear_attention"] * 2, "full_attention"] * 2, "num_hidden_layers": 6,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
          "rms_norm_eps": 1e-6}


def test_the_first_layers_are_taken_up_to_one_of_each_kind():
    def layers(config, windows=()):
        stage = kinds(config, windows)
        assert stage.embeds and stage.heads and stage.first == 0
        return stage.end
    assert layers(LLAMA) == 1
    assert layers(LLAMA, (0, 0, 7, 0, 7)) == 3
    assert layers({**MOE, "mlp_only_layers": []}) == 1
    assert layers({**MOE, "mlp_only_layers": [0, 1]}) == 3
    assert layers({**MOE, "mlp_only_layers": [4]}) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("config, more", [(LLAMA, {}), (STATES, {"speculative_method": "ngram"})],
                         ids=["dense", "states"])
def test_a_start_compiles_nothing_behind_its_rehearsal_and_keeps_nothing_of_it(
        config, more, tmp_path: Path, monkeypatch):
    from triton.runtime.jit import JITFunction
    compiled: dict[bool, list[str]] = {False: [], True: []}      # by whether it was behind it
    behind, compiles, join = [False], JITFunction._do_compile, Rehearsal.join
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    first = not torch.cuda.memory_reserved()        # else what an engine of a test before had is given back meanwhile
    left, before = set(), {(0, 0), *(tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot())}

    def compiling(self, *args):
        compiled[behind[0]].append(self.fn.__name__)
        return compiles(self, *args)

    def joined(self):
        join(self)
        behind[0] = True
        left.update({tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()} - before)

    monkeypatch.setattr(JITFunction, "_do_compile", compiling)
    monkeypatch.setattr(Rehearsal, "join", joined)
    (tmp_path / "config.json").write_text(json.dumps(config))
    said: list[str] = []
    given = {"load_format": "dummy", "device": "cuda", "max_num_seqs": 8, "kv_cache_memory_bytes": "64M", **more}
    info = build_engine(resolve(from_options(str(tmp_path), given), probe()), said.append).info
    assert compiled[False] and not compiled[True], (compiled, said)
    assert not left, "memory of the rehearsal is kept"
    assert 0 < info["gpu_weights_bytes"] < 64 << 20 or not first
    assert 64 << 20 <= info["gpu_kv_bytes"] < 128 << 20
    assert info["gpu_graphs_bytes"] > 0 and any("GPU memory in use" in line for line in said)
