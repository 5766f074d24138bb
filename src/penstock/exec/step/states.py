"""Where the states of a step's rows are: read behind the token before the step, written at the end of each
page and of the row's part of the step.

    B rows of the step   T tokens of the step   P pages   E elements of a state
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.exec.step.tables import Lowered
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.kernels.types.states import States
from penstock.memory.pool import BlockPool
from penstock.model.base import CacheShape, LocalLayer


class StatePools:
    """The layers of a rank that keep a state, if it has any."""

    def __init__(self, groups: Sequence[CacheShape], device: Sequence[BlockPool]) -> None:
        # Of each layer: its group, and the pool [P, E].
        self._layers = {layer: (g, pool.pages[:, i, 0, 0, 0])
                        for g, (group, pool) in enumerate(zip(groups, device, strict=True))
                        if group.snapshot for i, layer in enumerate(group.layers)}
        self._groups = {g for g, _ in self._layers.values()}

    def step(self, lowered: Lowered) -> StepStates:
        return StepStates(self._layers, {g: _places(lowered.ragged[g], lowered.positions_T)
                                         for g in self._groups}, lowered.ragged[0].query_start)


class StepStates:
    """Of one step."""

    def __init__(self, layers: dict[LocalLayer, tuple[int, Tensor]], places: dict[int, tuple[Tensor, Tensor]],
                 starts: tuple[int, ...]) -> None:
        self._layers, self._places, self._starts = layers, places, starts

    def __call__(self, layer: LocalLayer, tokens: int) -> States:
        """As `model.base.AttendsStates.state`."""
        assert tokens == self._starts[-1], f"{tokens} tokens in a step of {self._starts[-1]}"
        group, pool_PE = self._layers[layer]
        return States(pool_PE, self._starts, *self._places[group])


def _places(ragged: Ragged, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """`States.from_B` and `States.to_T` of a group."""
    size, device = ragged.page_size, positions_T.device
    before = [context - (end - first) - 1 for context, (first, end) in
              zip(ragged.context, pairwise(ragged.query_start), strict=True)]        # -1: it begins
    entry_B = on_device([max(0, position) // size for position in before], device, torch.int64)
    begins_B = on_device([position < 0 for position in before], device, torch.bool)
    page_B = ragged.pages_RM[on_device(ragged.rows, device, torch.int64), entry_B].long()
    leaves_T = (positions_T + 1) % size == 0
    leaves_T[on_device([end - 1 for end in ragged.query_start[1:]], device, torch.int64)] = True
    return page_B.where(~begins_B, -1), ragged.page_T.where(leaves_T, -1)
