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
from family_cases import (
    CASES,
    CLASSES,
    GRANITE,
    GREEDY,
    GROWING,
    LLAMA3,
    MAMBA,
    MINIMAX_M3,
    MLA,
    NEMOTRON,
    PROMPT,
    SMALL,
    VOCAB,
    tensors_of,
)
from safetensors.torch import load_file
from transformers import BambaConfig, PreTrainedConfig, PreTrainedModel

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.base import GlobalLayer, LocalLayer, Model, Stage


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
            if "norm" in name or name.endswith("scale"):    # transformers starts these at 1 and 0: that hides mistakes
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif not parameter.any():               # routers start so
                parameter.normal_(0.0, 0.25)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.1)
    return reference


def ours(reference: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Model:
    model = registry.build(reference.config.to_dict(), dtype=dtype, linear=plain_linear)
    for name, tensor in tensors_of(reference).items():
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
        got_TV = run(model, ids_T, chunks, Dense(model.reads, model.groups))
        assert got_TV.dtype == torch.float32
        torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4, msg=name)


@torch.inference_mode()
def test_greedy_tokens_equal(reference: PreTrainedModel) -> None:
    model, ids_T = ours(reference), prompt_ids()
    attend = Dense(model.reads, model.groups)
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
    got_TD = mine.draft(ids_T[1:], hidden_TD[:-1], torch.arange(1, PROMPT), Dense({LocalLayer(0): mine.drafting}))
    assert want_TD.std() > 0.1
    torch.testing.assert_close(got_TD, want_TD, rtol=0, atol=1e-4)
    torch.testing.assert_close(mine.logits(got_TD), reference.lm_head(want_TD), rtol=0, atol=2e-4)


@pytest.mark.covers(kind={"llama-tied": "ordinary", "moe-norm": "experts"}, weights="bfloat16")
@pytest.mark.parametrize("case", ["llama-tied", "qwen2", "qwen3", "moe-norm"])
@torch.inference_mode()
def test_bf16_follows_transformers(case: str) -> None:
    """bf16 rounds in other places than transformers; the error may not exceed its own."""
    reference, ids_T = make_reference(case), prompt_ids()
    exact_TV = reference(ids_T[None]).logits[0]
    model = ours(reference, torch.bfloat16)
    theirs_TV = reference.to(torch.bfloat16)(ids_T[None]).logits[0].float()
    got_TV = run(model, ids_T, [PROMPT], Dense(model.reads, model.groups))
    their_error, our_error = ((out - exact_TV).norm() for out in (theirs_TV, got_TV))
    assert our_error < 1.5 * their_error
    assert (got_TV - theirs_TV).norm() < 0.1 * exact_TV.norm()


@torch.inference_mode()
def test_rows_in_one_step_do_not_mix() -> None:
    """forward takes the tokens of several rows at once: only `attend` knows whose they are."""
    model = ours(make_reference("moe-norm"))
    ids = [prompt_ids()[:9], prompt_ids()[9:]]
    alone = [run(model, row, [len(row)], Dense(model.reads, model.groups)) for row in ids]
    rows = [Dense(model.reads, model.groups), Dense(model.reads, model.groups)]

    def attend(layer, q_TNH, kv_TCKH, _chosen, sinks_N):
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
    got_TV = run(model, prompt_ids(), [PROMPT], Dense(model.reads, model.groups))
    expected_TV = run(ours(reference), prompt_ids(), [PROMPT], Dense(model.reads, model.groups))
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
    got_TV = run(model, prompt_ids(), [PROMPT], Dense(model.reads, model.groups))
    expected_TV = reference(prompt_ids()[None]).logits[0]
    torch.testing.assert_close(got_TV, expected_TV, rtol=0, atol=1e-4)


def test_every_family_of_the_registry_is_covered() -> None:
    covered = {family for family, _ in CASES.values()}
    assert covered == set(CLASSES)
    assert registry.FAMILIES["kimi_k2"] == registry.FAMILIES["deepseek_v3"]
    # tests/parity/test_latent_parity.py has the ones that choose what they attend to
    # and tests/parity/test_wrappers.py those that only a wrapper has.
    assert registry.FAMILIES["minimax_m3"][1] is registry.FAMILIES["minimax_m3_vl_text"][1]
    assert covered | {"kimi_k2", "minimax_m3", "deepseek_v32", "glm_moe_dsa", "qwen2_5_vl_text", "qwen3_vl_text",
                      "qwen3_vl_moe_text"} == set(registry.FAMILIES)


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
    got_TV = run(model, ids_T, [PROMPT], Dense(model.reads, model.groups))
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
    got_TV = run(model, ids_T, [PROMPT], Dense(model.reads, model.groups))
    torch.testing.assert_close(got_TV, reference(ids_T[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [
    ("layer_types", ["mamba"] * 3), ("layer_types", ["mamba", "conv", "attention"]),
    ("position_embedding_type", "alibi"), ("num_experts_per_tok", 9)])
def test_granite_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        registry.read_spec_of({**SMALL, **GRANITE, "model_type": "granitemoehybrid", name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("layers_block_type", ["mamba", "mlp"]), ("layers_block_type", ["mamba", "conv"]),
    ("layers_block_type", 3), ("mlp_hidden_act", "silu"), ("moe_latent_size", 0), ("mlp_bias", True),
    ("n_groups", 4), ("tie_word_embeddings", True), ("num_experts_per_tok", 9)])
def test_nemotron_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="Mamba" if name == "n_groups" else name):
        registry.read_spec_of({**SMALL, **NEMOTRON, "model_type": "nemotron_h", name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("rope_parameters", None), ("rope_parameters", {**GROWING, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {**GROWING, "llama_4_scaling_beta": "0.1"}), ("scoring_func", "sigmoid"),
    ("q_lora_rank", None)])
def test_mistral4_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        registry.read_spec_of({**SMALL, **MLA, "rope_parameters": GROWING, "model_type": "mistral4", name: value})


# As makers write what transformers' config has.
PUBLISHED_M3 = {"model_type": "minimax_m3", "layer_types": None, "mlp_layer_types": None, "hidden_act": "swigluoai",
                "moe_layer_freq": [0, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 5e6, "rope_parameters": None,
                "use_gemma_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False}
SPARSE_M3 = {"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1], "sparse_num_index_heads": 2,
             "sparse_index_dim": 16, "sparse_block_size": 16, "sparse_topk_blocks": 4, "sparse_local_block": 1,
             "sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}


def test_minimax_m3_is_read_as_its_makers_write_it() -> None:
    """Their names and defaults, in place of those of transformers."""
    theirs = {**SMALL, **MINIMAX_M3, "model_type": "minimax_m3_vl_text"}
    makers = {**theirs, **PUBLISHED_M3, "sparse_attention_config": SPARSE_M3}
    want, spec = (registry.read_spec_of(config) for config in (theirs, makers))
    assert (spec.attention, spec.moe, spec.gate, spec.width) == (want.attention, want.moe, want.gate, 40)
    assert spec.rope.max_position == 256 and spec.attention.index.layers == {1, 2} == spec.moe.layers
    dense = registry.read_spec_of({**makers, "sparse_attention_config": {"use_sparse_attention": False}})
    assert dense.rope.max_position == 256 and dense.attention.index is None
    assert [registry.numbers_of(one)["block"] for one in (spec, dense)] == [16, 1]


@pytest.mark.parametrize(("name", "value"), [
    ("sparse_disable_index_value", [0, 0, 1]), ("sparse_disable_index_value", [0, 1]), ("sparse_score_type", "sum"),
    ("sparse_init_block", 1), ("sparse_local_block", 0), ("sparse_local_block", 5), ("sparse_num_index_heads", 4),
    ("sparse_index_dim", 8), ("sparse_attention_freq", [0, 1]), ("sparse_block_size", 0)])
def test_minimax_m3_refuses_other_selections(name: str, value: object) -> None:
    what = {"sparse_num_index_heads": "KV heads", "sparse_index_dim": "head_dim", "sparse_local_block": "local",
            "sparse_block_size": "block"}.get(name, "sparse_attention_config" if "freq" in name else name)
    with pytest.raises(ConfigError, match=what):
        registry.read_spec_of({**SMALL, **MINIMAX_M3, **PUBLISHED_M3,
                               "sparse_attention_config": {**SPARSE_M3, name: value}})


@pytest.mark.parametrize(("name", "value"), [
    ("attention_output_gate", True), ("use_gemma_norm", False), ("hidden_act", "gelu"), ("n_shared_experts", 2),
    ("moe_layer_freq", [0, 1]), ("scoring_func", "softmax"), ("qk_norm_type", "per_layer")])
def test_minimax_m3_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        registry.read_spec_of({**SMALL, **MINIMAX_M3, **PUBLISHED_M3, "sparse_attention_config": SPARSE_M3,
                               name: value})


def test_limits_of_steps_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    for limits, most in ((None, math.inf), ([0.25, 0.5], 0.5)):
        more = {} if limits is None else {"time_step_limit": limits}
        BambaConfig(**{**SMALL, **MAMBA, **more}).save_pretrained(tmp_path)
        states = registry.read_spec_of(json.loads((tmp_path / "config.json").read_text())).states
        assert states is not None and states.scan.most == most
    for wrong in ([2, 1], [0.1], [0, "inf"], [-1, 2], 3, [0, math.nan], [0, True]):
        with pytest.raises(ConfigError, match="time_step_limit"):
            registry.read_spec_of({**SMALL, **MAMBA, "model_type": "bamba", "time_step_limit": wrong})
