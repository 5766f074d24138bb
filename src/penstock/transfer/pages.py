"""Pieces of pages as bytes: out of the pools of this process, and into them.

A piece is dense [layers, heads, planes, units, dim], whatever pool it is of.

    P pages   L layers of the stage   K KV heads   C planes   U units of a page   B bytes of a vector
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pool import BlockPool
from penstock.transfer.layout import Piece


class PageBytes(Protocol):
    """Where bytes of pages are. Calls come from a link's threads, never two at once for one page."""

    def read(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int, out: memoryview) -> None:
        """The piece of `page`, whose units begin at `offset` in it, into `out` of just its size."""
        ...

    def write(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int,
              data: memoryview) -> None:
        """The reverse. When it returns, `data` may be used for something else."""
        ...


class PoolPages:
    """Pages over the pools of every stage, all visible in this process."""

    def __init__(self, stages: Sequence[Iterable[BlockPool]]) -> None:
        """stages: the pools of each, in the order of layers; a stage without layers of a group needs
        no pool of it."""
        self._parts: dict[tuple[Tier, Group], list[tuple[int, BlockPool, Tensor]]] = {}
        for pools in stages:
            for pool in pools:
                parts = self._parts.setdefault((pool.tier, pool.group), [])
                first = parts[-1][0] + parts[-1][1].layout.num_layers if parts else 0
                if pool.layout.num_layers:
                    parts.append((first, pool, pool.pages.view(torch.uint8)))

    def read(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int, out: memoryview) -> None:
        view = self._view(tier, group, page, piece, offset)
        dense = np.frombuffer(out, dtype=np.uint8).reshape(view.shape)
        np.copyto(dense, view.cpu().numpy())

    def write(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int,
              data: memoryview) -> None:
        view = self._view(tier, group, page, piece, offset)
        dense = np.frombuffer(data, dtype=np.uint8).reshape(view.shape)
        if view.is_cuda:
            view.copy_(torch.from_numpy(dense))
            torch.cuda.current_stream(view.device).synchronize()    # what is told of as there is there
        else:
            np.copyto(view.numpy(), dense)

    def _view(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int) -> Tensor:
        """uint8 [layers, K, C, units, B] of the stage that has these layers."""
        for first, pool, bytes_PLKCUB in self._parts[tier, group]:
            layer = piece.layer - first
            if 0 <= layer and layer + piece.layers <= pool.layout.num_layers:
                return bytes_PLKCUB[pool.index(page), layer:layer + piece.layers, :, :,
                                    offset:offset + piece.units]
        raise AssertionError(f"no stage has all layers of {piece}")
