"""Grid points: `host=64G..1T,engines=1..8,budget=2048,4096` is every combination of them."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import parse_bytes, show_bytes
from penstock.config.settings.tree import Config

BYTES = ("device", "host", "storage")
KEYS = (*BYTES, "engines", "budget")
QUIET = (("storage", 0), ("engines", 1))        # what is not shown of a point
POINTS_MAX = 256
ENGINES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a grid point changes; None: as the flags say. Bytes of each engine, of `storage` of all together."""

    device: int | None = None
    host: int | None = None
    storage: int = 0
    engines: int = 1
    budget: int | None = None           # tokens that a step selects, 0: it reads all

    def settings(self, config: Config) -> Config:
        kv = config.kv
        if self.device is not None:
            kv = replace(kv, kv_cache_memory_bytes=self.device)
        if self.host is not None:
            kv = replace(kv, kv_offloading_size=f"{self.host}B" if self.host else "0")
        if self.budget is not None:
            kv = replace(kv, sparse_top_k=self.budget or None)
        return replace(config, kv=kv)

    def __str__(self) -> str:
        shown = [f"{key}={show_bytes(value) if key in BYTES else value}" for key in KEYS
                 if (value := getattr(self, key)) is not None and (key, value) not in QUIET]
        return " ".join(shown) or "as the flags say"


def points(text: str | None) -> list[Point]:
    """Every combination. `a..b` is a, twice that, and so on up to b. Raises ConfigError."""
    values: dict[str, list[int]] = {}
    key = ""
    for part in (text or "").split(",") if text else ():
        name, equals, value = part.partition("=")
        if equals:
            if name not in KEYS or name in values:
                raise ConfigError(f"--grid {text}: {name!r} is {'there twice' if name in values else 'not known'}; "
                                  f"keys are {', '.join(KEYS)}")
            key = name
        elif not key:
            raise ConfigError(f"--grid {text}: a key is needed first, as in host=64G,128G")
        values.setdefault(key, []).extend(_values(key, value if equals else name, f"--grid {text}"))
    num = math.prod(map(len, values.values()))
    if num > POINTS_MAX:
        raise ConfigError(f"--grid {text}: {num:,} combinations, at most {POINTS_MAX}")
    return [Point(**dict(zip(values, one, strict=True))) for one in itertools.product(*values.values())]


def _values(key: str, text: str, where: str) -> Iterator[int]:
    first, dots, last = text.partition("..")
    read = parse_bytes if key in BYTES else _count
    try:
        low = read(first)
        high = read(last) if dots else low
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    if high < low or (dots and not low) or (key in ("device", "engines") and not low):
        raise ConfigError(f"{where}: {key}={text} has to go up, from 1 or more")
    if key == "engines" and high > ENGINES_MAX:
        raise ConfigError(f"{where}: engines={text}: at most {ENGINES_MAX:,}")
    while low < high:
        yield low
        low *= 2
    yield high


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(text)
