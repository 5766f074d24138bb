"""GGUF metadata and tensor names in Hugging Face's terms: the config dict and the name of each tensor.

Follows llama.cpp's `convert_hf_to_gguf.py` backwards for the architectures in `ARCHITECTURES`. Knows no
tensor values but the RoPE factors, which Hugging Face keeps in the config.
"""
from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import open_regular
from penstock.model.weights.gguf_file import GGUFHeader

# GGUF architecture -> (model_type, class name in config.json)
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
ROPE_FREQS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}
# Where these differ; and what the converter adds to the weights of norms.
_GEMMA = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
          "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_PLUS = 1.0
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?([a-z_]+)\.(weight|bias)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class HFName:
    """Where a GGUF tensor goes. `experts`: `name` holds an `{}` for the index along axis 0.

    `rope_heads` > 0: rows of that many heads are interleaved for RoPE and must be put back. `plus`: what was
    added to the values.
    """

    name: str
    experts: bool = False
    rope_heads: int = 0
    plus: float = 0.0


def hf_name(name: str, config: Mapping[str, Any], where: str) -> HFName:
    """The Hugging Face name of GGUF tensor `name`. Raises ConfigError on one that has none."""
    match = _NAME.match(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    gemma = config["model_type"] == "gemma3_text"
    plus = _GEMMA_PLUS if gemma and part.endswith("norm") else 0.0
    if layer is None and part in _TOP:
        return HFName(f"{_TOP[part]}.{kind}", plus=plus)
    if layer is not None and int(layer) < config["num_hidden_layers"]:
        prefix = f"model.layers.{int(layer)}"
        if gemma and part in _GEMMA:
            return HFName(f"{prefix}.{_GEMMA[part]}.{kind}", plus=plus)
        if config["model_type"] == "gpt_oss" and (part, kind) == ("attn_sinks", "weight"):
            return HFName(f"{prefix}.self_attn.sinks")
        if config["model_type"] == "gpt_oss" and part in _GPT_OSS:
            return HFName(f"{prefix}.{_GPT_OSS[part]}.{kind}")
        if part in _BLOCK:
            heads = {"attn_q": config["num_attention_heads"],
                     "attn_k": config["num_key_value_heads"]}.get(part, 0)
            # Only llama's converter interleaves: Qwen's GGUFs use RoPE in halves, as Hugging Face.
            rope_heads = heads if config["model_type"] == "llama" else 0
            return HFName(f"{prefix}.{_BLOCK[part]}.{kind}", rope_heads=rope_heads, plus=plus)
        kinds = {"qwen3_moe": ("weight",), "gpt_oss": ("weight", "bias")}.get(config["model_type"], ())
        if part in _EXPERTS and kind in kinds:
            return HFName(f"{prefix}.mlp.experts.{{}}.{_EXPERTS[part]}.{kind}", experts=True)
    raise ConfigError(f"{where}: tensor {show(name)} is not part of a {config['model_type']} model "
                      f"with {config['num_hidden_layers']} layers that penstock knows")


def read_gguf_config(path: Path, header: GGUFHeader) -> dict[str, Any]:
    """`hf_config` of the file at `path`, with the RoPE factors read from it. Raises ConfigError."""
    stored = header.tensors.get(ROPE_FREQS)
    if stored is None:
        return hf_config(header, str(path))
    if stored.block != "F32" or stored.num_bytes > 4096:
        raise ConfigError(f"{path}: {ROPE_FREQS} is {stored.block} {stored.shape}; expected a few F32")
    factors = array("f")
    file, _ = open_regular(path)
    with file:
        file.seek(stored.begin)
        factors.frombytes(file.read(stored.num_bytes))
    return hf_config(header, str(path), factors)


def hf_config(header: GGUFHeader, where: str,
              rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """config.json of the model in `header`; `rope_factors` are the values of `ROPE_FREQS`.

    Raises ConfigError on an unknown architecture, a missing or impossible key, or a feature that no
    family computes (it would be silently wrong text).
    """
    meta = _Meta(header.metadata, where)
    if meta.get("split.count", int, 1) != 1:
        raise ConfigError(f"{where}: one part of a split GGUF; join the parts first with "
                          "llama.cpp's `llama-gguf-split --merge`")
    architecture = meta.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{where}: GGUF architecture {show(architecture)} is not supported; "
                          f"supported are {', '.join(ARCHITECTURES)}")
    meta.architecture = architecture
    model_type, class_name = ARCHITECTURES[architecture]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{where}: there is no tensor 'token_embd.weight': not a language model")
    hidden, heads = meta.arch("embedding_length", int), meta.arch("attention.head_count", int)
    if heads < 1:
        raise ConfigError(f"{where}: {heads} attention heads")
    head_dim = meta.arch("attention.key_length", int, hidden // heads)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.arch("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.arch("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "intermediate_size": (meta.arch("expert_feed_forward_length", int)
                              if f"{architecture}.expert_feed_forward_length" in header.metadata and
                              f"{architecture}.feed_forward_length" not in header.metadata
                              else meta.arch("feed_forward_length", int)),
        "hidden_act": "silu",
        "rms_norm_eps": meta.arch("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": meta.arch("context_length", int),
        "rope_theta": meta.arch("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors and architecture != "qwen2",
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "torch_dtype": "float32",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": list(gguf_eos_ids(header.metadata, where)) or None,
    }
    if architecture == "gemma3":
        config |= _gemma3(meta, config)
    if architecture == "gpt-oss":
        config |= _gpt_oss(meta, config)
    _refuse_unknown_features(meta, config)
    if architecture == "qwen3moe":
        config |= {
            "num_experts": meta.arch("expert_count", int),
            "num_experts_per_tok": meta.arch("expert_used_count", int),
            "moe_intermediate_size": meta.arch("expert_feed_forward_length", int),
            # Not in the metadata: llama.cpp always normalises for this architecture.
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }
    if rope_factors is not None:
        config["rope_scaling"] = llama3_rope(rope_factors, config["rope_theta"], head_dim, where)
    check_config(config, where)
    return config


def _gemma3(meta: _Meta, config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp has in its code for this architecture, and no file says: which layers have the window,
    their RoPE, and the scale of scores, which is another in the largest model (27B)."""
    largest = config["num_hidden_layers"] == 62
    return {
        "sliding_window": meta.arch("attention.sliding_window", int), "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (config["hidden_size"] // config["num_attention_heads"] if largest else
                                  config["head_dim"]),
        "final_logit_softcapping": meta.arch("final_logit_softcapping", float, 0.0) or None,
    }


def _gpt_oss(meta: _Meta, config: dict[str, Any]) -> dict[str, Any]:
    """What no file says: how experts gate, that every other layer has the window, and that YaRN's limits are
    not rounded."""
    scaling = config["rope_scaling"]
    return {
        "sliding_window": meta.arch("attention.sliding_window", int), "layer_types": None,
        "num_experts": meta.arch("expert_count", int),
        "num_experts_per_tok": meta.arch("expert_used_count", int),
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
    }


def gguf_eos_ids(metadata: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The ids that end an answer: end of sequence, of turn, of message. Raises ConfigError."""
    meta = _Meta(metadata, where)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [meta.get(key, int, -1) for key in keys]
    # Files from before the `eot` key name only the end of the text; a chat then never ends.
    tokens = meta.get("tokenizer.ggml.tokens", list, [])
    ids += [tokens.index(token) for token in _TURN_ENDS if token in tokens]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))


# config.json keys that are sizes; the largest real values are under 2**24.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "intermediate_size", "moe_intermediate_size", "max_position_embeddings",
          "num_experts", "num_experts_per_tok")
_POSITIVE = ("rms_norm_eps", "rope_theta")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuses sizes that no model has, before they reach a family. Raises ConfigError."""
    kind, classes = config.get("model_type") or "", config.get("architectures") or []
    if (not isinstance(kind, str) or not isinstance(classes, list) or not (kind or classes)
            or not all(isinstance(name, str) for name in classes)):
        raise ConfigError(f"{where}: model_type {show(kind)} and architectures {show(classes)}: not the "
                          "config of a language model")
    for key in _SIZES:
        value, least = config.get(key), 0 if key == "num_experts" else 1        # none: a dense Qwen3-Next
        if value is not None and (type(value) is not int or not least <= value <= 1 << 28):
            raise ConfigError(f"{where}: {key} is {show(value)}; expected a positive integer")
    for key in _POSITIVE:
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < 1e30):
            raise ConfigError(f"{where}: {key} is {show(value)}; expected a positive number")


class _Meta:
    """Typed access to the metadata; a per-layer array counts as a number when all layers agree."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where, self.architecture = metadata, where, ""

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self.metadata.get(key, default)
        if value is ...:
            raise ConfigError(f"{self.where}: the metadata has no {key!r}")
        if isinstance(value, array) and len(value) and all(v == value[0] for v in value):
            value = value[0]
        if value is not default:
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ConfigError(f"{self.where}: {key} is {show(value)}; expected "
                                  f"{'one ' if isinstance(value, array) else ''}{kind.__name__}")
        return value

    def arch(self, key: str, kind: type, default: Any = ...) -> Any:
        return self.get(f"{self.architecture}.{key}", kind, default)


def _refuse_unknown_features(meta: _Meta, config: dict[str, Any]) -> None:
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    shared_experts = meta.arch("expert_shared_count", int, 0)
    scale = meta.arch("attention.scale", float, 0.0)
    refused = (
        ("partial RoPE", meta.arch("rope.dimension_count", int, head_dim) != head_dim),
        ("values narrower than keys", meta.arch("attention.value_length", int, head_dim) != head_dim),
        ("a sliding window", "sliding_window" not in config
         and 0 < meta.arch("attention.sliding_window", int, 0) < context),
        ("its own attention scale", scale != 0.0 and abs(scale * head_dim ** 0.5 - 1) > 1e-3),
        ("clamped queries", meta.arch("attention.clamp_kqv", float, 0.0) != 0.0),
        ("a logit scale", meta.arch("logit_scale", float, 1.0) not in (0.0, 1.0)),
        ("shared experts", shared_experts != 0),
        ("experts", config["model_type"] not in ("qwen3_moe", "gpt_oss")
         and meta.arch("expert_count", int, 0) != 0),
    )
    for feature, found in refused:
        if found:
            raise ConfigError(f"{meta.where}: this {config['model_type']} model has {feature}, "
                              "which is not supported")


def _rope_scaling(meta: _Meta) -> dict[str, Any] | None:
    kind = meta.arch("rope.scaling.type", str, None)
    old = meta.arch("rope.scale_linear", float, 0.0)
    if kind is None and old not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": old}
    if kind in (None, "none"):
        return None
    factor = meta.arch("rope.scaling.factor", float, 1.0)
    if not 0 < factor < 1e6:
        raise ConfigError(f"{meta.where}: RoPE scaling factor {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{meta.where}: RoPE scaling {show(kind)} is not supported; linear, yarn and "
                          "llama3 are")
    if meta.arch("rope.scaling.yarn_log_multiplier", float, 0.0) != 0.0:
        raise ConfigError(f"{meta.where}: YaRN with a log multiplier is not supported")
    scaling = {"rope_type": "yarn", "factor": factor,
               "beta_fast": meta.arch("rope.scaling.yarn_beta_fast", float, 32.0),
               "beta_slow": meta.arch("rope.scaling.yarn_beta_slow", float, 1.0)}
    original = meta.arch("rope.scaling.original_context_length", int, 0)
    if original > 0:
        scaling["original_max_position_embeddings"] = original
    # llama.cpp multiplies the two; Hugging Face's attention_factor is their product.
    attention = meta.arch("rope.scaling.attn_factor", float, 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def llama3_rope(factors: Sequence[float], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """The `rope_scaling` whose division of the inverse frequencies is `factors`, head_dim / 2 of them.

    GGUF stores the result, Hugging Face its parameters. Tries those of Llama 3.1 to 3.3, then solves
    for them: between the two bounds 1/factor is linear in the frequency. Raises ConfigError if no
    parameters reproduce the factors to 1e-3.
    """
    largest = max(factors, default=0.0)
    if len(factors) != head_dim // 2 or not 1.0 <= min(factors) <= largest < 1e6:
        raise ConfigError(f"{where}: {ROPE_FREQS} has {len(factors)} factors up to {largest}; expected "
                          f"{head_dim // 2} from 1")
    freqs = [theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(len(factors))]
    guesses = [(1.0, 4.0, 8192.0)]
    between = [(x, (1 / f - 1 / largest) / (1 - 1 / largest))
               for x, f in zip(freqs, factors, strict=True) if 1.0001 < f < largest * 0.9999]
    if len(between) >= 2:
        (x0, s0), (x1, s1) = between[0], between[-1]
        slope = (s0 - s1) / (x0 - x1)
        offset = s0 - slope * x0
        if slope > 0 > offset:
            # Only ratios are determined: low_freq_factor is 1 by choice.
            guesses.append((1.0, 1.0 - 1.0 / offset, -slope / offset))
    for low, high, original in guesses:
        made = [_llama3_factor(x, largest, low, high, original) for x in freqs]
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(made, factors, strict=True)):
            return {"rope_type": "llama3", "factor": largest, "low_freq_factor": low,
                    "high_freq_factor": high, "original_max_position_embeddings": round(original)}
    raise ConfigError(f"{where}: {ROPE_FREQS} is not a llama3 RoPE scaling; no other is supported")


def _llama3_factor(freq: float, factor: float, low: float, high: float, original: float) -> float:
    smooth = min(max((original * freq - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
