"""The text of a multimodal repository: its config and its names, as if it were a model of its own.

`unwrap` runs where a config.json is read, so that families, memory sizing and digests see a text config and
nothing else. Knows fields and names, neither tensors nor families.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.base.errors import ConfigError, show

FIELDS = ("text_config", "llm_config")
# Fields that one level or the other may have: where both do, they agree.
EITHER = ("quantization_config", "torch_dtype", "dtype", "eos_token_id")
_TEXT = ("model.", "lm_head.", "mtp.", "backbone.")
_INNER = ("model.language_model.", "language_model.", "model.text_model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One `model_type` that has a language model inside.

    texts      model_type of the text; the first is assumed where the config names none
    towers     beginnings of names that are not the text's, beside those that no text has
    flat       older configs have the text's fields at the top level, without text_config
    defaults   the values of transformers' text class for fields that published configs leave out
    """

    texts: tuple[str, ...]
    towers: tuple[str, ...] = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.",
                               "mm_projector.", "audio_tower.", "embed_vision.", "embed_audio.")
    flat: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, name: str) -> str | None:
        """Return the text model's name for a tensor of the files, None for one of a tower."""
        for inner in _INNER:
            if name.startswith(inner):
                rest = name.removeprefix(inner)
                known = rest if rest.startswith(_TEXT) else f"model.{rest}"
                return known.replace("model.blocks.", "model.layers.", 1)       # as transformers saves Kimi's
        if not name.startswith(_TEXT) or name.removeprefix("model.").startswith(self.towers):
            return None
        return name


_GEMMA3 = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "max_position_embeddings": 131072}
_INTERN = Wrapper(texts=("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"),
                  towers=("vision_", "multi_modal_projector.", "mlp1."))
_NEMOTRON = Wrapper(texts=("nemotron_h",))
WRAPPERS: dict[str, Wrapper] = {
    "qwen3_5": Wrapper(texts=("qwen3_5_text",)),
    "qwen3_5_moe": Wrapper(texts=("qwen3_5_moe_text",)),
    "qwen3_vl": Wrapper(texts=("qwen3_vl_text",)),
    "qwen3_vl_moe": Wrapper(texts=("qwen3_vl_moe_text",)),
    "qwen2_5_vl": Wrapper(texts=("qwen2_5_vl_text",), flat=True),
    "gemma3": Wrapper(texts=("gemma3_text",), defaults=_GEMMA3),
    "gemma4": Wrapper(texts=("gemma4_text",)),
    "kimi_k25": Wrapper(texts=("kimi_k2", "deepseek_v3")),
    "minimax_m3_vl": Wrapper(texts=("minimax_m3_vl_text", "minimax_m3")),
    "mistral3": Wrapper(texts=("mistral", "ministral3", "mistral4")),
    "internvl": _INTERN,
    "internvl_chat": _INTERN,
    "NemotronH_Nano_VL_V2": _NEMOTRON,
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
}


_MINIMAX = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))
# model_type of a text -> parts of names in published files, and what they are here.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "minimax_m2": _MINIMAX, "minimax_m3": _MINIMAX, "minimax_m3_vl_text": _MINIMAX,
}


def _agree(above: Any, below: Any) -> bool:
    """Whether the outer level says what the text's does, or names more tokens, as Gemma 4's ends of answers."""
    return above == below or (isinstance(above, list) and below in above)


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a config has a text model inside, of a type that is supported or not."""
    return config.get("model_type") in WRAPPERS or any(isinstance(config.get(name), dict) for name in FIELDS)


def unwrap(config: Mapping[str, Any], where: str,
           heads: bool | None) -> tuple[dict[str, Any], Wrapper | None]:
    """Return the text's config and its wrapper; the config as it is, and None, of a model that is text.

    heads    whether the files hold lm_head.weight: the levels' tie_word_embeddings disagree in published
             files, whose classes have other defaults than their texts. None: there are no files
    Raises   ConfigError: a text that is not supported, levels that contradict each other
    """
    kind = str(config.get("model_type") or "")
    inner = next((name for name in FIELDS if isinstance(config.get(name), dict)), None)
    wrapper = WRAPPERS.get(kind)
    if inner is None and not (wrapper and wrapper.flat):
        if wrapper is not None:
            raise ConfigError(f"{where}: model_type {show(kind)} has its text model in "
                              f"{' or '.join(FIELDS)}, an object: found {show(config.get(FIELDS[0]))}")
        return dict(config), None
    text = dict(config[inner]) if inner else {k: v for k, v in config.items() if k != "model_type"}
    named = text.get("model_type")
    if wrapper is None:
        raise ConfigError(f"{where}: model_type {show(kind)}, whose text is {show(named or '(absent)')}, is "
                          f"not supported; the text is read of {', '.join(WRAPPERS)}")
    family = wrapper.texts[0] if named is None else named
    if family not in wrapper.texts:
        raise ConfigError(f"{where}: the text of {kind}, model_type {show(named)}, is not supported; one of "
                          f"{', '.join(wrapper.texts)}")
    text.pop("architectures", None)             # of a class that the wrapper stands for
    text = {**wrapper.defaults, **text, "model_type": family}
    for name in EITHER:
        above, below = config.get(name), text.get(name)
        if above is not None and below is not None and not _agree(above, below):
            raise ConfigError(f"{where}: {name} is {show(above)} and, in {inner}, {show(below)}: they must "
                              "agree")
        if above is not None:
            text[name] = above
    if heads is not None:
        text["tie_word_embeddings"] = not heads
    elif text.get("tie_word_embeddings") is None and "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return text, wrapper
