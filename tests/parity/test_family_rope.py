"""RoPE frequencies and rotation against transformers' modeling_rope_utils, at real sizes."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attend import Dense
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.kernels.fused import layer
from penstock.model import registry
from penstock.model.rope import Rope, read_rope
from penstock.model.weights.fields import Fields
from penstock.model.weights.locate import files_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {**LLAMA3, "rope_theta": 5e5},
    "yarn": {**YARN, "rope_theta": 1e6},
    "yarn-attention": {**YARN, "rope_theta": 1e6, "attention_factor": 1.25},
    "yarn-mscale": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-betas": {**YARN, "rope_theta": 1e6, "beta_fast": 64, "beta_slow": 2, "truncate": False},
    "yarn-null-factor": {**YARN, "rope_theta": 1e6, "factor": None},
    "yarn-steep": {**YARN, "rope_theta": 1e6, "beta_fast": 1, "beta_slow": 1, "truncate": False},
}


def build(params: dict[str, Any], head_dim: int = 64, context: int = 40960, **more: Any) -> Rope:
    values = {"max_position_embeddings": context, "rope_parameters": params, **more}
    return read_rope(Fields(values, "llama"), head_dim)


def reference(params: dict[str, Any], head_dim: int, context: int) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=context,
            rope_parameters=dict(params),
        )
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_equals_transformers(name: str, head_dim: int) -> None:
    theirs = reference(SCALINGS[name], head_dim, 40960)
    rope = build(SCALINGS[name], head_dim)
    torch.testing.assert_close(rope.inv_freq_F, theirs.inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions_T = torch.tensor([0, 1, 7, 800, 4095])
    q, k = torch.randn(2, 1, 3, 5, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(q, positions_T[None])
    expected = torch.cat(apply_rotary_pos_emb(q, k, cos, sin), dim=1)[0].transpose(0, 1)
    qk_TMH = torch.cat((q, k), dim=1)[0].transpose(0, 1).contiguous()
    layer.OP.use("reference").rotate(qk_TMH, *rope.angles(positions_T, torch.float32))
    torch.testing.assert_close(qk_TMH, expected, rtol=0, atol=1e-5)


def test_dynamic_past_the_original_length_equals_decoding_one_by_one() -> None:
    theirs = reference(SCALINGS["dynamic"], 64, 50)
    rope = build(SCALINGS["dynamic"], context=50)
    assert rope.max_position == 100
    cos_TH, sin_TH = rope.angles(torch.arange(90), torch.float32)
    for position in range(90):
        cos, sin = theirs(cos_TH, torch.tensor([[position]]))
        torch.testing.assert_close(cos_TH[position], cos[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(sin_TH[position, :, 32:], sin[0, :, 32:], rtol=0, atol=2e-5)


def test_angles_do_not_depend_on_the_other_tokens_of_the_step() -> None:
    for params in SCALINGS.values():
        rope = build(params, context=50)
        together, alone = rope.angles(torch.tensor([80, 3]), torch.float32), []
        for position in (80, 3):
            alone.append(rope.angles(torch.tensor([position]), torch.float32))
        for both, parts in zip(together, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(both, torch.cat(parts), rtol=0, atol=0)


@pytest.mark.parametrize(
    "params, context, more, expected",
    [
        ({"rope_type": "default"}, 4096, {}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, {}, 4096),
        (YARN, 32768, {}, 131072),                  # Qwen's cards add the scaling, not the length
        (YARN, 262144, {}, 262144),
        ({"rope_type": "yarn", "factor": 4.0}, 4096, {}, 4096),
        ({"rope_type": "yarn", "factor": 2.0}, 64, {"original_max_position_embeddings": 48}, 96),
    ],
)
def test_context_length_after_scaling(params, context, more, expected) -> None:
    assert build(params, context=context, **more).max_position == expected


@pytest.mark.parametrize(
    "params, message",
    [
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' is not supported; one of default"),
        ({"type": "su"}, "'su' is not supported"),
        ({"rope_type": "linear"}, "needs factor, a number > 0; got None"),
        ({"rope_type": "linear", "factor": "4"}, "needs factor, a number > 0; got '4'"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor 4.0 must exceed"),
        ({**YARN, "attention_factor": "1"}, "needs attention_factor, a number > 0; got '1'"),
        ({**YARN, "original_max_position_embeddings": "4k"}, "needs original_max_position"),
        ({"rope_type": "default", "rope_theta": -1.0}, "needs rope_theta, a number > 0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
    ],
)
def test_rope_that_is_not_supported_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(params)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim 63 must be even"):
        build({"rope_type": "default"}, head_dim=63)


CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
           "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_yarn_by_flag_equals_transformers_with_the_same_config(family: str, tmp_path: Path) -> None:
    """Logits of a prompt of twice the length that the model was trained for, which the flag stretches."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config_class, model_class = CLASSES[family]
    made = {"max_position_embeddings": 32, "rope_theta": 1e4, **shape}
    torch.manual_seed(3)
    theirs = model_class(config_class(
        **made, rope_parameters={**scaling, "rope_theta": 1e4}, attn_implementation="eager")).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.3)
    ids_T = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(4))

    def ours(**flags: object) -> torch.Tensor:
        (tmp_path / "config.json").write_text(json.dumps(
            {"model_type": family, "architectures": [model_class.__name__], **made}))
        config = files_of(from_options(str(tmp_path), {**flags, "load_format": "dummy"}).model).config
        model = registry.build(config, dtype=torch.float32, linear=lambda weight_OI, bias_O: (
            lambda x_TI: torch.nn.functional.linear(x_TI, weight_OI, bias_O)))
        for name, tensor in theirs.state_dict().items():
            model.load(name, tensor)
        model.finish()
        attend = Dense(model.reads, model.groups)
        return torch.cat([model.logits(model.forward(ids_T[part], torch.arange(64)[part], attend))
                          for part in (slice(40), slice(40, 64))])

    expected_TV = theirs(ids_T[None]).logits[0]
    torch.testing.assert_close(ours(rope_scaling=scaling), expected_TV, rtol=1e-4, atol=1e-4)
    also_TV = ours(hf_overrides={"rope_scaling": scaling})
    torch.testing.assert_close(also_TV, expected_TV, rtol=1e-4, atol=1e-4)
    assert (ours() - expected_TV).abs().max() > 1e-2, "the scaling makes a difference"
