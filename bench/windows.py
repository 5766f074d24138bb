"""Tokens that the prefix cache of a model with sliding windows holds, by --window-interval.

    PYTHONPATH=src python bench/windows.py

The planner itself serves conversations that take turns, with one row and instant steps, until the device's memory has
been filled four times. Then each conversation goes on once more, the newest first, until three have found nearly
nothing: what they find, in all, is what the cache held, and what they compute again of it is what the interval costs.
Two kinds: chats, whose prompts begin with the last prompt and answer, and agents that fork from one of four long
prompts. No weights, no tensors: shapes of cache groups alone.
"""
from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, RequestId, Retired, Started
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.model.base import CacheShape, LocalLayer

PAGE, LOST = 16, 3
# GiB of device memory; layers with full attention, layers with a window, its tokens, KV heads, head dimension.
SHAPES = {"gpt-oss-20b": (2, 12, 12, 128, 8, 64), "gemma-3-27b": (8, 10, 52, 1024, 16, 128)}
INTERVALS = {"gpt-oss-20b": (0, 256, 512, 1024, 2048), "gemma-3-27b": (0, 2048, 4096, 8192)}


def _group(name: str, layers: int, heads: int, dim: int, **more: int) -> CacheShape:
    return CacheShape(name=name, layers=tuple(map(LocalLayer, range(layers))), num_kv_heads=heads, head_dim=dim, **more)


class Served:
    """A core whose steps end at once."""

    def __init__(self, shape: str, interval: int) -> None:
        gib, full, near, window, heads, dim = SHAPES[shape]
        caches = caches_of([
            _group("full", full, heads, dim),
            _group("window", near, heads, dim, window=window, keep=interval),
        ], PAGE, torch.bfloat16)
        self.core = Core(CoreConfig(page_size=PAGE, rows=2, hbm_pages=caches.num_pages(gib << 30), step_tokens=8192,
                                    groups=caches.groups))
        self.num = 0

    def ask(self, prompt: list[int], answer: int) -> tuple[int, list[int]]:
        """Tokens of the prompt that were cached, and the answer."""
        self.num += 1
        events: tuple[Event, ...] = (Arrived(RequestId(self.num), tuple(prompt), answer),)
        cached, said = 0, list[int]()
        while events or self.core.live:
            advance = self.core.advance(events)
            events = ()
            cached += sum([out.hbm_tokens for out in advance.outputs if isinstance(out, Started)])
            if (plan := advance.plan) is not None:
                new = [random.randrange(1 << 17) for sampled in plan.samples if sampled]
                said, events = said + new, (Retired(plan.step, tuple([(token,) for token in new])),)
        return cached, said


def texts(kind: str, dice: random.Random) -> Iterator[list[int]]:
    """First prompts."""
    def some(n: int) -> list[int]:
        return [dice.randrange(1 << 17) for _ in range(n)]

    forks = [some(6_000) for _ in range(4)]
    while True:
        yield some(dice.randrange(200, 3_000)) if kind == "chats" else dice.choice(forks) + some(400)


def measure(shape: str, interval: int, kind: str) -> tuple[int, float]:
    """Tokens that were held, and tokens a turn of those that a conversation had before which were computed again."""
    dice = random.Random(1)
    random.seed(2)
    gib, full, near, _, heads, dim = SHAPES[shape]
    served, first, filled = Served(shape, interval), texts(kind, dice), 0
    talks: list[tuple[list[int], int]] = []       # and how much of it has been computed
    while filled < 4 * gib << 30:
        talk, known = next(first), 0
        for _ in range(dice.randrange(2, 6)):
            _, said = served.ask(talk, answer := dice.randrange(40, 300))
            assert len(said) == answer
            known = len(talk) + answer
            talk += [*said, *[dice.randrange(1 << 17) for _ in range(dice.randrange(20, 600))]]
        talks.append((talk, known))
        filled += len(talk) * (full + near) * heads * dim * 4
    held, again, turns, lost = 0, 0, 0, 0
    for talk, known in reversed(talks):
        cached, _ = served.ask(talk, 1)
        if cached < known // 8 and (lost := lost + 1) == LOST:
            break
        if cached >= known // 8:
            held, again, turns = held + cached, again + known - cached, turns + 1
    return held, again / max(1, turns)


def main() -> None:
    for shape, intervals in INTERVALS.items():
        gib = SHAPES[shape][0]
        for kind in ("chats", "agents"):
            base = 0
            for interval in intervals:
                held, again = measure(shape, interval, kind)
                base = base or held
                print(f"{shape}, {gib} GiB, {kind:6} --window-interval {interval:5}: {held:7,} tokens found "
                      f"({held / base:.2f}), {again:5,.0f} a turn computed again", flush=True)


if __name__ == "__main__":
    main()
