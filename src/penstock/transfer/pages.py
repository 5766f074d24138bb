"""Pieces of pages as bytes: out of the pools of this process, and into them.

A piece is dense [layers, heads, planes, units, dim], whatever pool it is of.

    P pages   L layers of the rank   K its KV heads   C planes   U units of a page   B bytes of a vector
"""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
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
    """Pages over the pools of every rank, all visible in this process."""

    def __init__(self, ranks: Iterable[Iterable[BlockPool]]) -> None:
        """ranks: the pools of each, which say which layers and heads they have; one without layers of a group
        needs no pool of it."""
        self._pools: dict[tuple[Tier, Group], list[tuple[BlockPool, Tensor]]] = {}
        self._staging = threading.local()           # of each thread that reads or writes a GPU's pages
        for pools in ranks:
            for pool in pools:
                if pool.layout.num_layers:
                    self._pools.setdefault((pool.tier, pool.group), []).append(
                        (pool, pool.pages.view(torch.uint8)))

    def read(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int, out: memoryview) -> None:
        """Each head from the first rank that has it."""
        done = 0
        for heads, view, shape in self._views(tier, group, page, piece, offset):
            if heads.stop > done:
                dense = np.frombuffer(out, dtype=np.uint8).reshape(shape)
                np.copyto(dense[:, heads], self._copied(view, None) if view.is_cuda else view.numpy())
                done = heads.stop

    def write(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int,
              data: memoryview) -> None:
        """To every rank that has it on its device, and once to the host."""
        for heads, view, shape in self._views(tier, group, page, piece, offset):
            dense = np.frombuffer(data, dtype=np.uint8).reshape(shape)[:, heads]
            if view.is_cuda:
                self._copied(view, dense)
            else:
                np.copyto(view.numpy(), dense)

    def _copied(self, view: Tensor, dense: np.ndarray | None) -> np.ndarray:
        """What is in `view`, after `dense` is, if given. It is there when this returns: through pinned memory
        on a stream of its own: no step touches a page that is sent or delivered, and none is waited for."""
        of = self._staging
        if getattr(of, "pinned", None) is None or of.pinned.numel() < view.numel():
            of.stream = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
            of.pinned = torch.empty(1 << view.numel().bit_length(), dtype=torch.uint8, pin_memory=True)
        staged = of.pinned[:view.numel()].view(view.shape)
        with torch.cuda.stream(of.stream):
            if dense is None:
                staged.copy_(view, non_blocking=True)
            else:
                np.copyto(staged.numpy(), dense)
                view.copy_(staged, non_blocking=True)
        of.stream.synchronize()
        found: np.ndarray = staged.numpy()
        return found

    def _views(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int) \
            -> Iterator[tuple[slice, Tensor, tuple[int, ...]]]:
        """Of each rank that has these layers: its heads, uint8 [layers, their number, C, units, B] of them,
        and the shape of the whole piece. In the order of heads, all of them; of the same memory once."""
        done = 0
        for pool, bytes_PLKCUB in self._pools[tier, group]:
            layer, whole = piece.layer - pool.part.layer, pool.part.whole
            if pool.writes and 0 <= layer and layer + piece.layers <= pool.layout.num_layers:
                heads = slice(pool.part.head, pool.part.head + pool.layout.num_kv_heads)
                view = bytes_PLKCUB[pool.index(page), layer:layer + piece.layers, :, :,
                                    offset:offset + piece.units]
                assert heads.start <= done, f"no rank has head {done} of {piece}"
                done = heads.stop
                yield heads, view, (len(view), whole.num_kv_heads, *view.shape[2:])
        assert done, f"no rank has all layers of {piece}"
