"""Fields of config.json that a user replaces: --hf-overrides.

Owns what a longer RoPE does to the context length. Knows no family: what a field means is its reader's.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.base.errors import ConfigError, show
from penstock.config.settings.plain import object_of
from penstock.config.settings.tree import ModelConfig

ROPE = ("rope_scaling", "rope_parameters")
POSITIONS, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
FACTOR_MAX = 1e6


def overrides_of(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of --hf-overrides."""
    return object_of(model.hf_overrides) or {}


def overridden(config: dict[str, Any], given: Mapping[str, Any], *, inside: bool = False) -> dict[str, Any]:
    """`config` with these fields in place of its own. inside: it is the text_config of another file, so that
    fields may be given in an object of that name too.

    A RoPE scaling replaces the file's, but for its base and what a family turns, where it does not name
    them. Its factor counts from the length that the model was trained for: the file's
    original_max_position_embeddings, else max_position_embeddings. The context becomes their product,
    unless max_position_embeddings is given as well.
    Raises ConfigError: a RoPE scaling is no object, or has no factor that is a number.
    """
    if not given:
        return config
    if inside and isinstance(given.get("text_config"), dict):
        given = {**{k: v for k, v in given.items() if k != "text_config"}, **given["text_config"]}
    out = {**config, **{name: value for name, value in given.items() if name not in ROPE}}
    asked = [given[name] for name in ROPE if name in given]
    if not asked:
        return out
    if len(asked) > 1 or not isinstance(asked[0] or {}, dict):
        named = " and ".join(name for name in ROPE if name in given)
        raise ConfigError(f"--hf-overrides: {named}: one JSON object is needed, got {show(asked[0])}")
    where = next((name for name in reversed(ROPE) if config.get(name)), ROPE[0])
    old, scaling = config.get(where) or {}, asked[0] or {}
    for name in ROPE:
        out.pop(name, None)
    if isinstance(old.get("full_attention"), dict) and "full_attention" not in scaling:
        full = _scaled(out, old["full_attention"], scaling, POSITIONS in given)
        out[where] = {**old, "full_attention": full}
    else:
        out[where] = _scaled(out, old, scaling, POSITIONS in given)
    return out


def _scaled(out: dict[str, Any], old: Mapping[str, Any], scaling: Mapping[str, Any],
            keeps_positions: bool) -> dict[str, Any]:
    """The whole of a scaling; the context length goes into `out`. Raises ConfigError."""
    kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section")
            if name in old}
    new = {**kept, **scaling}
    if new.get("rope_type", new.get("type", "default")) not in ("yarn", "llama3", "linear"):
        return new                              # dynamic counts from max_position_embeddings itself
    factor = new.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= FACTOR_MAX:
        raise ConfigError(f"RoPE scaling: factor {show(factor)}: how many times longer the context becomes "
                          'is needed, such as {"rope_type": "yarn", "factor": 4.0}')
    trained = new.get(ORIGINAL) or out.get(ORIGINAL) or old.get(ORIGINAL) or out.get(POSITIONS)
    if isinstance(trained, bool) or not isinstance(trained, int) or trained < 1:
        raise ConfigError(f"RoPE scaling: {ORIGINAL} {show(trained)}: the length in tokens that the model "
                          "was trained for is needed")
    if out.get(ORIGINAL) is None or ORIGINAL in scaling:
        new[ORIGINAL] = trained
    if ORIGINAL in out and ORIGINAL in scaling:
        out[ORIGINAL] = trained                 # it would win over the scaling's own
    if not keeps_positions:
        out[POSITIONS] = max(out.get(POSITIONS) or 0, int(trained * factor))
    return new


class Noted(dict[str, Any]):
    """A config that notes which of its fields were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def check(self, given: Mapping[str, Any], own: Mapping[str, Any], name: str, *, inside: bool) -> None:
        """Raises ConfigError on a field of --hf-overrides that is not in the file `own` nor read by anything:
        most likely its name is wrong."""
        known = {*self.read, *own, *ROPE, *(["text_config"] if inside else [])}
        for field in given:
            if field not in known:
                raise ConfigError(f"--hf-overrides: {field!r} is not a field of {name}'s config.json, and "
                                  "nothing reads it: see how it is spelled")
