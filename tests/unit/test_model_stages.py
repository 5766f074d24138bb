"""A model cut into stages: computes what the whole does, bit for bit, and reads its own weights only."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_attend import Dense
from safetensors.torch import save_file

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.base import Boundary, GlobalLayer, Stage
from penstock.model.weights import checkpoint
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

LAYERS, HIDDEN, VOCAB = 4, 16, 40
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
       "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
       "mlp_only_layers": [1]}
# Layers 1 and 3 attend to what the layer before them chose, which may be in another stage.
SHARED = {**LLAMA, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
          "first_k_dense_replace": LAYERS, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
          "qk_rope_head_dim": 4, "v_head_dim": 6, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 3,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
          "indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 1}
EMBED = "model.embed_tokens.weight"


def cut(*ends: int) -> list[Stage]:
    """Stages that end at these layers; the last at LAYERS."""
    starts = (0, *ends)
    return [Stage(GlobalLayer(a), GlobalLayer(b), embeds=a == 0, heads=b == LAYERS)
            for a, b in zip(starts, (*ends, LAYERS), strict=True)]


def build(config: dict[str, Any], stage: Stage | None = None) -> Any:
    model = registry.build(config, dtype=torch.float32, stage=stage,
                           linear=lambda w_OI, b_O: lambda x_TI: F.linear(x_TI, w_OI, b_O))
    for name, tensor in registry.dummy_tensors(config, 7, model.wants):
        model.load(name, tensor)
    model.finish()
    return model


@pytest.mark.parametrize("config", [LLAMA, TIED, MOE, SHARED], ids=["llama", "tied", "moe", "shared choice"])
@pytest.mark.parametrize("ends", [(1,), (2,), (1, 3), (1, 2, 3)])
@torch.inference_mode()
def test_stages_compute_what_the_whole_model_does(config, ends):
    whole, stages = build(config), [build(config, stage) for stage in cut(*ends)]
    assert sum(len(stage.groups[0].layers) for stage in stages) == LAYERS
    attends, one = [Dense(whole.reads) for _ in stages], Dense(whole.reads)
    ids = torch.arange(12) * 3 % VOCAB
    for first, end in ((0, 7), (7, 11), (11, 12)):              # chunks, then a decode
        positions = torch.arange(first, end)
        x = stages[0].embed(ids[first:end])
        for stage, attend in zip(stages, attends, strict=True):
            x = Boundary(*(t.clone() if isinstance(t, torch.Tensor) else t for t in x))  # as sent
            x = stage.layers(x, positions, attend)
        got = stages[-1].logits(stages[-1].norm(x))
        want = whole.logits(whole.forward(ids[first:end], positions, one))
        assert got.equal(want) and want.isfinite().all()
    assert [sorted(a.stored) for a in attends] == [list(s.groups[0].layers) for s in stages]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is read of a checkpoint's tensors."""
    sizes: list[int] = []
    real = checkpoint._read_into
    monkeypatch.setattr(checkpoint, "_read_into", lambda file, begin, target, path: (
        sizes.append(len(target)), real(file, begin, target, path)))
    return sizes


def read_by_stages(folder: Path, config: dict[str, Any], reads: list[int]) -> tuple[list[int], int]:
    """(bytes that each of three stages reads, bytes of the whole checkpoint); each gets what it lacks."""
    opened = open_checkpoint(locate(str(folder)))
    per_stage = []
    for stage in cut(1, 3):
        model = registry.build(config, dtype=torch.float32, stage=stage,
                               linear=lambda w, b: lambda x: F.linear(x, w, b))
        del reads[:]
        for name, tensor in opened.tensors(model.wants):
            model.load(name, tensor)
        model.finish()
        per_stage.append(sum(reads))
        assert per_stage[-1] == sum(4 * np.prod(shape, dtype=int) for _, shape
                                    in registry.tensor_shapes(config, stage))
    del reads[:]
    list(opened.tensors())
    return per_stage, sum(reads)


@pytest.mark.parametrize("config", [LLAMA, TIED, MOE, SHARED], ids=["llama", "tied", "moe", "shared choice"])
def test_a_stage_reads_its_own_tensors_of_safetensors_only(tmp_path, config, reads):
    tensors = dict(registry.dummy_tensors(config, 1))
    tensors = {name: tensors[name] for name in sorted(tensors)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    per_stage, whole = read_by_stages(tmp_path, config, reads)
    twice = 4 * VOCAB * HIDDEN if config["tie_word_embeddings"] else 0
    assert sum(per_stage) == whole + twice and all(per_stage)


def test_a_stage_reads_its_own_tensors_of_gguf_only(tmp_path, reads):
    path = tmp_path / "m.gguf"
    made = gguf.GGUFWriter(path, "qwen2")
    for key, value in (("block_count", LAYERS), ("context_length", 64), ("embedding_length", HIDDEN),
                       ("feed_forward_length", 24), ("attention.head_count", 4),
                       ("attention.head_count_kv", 2)):
        made.add_uint32(f"qwen2.{key}", value)
    made.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    made.add_float32("qwen2.rope.freq_base", 10000.0)
    ours = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm"}
    top = {EMBED: "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    for name, tensor in registry.dummy_tensors(config, 1):
        if name in top:
            stored = top[name]
        else:
            _, _, layer, part = name.split(".", 3)
            module, _, kind = part.rpartition(".")
            stored = f"blk.{layer}.{ours[module]}.{kind}"
        made.add_tensor(stored, tensor.numpy())
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    per_stage, whole = read_by_stages(path, config, reads)
    assert sum(per_stage) == whole and all(per_stage)


def test_a_stage_draws_its_own_dummy_tensors_only_and_the_same():
    whole = dict(registry.dummy_tensors(LLAMA, 3))
    parts = [dict(registry.dummy_tensors(LLAMA, 3, build(LLAMA, stage).wants)) for stage in cut(1, 3)]
    assert sum(map(len, parts)) == len(whole)
    assert all(tensor.equal(whole[name]) for part in parts for name, tensor in part.items())
    assert len({float(t.view(-1)[0]) for name, t in whole.items() if "norm" not in name}) == 2 + 7 * LAYERS


def test_either_name_of_a_tied_tensor_is_enough_for_a_stage():
    for stage in cut(2):
        model = registry.build(TIED, dtype=torch.float32, stage=stage,
                               linear=lambda w, b: lambda x: F.linear(x, w, b))
        assert model.wants(EMBED) and model.wants("lm_head.weight")
        for name, tensor in registry.dummy_tensors(TIED, 3, model.wants):
            model.load("lm_head.weight" if name == EMBED else name, tensor)
        model.finish()
    middle = registry.build(TIED, dtype=torch.float32, stage=cut(1, 3)[1], linear=lambda w, b: F.silu)
    assert not middle.wants(EMBED) and not middle.wants("lm_head.weight")


def test_a_bias_of_zeros_that_the_model_does_not_have_is_skipped():
    """AutoGPTQ writes one for every matrix. A bias of a norm says that the norm is another."""
    model = registry.build(LLAMA, dtype=torch.float32, linear=lambda w, b: F.silu)
    shapes = dict(registry.tensor_shapes(LLAMA))
    rows = shapes["model.layers.2.mlp.up_proj.weight"][0]
    model.load("model.layers.2.mlp.up_proj.bias", torch.zeros(rows))
    for name, bias in (("mlp.up_proj", torch.ones(rows)), ("mlp.up_proj", torch.zeros(rows + 1)),
                       ("input_layernorm", torch.zeros(shapes["model.norm.weight"]))):
        with pytest.raises(ConfigError, match="does not have"):
            model.load(f"model.layers.2.{name}.bias", bias)


@pytest.mark.parametrize("name, ignored", [
    ("model.layers.4.mlp.up_proj.weight", True), ("visual.proj.weight", True), ("mtp.norm.weight", True),
    ("model.layers.1.mlp.odd.weight", False), ("model.layers.2.self_attn.q_proj.bias", False),
    ("model.norm.bias", False), ("lm_head.bias", False)])
def test_a_name_that_no_stage_knows_is_ignored_outside_of_the_model_and_refused_within(name, ignored):
    model = registry.build(LLAMA, dtype=torch.float32, stage=cut(1, 3)[1], linear=lambda w, b: F.silu)
    assert model.ignores(name) == ignored
    assert model.wants(name) != ignored or name.startswith(("model.norm", "lm_head"))
    with pytest.raises(ConfigError, match="does not have"):
        model.load(name, torch.ones(1))
