"""Sampling values that a model's authors recommend: generation_config.json, as defaults of requests."""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config.base.errors import ConfigError, RequestError, show
from penstock.config.request.params import SamplingParams

# Of the file's fields those that choose tokens here. `do_sample` is not read: greedy is temperature 0.
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Sampling = dict[str, float]


def sampling_of(given: Mapping[str, Any], where: str) -> Sampling:
    """The fields of `given` that are defaults of requests; null ones are none. `where`: for errors.

    Raises ConfigError: a value is no number, or out of its range.
    """
    found: Sampling = {}
    for name in FIELDS:
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ConfigError(f"{where}: {name} is {show(value)}: expected a number")
        found[name] = value
    params(found, where)
    return found


def params(sampling: Sampling, where: str = "sampling defaults") -> SamplingParams:
    """A request that has them and nothing else. Raises ConfigError."""
    try:
        return msgspec.structs.replace(SamplingParams(), **sampling).checked()
    except RequestError as e:
        raise ConfigError(f"{where}: {e}") from None


def overrides(text: str | None) -> Sampling:
    """Return the values of --override-generation-config. Raises ConfigError."""
    if text is None:
        return {}
    given = json.loads(text)                    # refused before, unless it is an object
    if unknown := sorted(set(given) - set(FIELDS)):
        raise ConfigError(f"--override-generation-config has {show(unknown[0])}: it takes "
                          f"{', '.join(FIELDS)}")
    return sampling_of(given, "--override-generation-config")


def shown(sampling: Sampling) -> str:
    """For a person."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items()) or "none"
