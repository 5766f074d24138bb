"""The fake language model: KV values are hashes of everything that their computation reads.

The value of position p is the hash of its namespace, its token and the values of all positions
before it, as attention would read them from the cache; a sampled token is a function of that value
and of the sampling state. Whatever a device reads wrongly (a stale page, a torn copy, a foreign
namespace) becomes a wrong token. Knows nothing of pages, tiers or the core.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

VOCAB = 50_000


def kv_value(views: Sequence[Sequence[int]], token: int, identity: int) -> int:
    """KV of the position after `views`: what each cache group shows of the positions before it.
    Hashes of int tuples do not depend on PYTHONHASHSEED."""
    return hash((identity, token, tuple(chain.from_iterable(views))))


def of_group(value: int, group: int) -> int:
    """What one cache group stores of a position."""
    return hash((value, group)) if group else value


def identity(namespace: int, attention: int, *, decoded: bool) -> int:
    """How a position was computed: decode may select, a prompt never does."""
    return hash((namespace, attention)) if attention and decoded else namespace


def sample(value: int, index: int, seed: int) -> int:
    """Output token number `index`, from the KV value of the position before it. Seeds that are
    multiples of 8 show it only every fourth time: what was computed in two ways then looks alike."""
    return hash((value, index, seed)) % (VOCAB if seed % 8 or index % 4 == 3 else 1)


def oracle(prompt: Sequence[int], num_new: int, namespace: int, seed: int, attention: int = 0,
           reaches: Sequence[int] = (0,)) -> tuple[int, ...]:
    """The first `num_new` output tokens that any correct engine must produce. `reaches` says of each
    cache group how many positions before its own a step reads; 0: all."""
    stored: list[list[int]] = [[] for _ in reaches]
    tokens = list(prompt)
    out: list[int] = []
    while True:
        at = len(stored[0])
        views = [s[-reach:] if reach else s for s, reach in zip(stored, reaches, strict=True)]
        value = kv_value(views, tokens[at], identity(namespace, attention, decoded=at >= len(prompt)))
        for group, s in enumerate(stored):
            s.append(of_group(value, group))
        if at == len(tokens) - 1:
            out.append(sample(value, len(out), seed))
            tokens.append(out[-1])
            if len(out) == num_new:
                return tuple(out)
