"""Sizes as people type them: 4096, 512M, 1.5GiB, 2GB. What is shown can be typed."""
from __future__ import annotations

import re

from penstock.config.base.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS |= {f"{u}IB": n for u, n in _UNITS.items() if u} | {"B": 1}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """A size: 4096, 1e9, 512M, 1.5GiB, 2GB. K, M, G, T are powers of 1,024; KB, MB, GB of 1,000.

    Raises ConfigError.
    """
    match = re.fullmatch(r"([0-9][0-9_]{0,23}(?:\.[0-9]{1,18})?(?:[eE]\+?[0-9]{1,2})?) ?([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with K, M, G, T "
                          "(powers of 1,024) or KB, MB, GB, TB (powers of 1,000)")
    number = match[1].replace("_", "")
    size = int(number) * unit if number.isdigit() else int(float(number) * unit)
    if size >= 1 << 62:
        raise ConfigError(f"{text!r} is {size} bytes: more than any machine has")
    return size


def counted(n: int, noun: str) -> str:
    """`1 layer`, `36 layers`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def show_bytes(size: int) -> str:
    """A size as `parse_bytes` reads it back: 4194304 is 4MiB."""
    for unit in ("T", "G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}iB"
    return str(size)
