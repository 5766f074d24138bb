"""Which configs are built, which are refused, and what loading does with names, shapes and memory."""
from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.transformer import Transformer

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
}


def plain_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
    return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)


def build(changes: dict[str, Any] | None = None, base: dict[str, Any] = LLAMA, **options: Any):
    options = {"dtype": torch.float32, "linear": plain_linear} | options
    return registry.build({**base, **(changes or {})}, **options)


def as_family(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, "architectures": None, **changes}


REFUSED = {
    "another type": ({"model_type": "gpt2"}, "'gpt2' is not supported; one of llama"),
    "no type": ({"model_type": None, "architectures": None}, r"'\(absent\)' is not supported"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "does not go with"),
    "type and class differ": ({"architectures": ["Qwen2ForCausalLM"]}, "does not go with"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .* supported: 'silu'"),
    "logit scale": ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved = True"),
    "bidirectional": ({"is_causal": False}, "is_causal = False"),
    "window in llama": ({"sliding_window": 32}, "sliding_window = 32 .*none in transformers"),
    "window types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "mistral's types differ": (
        as_family("mistral", sliding_window=16, layer_types=["full_attention", "sliding_attention"]),
        "layer_types .* all layers are of one type",
    ),
    "qwen2's types without its switch": (
        as_family("qwen2", sliding_window=16, layer_types=["full_attention", "sliding_attention"]),
        "use_sliding_window = None",
    ),
    "window of no tokens": (as_family("mistral", sliding_window=0), "sliding_window = 0"),
    "fewer types than layers": (as_family("qwen2", layer_types=["full_attention"]), "layer_types"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "size as text": ({"hidden_size": "16"}, "hidden_size = '16' .* integer >= 1"),
    "size zero": ({"vocab_size": 0}, "vocab_size = 0"),
    "flag as text": ({"attention_bias": "no"}, "attention_bias = 'no' .* true or false"),
    "negative eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
    "no such type": ({"torch_dtype": "float7"}, "torch_dtype = 'float7'"),
    "a type that is no text": ({"dtype": 7}, "dtype = 7 "),
    "end past the vocabulary": ({"eos_token_id": [1, 10**6]}, "eos_token_id = .1, 1000000. .* below vocab"),
    "start past the vocabulary": ({"bos_token_id": 10**6}, "bos_token_id = 1000000"),
    "empty architectures": ({"architectures": []}, r"architectures = \[\] is not supported"),
    "architectures as text": ({"architectures": "LlamaForCausalLM"}, "architectures = 'Llama"),
    "size past counting": ({"vocab_size": 10**30}, "vocab_size = 1.* at most 2147483647"),
    "theta past counting": ({"rope_theta": 1e300}, "rope_theta = 1e.300"),
    "yarn past counting": ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor 1e.300: at"),
    "odd groups": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
    "odd heads": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "without head_dim"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_would_be_wrong_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        build(changes)


STATED = {
    "norms of heads": ({"use_qk_norm": True, "query_pre_attn_scalar": 4}, MOE),
    "norms of heads, dense": (as_family("qwen3", use_qk_norm=True), LLAMA),
    "the usual scale": ({"attention_multiplier": 4 ** -0.5, "no_rope_layers": [1, 1]}, LLAMA),
}


@pytest.mark.parametrize("case", STATED)
def test_a_field_that_states_what_the_family_does_is_read(case: str) -> None:
    """Qwen3-Coder-480B says use_qk_norm: true. The same fields with another meaning stay refused."""
    changes, base = STATED[case]
    assert build({"head_dim": 4, **changes}, base)
    for name, value in (("use_qk_norm", True), ("attention_multiplier", 0.3), ("no_rope_layers", [1, 0]),
                        ("query_pre_attn_scalar", 5)):
        with pytest.raises(ConfigError, match=f"{name} = "):
            build({"head_dim": 4, name: value}, LLAMA)


@pytest.mark.parametrize("changes, windows", [
    (as_family("mistral", max_position_embeddings=32768), (4096, 4096)),
    (as_family("mistral", sliding_window=16), (16, 16)),
    (as_family("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1), (0, 16)),
    (as_family("qwen3", use_sliding_window=True, sliding_window=16), ()),        # layers 28 and on
    (as_family("qwen3", use_sliding_window=True, sliding_window=None, max_window_layers=0), ()),
    (as_family("qwen3_moe", use_sliding_window=True, sliding_window=16), (16, 16)),
])
def test_windows_are_as_in_transformers(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    base = MOE if changes["model_type"] == "qwen3_moe" else LLAMA
    groups = build(changes, base).groups
    assert {layer: g.window for g in groups for layer in g.layers} == dict(enumerate(windows or (0, 0)))


def test_experts_config_is_checked() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok = 5 is more than"):
        build({"num_experts_per_tok": 5}, MOE)
    with pytest.raises(ConfigError, match="num_local_experts = 8"):
        build({"num_local_experts": 8}, MOE)
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        build({"mlp_only_layers": "0"}, MOE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": None},
        {"architectures": None},
        {"sliding_window": 64},                           # as long as the context: never felt
        as_family("mistral", sliding_window=None),
        as_family("qwen2", use_sliding_window=False, sliding_window=16, max_window_layers=1),
        as_family("qwen3", layer_types=["full_attention", "full_attention"]),
        {"quantization_config": None, "pretraining_tp": 2, "attention_dropout": 0.1},
    ],
)
def test_config_that_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    assert build(changes).vocab_size == 40


def test_model_says_its_kv_shape_before_loading() -> None:
    model = build({"head_dim": 6})
    [group] = model.groups
    assert (group.layers, group.num_kv_heads, group.head_dim, group.planes) == ((0, 1), 2, 6, 2)
    assert (model.reads[0].num_heads, model.reads[0].scale) == (4, 6**-0.5)
    assert model.max_position == 64
    absent = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert build(base=absent).groups[0].num_kv_heads == 4
    assert build(as_family("qwen3")).groups[0].head_dim == 128


@pytest.mark.parametrize("base", [LLAMA, {**LLAMA, "tie_word_embeddings": False}, MOE])
def test_dummy_tensors_are_complete_seeded_and_sane(base: dict[str, Any]) -> None:
    first = dict(registry.dummy_tensors(base, seed=3))
    again = dict(registry.dummy_tensors(base, seed=3))
    other = dict(registry.dummy_tensors(base, seed=4))
    assert first.keys() == again.keys() == dict(registry.tensor_shapes(base)).keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(0.02, rel=0.2)
    assert (first["model.layers.0.input_layernorm.weight"] == 1).all()
    model = build(base=base)
    for name, tensor in first.items():
        model.load(name, tensor)
    model.finish()
    hidden = model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), lambda _, q, *others, **more: q)
    assert model.logits(hidden).isfinite().all()


def test_missing_tensors_are_listed() -> None:
    model = build()
    for name, tensor in registry.dummy_tensors(LLAMA, seed=0):
        if not name.endswith("v_proj.weight"):
            model.load(name, tensor)
    with pytest.raises(ConfigError, match=r"lacks 2 tensors: .*\.0.*v_proj.weight, .*\.1.*v_proj"):
        model.finish()


def test_wrong_tensors_are_refused_by_name() -> None:
    model = build()
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ConfigError, match=r"k_proj.weight' has shape \[16, 8\].*asks for \[8, 16\]"):
        model.load(name, torch.zeros(16, 8))
    with pytest.raises(ConfigError, match="is int8; supported"):
        model.load(name, torch.zeros(8, 16, dtype=torch.int8))
    model.load(name, torch.zeros(8, 16))
    with pytest.raises(ConfigError, match="twice"):
        model.load(name, torch.zeros(8, 16))
    for unknown in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias"):
        with pytest.raises(ConfigError, match=f"{unknown}', which a model of this"):
            model.load(unknown, torch.ones(8))
    with pytest.raises(ConfigError, match=r"lm_head.weight' has shape"):
        model.load("lm_head.weight", torch.zeros(3, 3))


def test_inv_freq_buffers_of_old_llama_files_are_ignored() -> None:
    build().load("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(2))


def load_tied(order: list[str], tensors: dict[str, torch.Tensor]) -> Transformer:
    model = build()
    for name in order:
        model.load(name, tensors[name])
    model.finish()
    return model


def test_explicit_head_of_a_tied_model_is_treated_as_transformers_does() -> None:
    tensors = dict(registry.dummy_tensors(LLAMA, seed=0))
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    x = torch.randn(3, 16)
    names = list(tensors)
    tied = load_tied(names, tensors).logits(x)
    assert torch.equal(tied, x @ tensors[embed].T)
    equal = tensors | {head: tensors[embed].clone()}
    for order in ([head, *names], [*names, head]):
        assert torch.equal(load_tied(order, equal).logits(x), tied)
        other = tensors | {head: torch.randn(40, 16)}           # differs: the head of the file wins
        torch.testing.assert_close(load_tied(order, other).logits(x), x @ other[head].T)
    moved = {name: tensor for name, tensor in equal.items() if name != embed}
    assert torch.equal(load_tied(list(moved), moved).logits(x), tied)      # only the head in the file


def test_each_weight_is_packed_once_as_soon_as_it_is_complete() -> None:
    packed: list[tuple[tuple[int, ...], bool]] = []

    def spy(weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        packed.append((tuple(weight_OI.shape), bias_O is not None))
        return plain_linear(weight_OI, bias_O)

    config = {**LLAMA, "model_type": "qwen2", "architectures": None}
    model = registry.build(config, dtype=torch.bfloat16, linear=spy)
    counts = {}
    for name, tensor in registry.dummy_tensors(config, seed=0):
        model.load(name, tensor)
        counts[name] = len(packed)
    layer = "model.layers.0."
    assert counts[layer + "self_attn.q_proj.bias"] == 0
    assert counts[layer + "self_attn.v_proj.bias"] == 1 and packed[0] == ((32, 16), True)
    assert counts[layer + "self_attn.o_proj.weight"] == 2 and packed[1] == ((16, 16), False)
    assert counts[layer + "mlp.up_proj.weight"] == 3 and packed[2] == ((48, 16), False)
    model.finish()
    assert len(packed) == 2 * 4 + 1 and packed[-1] == ((40, 16), False)


def test_loading_keeps_neither_sources_nor_fused_copies() -> None:
    """With a packer that copies, what stays alive is the packed weight only."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def copying(weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        alive.append(weakref.ref(weight_OI))
        return plain_linear(weight_OI.clone(), bias_O)

    config = {**LLAMA, "tie_word_embeddings": False}
    model = registry.build(config, dtype=torch.float32, linear=copying)
    for name, tensor in registry.dummy_tensors(config, seed=0):
        alive.append(weakref.ref(tensor))
        model.load(name, tensor)
        del tensor
        assert not any(ref() is not None for ref in alive)
    model.finish()


def test_source_may_be_overwritten_after_load() -> None:
    model, again = build(), build()
    for name, tensor in registry.dummy_tensors(LLAMA, seed=0):
        again.load(name, tensor.clone())
        model.load(name, tensor)
        tensor.fill_(9.0)
    model.finish()
    again.finish()
    x = torch.randn(2, 16)
    assert torch.equal(model.logits(x), again.logits(x))
    step = (torch.tensor([1, 2]), torch.tensor([0, 1]), lambda _, q, *others, **more: q)
    assert torch.equal(model.forward(*step), again.forward(*step))
