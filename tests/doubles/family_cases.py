"""Small configs of every family, for parity with transformers: two layers or a few, random weights."""
from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
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
    SeedOssConfig,
    SeedOssForCausalLM,
)

PROMPT, GREEDY, VOCAB = 21, 32, 131

CLASSES = {
    "bamba": (BambaConfig, BambaForCausalLM),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM),
    "mistral4": (Mistral4Config, Mistral4ForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "minimax_m3_vl_text": (MiniMaxM3VLTextConfig, MiniMaxM3VLForCausalLM),
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
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM),
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
GLM4 = {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_mtp_layers": 0}
MINIMAX = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
           "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}
# One layer with a dense MLP and without index heads; four blocks of 16 tokens are all that the tests have.
MINIMAX_M3 = {**MINIMAX, "num_hidden_layers": 3, "rotary_dim": 8, "dense_intermediate_size": 40,
              "shared_intermediate_size": 28, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
              "index_topk_blocks": 4, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
              "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limit": 1.5, "swiglu_alpha": 1.3,
              "routed_scaling_factor": 1.7}
# Queries grow three times within the prompt.
GROWING = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 6, "beta_fast": 32.0,
           "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6,
           "llama_4_scaling_beta": 0.4, "max_position_embeddings": 96}
# Scores have no scale, so queries and keys are normed to what a scale of 1 bears.
GEMMA4 = {"head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0,
          "vocab_size_per_layer_input": VOCAB, "sliding_window": 7, "pad_token_id": None, "initializer_range": 0.1,
          "layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA4_MOE = {**GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
              "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 8,
              "top_k_experts": 3, "moe_intermediate_size": 24}
GEMMA4_SHARED = {**GEMMA4, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 12, "use_double_wide_mlp": True}
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
    "gemma4": ("gemma4_text", {**GEMMA4, "final_logit_softcapping": 4.0}),
    "gemma4-one-kv-head": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-experts": ("gemma4_text", GEMMA4_MOE),
    "gemma4-tokens": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 12}),
    "gemma4-shared": ("gemma4_text", GEMMA4_SHARED),
    "gemma4-all": ("gemma4_text", {**GEMMA4_MOE, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12}),
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
    "hybrids-nemotron-latent": ("nemotron_h", {**NEMOTRON, "moe_latent_size": 20}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING, "max_position_embeddings": 96}),
    "ministral3-window": ("ministral3", {"head_dim": 8, "rope_parameters": GROWING, "sliding_window": 5,
                                         "max_position_embeddings": 96, "tie_word_embeddings": True}),
    "mistral4": ("mistral4", {**MLA, "first_k_dense_replace": 0, "rope_parameters": {**GROWING},
                              "max_position_embeddings": 96}),
    "mistral4-groups": ("mistral4", {**MLA, "rope_parameters": {**GROWING, "mscale": 1.0, "mscale_all_dim": 0.7},
                                     "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.6,
                                     "n_shared_experts": 2, "attention_bias": True, "max_position_embeddings": 96}),
    "mistral4-unscaled": ("mistral4", {**MLA, "norm_topk_prob": False, "tie_word_embeddings": True, "rope_parameters": {
        **GROWING, "mscale": None, "mscale_all_dim": None, "llama_4_scaling_beta": 0.0}}),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "seed-oss-biases": ("seed_oss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True,
                                     "mlp_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4_moe", GLM4),
    "glm4-norm-groups": ("glm4_moe", {**GLM4, "use_qk_norm": True, "attention_bias": True, "n_group": 2,
                                      "topk_group": 1, "routed_scaling_factor": 2.5}),
    "minimax-m2": ("minimax_m2", MINIMAX),
    "minimax-m2-whole": ("minimax_m2", {**MINIMAX, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "minimax-m3": ("minimax_m3_vl_text", MINIMAX_M3),
    "minimax-m3-selects": ("minimax_m3_vl_text", {**MINIMAX_M3, "index_block_size": 4, "index_topk_blocks": 3}),
    "minimax-m3-last": ("minimax_m3_vl_text", {
        **MINIMAX_M3, "index_block_size": 3, "index_topk_blocks": 4, "index_local_blocks": 2}),
    "minimax-m3-dense": ("minimax_m3_vl_text", {
        **MINIMAX_M3, "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "moe-window": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 4}),
    "moe-norm": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "moe-dense-first": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
    "moe-step": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": True}),
}


def tensors_of(reference: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of a model of transformers by the names that its makers publish and our families read."""
    tied, tensors = reference.config.tie_word_embeddings, reference.state_dict()
    if tied:
        tensors.pop("lm_head.weight", None)
    if reference.config.model_type != "minimax_m3_vl_text":
        return tensors
    found = {}
    for name, tensor in tensors.items():
        name = name.replace(".indexer.", ".index_").replace("gate.e_score_", "e_score_")
        if name.endswith(".gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[name.replace("gate_up", part)] = half
        else:
            found[name] = tensor
    return found
