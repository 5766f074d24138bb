"""The fake language model: KV values are hashes of everything that their computation reads.

The value of position p is the hash of its namespace, its token and the values of all positions
before it, as attention would read them from the cache; a sampled token is a function of that value
and of the sampling state. Whatever a device reads wrongly (a stale page, a torn copy, a foreign
namespace) becomes a wrong token. Knows nothing of pages, tiers or the core.
"""
from __future__ import annotations

from collections.abc import Sequence

VOCAB = 50_000


def kv_value(values: Sequence[int], token: int, namespace: int) -> int:
    """KV of the position after `values`. Hashes of int tuples do not depend on PYTHONHASHSEED."""
    return hash((namespace, token, tuple(values)))


def sample(value: int, index: int, seed: int) -> int:
    """Output token number `index`, from the KV value of the position before it."""
    return hash((value, index, seed)) % VOCAB


def oracle(prompt: Sequence[int], num_new: int, namespace: int, seed: int) -> tuple[int, ...]:
    """The first `num_new` output tokens that any correct engine must produce."""
    values: list[int] = []
    for token in prompt:
        values.append(kv_value(values, token, namespace))
    out: list[int] = []
    while True:
        out.append(sample(values[-1], len(out), seed))
        if len(out) == num_new:
            return tuple(out)
        values.append(kv_value(values, out[-1], namespace))
