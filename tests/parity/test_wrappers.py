"""The text of multimodal repositories against transformers' own wrapper classes: folders that they save.

    T tokens of the prompt   V vocabulary
"""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from dense_attend import Dense
from packers import FORMATS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.config.base.errors import ConfigError
from penstock.exec.load.weights import weight_bytes
from penstock.model import registry
from penstock.model.base import Model
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import ModelFiles, locate
from penstock.model.weights.wrappers import RENAMED, WRAPPERS, unwrap

VOCAB, CHUNKS = 131, (1, 7, 5, 8)
TEXT = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
        "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
STATES = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 12, "linear_value_head_dim": 20, "rope_parameters": {
              "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
              "mrope_section": [1, 1, 0], "mrope_interleaved": True}}
GRID = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
       "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1,
       "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
       "head_dim": 8}
QWEN_SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48,
             "patch_size": 4}
SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4}
# Class, config class, text fields, tower fields, other fields.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", STATES, QWEN_SEES, {}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
                    {**STATES, **EXPERTS, "shared_expert_intermediate_size": 28}, QWEN_SEES, {}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", {"rope_parameters": GRID},
                 {**QWEN_SEES, "deepstack_visual_indexes": [0]}, {}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig",
                     {**EXPERTS, "rope_parameters": GRID},
                     {**QWEN_SEES, "deepstack_visual_indexes": [0]}, {}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
                   {"head_dim": 8, "rope_parameters": {**GRID, "type": "mrope", "mrope_section": [2, 1, 1]}},
                   QWEN_SEES, {}),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Config",
               {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
               {**SEES, "vision_use_head": False}, {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4Config",
               {"num_hidden_layers": 4, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 24, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                "moe_intermediate_size": 20, "pad_token_id": 0},
               {**SEES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
                "pooling_kernel_size": 1},
               {"audio_config": None}),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig", {
        "num_hidden_layers": 3, "rotary_dim": 8, "intermediate_size": 24, "dense_intermediate_size": 40,
        "shared_intermediate_size": 28, "num_local_experts": 6, "num_experts_per_tok": 2, "index_n_heads": 2,
        "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
        {**SEES, "spatial_merge_size": 2, "temporal_patch_size": 2}, {"projector_hidden_size": 16}),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "Kimi_K25Config", MLA, SEES, {}),
    "mistral3": ("Mistral3ForConditionalGeneration", "Mistral3Config",
                 {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", **SEES}, {}),
    "mistral3-ministral3": ("Mistral3ForConditionalGeneration", "Mistral3Config",
                            {"model_type": "ministral3", "rope_parameters": {
                                "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 6,
                                "rope_theta": 1e6, "llama_4_scaling_beta": 0.4, "mscale": 1.0,
                                "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}},
                            {"model_type": "pixtral", **SEES}, {"tie_word_embeddings": False}),
    "mistral3-mistral4": ("Mistral3ForConditionalGeneration", "Mistral3Config",
                          {**MLA, "model_type": "mistral4", "head_dim": 20, "rope_parameters": {
                              "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 6,
                              "rope_theta": 1e6, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "beta_fast": 32.0, "beta_slow": 1.0}},
                          {"model_type": "pixtral", **SEES}, {"tie_word_embeddings": False}),
    "internvl": ("InternVLForConditionalGeneration", "InternVLConfig", {"model_type": "qwen3"},
                 {**SEES, "image_size": [16, 16], "patch_size": [4, 4]}, {}),
}
Saves = Callable[..., tuple[Path, Any]]


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    """Save a tiny wrapper with random weights; returns its folder and the model."""
    def save(case: str, shard: str = "1GB", **more: Any) -> tuple[Path, Any]:
        name, config, text, tower, other = CASES[case]
        made = getattr(hf, config)(text_config={**TEXT, **text, **more}, vision_config=tower, **other)
        made._attn_implementation = "eager"
        torch.manual_seed(3)
        model = getattr(hf, name)(made).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(0.0, 0.2)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        return tmp_path, model
    return save


def opened(files: ModelFiles) -> Model:
    model = registry.build(files.config, dtype=torch.float32, linear=lambda w, b: lambda x: F.linear(x, w, b))
    for name, tensor in open_checkpoint(files).tensors(model.wants):
        model.load(name, tensor)
    model.finish()
    return model


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_the_text_of_a_saved_wrapper_equals_transformers(case: str, saves: Saves) -> None:
    """Whole and in chunks; its towers are neither read nor counted, and the log says so once."""
    folder, theirs = saves(case)
    files = locate(str(folder))
    model, ids_T = opened(files), torch.arange(sum(CHUNKS)) * 37 % 101 + 3
    expected_TV = theirs(input_ids=ids_T[None]).logits[0]
    assert expected_TV.std() > 0.01
    for chunks in ((len(ids_T),), CHUNKS):
        attend, first = Dense(model.reads, model.groups), 0
        for size in chunks:
            part = slice(first, first + size)
            got_TV = model.logits(model.forward(ids_T[part], torch.arange(first, first + size), attend))
            torch.testing.assert_close(got_TV, expected_TV[part], rtol=0, atol=1e-4)
            first += size
    with safe_open(folder / "model.safetensors", "pt") as stored:
        names = list(stored.keys())
    tower = [name for name in names if any(part in name for part in ("vision", "visual", "projector", "patch_merge"))]
    checkpoint = open_checkpoint(files)
    [line] = checkpoint.unread(model.ignores)
    assert line.startswith(f"text of {files.name}; vision tower not served: {len(tower)} tensors of ")
    read = [name for name, _ in checkpoint.tensors(model.wants)]
    assert tower and len(read) == len(names) - len(tower)
    assert weight_bytes(checkpoint, torch.float32) <= sum(
        tensor.nbytes for name, tensor in theirs.state_dict().items() if "vis" not in name)


@torch.inference_mode()
def test_a_wrapper_in_shards_without_a_head_of_its_own_is_tied(saves: Saves) -> None:
    folder, theirs = saves("gemma3", "50KB")
    files = locate(str(folder))
    assert files.index is not None and files.config["tie_word_embeddings"] is True
    ids_T, model = torch.arange(9) + 3, opened(files)
    got_TV = model.logits(model.forward(ids_T, torch.arange(9), Dense(model.reads, model.groups)))
    torch.testing.assert_close(got_TV, theirs(input_ids=ids_T[None]).logits[0], rtol=0, atol=1e-4)


def test_a_gemma_3_that_leaves_fields_out_has_those_of_transformers_class(tmp_path: Path) -> None:
    """Published text configs have neither heads nor a vocabulary."""
    given = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
             "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
             "sliding_window": 1024}
    config, wrapper = unwrap({"model_type": "gemma3", "text_config": given, "eos_token_id": [1, 106],
                              "architectures": ["Gemma3ForConditionalGeneration"]}, "config.json", False)
    spec, theirs = registry.read_spec_of(config), hf.Gemma3TextConfig()
    assert wrapper is WRAPPERS["gemma3"] and config["eos_token_id"] == [1, 106] and spec.tied
    assert (spec.vocab_size, spec.hidden, spec.num_layers) == (theirs.vocab_size, 2560, 34)
    assert spec.rope.max_position == theirs.max_position_embeddings == 131072
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    absent = {name for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
              if wrapper.defaults[name] != getattr(theirs, name)}
    assert not absent


@torch.inference_mode()
def test_experts_of_qwen3_vl_are_read_as_makers_publish_them_too(saves: Saves) -> None:
    """In two tensors a layer, inputs by outputs."""
    files = locate(str(saves("qwen3_vl_moe")[0]))
    model, turned = opened(files), registry.build(
        files.config, dtype=torch.float32, linear=lambda w, b: lambda x: F.linear(x, w, b))
    for name, tensor in open_checkpoint(files).tensors(turned.wants):
        stacked = name.endswith(("gate_up_proj", "down_proj"))
        turned.load(name, tensor.mT.contiguous() if stacked else tensor)
    turned.finish()
    ids_T, at_T = torch.arange(9) + 3, torch.arange(9)
    got_TV, want_TV = (made.logits(made.forward(ids_T, at_T, Dense(made.reads, made.groups)))
                       for made in (turned, model))
    assert got_TV.equal(want_TV)


OWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "use_qk_norm": True}),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {}),
}


@pytest.mark.parametrize("case", OWN)
@torch.inference_mode()
def test_a_saved_folder_has_the_names_that_are_read(case: str, tmp_path: Path) -> None:
    """Makers publish other names than transformers' modules have."""
    name, config, more = OWN[case]
    theirs = getattr(hf, name)(getattr(hf, config)(**{**TEXT, **more})).eval()
    theirs.save_pretrained(tmp_path)
    files, ids_T = locate(str(tmp_path)), torch.arange(9) + 3
    model = opened(files)
    assert open_checkpoint(files).unread(model.ignores) == []
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert any("block_sparse_moe" in name for name in stored.keys()) == (case == "minimax_m2")
    got_TV = model.logits(model.forward(ids_T, torch.arange(9), Dense(model.reads, model.groups)))
    torch.testing.assert_close(got_TV, theirs(ids_T[None]).logits[0], rtol=0, atol=1e-4)


def test_scales_of_published_names_are_found_under_ours(tmp_path: Path) -> None:
    """Sizes are counted by our names, in fp8 for what is in fp8."""
    config = {"model_type": "minimax_m2", "hidden_size": 256, "intermediate_size": 128, "vocab_size": 64,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
              "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64,
              "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {}
    for name, tensor in registry.dummy_tensors(config, 1):
        for theirs, ours in RENAMED["minimax_m2"]:
            name = name.replace(ours, theirs)
        stored[name] = tensor
        if "experts." in name:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.ones(*(-(-n // 128) for n in tensor.shape))
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(locate(str(tmp_path)), ["e4m3"])
    assert checkpoint.format("model.layers.0.mlp.experts.1.down_proj.weight")
    assert weight_bytes(checkpoint, torch.float32) == sum(tensor.nbytes for tensor in stored.values())
    opened(locate(str(tmp_path)))


@torch.inference_mode()
def test_all_of_minimax_m3_but_its_router_may_be_packed(saves: Saves) -> None:
    """As its maker and NVIDIA publish it: each expert's tensors by themselves, the indexer's projections packed too."""
    folder, _ = saves("minimax_m3_vl")
    file = folder / "model.safetensors"
    config, stored = json.loads((folder / "config.json").read_text()), load_file(file)
    for form in ("mxfp8, minimax", "modelopt nvfp4"):
        given, packer = FORMATS[form]
        parts, plain = dict(stored), dict(stored)
        for name in stored:
            if name.startswith("language_model.model.layers.") and name.endswith(("_proj.weight", *(
                    f".w{n}.weight" for n in (1, 2, 3)))):
                found, plain[name] = packer(parts.pop(name))
                parts |= {name.removesuffix("weight") + part: t.contiguous() for part, t in found.items()}
        assert sum("block_sparse_moe.experts." in name for name in parts) >= 2 * 6 * 3 * 2
        assert any("index_q_proj.weight_scale" in name for name in parts)
        logits = []
        for tensors, more in ((parts, {"quantization_config": given}), (plain, {})):
            (folder / "config.json").write_text(json.dumps(config | more))
            save_file({name: t.contiguous() for name, t in tensors.items()}, file)
            model = opened(locate(str(folder)))
            ids_T, at_T = torch.arange(40) + 3, torch.arange(40)
            logits.append(model.logits(model.forward(ids_T, at_T, Dense(model.reads, model.groups))))
        assert logits[0].equal(logits[1]), form


NAMES = {
    "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
    "language_model.model.norm.weight": "model.norm.weight",
    "language_model.layers.3.self_attn.q_proj.weight": "model.layers.3.self_attn.q_proj.weight",
    "language_model.lm_head.weight": "lm_head.weight", "lm_head.weight": "lm_head.weight",
    "language_model.backbone.layers.0.norm.weight": "backbone.layers.0.norm.weight",
    "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
    "mtp.fc.weight": "mtp.fc.weight", "language_model.mtp.fc.weight": "mtp.fc.weight",
    "model.visual.blocks.0.mlp.weight": None, "visual.merger.weight": None, "mlp1.0.weight": None,
    "vision_tower.model.layers.0.mlp.up_proj.weight": None, "mm_projector.proj.weight": None,
    "model.vision_tower.model.language_model.layers.0.weight": None, "sound_encoder.conv.weight": None,
    "model.multi_modal_projector.linear_1.weight": None,
}


def test_names_of_the_text_lose_their_prefix_and_names_of_towers_have_none() -> None:
    assert {name: WRAPPERS["kimi_k25"].name_of(name) for name in NAMES} == NAMES


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
             "model_type 'llama4', whose text is 'llama4_text', is not supported"),
    "another text": ({"model_type": "mistral3", "text_config": {"model_type": "mistral5"}},
                     "the text of mistral3, model_type 'mistral5', is not supported; one of mistral, min"),
    "no text": ({"model_type": "qwen3_5"}, "text_config or llm_config, an object: found None"),
    "two kinds of codes": ({"model_type": "kimi_k25", "quantization_config": {"quant_method": "fp8"},
                            "text_config": {"quantization_config": {"quant_method": "awq"}}},
                           "quantization_config is .* they must agree"),
    "two ends": ({"model_type": "qwen3_5", "eos_token_id": 3, "text_config": {"eos_token_id": 4}},
                 "eos_token_id is 3 and, in text_config, 4"),
    "codes in the text": (
        {"model_type": "kimi_k25",
         "text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
        "quantised with 'compressed-tensors'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrapper_that_is_not_read_says_why(case: str, tmp_path: Path) -> None:
    config, words = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        _ = locate(str(tmp_path), load_format="dummy").config
