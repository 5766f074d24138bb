"""The best by their scores, of tokens or of units, by clusters of blocks in CUDA C++, on Hopper. Of the many
queries of a long prompt a block each reads the scores once; a cluster takes what that cannot settle.

Imported only where a CUDA device was asked for. What cannot be had is chosen by the ops' kernels in Triton.
"""
from __future__ import annotations

import functools
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.c.device import Launch, launcher
from penstock.kernels.triton.lazy import is_alone

SHARES = (8, 8), (16, 4), (66, 2)   # up to so many lines: blocks that choose together, on 132 processors
MOST = 8                            # blocks of a cluster, on any Hopper
BINS = 8192                         # of scores: see `topn.bin_of`
NEAR = 2048                         # of the cut's bin that are kept: of 32,768 tokens it has some hundred
MANY, WIDE, ROOM = 66, 65536, 2048  # more lines, as wide, are read once where no more are to be chosen
_SOURCE, _MANY = (Path(__file__).with_name(f"{name}.cu") for name in ("choose_best", "choose_many"))


class Choose(Protocol):
    def __call__(self, score: Tensor, position_B: Tensor, budget_B: Tensor | None, chosen: Tensor, *,
                 heads: int = 1, unit: int = 1, sinks: int = 0, window: int = 0) -> None:
        """Select as `choose.select` and `choose.index_select` have it, of f32 scores of each query and head."""


@functools.cache
def _launches() -> dict[int, Launch]:
    """By the blocks of a line: all at once, as a compile between steps would stop who streams. None where
    they cannot be had."""
    found: dict[int, Launch] = {}
    for share in (*(blocks for _, blocks in SHARES), 1):
        launch = launcher(_SOURCE, "choose_best", BINS=BINS, NEAR=NEAR, SHARE=share)
        if launch is None:
            return {}
        found[share] = launch
    _many()
    return found


def _many() -> Launch | None:
    return launcher(_MANY, "choose_many", shared=4 * (BINS + 9 * ROOM + 1024), BINS=BINS, ROOM=ROOM)


def clustered(lines: int, scores: int) -> Choose | None:
    """What counts and chooses in one launch, of so many lines of scores: a multiple of four, and not too many
    for their blocks, of which there are more where one would have 131,072. Capturable."""
    share = next((blocks for most, blocks in SHARES if lines <= most), 1)
    while share < MOST and scores >= share << 17:
        share *= 2
    if is_alone() or scores % 4 or scores >= share << 17 or (launch := _launches().get(share)) is None:
        return None

    def choose(score: Tensor, position_B: Tensor, budget_B: Tensor | None, chosen: Tensor, *, heads: int = 1,
               unit: int = 1, sinks: int = 0, window: int = 0) -> None:
        room = chosen.shape[-1]
        left: Tensor | int = 0
        plain = budget_B is None and (heads, unit, sinks, window) == (1, 1, 0, 0)
        if plain and lines > MANY and scores >= WIDE and room <= ROOM and (many := _many()) is not None:
            left = torch.empty_like(position_B)
            many((len(chosen), 1), 512, score, position_B, chosen, left, scores, room)
        launch((chosen.numel() // room * share, 1), 1024, score, position_B,
               0 if budget_B is None else budget_B, chosen, scores, room, heads, unit, sinks, window,
               left)
    return choose
