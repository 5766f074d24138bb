"""A config.json, read field by field: a missing or wrong field is a ConfigError that names it.

Owns the checks that every family shares; knows no family. Fields that transformers does not read
for a family are free, except those of NEUTRAL: a model that sets one needs code that is not here.
"""
from __future__ import annotations

from typing import Any, NoReturn

from penstock.config.base.errors import ConfigError

REQUIRED = -1
SIZE_MAX = 2**31 - 1
NUMBER_MAX = 1e12
DTYPES = (None, "auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Field -> the values that change nothing. Anything else would be a silently different model.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
}


class Fields:
    """Typed reads of one config. A null counts as absent, as in transformers."""

    def __init__(self, values: dict[str, Any], family: str) -> None:
        self.values = values
        self.family = family
        for name, neutral in NEUTRAL.items():
            if values.get(name) not in neutral:
                self.refuse(name, f"{self.family} is supported without it")
        for name in ("torch_dtype", "dtype"):
            kind = values.get(name)
            if (kind.removeprefix("torch.") if isinstance(kind, str) else kind) not in DTYPES:
                self.refuse(name, f"one of {', '.join(d for d in DTYPES if d)}")
        for name in TOKENS:
            given, vocab = values.get(name), values.get("vocab_size")
            ids = given if isinstance(given, list) else [given]
            if isinstance(vocab, int) and any(isinstance(i, int) and i >= vocab for i in ids):
                self.refuse(name, f"token ids are below vocab_size = {vocab}")

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raises ConfigError: the field, what it holds, what is supported."""
        raise ConfigError(
            f"config.json: {name} = {self.values.get(name)!r} is not supported "
            f"for model_type {self.family!r}; {supported}"
        )

    def size(self, name: str, default: int = REQUIRED, *, least: int = 1) -> int:
        """An integer >= `least`. Raises ConfigError when it is absent and has no default."""
        value = self.values.get(name)
        if value is None:
            if default == REQUIRED:
                raise ConfigError(f"config.json: {name} is missing (model_type {self.family!r})")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, f"it must be an integer >= {least}")
        if value > SIZE_MAX:
            self.refuse(name, f"it must be at most {SIZE_MAX}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(name, "it must be a number > 0")
        if value > NUMBER_MAX:
            self.refuse(name, f"it must be at most {NUMBER_MAX:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "it must be true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "it must be an object")
        return value

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers, empty when absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self.refuse(name, "it must be a list of layer numbers")
        return tuple(value)

    def refuse_window(self, max_position: int, *, switched: bool, default: int | None,
                      layer_type: str) -> None:
        """Raises ConfigError when a layer may see a window shorter than the context, or is not of the
        family's type.

        `switched`: the family has use_sliding_window, off when absent. `default`: the window that
        transformers assumes when the field is absent.
        """
        types = self.values.get("layer_types")
        if types is not None and (not isinstance(types, list) or set(types) - {layer_type}):
            self.refuse("layer_types", f"every layer must be {layer_type!r}")
        if switched and not self.flag("use_sliding_window"):
            return
        window = self.values.get("sliding_window", default)
        if window is None or (isinstance(window, int) and window >= max_position):
            return
        raise ConfigError(
            f"config.json: a sliding window of {window!r} tokens is in use (context "
            f"{max_position}); only full attention is supported. Choose a checkpoint whose "
            f"sliding_window is null or whose use_sliding_window is false"
        )
