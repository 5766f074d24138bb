"""A config.json, read field by field: a missing or wrong field is a ConfigError that names it.

Owns the checks that every family shares; knows no family. Fields that transformers does not read
for a family are free, except those of NEUTRAL: a model that sets one needs code that is not here.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
        for name in ("torch_dtype", "dtype"):
            kind = values.get(name)
            if (kind.removeprefix("torch.") if isinstance(kind, str) else kind) not in DTYPES:
                self.refuse(name, f"one of {', '.join(d for d in DTYPES if d)}")
        for name in TOKENS:
            given, vocab = values.get(name), values.get("vocab_size")
            ids = given if isinstance(given, list) else [given]
            if isinstance(vocab, int) and any(isinstance(i, int) and i >= vocab for i in ids):
                self.refuse(name, f"token ids are below vocab_size = {vocab}")

    def check_neutral(self, reads: Collection[str], states: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ConfigError on a field of NEUTRAL that changes something.

        reads    fields that the family reads itself
        states   values of a field that say what the family does anyway
        """
        for name, neutral in NEUTRAL.items():
            allowed = (*neutral, *states.get(name, ()))
            if name not in reads and self.values.get(name) not in allowed:
                self.refuse(name, f"{self.family} is supported without it" + (
                    f", or with {states[name][0]!r}" if states.get(name) else ""))

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

    def windows(self, max_position: int, *, slides: Callable[[int], bool] | None, default: int | None,
                full: str = "full_attention", kinds: Collection[str] = ()) -> tuple[int, ...]:
        """Tokens that a query of each layer sees, 0: all; () where all layers see all.

        slides    whether a layer has the window, where layer_types does not say; None: no layer of the family
                  has one      default    what transformers assumes when sliding_window is absent
        full      the family's word for a layer without      kinds    others that it has
        Raises ConfigError on a layer of another type, and on a window in a family without.
        """
        num, types = self.size("num_hidden_layers"), self.values.get("layer_types")
        allowed = {full, *kinds} if slides is None else {full, "sliding_attention"}
        if types is not None and (not isinstance(types, list) or set(map(str, types)) - allowed
                                  or len(types) < num):
            self.refuse("layer_types", f"one of {', '.join(sorted(allowed))} for every layer")
        window = default if "sliding_window" not in self.values else self.values["sliding_window"]
        if window is not None and (type(window) is not int or window < 1):
            self.refuse("sliding_window", "a number of tokens, or null")
        if window is None or window >= max_position:
            return ()
        if slides is None:
            self.refuse("sliding_window", "this family has none in transformers: null, or the whole context")
        found = [types[i] == "sliding_attention" if types is not None else slides(i) for i in range(num)]
        return tuple(window if slid else 0 for slid in found) if any(found) else ()
