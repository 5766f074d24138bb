"""SGLang's words for sparse decode, in ours: --enable-hisparse and the JSON of --hisparse-config."""
from __future__ import annotations

import json
from collections.abc import Callable

from penstock.config.base.errors import ConfigError

ENABLE, CONFIG = "--enable-hisparse", "--hisparse-config"


def _whole(value: object) -> bool:
    return type(value) is int and value > 0


def _ratio(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


# key: (our flag, what its value is, whether a value is that)
KEYS: dict[str, tuple[str, str, Callable[[object], bool]]] = {
    "top_k": ("--sparse-top-k", "a whole number of tokens", _whole),
    "device_buffer_size": ("--hot-buffer-tokens", "a whole number of tokens", _whole),
    "host_to_device_ratio": ("--dram-ratio", "a number", _ratio),
}


def translated(text: str) -> list[str]:
    """Our flags for the JSON object `text`. Raises ConfigError that names the key."""
    known = ", ".join(KEYS)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG} {text}: a JSON object is needed, with keys of {known}")
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError(f"{CONFIG}: {key!r} is not a key that penstock has; it has {known}")
        if not KEYS[key][2](value):
            raise ConfigError(f"{CONFIG}: {key} is {json.dumps(value)}: {KEYS[key][1]} is needed")
    return [f"{KEYS[key][0]}={value}" for key, value in values.items()]
