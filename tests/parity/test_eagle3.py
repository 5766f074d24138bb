"""A layer of EAGLE-3 against its formula, on what transformers' Llama makes: random weights, f32, CPU.

    T tokens   D model dim   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_attend import Dense
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config, DeviceConfig, KVConfig, ModelConfig, ScheduleConfig
from penstock.exec.start.build import build_engine
from penstock.kernels.fused import layer
from penstock.model import registry
from penstock.model.base import LocalLayer
from penstock.model.eagle3 import Eagle3, read_eagle

D, N, K, H, WORDS, VOCAB, LAYERS, TOKENS = 32, 4, 2, 8, 23, 61, 6, 40
CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": D,
          "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": N, "num_key_value_heads": K,
          "head_dim": H, "vocab_size": VOCAB, "draft_vocab_size": WORDS, "rms_norm_eps": 1e-5,
          "rope_theta": 5000.0, "max_position_embeddings": 512}


def tensors() -> dict[str, Tensor]:
    """As its makers' files have them."""
    random = torch.Generator().manual_seed(4)
    at, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {"fc": (D, 3 * D), f"{at}.q_proj": (N * H, 2 * D), f"{at}.k_proj": (K * H, 2 * D),
              f"{at}.v_proj": (K * H, 2 * D), f"{at}.o_proj": (D, N * H), f"{mlp}.gate_proj": (48, D),
              f"{mlp}.up_proj": (48, D), f"{mlp}.down_proj": (D, 48), "lm_head": (WORDS, D)}
    norms = (*(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
             "norm")
    words = torch.randperm(VOCAB, generator=random)[:WORDS].sort().values
    return {**{f"{name}.weight": torch.randn(size, generator=random) * 0.3 for name, size in shapes.items()},
            **{f"{name}.weight": torch.rand(D, generator=random) + 0.5 for name in norms},
            "d2t": words - torch.arange(WORDS), "t2d": torch.isin(torch.arange(VOCAB), words)}


def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=N, num_key_value_heads=K, max_position_embeddings=512, initializer_range=0.3,
        tie_word_embeddings=False, rope_theta=10000.0)).eval()


def turned(x_TMH: Tensor, position_T: Tensor) -> Tensor:
    angle_TH = position_T[:, None] * (5000.0 ** (-torch.arange(0, H, 2) / H)).repeat(2)
    a, b = x_TMH.chunk(2, -1)
    return x_TMH * angle_TH.cos()[:, None] + torch.cat((-b, a), -1) * angle_TH.sin()[:, None]


def formula(w: dict[str, Tensor], token_TD: Tensor, hidden_TD: Tensor, position_T: Tensor) -> Tensor:
    """What goes into the last norm: arXiv:2503.01840, figure 5, with the two norms of its makers' code."""
    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (D,), w[f"{name}.weight"], 1e-5)
    both = torch.cat((norm(token_TD, "midlayer.input_layernorm"), norm(hidden_TD, "midlayer.hidden_norm")), 1)
    q, k, v = ((both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, H)) for name in "qkv")
    q, k = turned(q, position_T), turned(k, position_T)
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True,
                                         enable_gqa=True)[0].transpose(0, 1).flatten(1)
    x = hidden_TD + out @ w["midlayer.self_attn.o_proj.weight"].T
    fed = norm(x, "midlayer.post_attention_layernorm")
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (F.silu(fed @ gate.T) * (fed @ up.T)) @ down.T


@torch.inference_mode()
def test_eagle3_equals_its_formula() -> None:
    """Two drafts deep; the layers whose hidden states it reads are those that its makers take."""
    reference, w = target(), tensors()
    plain = lambda weight, bias: lambda x: F.linear(x, weight, bias)  # noqa: E731
    model = registry.build(reference.config.to_dict(), dtype=torch.float32, linear=plain)
    for name, tensor in reference.state_dict().items():
        model.load(name, tensor)
    model.finish()
    spec = read_eagle(CONFIG, registry.read_spec_of(reference.config.to_dict()), "here")
    eagle = Eagle3(spec, torch.float32, plain, layer.OP.use("reference"))
    for name, tensor in w.items():
        if eagle.wants(name):
            eagle.load(name.replace("midlayer.", "layers.0."), tensor)      # as newer files have it
    eagle.finish()
    model.take_drafts(eagle)

    ids_T = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(7))
    states = reference(ids_T[None], output_hidden_states=True).hidden_states
    made_TD = torch.cat([states[i][0] for i in (2, LAYERS // 2, LAYERS - 3)], 1) @ w["fc.weight"].T
    last_TD = model.forward(ids_T, torch.arange(TOKENS), Dense(model.reads))
    torch.testing.assert_close(model.made(last_TD), made_TD, rtol=2e-5, atol=1e-4)
    tokens_TD, hidden_TD = reference.model.embed_tokens(ids_T[1:]), made_TD[:-1]
    attend, ids = Dense({LocalLayer(0): eagle.reads}), ids_T[1:]
    for first in (1, TOKENS):
        position_T = torch.arange(1, 1 + len(tokens_TD))
        want_TD = formula(w, tokens_TD, hidden_TD, position_T)
        got_TD = model.draft(ids, hidden_TD[first - 1:], position_T[first - 1:], attend)
        torch.testing.assert_close(got_TD, want_TD[first - 1:], rtol=2e-5, atol=1e-4)
        word = (F.rms_norm(want_TD[-1], (D,), w["norm.weight"], 1e-5) @ w["lm_head.weight"].T).argmax()
        ids = word[None] + w["d2t"][word]
        assert w["t2d"][ids] and model.guess(got_TD[-1:])[1] == ids
        tokens_TD = torch.cat((tokens_TD, reference.model.embed_tokens(ids)))
        hidden_TD = torch.cat((hidden_TD, got_TD[-1:]))


@torch.inference_mode()
def test_what_bench_trains_is_what_an_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/eagle3.py: three drafts behind a token in the middle; names and shapes are those of `load`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    config, words = LlamaConfig(**CONFIG), tensors()["d2t"] + torch.arange(WORDS)
    torch.manual_seed(2)
    trained = importlib.import_module("eagle3").Eagle(config, words)
    for weight in trained.parameters():
        torch.nn.init.uniform_(weight, -0.4 if weight.ndim > 1 else 0.5, 0.4 if weight.ndim > 1 else 1.5)
    spec = read_eagle(CONFIG, registry.read_spec_of(target().config.to_dict()), "here")
    eagle = Eagle3(spec, torch.float32, lambda weight, bias: lambda x: F.linear(x, weight, bias),
                   layer.OP.use("reference"))
    written = trained.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {
        **dict(eagle.shapes()), "d2t": (WORDS,)}
    for name, tensor in written.items():
        eagle.load(name, tensor)
    eagle.finish()
    assert eagle.rope is not None

    token_ED, tapped_ED = torch.randn(TOKENS, D), torch.randn(TOKENS, 3 * D)
    position_E = torch.arange(1, 1 + TOKENS)
    rope = LlamaRotaryEmbedding(config)(token_ED, position_E[None])
    every = [x[0] for x in trained(token_ED[None], tapped_ED[None], rope)]
    first, last, attend = 0, TOKENS // 2, Dense({LocalLayer(0): eagle.reads})
    hidden = eagle.made(tapped_ED, tapped_ED.split(D, 1))[:last]
    for want_ED in every:
        angles = eagle.rope.angles(position_E[first:last], torch.float32)
        hidden = eagle(token_ED[first:last], hidden, *angles, attend)
        torch.testing.assert_close(hidden, want_ED[first:last], rtol=2e-5, atol=1e-4)
        first, last, hidden = last, last + 1, hidden[-1:]
        word = trained.lm_head(trained.norm(hidden)).argmax()
        assert int(eagle.guess(hidden, lambda x: x)[1]) == int(words[word])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and what drafts for it."""
    of, drafts = tmp_path / "model", tmp_path / "drafts"
    target().save_pretrained(of)
    drafts.mkdir()
    (drafts / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), drafts / "model.safetensors")
    return of, drafts


def built(of: Path, drafts: Path) -> Any:
    return build_engine(Config(
        model=ModelConfig(model=str(of), dtype="float32"), kv=KVConfig(kv_cache_memory_bytes=1 << 20,
                                                                       kv_offloading_size="0"),
        schedule=ScheduleConfig(max_num_batched_tokens=64, speculative_method="eagle3", speculative_model=str(drafts)),
        device=DeviceConfig(device="cpu", threads=1)), str)


def test_an_engine_is_built_with_what_a_folder_drafts(folders: tuple[Path, Path]) -> None:
    engine = built(*folders)
    groups = {group.name: group for group in engine.core_config.groups}
    assert list(groups) == ["full", "draft", "draft_hidden"] and engine.core_config.draft_tokens == 3
    assert engine.executor._ranks[0]._drafts.layer.name == "eagle3"


@pytest.mark.parametrize(("given", "said"), [
    ({"vocab_size": VOCAB + 1}, f"its vocab_size is {VOCAB + 1}, the model's is {VOCAB}: give a folder that"),
    ({"hidden_size": 2 * D}, f"its hidden_size is {2 * D}, the model's is {D}"),
    ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size = 62"), ({"num_hidden_layers": 2}, "supported: 1"),
    ({"norm_before_residual": True}, "norm_before_residual = True"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, "the model has layers 0 to 5")])
def test_a_folder_for_another_model_is_refused_before_weights(
        folders: tuple[Path, Path], given: dict[str, Any], said: str) -> None:
    of, drafts = folders
    (drafts / "config.json").write_text(json.dumps({**CONFIG, **given}))
    (drafts / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=said):
        built(of, drafts)


def test_a_folder_without_a_tensor_says_which(folders: tuple[Path, Path]) -> None:
    own = tensors()
    del own["d2t"]
    save_file(own, folders[1] / "model.safetensors")
    with pytest.raises(ConfigError, match="the draft lacks 1 tensors: d2t"):
        built(*folders)
