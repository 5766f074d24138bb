"""The config as plain data, for the message that starts the engine process.

Secrets stay behind: the engine has no use for them.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import SECRETS, Config

Plain = dict[str, dict[str, str | int | float | bool | list[str] | None]]


def object_of(text: str | None) -> dict[str, Any] | None:
    """The JSON object of a setting, {} without one; None where `text` is another thing."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def to_plain(config: Config) -> Plain:
    """Section -> field -> value; tuples become lists. `from_plain` gives the same config back,
    but for secrets, which become None."""
    out: Plain = {}
    for section in fields(config):
        part = getattr(config, section.name)
        out[section.name] = {
            f.name: list(value) if isinstance(value := getattr(part, f.name), tuple) else value
            for f in fields(part) if f"{section.name}.{f.name}" not in SECRETS}
    return out


def from_plain(plain: Mapping[str, Mapping[str, Any]]) -> Config:
    """Raises ConfigError for anything that `to_plain` cannot have made."""
    hints = get_type_hints(Config)
    if unknown := set(plain) - set(hints):
        raise ConfigError(f"unknown config section {min(unknown)!r}")
    for section, values in plain.items():
        if extra := set(values) - {f.name for f in fields(hints[section])}:
            raise ConfigError(f"unknown config field {section}.{min(extra)}")
    try:
        return msgspec.convert(plain, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"config from another process: {e}") from None
