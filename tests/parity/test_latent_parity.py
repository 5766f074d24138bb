"""DeepSeek-V3.2 and GLM-5 against transformers: random weights, f32, CPU, contexts of 9 x index_topk.

    T tokens of the step   S chosen tokens of a query   V vocabulary
"""
from __future__ import annotations

from collections.abc import Mapping
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
from penstock.model.base import LocalLayer, Model, Reads, Stage

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
        rows = [row[0] for step in attend.chosen[layer] for row in step]
        scores = [row[0] for step in attend.scores[layer] for row in step]
        for at, (mine, score, their) in enumerate(zip(rows, scores, sets, strict=True)):
            mine = {p for p in mine.tolist() if p >= 0}
            assert len(mine) == min(at + 1, TOPK)
            cut = min(score[p] for p in mine)
            close = {p for p in mine ^ their if abs(score[p] - cut) <= 1e-5 * abs(cut)}
            assert mine ^ their == close, f"layer {layer}, position {at}"


class Following(Dense):
    """Where scores tie at the cut, either choice is right: this takes theirs, so that what follows can be
    compared. What it would have chosen itself is recorded all the same."""

    def __init__(self, reads: Mapping[LocalLayer, Reads], theirs: dict[int, list[set[int]]]) -> None:
        super().__init__(reads)
        self.theirs = theirs

    def select(self, layer: LocalLayer, *query: torch.Tensor) -> torch.Tensor:
        first = sum(map(len, self.chosen.get(layer, [])))
        chosen_TKY = super().select(layer, *query).clone()
        for row_S, their in zip(chosen_TKY[:, 0], self.theirs[layer][first:], strict=False):
            row_S[:len(their)] = torch.tensor(sorted(their))
        return chosen_TKY


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
        attend = Following(model.reads, theirs)
        got_TV = run(model, ids_T, chunks, attend)
        check_chosen(attend, theirs)
        torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4, msg=name)
    all_of_it = ours(make_reference(case, index_topk=256), case)
    everything = run(all_of_it, ids_T, [len(ids_T)], Dense(all_of_it.reads))
    assert (everything - got_TV)[TOPK:].abs().max() > 1e-2, "choosing changes nothing here"


@pytest.mark.covers(kind="latent", weights="bfloat16")
@pytest.mark.parametrize("case", ["v32-groups", "glm-shared"])
@torch.inference_mode()
def test_bf16_follows_transformers(case: str) -> None:
    """bf16 rounds in other places than transformers; where all is attended to, the error is like its own."""
    reference, ids_T = make_reference(case, index_topk=256), prompt_ids()
    exact_TV = reference(ids_T[None]).logits[0]
    model = ours(reference, case, torch.bfloat16)
    theirs_TV = reference.to(torch.bfloat16)(ids_T[None]).logits[0].float()
    got_TV = run(model, ids_T, [len(ids_T)], Dense(model.reads))
    their_error, our_error = ((out - exact_TV).norm() for out in (theirs_TV, got_TV))
    assert our_error < 1.5 * their_error


@pytest.mark.parametrize("case", ["v32", "v32-groups", "v32-yarn-bias", "glm"])
@torch.inference_mode()
def test_a_layer_that_drafts_equals_transformers_layer_on_the_papers_input(case: str) -> None:
    """arXiv:2412.19437, equations 21 to 23: M [norm(h_i); norm(embed(t_i+1))] through a block as the model's,
    the embedding first, as files have M. Two drafts deep: the second has the first's hidden state."""
    reference, ids_T = make_reference(case, num_hidden_layers=LAYERS + 1, index_topk=256), prompt_ids()
    at, model = f"model.layers.{LAYERS}", reference.model
    random, hidden = torch.Generator().manual_seed(3), SMALL["hidden_size"]
    more = {f"{at}.eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=random) * 0.2,
            **{f"{at}.{name}.weight": torch.rand(hidden, generator=random) + 0.5
               for name in ("enorm", "hnorm", "shared_head.norm")}}
    config = {**raw_config(reference, case), "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    mine = registry.build(config, dtype=torch.float32, linear=plain_linear,
                          stage=Stage(0, LAYERS, embeds=True, heads=True, drafts=True))
    shared = {f"{at}.embed_tokens.weight": torch.zeros(1), f"{at}.shared_head.head.weight": torch.zeros(1)}
    for name, tensor in {**reference.state_dict(), **more, **shared}.items():
        if mine.wants(name):
            mine.load(name, tensor)
    mine.finish()

    layers, eps = list(model.layers), reference.config.rms_norm_eps
    model.layers = torch.nn.ModuleList(layers[:LAYERS])
    hidden_TD = model(ids_T[None]).last_hidden_state[0]
    torch.testing.assert_close(
        mine.forward(ids_T, torch.arange(len(ids_T)), Dense(mine.reads)), hidden_TD, rtol=0, atol=1e-4)
    model.layers = torch.nn.ModuleList(layers[LAYERS:])
    layers[LAYERS].self_attn.layer_idx = 0
    model.norm.weight.copy_(more[f"{at}.shared_head.norm.weight"])

    def joint(ids: torch.Tensor, before_TD: torch.Tensor) -> torch.Tensor:
        both = [F.rms_norm(x, (hidden,), more[f"{at}.{name}.weight"], eps) for name, x in (
            ("enorm", model.embed_tokens(ids)), ("hnorm", before_TD))]
        return torch.cat(both, 1) @ more[f"{at}.eh_proj.weight"].T

    attend, ids, before_TD, inputs_TD = Dense({LocalLayer(0): mine.drafting}), ids_T[1:], hidden_TD[:-1], None
    for first in (1, len(ids_T)):
        inputs_TD = joint(ids, before_TD) if inputs_TD is None else torch.cat(
            (inputs_TD, joint(ids, before_TD)))
        position_1T = torch.arange(1, 1 + len(inputs_TD))[None]
        out_TD = model(inputs_embeds=inputs_TD[None], position_ids=position_1T).last_hidden_state[0]
        want_TD = out_TD[-len(ids):]
        got_TD = mine.draft(ids, before_TD, torch.arange(first, first + len(ids)), attend)
        torch.testing.assert_close(got_TD, want_TD, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.logits(got_TD), reference.lm_head(want_TD), rtol=0, atol=2e-4)
        ids, before_TD = mine.logits(got_TD[-1:]).argmax(1), got_TD[-1:]


def test_layers_for_predicting_several_tokens_are_skipped() -> None:
    reference = make_reference("v32")
    config = {**raw_config(reference, "v32"), "num_nextn_predict_layers": 1}
    model = registry.build(config, dtype=torch.float32, linear=plain_linear)
    assert not model.wants(f"model.layers.{LAYERS}.embed_tokens.weight")
    assert model.wants(f"model.layers.{LAYERS - 1}.mlp.gate.weight")
    assert model.ignores(f"model.layers.{LAYERS + 1}.mlp.gate.weight"), "of a layer that nothing announced"


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
    "no query rank": ({"q_lora_rank": None}, "q_lora_rank is null: queries made by one q_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_refused(case: str) -> None:
    changes, words = REFUSED[case]
    config = {**raw_config(make_reference("v32"), "v32"), **changes}
    with pytest.raises(ConfigError, match=words):
        registry.read_spec_of(config)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("indexer_types", ["shared"] * LAYERS, "no layer before it"),
    ("index_topk_pattern", "S" * LAYERS, "index_topk_pattern = 'SSSS' .* no layer before it"),
    ("index_topk_pattern", "FX", "index_topk_pattern = 'FX' ")])
def test_an_indexer_that_layers_share_is_of_an_earlier_one(field: str, value: object, message: str) -> None:
    config = {**raw_config(make_reference("glm"), "glm"), "indexer_types": None, field: value}
    with pytest.raises(ConfigError, match=message):
        registry.read_spec_of(config)
