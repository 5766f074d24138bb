"""Every family against Hugging Face transformers: 2 layers of random weights, f32, CPU.

    T tokens of the step   N query heads   K KV heads   C planes   H head dim
"""
from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_attend import Dense
from safetensors.torch import load_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.base import GlobalLayer, Model, Stage

PROMPT, GREEDY, VOCAB = 21, 32, 131

CLASSES = {
    "bamba": (BambaConfig, BambaForCausalLM),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,          # large enough that attention and the top logits are decided
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
OSS = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5,
       "swiglu_alpha": 1.3}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
       "v_head_dim": 10, "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
       "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 24,
       "first_k_dense_replace": 1}
# Three of four layers keep a state; RoPE turns 4 of 16 dims. Of larger weights transformers' own logits, all
# at once and token by token, are 4e-4 apart.
STATES = {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 12, "linear_value_head_dim": 20, "initializer_range": 0.1}
MAMBA = {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": 16,
         "mamba_n_groups": 2, "mamba_d_state": 10, "initializer_range": 0.12}
GRANITE = {**MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
           "shared_intermediate_size": 28, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
           "residual_multiplier": 0.4, "logits_scaling": 0.25}
NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 10,
            "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 28, "initializer_range": 0.2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 28}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
            "max_position_embeddings": PROMPT + 4,      # decoding goes past it
        },
    ),
    "hybrids-mistral": ("mistral", {"sliding_window": None}),
    "hybrids-mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-window": ("qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7,
                               "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}},
    ),
    "hybrids-v3": ("deepseek_v3", MLA),
    "hybrids-v3-yarn-bias": ("deepseek_v3", {
        **MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}),
    "hybrids-v3-dense": ("deepseek_v3", {**MLA, "first_k_dense_replace": 2}),
    "hybrids-gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "hybrids-gemma2-uncapped": ("gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": None,
                                   "final_logit_softcapping": None, "tie_word_embeddings": False}),
    "hybrids-gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 7, "layer_types": [
        "sliding_attention", "full_attention"], "query_pre_attn_scalar": 10}),
    "hybrids-gemma3-linear": ("gemma3_text", {
        "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 3, "sliding_window_pattern": 3,
        "final_logit_softcapping": 9.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
    "hybrids-gpt-oss": ("gpt_oss", {**OSS, "sliding_window": 6}),
    "hybrids-gpt-oss-plain": ("gpt_oss", {
        **OSS, "sliding_window": 300, "attention_bias": False, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}, "num_local_experts": 3}),
    "hybrids-next": ("qwen3_next", {**STATES, **SHARED}),
    "hybrids-next-dense": ("qwen3_next", {
        **STATES, **SHARED, "mlp_only_layers": [0, 1, 2, 3], "attention_bias": True,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "hybrids-next-types": ("qwen3_next", {
        **STATES, **SHARED, "decoder_sparse_step": 2, "linear_conv_kernel_dim": 2,
        "layer_types": ["full_attention", "linear_attention"] * 2}),
    "hybrids-3.5": ("qwen3_5_text", {**STATES, "tie_word_embeddings": True}),
    "hybrids-3.5-moe": ("qwen3_5_moe_text", {**STATES, **SHARED, "num_hidden_layers": 3, "layer_types": [
        "linear_attention", "full_attention", "linear_attention"]}),
    "hybrids-bamba": ("bamba", MAMBA),
    "hybrids-bamba-biases": ("bamba", {
        **MAMBA, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "mamba_d_conv": 3,
        "mamba_n_groups": 1, "tie_word_embeddings": True}),
    "hybrids-bamba-limits": ("bamba", {**MAMBA, "mamba_conv_bias": False, "time_step_limit": [0.3, 0.9]}),
    "hybrids-granite": ("granitemoehybrid", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "hybrids-granite-dense": ("granitemoehybrid", {
        **GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True,
        "tie_word_embeddings": True}),
    "hybrids-nemotron": ("nemotron_h", NEMOTRON),
    "hybrids-nemotron-dense": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["mlp", "full_attention", "linear_attention"], "mlp_bias": True,
        "use_bias": True, "use_conv_bias": False, "conv_kernel": 2, "time_step_min": 0.4}),
    "hybrids-nemotron-groups": ("nemotron_h", {
        **NEMOTRON, "n_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": False,
        "layers_block_type": ["full_attention", "moe"]}),
    "moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "moe-window": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 4}),
    "moe-norm": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "moe-dense-first": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
    "moe-step": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": True}),
}


def plain_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


def make_reference(case: str) -> PreTrainedModel:
    family, changes = CASES[case]
    config_class, model_class = CLASSES[family]
    # Another implementation may not cap its scores.
    config: PreTrainedConfig = config_class(**{**SMALL, **changes}, attn_implementation="eager")
    torch.manual_seed(zlib.crc32(case.encode()))
    reference = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:          # transformers starts these at 1 and 0, which hides mistakes
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif not parameter.any():               # routers start so
                parameter.normal_(0.0, 0.25)
    return reference


def ours(reference: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Model:
    model = registry.build(reference.config.to_dict(), dtype=dtype, linear=plain_linear)
    tied = reference.config.tie_word_embeddings
    for name, tensor in reference.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            model.load(name, tensor.to(dtype))
    model.finish()
    return model


def prompt_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(5))


def run(model: Model, ids_T: torch.Tensor, chunks: list[int], attend: Dense) -> torch.Tensor:
    """logits_TV of all tokens, computed chunk by chunk."""
    outs, first = [], 0
    for size in chunks:
        positions_T = torch.arange(first, first + size)
        hidden_TD = model.forward(ids_T[first : first + size], positions_T, attend)
        outs.append(model.logits(hidden_TD))
        first += size
    assert first == len(ids_T)
    return torch.cat(outs)


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_reference(request.param)


CHUNKS = {"whole": [PROMPT], "odd": [1, 7, 5, 8], "seven": [7] * 3, "one": [1] * PROMPT}


@torch.inference_mode()
def test_prefill_logits_equal_whole_chunked_and_token_by_token(reference: PreTrainedModel) -> None:
    model, ids_T = ours(reference), prompt_ids()
    expected_TV = reference(ids_T[None]).logits[0]
    assert expected_TV.std() > 0.1
    for name, chunks in CHUNKS.items():
        got_TV = run(model, ids_T, chunks, Dense(model.attention, model.groups))
        assert got_TV.dtype == torch.float32
        torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4, msg=name)


@torch.inference_mode()
def test_greedy_tokens_equal(reference: PreTrainedModel) -> None:
    model, ids_T = ours(reference), prompt_ids()
    attend = Dense(model.attention, model.groups)
    cache_out = reference(ids_T[None], use_cache=True)
    # Of transformers 5.23's Bamba: with a cache it bounds no steps, and begins at position 0 unless told.
    bounded = getattr(reference.config, "time_step_limit", (0.0, math.inf)) != (0.0, math.inf) or getattr(
        reference.config, "time_step_min", 0.0) > 0.1
    got_V = run(model, ids_T, [PROMPT], attend)[-1]
    for step in range(GREEDY):
        expected_V = cache_out.logits[0, -1]
        torch.testing.assert_close(got_V, expected_V, rtol=0, atol=1e-4)
        token, other = expected_V.topk(2).indices.tolist()
        if expected_V[token] - expected_V[other] > 1e-3:
            assert int(got_V.argmax()) == token, f"token {step}"
        token_1 = torch.tensor([token])
        position_1, ids_T = torch.tensor([PROMPT + step]), torch.cat((ids_T, token_1))
        if bounded:
            cache_out = reference(ids_T[None])
        else:
            cache_out = reference(token_1[None], past_key_values=cache_out.past_key_values,
                                  position_ids=position_1[None])
        got_V = model.logits(model.forward(token_1, position_1, attend))[0]


@pytest.mark.parametrize("case", ["hybrids-next", "hybrids-next-dense", "hybrids-3.5", "hybrids-3.5-moe"])
@torch.inference_mode()
def test_a_hybrid_s_layer_that_drafts_equals_a_block_of_transformers(case: str,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """arXiv:2412.19437, equation 21: M [norm(h_i); norm(embed(t_i+1))], the embedding first as files have M,
    through one more block with attention. Norms are of 1 + weight."""
    family, changes = CASES[case]
    types = [*(make_reference(case).config.layer_types), "full_attention"]
    dense = {name: [*changes[name], len(types) - 1] for name in ("mlp_only_layers",) if name in changes}
    monkeypatch.setitem(CASES, case, (family, {**changes, **dense, "num_hidden_layers": len(types),
                                               "layer_types": types}))
    reference, ids_T, last = make_reference(case), prompt_ids(), len(types) - 1
    model, hidden = reference.model, reference.config.hidden_size
    random = torch.Generator().manual_seed(3)
    more = {"mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=random) * 0.2,
            **{f"mtp.{name}.weight": torch.rand(hidden, generator=random) - 0.5
               for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}}
    own = {name.replace(f"model.layers.{last}.", "mtp.layers.0."): tensor
           for name, tensor in reference.state_dict().items()}
    config = {**reference.config.to_dict(), "num_hidden_layers": last, "layer_types": types[:-1]}
    stage = Stage(GlobalLayer(0), GlobalLayer(last), embeds=True, heads=True, drafts=True)
    mine = registry.build(config, dtype=torch.float32, linear=plain_linear, stage=stage)
    for name, tensor in {**own, **more}.items():
        if not (reference.config.tie_word_embeddings and name == "lm_head.weight"):
            mine.load(name, tensor)
    mine.finish()

    layers, eps = list(model.layers), reference.config.rms_norm_eps
    model.layers = torch.nn.ModuleList(layers[:last])
    reference.config.num_hidden_layers, reference.config.layer_types = last, types[:-1]
    hidden_TD = model(ids_T[None], use_cache=False).last_hidden_state[0]
    both = [F.rms_norm(x, (hidden,), 1 + more[f"mtp.pre_fc_norm_{name}.weight"], eps) for name, x in (
        ("embedding", model.embed_tokens(ids_T[1:])), ("hidden", hidden_TD[:-1]))]
    model.layers = torch.nn.ModuleList(layers[last:])
    reference.config.num_hidden_layers, reference.config.layer_types = 1, ["full_attention"]
    model.norm.weight.copy_(more["mtp.norm.weight"])
    want_TD = model(inputs_embeds=(torch.cat(both, 1) @ more["mtp.fc.weight"].T)[None], use_cache=False,
                    position_ids=torch.arange(1, PROMPT)[None]).last_hidden_state[0]
    got_TD = mine.draft(ids_T[1:], hidden_TD[:-1], torch.arange(1, PROMPT), Dense(mine.attention))
    assert want_TD.std() > 0.1
    torch.testing.assert_close(got_TD, want_TD, rtol=0, atol=1e-4)
    torch.testing.assert_close(mine.logits(got_TD), reference.lm_head(want_TD), rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2", "qwen3", "moe-norm"])
@torch.inference_mode()
def test_bf16_follows_transformers(case: str) -> None:
    """bf16 rounds in other places than transformers; the error may not exceed its own."""
    reference, ids_T = make_reference(case), prompt_ids()
    exact_TV = reference(ids_T[None]).logits[0]
    model = ours(reference, torch.bfloat16)
    theirs_TV = reference.to(torch.bfloat16)(ids_T[None]).logits[0].float()
    got_TV = run(model, ids_T, [PROMPT], Dense(model.attention, model.groups))
    their_error, our_error = ((out - exact_TV).norm() for out in (theirs_TV, got_TV))
    assert our_error < 1.5 * their_error
    assert (got_TV - theirs_TV).norm() < 0.1 * exact_TV.norm()


@torch.inference_mode()
def test_rows_in_one_step_do_not_mix() -> None:
    """forward takes the tokens of several rows at once: only `attend` knows whose they are."""
    model = ours(make_reference("moe-norm"))
    ids = [prompt_ids()[:9], prompt_ids()[9:]]
    alone = [run(model, row, [len(row)], Dense(model.attention, model.groups)) for row in ids]
    rows = [Dense(model.attention, model.groups), Dense(model.attention, model.groups)]

    def attend(layer, q_TNH, kv_TCKH, sinks_N):
        parts = zip(rows, *(t.split([9, PROMPT - 9]) for t in (q_TNH, kv_TCKH)), strict=True)
        return torch.cat([row(layer, q, kv) for row, q, kv in parts])

    positions_T = torch.cat([torch.arange(len(row)) for row in ids])
    hidden_TD = model.forward(torch.cat(ids), positions_T, attend)
    torch.testing.assert_close(model.logits(hidden_TD), torch.cat(alone), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_files_with_one_tensor_per_expert_load_the_same() -> None:
    reference = make_reference("moe")
    model = registry.build(reference.config.to_dict(), dtype=torch.float32, linear=plain_linear)
    for name, tensor in reference.state_dict().items():
        prefix, _, rest = name.partition(".experts.")
        if rest == "gate_up_proj":
            for index, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                model.load(f"{prefix}.experts.{index}.up_proj.weight", up)
                model.load(f"{prefix}.experts.{index}.gate_proj.weight", gate)
        elif rest == "down_proj":
            for index, down in enumerate(tensor):
                model.load(f"{prefix}.experts.{index}.down_proj.weight", down)
        else:
            model.load(name, tensor)
    model.finish()
    got_TV = run(model, prompt_ids(), [PROMPT], Dense(model.attention, model.groups))
    expected_TV = run(ours(reference), prompt_ids(), [PROMPT], Dense(model.attention, model.groups))
    assert torch.equal(got_TV, expected_TV)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e4}),
        ("llama", {"rope_scaling": LLAMA3 | {"rope_theta": 7e4}, "head_dim": None}),
        ("qwen2", {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 16}),
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 16}),
    ],
)
@torch.inference_mode()
def test_config_files_of_transformers_4_mean_the_same(
    family: str, changes: dict[str, Any]
) -> None:
    """The raw dict of an old config.json, which transformers standardises and we read as it is."""
    old = {**SMALL, **changes}
    config_class, model_class = CLASSES[family]
    torch.manual_seed(1)
    reference = model_class(config_class(**{**old, "rope_scaling": old.get("rope_scaling")})).eval()
    model = registry.build({**old, "model_type": family}, dtype=torch.float32, linear=plain_linear)
    for name, tensor in reference.state_dict().items():
        model.load(name, tensor)
    model.finish()
    got_TV = run(model, prompt_ids(), [PROMPT], Dense(model.attention, model.groups))
    expected_TV = reference(prompt_ids()[None]).logits[0]
    torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4)


def test_every_family_of_the_registry_is_covered() -> None:
    covered = {family for family, _ in CASES.values()}
    assert covered == set(CLASSES)
    assert registry.FAMILIES["kimi_k2"] == registry.FAMILIES["deepseek_v3"]
    # tests/parity/test_latent_parity.py has the ones that choose what they attend to
    assert covered | {"kimi_k2", "deepseek_v32", "glm_moe_dsa"} == set(registry.FAMILIES)


@torch.inference_mode()
@pytest.mark.parametrize(("case", "known", "older"), [
    ("hybrids-granite", "input_linear", {"layer_types": ["mamba", "attention", "mamba"]}),
    ("hybrids-granite-dense", "input_linear", {"layer_types": ["mamba", "attention", "mamba"]}),
    ("hybrids-nemotron", "backbone.layers.3.mixer.experts.5.up_proj",
     {"layers_block_type": None, "hybrid_override_pattern": "M-*EM"}),
    ("hybrids-nemotron-dense", "backbone.embeddings",
     {"layers_block_type": ["mlp", "attention", "mamba"], "conv_kernel": 4, "mamba_d_conv": 2})])
def test_as_files_have_it(case: str, known: str, older: dict[str, Any], tmp_path: Path) -> None:
    """transformers writes other names than its modules have; `older`: as it wrote them once."""
    reference = make_reference(case)
    reference.save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), **older}
    model = registry.build(config, dtype=torch.float32, linear=plain_linear)
    tensors = {**load_file(tmp_path / "model.safetensors"), "mtp.layers.0.norm.weight": torch.ones(48)}
    assert any(known in name for name in tensors)
    for name, tensor in tensors.items():
        if model.wants(name):
            model.load(name, tensor)
    model.finish()
    ids_T = prompt_ids()
    got_TV = run(model, ids_T, [PROMPT], Dense(model.attention, model.groups))
    torch.testing.assert_close(got_TV, reference(ids_T[None]).logits[0], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_granite_of_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its micro model: no layer keeps a state."""
    monkeypatch.setitem(CASES, "~", ("granitemoehybrid", {
        **GRANITE, "layer_types": ["full_attention"] * 3, "num_local_experts": 0,
        "position_embedding_type": "rope"}))
    reference, ids_T = make_reference("~"), prompt_ids()
    model = ours(reference)
    assert not any(group.snapshot for group in model.groups)
    got_TV = run(model, ids_T, [PROMPT], Dense(model.attention, model.groups))
    torch.testing.assert_close(got_TV, reference(ids_T[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [
    ("layer_types", ["mamba"] * 3), ("layer_types", ["mamba", "conv", "attention"]),
    ("position_embedding_type", "alibi"), ("num_experts_per_tok", 9)])
def test_granite_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        registry.read_spec_of({**SMALL, **GRANITE, "model_type": "granitemoehybrid", name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("layers_block_type", ["mamba", "mlp"]), ("layers_block_type", ["mamba", "conv"]),
    ("layers_block_type", 3), ("mlp_hidden_act", "silu"), ("moe_latent_size", 16), ("mlp_bias", True),
    ("n_groups", 4), ("tie_word_embeddings", True), ("num_experts_per_tok", 9)])
def test_nemotron_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="Mamba" if name == "n_groups" else name):
        registry.read_spec_of({**SMALL, **NEMOTRON, "model_type": "nemotron_h", name: value})


def test_limits_of_steps_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    for limits, most in ((None, math.inf), ([0.25, 0.5], 0.5)):
        more = {} if limits is None else {"time_step_limit": limits}
        BambaConfig(**{**SMALL, **MAMBA, **more}).save_pretrained(tmp_path)
        states = registry.read_spec_of(json.loads((tmp_path / "config.json").read_text())).states
        assert states is not None and states.scan.most == most
    for wrong in ([2, 1], [0.1], [0, "inf"], [-1, 2], 3, [0, math.nan], [0, True]):
        with pytest.raises(ConfigError, match="time_step_limit"):
            registry.read_spec_of({**SMALL, **MAMBA, "model_type": "bamba", "time_step_limit": wrong})
