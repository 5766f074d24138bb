"""DeepSeek-V3.2 and GLM-5 against transformers: random weights, f32, CPU, contexts of 9 x index_topk.

    T tokens of the step   S chosen tokens of a query   V vocabulary
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_attend import Dense
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.base import AttentionShape, Model

TOPK, PROMPT, FORCED, VOCAB, LAYERS = 8, 72, 12, 61, 4
CLASSES = {"deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
           "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM)}
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 64, "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "index_n_heads": 8, "index_head_dim": 20,
    "index_topk": TOPK, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "max_position_embeddings": 256, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("deepseek_v32", {}),
    "v32-groups": ("deepseek_v32", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "v32-yarn-bias": ("deepseek_v32", {"rope_parameters": YARN, "attention_bias": True}),
    "v32-dense-layers": ("deepseek_v32", {"first_k_dense_replace": LAYERS}),
    "glm": ("glm_moe_dsa", {"rms_norm_eps": 1e-5, "n_shared_experts": 2}),
    "glm-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
    "glm-frequency": ("glm_moe_dsa", {"index_topk_freq": 3, "index_skip_topk_offset": 1}),
}


def plain_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


def make_reference(case: str, **changes: Any) -> PreTrainedModel:
    family, own = CASES[case]
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SMALL, **own, **changes}, attn_implementation="eager")
    torch.manual_seed(sorted(CASES).index(case))
    reference = model_class(config).eval()
    with torch.no_grad():
        for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
            if name.endswith("norm.weight"):       # starts at 1, which hides mistakes
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.3)
            elif name.endswith("gate.weight"):
                tensor.normal_(0.0, 0.25)
    return reference


def raw_config(reference: PreTrainedModel, case: str) -> dict[str, Any]:
    """As transformers saves it, or, where the case says more, as the makers' files say it."""
    return {**reference.config.to_dict(), **CASES[case][1]}


def ours(reference: PreTrainedModel, case: str, dtype: torch.dtype = torch.float32) -> Model:
    model = registry.build(raw_config(reference, case), dtype=dtype, linear=plain_linear)
    for name, tensor in reference.state_dict().items():
        model.load(name, tensor)
    model.finish()
    return model


def prompt_ids(count: int = PROMPT + FORCED) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(7))


def run(model: Model, ids_T: torch.Tensor, chunks: list[int], attend: Dense) -> torch.Tensor:
    """logits_TV of all tokens, computed chunk by chunk."""
    outs, first = [], 0
    for size in chunks:
        positions_T = torch.arange(first, first + size)
        outs.append(model.logits(model.forward(ids_T[first:first + size], positions_T, attend)))
        first += size
    assert first == len(ids_T)
    return torch.cat(outs)


def expected(reference: PreTrainedModel,
             ids_T: torch.Tensor) -> tuple[torch.Tensor, dict[int, list[set[int]]]]:
    """transformers' logits_TV and, of each layer with an indexer, what every position chose."""
    chosen: dict[int, list[set[int]]] = {}

    def remember(layer: int):
        def hook(module, inputs, output):
            chosen[layer] = [{p for p in row.tolist() if p <= at} for at, row in enumerate(output[0])]
        return hook

    for layer, block in enumerate(reference.model.layers):
        if block.self_attn.indexer is not None:
            block.self_attn.indexer.register_forward_hook(remember(layer))
    return reference(ids_T[None]).logits[0], chosen


def check_chosen(attend: Dense, theirs: dict[int, list[set[int]]]) -> None:
    """Equal, but for members whose score lies within 1e-5 of the cut."""
    assert sorted(attend.chosen) == sorted(theirs)
    for layer, sets in theirs.items():
        rows = [row for step in attend.chosen[layer] for row in step]
        scores = [row for step in attend.scores[layer] for row in step]
        for at, (mine, score, their) in enumerate(zip(rows, scores, sets, strict=True)):
            mine = {p for p in mine.tolist() if p >= 0}
            assert len(mine) == min(at + 1, TOPK)
            cut = min(score[p] for p in mine)
            close = {p for p in mine ^ their if abs(score[p] - cut) <= 1e-5 * abs(cut)}
            assert mine ^ their == close, f"layer {layer}, position {at}"


class Following(Dense):
    """Where scores tie at the cut, either choice is right: this takes theirs, so that what follows can be
    compared. What it would have chosen itself is recorded all the same."""

    def __init__(self, shape: AttentionShape, theirs: dict[int, list[set[int]]]) -> None:
        super().__init__(shape)
        self.theirs = theirs

    def select(self, layer: int, *query: torch.Tensor) -> torch.Tensor:
        first = sum(map(len, self.chosen.get(layer, [])))
        chosen_TS = super().select(layer, *query).clone()
        for row_S, their in zip(chosen_TS, self.theirs[layer][first:], strict=False):
            row_S[:len(their)] = torch.tensor(sorted(their))
        return chosen_TS


CHUNKS = {"whole": [PROMPT + FORCED], "odd": [1, 37, 22, 12, *[1] * FORCED]}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_and_choices_equal_transformers(case: str) -> None:
    """Prefill, chunks and teacher-forced decode; context 10 times the tokens that a query reads."""
    reference, ids_T = make_reference(case), prompt_ids()
    expected_TV, theirs = expected(reference, ids_T)
    assert expected_TV.std() > 0.1
    model = ours(reference, case)
    for name, chunks in CHUNKS.items():
        attend = Following(model.attention, theirs)
        got_TV = run(model, ids_T, chunks, attend)
        check_chosen(attend, theirs)
        torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4, msg=name)
    all_of_it = ours(make_reference(case, index_topk=256), case)
    everything = run(all_of_it, ids_T, [len(ids_T)], Dense(all_of_it.attention))
    assert (everything - got_TV)[TOPK:].abs().max() > 1e-2, "choosing changes nothing here"


@pytest.mark.parametrize("case", ["v32-groups", "glm-shared"])
@torch.inference_mode()
def test_bf16_follows_transformers(case: str) -> None:
    """bf16 rounds in other places than transformers; where all is attended to, the error is like its own."""
    reference, ids_T = make_reference(case, index_topk=256), prompt_ids()
    exact_TV = reference(ids_T[None]).logits[0]
    model = ours(reference, case, torch.bfloat16)
    theirs_TV = reference.to(torch.bfloat16)(ids_T[None]).logits[0].float()
    got_TV = run(model, ids_T, [len(ids_T)], Dense(model.attention))
    their_error, our_error = ((out - exact_TV).norm() for out in (theirs_TV, got_TV))
    assert our_error < 1.5 * their_error


def test_layers_for_predicting_several_tokens_are_skipped() -> None:
    reference = make_reference("v32")
    config = {**raw_config(reference, "v32"), "num_nextn_predict_layers": 1}
    model = registry.build(config, dtype=torch.float32, linear=plain_linear)
    assert not model.wants(f"model.layers.{LAYERS}.embed_tokens.weight")
    assert model.wants(f"model.layers.{LAYERS - 1}.mlp.gate.weight")
    assert model.wants(f"model.layers.{LAYERS + 1}.mlp.gate.weight"), "of a layer that nobody announced"


REFUSED = {
    "scoring": ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    "groups": ({"n_group": 3}, "do not go together"),
    "too many chosen": ({"n_group": 4, "topk_group": 1}, "more than the 2 experts"),
    "odd rope": ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7"),
    "index head": ({"index_head_dim": 4}, "index_head_dim = 4"),
    "no indexer": ({"index_topk": None}, "index_topk is missing"),
    "layer types": ({"layer_types": ["full_attention"] * LAYERS}, "layer_types"),
    "mlp types": ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    "rope": ({"rope_interleave": False}, "rope_interleave = False"),
    "mscale": ({"rope_parameters": {**YARN, "mscale_all_dim": "1"}}, "mscale_all_dim '1'"),
    "no query rank": ({"q_lora_rank": None}, "q_lora_rank is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_refused(case: str) -> None:
    changes, words = REFUSED[case]
    config = {**raw_config(make_reference("v32"), "v32"), **changes}
    with pytest.raises(ConfigError, match=words):
        registry.read_spec_of(config)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("indexer_types", ["shared"] * LAYERS, "nobody to share with"),
    ("index_topk_pattern", "S" * LAYERS, "index_topk_pattern = 'SSSS' .* nobody to share with"),
    ("index_topk_pattern", "FX", "index_topk_pattern = 'FX' ")])
def test_an_indexer_that_layers_share_is_of_an_earlier_one(field: str, value: object, message: str) -> None:
    config = {**raw_config(make_reference("glm"), "glm"), "indexer_types": None, field: value}
    with pytest.raises(ConfigError, match=message):
        registry.read_spec_of(config)
